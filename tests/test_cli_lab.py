"""`nanovllm lab`, as a user runs it."""

import dataclasses
import json

import pytest
from typer.testing import CliRunner

from nanovllm.cli.lab import LESSONS, app
from nanovllm.console import StatusLine
from nanovllm.hardware.measured_rates import Rates
from nanovllm.lab import mlp_sweeps
from nanovllm.lab import way_timing as timing
from nanovllm.lab.lesson import NAMES, lesson
from tests.commands import run_here


@pytest.fixture(autouse=True)
def fixed_rates(monkeypatch):
    rates = Rates("a test", 1e10, 1e10, 1e10, {"float32": 1e11})
    monkeypatch.setattr(timing, "rates", lambda *args: rates)
    monkeypatch.setattr(mlp_sweeps, "rates", lambda *args: rates)


def lab(*args):
    return CliRunner().invoke(app, list(args))


def words(output):
    """The words of every line."""
    return [line.split() for line in output.splitlines()]


def test_there_is_a_command_for_each_lesson():
    assert tuple(LESSONS) == NAMES
    printed = lab("--help").output
    assert all(name in printed for name in (*NAMES, "mlp")) and lab("gleu").exit_code == 2


def test_a_lesson_end_to_end(tmp_path):
    if pytest.importorskip("triton").knobs.runtime.interpret:
        pytest.skip("compiles nothing under TRITON_INTERPRET")
    files = tmp_path / "deep" / "gelu.json", tmp_path / "ptx", tmp_path / "gelu.png"
    options = "--sizes 32 --device cpu --gpu h200 --seed 4".split()
    written = ["--json", str(files[0]), "--ptx", str(files[1]), "--plot", str(files[2])]
    done = lab("gelu", *options, *written)
    assert done.exit_code == 0, done.output
    lines = [line for line in done.output.splitlines() if not line.startswith("wrote ")]
    assert max(map(len, lines)) <= 80 and "…" not in done.output
    checks, timings = done.output.split("How fast?")
    ways = ("plain", "torch", "compile", "triton")
    right = {line[0]: line[-1] for line in words(checks) if line and line[0] in ways}
    assert right == {"plain": "right", "torch": "right", "compile": "right", "triton": "(interpreter)"}
    assert ["32", "plain"] in [line[:2] for line in words(timings)]
    assert "Not timed: cuda, dim 32: " in done.output and "Not timed: triton, dim 32: " in done.output
    assert "aten::gelu" in done.output and "cpp_fused" in done.output
    assert "Triton compiled for nvidia-h200, float32, dim 32" in done.output and "registers a thread" in done.output
    document = json.loads(files[0].read_text())
    assert document["seed"] == 4 and {r["dim"] for r in document["rows"]} == {32}
    assert ".entry gelu_kernel" in (files[1] / "gelu_triton_nvidia-h200.ptx").read_text()
    assert files[2].read_bytes().startswith(b"\x89PNG")


def test_what_was_not_compiled_is_said_in_80_columns(monkeypatch):
    pytest.importorskip("triton")

    def refuse(*_):
        raise RuntimeError("Triton compiles nothing here; " + "unset its variable " * 4)

    monkeypatch.setattr("nanovllm.lab.lesson_run.triton_reading", refuse)
    done = lab("softmax", "--way", "triton", "--sizes", "64", "--device", "cpu", "--gpu", "h100")
    lines = done.output.splitlines()
    assert "Triton compiled for" not in done.output and max(map(len, lines)) <= 80
    said = " ".join(done.output.split())
    assert "Not compiled: triton for nvidia-h100, float32, dim 64: Triton compiles nothing here; unset its" in said


def test_several_sizes(tmp_path):
    done = lab("gelu", "--sizes", "32,16", "--device", "cpu", "--way", "plain", "--json", str(tmp_path / "gelu.json"))
    timed = {tuple(line[:2]) for line in words(done.output.split("How fast?")[1])}
    assert timed >= {("16", "plain"), ("32", "plain")}
    assert {r["dim"] for r in json.loads((tmp_path / "gelu.json").read_text())["rows"]} == {16, 32}


def test_a_wrong_kernel_fails_the_command(monkeypatch):
    broken = dataclasses.replace(lesson("softmax"), own=lambda x: x.sigmoid())
    monkeypatch.setattr("nanovllm.lab.lesson.lesson", lambda name: broken)
    done = lab("softmax", "--way", "torch", "--sizes", "8", "--device", "cpu")
    assert done.exit_code == 1 and "elements are wrong" in done.output


