"""The server that vLLM's tests get."""

import subprocess
import sys

import pytest

pytest.importorskip("uvicorn", reason='pip install "nanovllm[serve]"')

from benchmarks.serving.vllm_tests import RemoteOpenAIServer, bounded, known_options, main
from tests.waiting import wait_until

PROGRAM = """
import pathlib, sys, time
print("tiny at http://127.0.0.1:1 (Ctrl-C ends it)", file=sys.stderr, flush=True)
for i in range(5000):
    print(f"line {i} of a long log", file=sys.stderr)
pathlib.Path(sys.argv[1]).touch()
time.sleep(60)
"""


def test_a_server_that_logs_much_does_not_block(tmp_path):
    logged = tmp_path / "logged"
    server = RemoteOpenAIServer("tiny", [])
    server.command = [sys.executable, "-c", PROGRAM, str(logged)]
    with server:
        assert server.url_for("v1") == "http://127.0.0.1:1/v1"
        wait_until(logged.exists)


def test_options_that_are_dropped_and_bounded():
    given = ["--dtype", "bfloat16", "--max_num_seqs=8", "-tp", "4", "--no-enable-prefix-caching", "--lora-rank", "4"]
    kept = known_options(given)
    assert kept == ["--max-num-seqs", "8", "--no-enable-prefix-caching"]
    assert bounded(kept, 512) == [*kept, "--max-model-len", "512"]
    assert bounded(["--max-model-len", "8192", "--seed", "1"], 512) == ["--max-model-len", "512", "--seed", "1"]
    assert bounded(["--max-model-len", "128"], 512) == ["--max-model-len", "128"]


def test_tests_get_the_conftest_of_their_directory_and_stand_ins(tmp_path):
    directory = tmp_path / "tests" / "area"
    directory.mkdir(parents=True)
    (tmp_path / "tests" / "conftest.py").write_text("raise ImportError('that of tests is not loaded')")
    (directory / "__init__.py").touch()
    (directory / "conftest.py").write_text(
        "import pytest\nfrom tests.utils import ROCM_EXTRA_ARGS, VLLM_PATH, multi_gpu_only\n"
        "from vllm.platforms import current_platform\n"
        "@pytest.fixture\ndef found(): return ROCM_EXTRA_ARGS, VLLM_PATH.name, current_platform.is_rocm()\n"
    )
    (directory / "test_it.py").write_text(
        "from vllm.config import Config\nfrom tests.utils import multi_gpu_only\n"
        f"def test_fixture(found): assert found == ([], {tmp_path.name!r}, False)\n"
        "def test_of_vllm_itself(): assert Config().model\n"
        "@multi_gpu_only(num_gpus=2)\ndef test_of_two(): assert False\n"
    )
    command = [sys.executable, "-m", "benchmarks.serving.vllm_tests", str(tmp_path), "tests/area/test_it.py", "-q"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "1 passed, 2 skipped" in done.stdout, done.stdout + done.stderr


def test_a_folder_that_is_no_checkout(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", ["vllm_tests", str(tmp_path), "x.py"])
    with pytest.raises(SystemExit):
        main()
    assert f"{tmp_path}: holds no tests; pass a checkout of vLLM" in " ".join(capsys.readouterr().err.split())
