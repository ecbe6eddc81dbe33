"""`nanovllm plan` and `nanovllm device`, through their own commands; nothing needs a GPU."""

import json
import re
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from nanovllm.cli.device import app as device_app
from nanovllm.cli.plan import app
from tests.docs.runnable_markdown import blocks

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about a machine without a GPU")


def run(*args, command=app):
    done = CliRunner().invoke(command, [str(a) for a in args])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == 0, done.output
    return done.stdout


GEMM = ("gemm", "--m", 512, "--n", 4096, "--k", 1024, "--gpu", "h100")


def test_gemm_table():
    text = run(*GEMM, "--dtype", "bf16", "--top", 3)
    assert "gemm on nvidia-h100: m 512, n 4096, k 1024, dtype bfloat16" in text and "predicted, not measured" in text
    assert "#  configuration" in text and "waves" in text and "occupancy" not in text
    assert sum(bool(re.match(r"\d  ", line)) for line in text.splitlines()) == 3
    wide = run(*GEMM, "--top", 3, "--wide")
    assert "occupancy" in wide and "limited by" in wide and max(map(len, wide.splitlines())) > 80


@pytest.mark.parametrize("columns", ["80", "160"])
def test_tables_fit_the_terminal_and_cut_no_cell(columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    for args in (GEMM, ("conv", "--channels", 64, "--filters", 128, "--height", 56, "--width", 56, "--gpu", "h100")):
        text = run(*args, "--top", 4)
        assert "…" not in text and max(map(len, text.splitlines())) <= int(columns)


def test_the_first_line_is_the_ideal_whatever_binds_a_plan():
    tiny = run("gemm", "--m", "1", "--n", "1", "--k", "1", "--gpu", "h100")
    assert re.search(r"\nat best \d\.\de-06 us, bound by memory", tiny)  # 6 bytes: not "0.00 us"
    assert re.search(r"ridge \d+\)\nat best 5\.4\d us, bound by arithmetic; \d+ configurations fit", run(*GEMM))


def test_an_order_that_is_not_of_time_is_explained():
    said = "Plans within 0.5 % of each other count as equally fast"
    for m, sorted_by_time in ((256, True), (16, False)):
        args = ("gemm", "--m", m, "--n", 4096, "--k", 4096, "--gpu", "h200")
        times = [round(1e6 * plan["seconds"], 2) for plan in json.loads(run(*args, "--json", "-"))["plans"]]
        assert (times == sorted(times)) == sorted_by_time == (said not in run(*args))
        assert said not in run(*args, "--top", 1)


PAGE = blocks((Path(__file__).parents[1] / "docs" / "planner.md").read_text())


def documented():
    """(arguments, output) of each command of docs/planner.md."""
    commands = (c for b in PAGE if b.language == "console" for c in b.commands())
    return [(command.removeprefix("nanovllm plan "), "\n".join(output)) for command, output in commands]


@pytest.mark.parametrize("command, output", documented(), ids=lambda text: text.split("\n")[0][:30])
def test_the_documentation_shows_what_is_printed(command, output, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert output and run(*command.split()).strip() == output


def test_the_documentations_python_runs():
    (code,) = [b.text for b in PAGE if b.language == "python"]
    exec(code, {})


def test_gemm_json_is_what_the_planner_says():
    from nanovllm.hardware.gpu_presets import device_model
    from nanovllm.plan import GemmProblem, plan_gemm

    found = json.loads(run(*GEMM, "--json", "-"))
    plans = plan_gemm(GemmProblem(512, 4096, 1024), device_model("h100"))
    assert found["candidates"] == len(plans) and len(found["plans"]) == 10 and found["gpu"] == "nvidia-h100"
    for shown, plan in zip(found["plans"], plans):
        assert shown["config"]["block_m"] == plan.config.block_m
        assert (shown["seconds"], shown["limit"]) == (plan.seconds, plan.limit)
        assert {"intensity", "shared", "registers", "min_stages", "occupancy", "waves", "parts"} <= set(shown)
    # 2 m n k flops at 80 % of 989.4 TFLOP/s: 5.4 us; 2 (m k + n k + m n) bytes at 92 % of 3.35 TB/s would be 4.4
    assert found["floor_seconds"] == pytest.approx(2 * 512 * 4096 * 1024 / (0.8 * 989.4e12))


def test_what_the_memory_does_not_hold_is_said():
    many = ("gemm", "--m", 10**11, "--n", 4, "--k", 4, "--gpu", "h100", "--top", 1)
    assert "It does not fit nvidia-h100: it takes 1,600 GB at least, the GPU has 80 GB." in run(*many)
    assert "does not fit" not in run(*GEMM) and json.loads(run(*many, "--json", "-"))["memory_bytes"] == 80e9


COMMANDS = [
    ("a100", "gemm --m 64 --n 512 --k 512 --dtype fp16"),
    ("h100", "attention --query 1024 --batch 2"),
    ("h200", "attention --query 1 --context 4096"),
    ("b200", "conv --channels 64 --filters 128 --height 56 --width 56 --kernel 3x1 --padding 1"),
    ("rtx-4090", "elementwise --elements 1048576 --inputs 4"),
    ("b200", "reduction softmax --rows 512 --size 4096"),
    ("rtx-4090", "reduction layer-norm --rows 512 --size 100000"),
    ("h100", "reduction RMSNorm --rows 512 --size 4096"),
    ("a100", "gemm --m 16 --n 4096 --k 4096 --weight i4"),
]


@pytest.mark.parametrize("gpu, command", COMMANDS)
def test_every_command(command, gpu):
    args = (*command.split(), "--gpu", gpu, "--top", 2)
    found = json.loads(run(*args, "--json", "-"))
    assert (
        len(found["plans"]) == 2 and all(p["seconds"] > 0 for p in found["plans"]) and found["gpu"] == f"nvidia-{gpu}"
    )
    assert "predicted, not measured" in run(*args)
    if "i4" in command:
        assert found["problem"]["weight"] == "int4" and "conversion" in found["plans"][0]["parts"]
    if "reduction" in command:
        assert found["problem"]["kind"] in ("softmax", "layer_norm", "rms_norm")


@pytest.mark.parametrize(
    "command", ["gemm --m 64 --n 64 --k 64", "attention --query 64", "elementwise --elements 4096",
                "conv --channels 64 --filters 64 --height 8 --width 8", "reduction softmax --rows 64 --size 64"],
)  # fmt: skip
def test_the_help_names_the_dtypes_that_the_command_takes(command):
    found = typer.main.get_command(app).commands[command.split()[0]]
    (option,) = (parameter for parameter in found.params if parameter.name == "dtype")
    named = set(re.findall(r"[bt]?float\d+", option.help))
    with pytest.raises(ValueError, match="^--dtype: expected one of") as error:
        run(*command.split(), "--gpu", "h100", "--dtype", "fp61")
    assert named == set(re.findall(r"[bt]?float\d+", str(error.value)))


def test_compiled_beside_predicted():
    triton = pytest.importorskip("triton")
    if triton.knobs.runtime.interpret:
        pytest.skip("compiles nothing under TRITON_INTERPRET")
    text = run("elementwise", "--elements", 1 << 20, "--gpu", "h100", "--top", 2, "--compile")
    assert "compiled" in text and "spilled" in text
    gemm = "gemm --m 64 --n 1024 --k 1024 --gpu h100 --top 1 --compile --json -"
    (plan,) = json.loads(run(*gemm.split()))["plans"]
    assert plan["compiled"]["shared"] == plan["shared"] and 0.5 < plan["compiled"]["registers"] / plan["registers"] < 2


@pytest.mark.parametrize(
    "args, message",
    [
        ("gemm --m 0 --n 1 --k 1", "--m: expected a positive integer, not 0"),
        ("gemm --m 1 --n 1 --k 1 --gpu h300", "--gpu: no preset for 'h300'; known are h100, h200, "),
        (
            "gemm --m 1 --n 1 --k 1 --dtype fp61",
            "--dtype: expected one of bfloat16, float16, float32, tfloat32, float8",
        ),
        (
            "gemm --m 1 --n 1 --k 1 --dtype int8",
            "--dtype: expected one of bfloat16, float16, float32, tfloat32, float8",
        ),
        ("gemm --m 1 --n 1 --k 1 --weight int3", "--weight: expected one of int4, int8, float8, not 'int3'; did you"),
        (
            "gemm --m 1 --n 1 --k 128 --weight int4 --compile",
            "--compile: the planned kernels, tma_kernel and tile_kernel, ",
        ),
        ("attention --query 8 --context 4", "--context: expected at least the 8 query tokens, not 4"),
        ("conv --channels 1 --filters 1 --height 2 --width 2 --kernel 3x3x3", "--kernel: expected a size such as 3"),
        ("reduction median --rows 4 --size 4", "kind: expected one of softmax, layer_norm, rms_norm, not 'median'"),
    ],
)
def test_what_a_user_can_mend_is_one_line(args, message):
    given = args if "--gpu" in args else f"{args} --gpu h100"
    with pytest.raises(ValueError) as error:
        run(*given.split())
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


@without_gpu
def test_without_a_gpu():
    assert "on nvidia-h100" in run("elementwise", "--elements", 1000, "--top", 1)
    with pytest.raises(ValueError, match="CUDA device"):
        run("elementwise", "--elements", 1000, "--gpu", "here")
    for args in (("--refresh",), ("--gpu", "here")):
        with pytest.raises(ValueError, match="^device: there is no CUDA device to measure"):
            run(*args, command=device_app)


def test_device():
    text = run("--gpu", "h100", command=device_app)
    assert "nvidia-h100" in text and "132" in text and "228 / 227" in text and "wgmma" in text and "Presets: " in text
    found = json.loads(run("--gpu", "rtx-4090", "--json", "-", command=device_app))
    shown = [found[key] for key in ("name", "sms", "matrix_unit", "measured")]
    assert shown == ["nvidia-rtx-4090", 128, "mma", []]
    with pytest.raises(ValueError, match="^--refresh: measures the GPU that is here, so it does not go with --gpu h10"):
        run("--gpu", "h100", "--refresh", command=device_app)


@without_gpu
def test_every_preset_without_a_gpu():
    text = run(command=device_app)
    assert all(name in text for name in ("nvidia-a100", "nvidia-h200", "nvidia-b200"))
    assert len(json.loads(run("--json", "-", command=device_app))) == 6


def test_what_was_measured_is_marked(monkeypatch):
    from nanovllm.hardware import gpu_presets
    from nanovllm.hardware.measured_rates import Rates

    rates = Rates("NVIDIA H200", 4.5e12, 4.5e12, 4.3e12, {"bfloat16": 7.9e14}, 60 << 20, 9e12, 9e-7, 6e-7, 2e-7)
    model = gpu_presets.measured(gpu_presets.device_model("h200"), rates)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(gpu_presets, "this_device", lambda device, refresh=False: model)
    lines = run(command=device_app).splitlines()
    assert any("memory latency" in line and "600 *" in line for line in lines)
    assert any("4.40 *" in line for line in lines) and "* measured on this GPU" in lines[-1]
    assert any("tfloat32" in line and "*" not in line for line in lines)