@pytest.mark.parametrize(
    "command, option, name, said",
    [
        ("gelu", "--plot", "x.foo", "expected a name that ends in ."),
        ("mlp", "--plot", "x", ".png"),
        ("gelu", "--plot", "folder.png", "it is a folder"),
        ("mlp", "--plot", "none/x.png", "there is no folder {tmp}/none"),
        ("gelu", "--json", "folder.png", "folder.png: it is a folder, expected a file"),
        ("mlp", "--json", "file/deep/x.json", "file is a file, expected a folder"),
        ("gelu", "--ptx", "file", "file is a file, expected a folder"),
    ],
)
def test_what_cannot_be_written_is_said_before_anything_runs(command, option, name, said, tmp_path, monkeypatch):
    if option == "--plot":
        pytest.importorskip("matplotlib")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("nanovllm.lab.lesson_run.run", lambda *_: pytest.fail("it ran"))
    monkeypatch.setattr("nanovllm.lab.mlp_sweeps.run_sweeps", lambda *_: pytest.fail("it ran"))
    error = lab(command, "--device", "cpu", option, str(tmp_path / name)).exception
    assert isinstance(error, ValueError) and str(error).startswith(f"{option} {tmp_path / name}: ")
    assert said.replace("{tmp}", str(tmp_path)) in str(error)
    assert not (tmp_path / "none").exists()


def test_only_the_ways_asked_for_and_that_there_is_no_ptx(tmp_path):
    ways = "--way torch --way plain --sizes 24 --device cpu --ptx"
    done = lab("matmul", *ways.split(), str(tmp_path / "ptx"))
    assert done.exit_code == 0, done.output
    assert {line[0] for line in words(done.output) if line} & {"plain", "torch", "triton"} == {"plain", "torch"}
    assert "compiled for" not in done.output
    assert "neither cuda nor triton was compiled" in done.output.replace("\n", " ")


def test_where_nothing_was_timed_there_is_a_reason_and_no_empty_table():
    done = lab("matmul", "--way", "plain", "--sizes", "8192", "--device", "cpu")
    assert done.exit_code == 0 and "Not timed: plain, dim 8192: only up to" in done.output
    assert "spread" not in done.output and "TFLOP/s\n" not in done.output


def test_mlp(tmp_path):
    figure, numbers = tmp_path / "mlp.png", tmp_path / "mlp.json"
    options = "--dim 16 --batch 8 --layers 2 --steps 1 --factors 1,2 --device cpu --profile".split()
    done = lab("mlp", "--sweep", "dim", "--sweep", "steps", *options, "--plot", str(figure), "--json", str(numbers))
    assert done.exit_code == 0, done.output
    heads = [line.split(":")[0] for line in done.output.splitlines() if "host time included" in line]
    assert heads == ["steps", "dim"]
    assert "x4.00" in done.output and "aten::mm" in done.output
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert list(json.loads(numbers.read_text())["sweeps"]) == ["steps", "dim"]


@pytest.mark.parametrize(
    "args, said",
    [
        (("gelu", "--sizes", "12x"), "--sizes 12x: expected whole numbers"),
        (("gelu", "--sizes", "0"), "--sizes: expected numbers from 1 to 32768, not 0"),
        (("gelu", "--dtype", "int8"), "--dtype int8: expected one of bfloat16, float16, float32"),
        (("gelu", "--way", "cude"), "--way: expected one of plain"),
        (("gelu", "--gpu", "v100"), "no preset for 'v100'"),
        (("gelu", "--device", "tpu"), "not a device"),
        (("mlp", "--sweep", "width"), "--sweep: expected one of"),
        (("mlp", "--factors", "2,1"), "--factors: expected ascending"),
        (("mlp", "--dim", "0"), "--dim: expected a number from 1"),
    ],
)
def test_bad_input_is_a_valueerror_that_names_it(args, said):
    done = lab(*args)
    assert isinstance(done.exception, ValueError) and said in str(done.exception)


def test_a_terminal_shows_what_a_lesson_does_and_then_nothing_of_it():
    done = run_here("lab", "gelu", "--way", "torch", "--sizes", "16", "--device", "cpu", terminal=True)
    assert done.returncode == 0 and "\r\x1b[2Ktiming torch at 16 ..." in done.stderr
    assert done.stderr.endswith("\r\x1b[2K") and StatusLine.current is None


def test_where_a_lesson_fails_its_line_is_taken_away(monkeypatch):
    monkeypatch.setattr("nanovllm.lab.lesson_run.limits", lambda *args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        run_here("lab", "gelu", "--way", "torch", "--sizes", "16", "--device", "cpu", terminal=True)
    assert StatusLine.current is None
