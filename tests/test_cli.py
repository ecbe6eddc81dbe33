"""The console command, as a user runs it."""

import json
import subprocess
import sys

import pytest

from nanovllm.kernels import all_ops
from tests import tiny


def run(*args: str, stdin: str = "") -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "nanovllm", *args], input=stdin, capture_output=True, text=True, timeout=120
    )


def test_version_and_help():
    assert run("--version").stdout.startswith("nanovllm 0.")
    assert {"chat", "generate", "kernels"} <= set(run("--help").stdout.split())


def test_generate_and_chat(smollm2_path):
    done = run("generate", "The capital of France is", "--max-tokens", "4", "--temperature", "0")
    assert done.returncode == 0 and "> The capital of France is\n Paris" in done.stdout
    done = run("chat", "--max-tokens", "12", "--temperature", "0", stdin="What is the capital of France?\n\n")
    assert done.returncode == 0 and "Paris" in done.stdout


def test_what_a_user_can_mend_is_one_line(tmp_path):
    for args, said in [
        (("generate", "x", "--model", str(tmp_path)), "holds no config.json"),
        (("generate", "x", "--temperature", "-1"), "temperature=-1.0: must be at least 0"),
    ]:
        done = run(*args)
        assert done.returncode == 1 and done.stderr.startswith("nanovllm: ") and said in done.stderr
        assert "Traceback" not in done.stderr


def test_generate_from_a_checkpoint_without_a_tokenizer(tmp_path):
    tiny.save(tmp_path)
    done = run("generate", "x", "--model", str(tmp_path))
    assert done.returncode == 1 and "holds no tokenizer" in done.stderr


@pytest.mark.parametrize("device", ["cpu"])
def test_kernels_list(device):
    rows = json.loads(run("kernels", "list", "--device", device, "--json").stdout)
    assert {r["op"] for r in rows} == set(all_ops())
    for name in all_ops():
        (chosen,) = [r for r in rows if r["op"] == name and r["chosen"]]
        assert chosen["provider"] == "native" and chosen["reason"] is None
    assert any("need a CUDA device" in (r["reason"] or "") for r in rows if r["provider"] == "triton")
    assert "rms_norm" in run("kernels", "list", "--device", device).stdout
