"""`nanovllm kernels export` and `import` as a user runs them."""

import json

import pytest
from typer.testing import CliRunner

from nanovllm.cli import app
from tests.adapters.flashinfer_bench.documents import RIGHT, WRONG, solution
from tests.adapters.flashinfer_bench.test_importing import write


@pytest.fixture
def command(warm_python):
    return lambda *arguments: warm_python.run("-m", "nanovllm", "kernels", *map(str, arguments))


def test_export_prints_the_files(tmp_path):
    done = CliRunner().invoke(
        app, ["kernels", "export", "rms_norm", "--out", str(tmp_path), "--shape", "4x64", "--provider", "native"]
    )
    assert done.exit_code == 0, done.output
    files = done.output.split()
    assert len(files) == 3 and json.loads(open(files[0]).read())["name"] == "rms_norm_size64_bfloat16"


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["export", "rms_nrom"], "rms_norm"),
        (["export", "sample"], "cannot be written as a Definition"),
        (["export", "rms_norm", "--shape", "4"], "takes ROWSxSIZE"),
        (["import", "gone.json"], "gone.json: no such file or directory"),
        (["import", ".", "--save", "plugin.txt"], "expected a file whose name ends in .py"),
    ],
)
def test_wrong_arguments(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = CliRunner().invoke(app, ["kernels", *arguments]).exception
    assert isinstance(error, ValueError) and said in str(error)


@pytest.mark.slow
def test_import_verifies_and_times(tmp_path, command):
    write(tmp_path, [solution("right", RIGHT)])
    done = command("import", tmp_path, "--seed", 1, "--save", tmp_path / "plugin.py")
    assert done.returncode == 0, done.stderr
    assert "right" in done.stdout and " us " in done.stdout and (tmp_path / "plugin.py").exists()


@pytest.mark.slow
def test_import_of_what_is_wrong_crashes_or_hangs(tmp_path, command):
    crashing, hanging = "import os\nos._exit(7)\n", "def run(x, y, factor):\n    while True: pass\n"
    codes = {"wrong": WRONG, "crashing": crashing, "hanging": hanging}
    write(tmp_path, [solution(name, code) for name, code in codes.items()])
    done = command("import", tmp_path, "--timeout", 2, "--seed", 1)
    said = " ".join(done.stdout.split())
    assert done.returncode == 1 and " us " not in said, done.stdout + done.stderr
    for expected in ("times the tolerance", "ended the process with code 7", "longer than 2 s"):
        assert expected in said


@pytest.mark.slow
def test_import_of_what_ends_the_benchmark(tmp_path, command):
    """It is right in the five calls that are compared."""
    code = "import os\n\nn = []\n\n\ndef run(x, y, factor):\n    n.append(0)\n    len(n) > 5 and os._exit(7)\n"
    write(tmp_path, [solution("ends", f"{code}    return x * factor + y\n")])
    done = command("import", tmp_path, "--seed", 1)
    assert done.returncode == 1 and "right" in done.stdout, done.stdout
    assert "a Solution ended the process of `kernels bench` with code 7" in " ".join(done.stderr.split())
