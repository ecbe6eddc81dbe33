"""`nanovllm fuse` as a user runs it."""

import functools
import json
import sys

import pytest
import typer
from typer.testing import CliRunner

from nanovllm.cli.fuse import fuse
from nanovllm.fuse import cpu_model
from nanovllm.fuse.loop_nest import parse
from nanovllm.fuse.tile_fusion import TileFusion
from nanovllm.hardware.gpu_presets import device_model

MODULE = """
import torch, torch.nn as nn
def make():
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32)).requires_grad_(False), (torch.randn(4, 16),)
def named():
    return lambda x, y: torch.relu(x * 2 + y), {"y": torch.ones(4), "x": torch.zeros(3, 4)}
def branch():
    return lambda x: x + 1 if x.sum() > 0 else x, (torch.ones(3),)
def nothing():
    return 5
def identity():
    return nn.Identity(), (torch.randn(4, 16),)
def raises():
    return {}["nope"]
def on_meta():
    return nn.Linear(4, 4), (torch.empty(4, 4, device="meta"),)
def all_meta():
    return nn.Linear(4, 4, device="meta"), {"input": torch.randn(4, 4)}
def counts():
    layer = nn.BatchNorm1d(4)
    layer.num_batches_tracked = layer.num_batches_tracked.to("meta")
    return layer, (torch.randn(4, 4),)
def single():
    return nn.Linear(4, 4), (torch.randn(4, 4),)
def no_rows():
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 8)), (torch.randn(0, 64),)
"""


@pytest.fixture
def module(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MODULE)
    return path


measured_once = functools.cache(cpu_model.measure_cpu)


@pytest.fixture(autouse=True)
def one_measurement(monkeypatch):
    """Of the CPU, for all tests: it takes seconds."""
    monkeypatch.setattr(cpu_model, "measure_cpu", measured_once)


ON_CPU = ("--measure", "--device", "cpu", "--no-compile")


def run(*args, columns=160):
    app = typer.Typer()
    app.command()(fuse)
    return CliRunner().invoke(app, args, env={"COLUMNS": str(columns)})


def said(*args):
    """The error of a run that is the user's to mend; `nanovllm` prints it in one line."""
    error = run(*args).exception
    assert isinstance(error, ValueError) and "\n" not in str(error), error
    return str(error)


def test_a_module_without_kernels(module, tmp_path):
    for more in ((), (*ON_CPU, "--iters", "1", "--save", str(tmp_path))):
        done = run("--module", f"{module}:identity", *more)
        assert done.exit_code == 0 and "nothing to fuse, it runs no kernel" in done.output, (more, done.exception)
    assert json.loads(run("--module", f"{module}:identity", "--json", "-").output)["groups"] == []
    assert not list(tmp_path.rglob("fusion.json"))


def test_one_kernel(module):
    text = run("--module", f"{module}:single").output
    assert (
        "\n1 kernel becomes 1: " in text
        and "\npredicted for nvidia-h100 (by default; --gpu names another GPU)\n" in text
    )


def test_a_preset():
    text = run("--preset", "qwen3-0.6b", "--tokens", "64", "--gpu", "h200", "--left", columns=80).output
    parts = "predicted for nvidia-h200, qk_norm_rope_store, Not merged, two matrix products, 59 kernels become 8"
    assert all(part in " ".join(text.split()) for part in parts.split(", "))
    assert max(len(line) for line in text.splitlines() if not line.endswith(".")) <= 80 and "\u2026" not in text
    data = json.loads(run("--preset", "llama3.2-1b", "--phase", "prefill", "--tokens", "128", "--json", "-").output)
    shown = [data[key] for key in ("phase", "context", "dtype", "device")]
    assert shown == ["prefill", 128, "bfloat16", "nvidia-h100"]
    assert sum(g["unfused_us"] for g in data["groups"]) == pytest.approx(data["unfused_us"], abs=1e-2)
    assert {"attention_prefill"} <= {g["served"] for g in data["groups"]}


def test_a_module_of_ones_own(module):
    data = json.loads(run("--module", f"{module}:make", "--gpu", "rtx4090", "--json", "-").output)
    assert [g["ops"] for g in data["groups"]] == ["linear, gelu", "layer_norm"]
    assert [g["served"] for g in data["groups"]] == ["linear_bias_act", "layer_norm"]
    assert data["arguments"] == "float32[4, 16]"
    assert json.loads(run("--module", f"{module}:named", "--json", "-").output)["groups"][0]["ops"] == "mul, add, relu"


def test_measured_on_a_cpu_and_kept(module, tmp_path):
    kept = tmp_path / "results"
    done = run("--module", f"{module}:make", *ON_CPU, "--iters", "2", "--save", str(kept))
    assert "measured on cpu" in done.output and "rank correlation" in done.output and "On a CPU" in done.output
    (path,) = kept.glob("cpu*/fusion.json")
    (stored,) = json.loads(path.read_text())
    assert [g["number"] for g in stored["groups"]] == [1, 2] and all(g["unfused"]["us"] > 0 for g in stored["groups"])
    assert stored["arguments"] == {"module": f"{module}:make", "arguments": "float32[4, 16]"}


def test_an_interrupt_shows_what_is_there(module, monkeypatch):
    from nanovllm.fuse import group_timing

    whole = group_timing.measure

    def interrupted(*args, **options):
        yield next(whole(*args, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(group_timing, "measure", interrupted)
    done = run("--module", f"{module}:make", *ON_CPU, "--iters", "1")
    assert done.exit_code == 130 and "linear_bias_act" in done.output and "measured 1 of 2 groups" in done.output


def test_errors_of_the_users_own(module, tmp_path):
    line = MODULE[: MODULE.index('{}["nope"]')].count("\n") + 1
    assert said("--module", f"{module}:raises").endswith(f"mine.py:raises: KeyError: 'nope' ({module}:{line})")
    broken = tmp_path / "broken.py"
    broken.write_text("import torch\ntorch.ones(2) @ torch.ones(3)\n")
    assert f"({broken}:2)" in said("--module", f"{broken}:make")


def test_measuring_needs_values(module):
    needs = "is on the meta device, and --measure needs values: make"
    for name, what in (
        ("on_meta", f"argument 0 {needs} it with values, such as torch.randn(4, 4)"),
        ("all_meta", f"parameter weight {needs} the module without the meta device"),
        ("counts", f"buffer num_batches_tracked {needs}"),
    ):
        assert what in said("--module", f"{module}:{name}", "--measure", "--device", "cpu"), name


def test_no_rows(module):
    done = run("--module", f"{module}:no_rows")
    assert done.exit_code == 0 and "Every tensor is empty, so no kernel has anything to do." in done.output
    done = run("--module", f"{module}:no_rows", *ON_CPU, "--iters", "1")
    assert done.exit_code == 0 and "median error of the prediction: unfused -" in done.output


def test_loops(tmp_path):
    path = tmp_path / "loops.py"
    path.write_text("for i in range(1, N):\n    B[i] = A[i]\nfor i in range(1, N):\n    C[i] = B[i + 1]\n")
    text = run("--loops", str(path), "--size", "N=64").output
    assert "RAW on B: B[i] then B[i + 1], distance (-1): prevents fusion" in text
    assert "No common loops can be fused" in text and "Tiles for" in text
    assert "All loops can be fused with a delay: nest 2 by (1,)" in text
    data = json.loads(run("--loops", str(path), "--size", "N=64", "--json", "-").output)
    assert data["fused_levels"] == 0 and data["shift"] == [[0], [1]] and data["tile"]["tiles"] == 1
    assert "--size N: expected a name and a number" in said("--loops", str(path), "--size", "N")
    assert "give its value (--size N=1024)" in said("--loops", str(path))
    assert "no such file" in said("--loops", "nowhere.py")
    for size in (0, 1):
        empty = said("--loops", str(path), "--size", f"N={size}")
        assert f"nest 1 runs no iteration with N={size}: `for i in range(1, {size})` is empty" in empty


def test_without_islpy_the_error_names_the_extra(tmp_path, monkeypatch):
    path = tmp_path / "loops.py"
    path.write_text("for i in range(4):\n    B[i] = A[i]\n")
    monkeypatch.setitem(sys.modules, "islpy", None)
    for name in ("cli.fuse_loops", "fuse.loops", "fuse.tile_fusion", "fuse.dependence"):
        monkeypatch.delitem(sys.modules, f"nanovllm.{name}", raising=False)
    assert "needs islpy; pip install 'nanovllm[fuse]'" in said("--loops", str(path))


def test_one_nest_is_tiled(tmp_path):
    path = tmp_path / "loops.py"
    nest = "for i in range(N):\n    for j in range(N):\n        for k in range(N):\n"
    loops = nest + "            C[i, j] += A[i, k] * B[k, j]\n"
    path.write_text(loops)
    text = run("--loops", str(path), "--size", "N=512").output
    assert "One nest, nothing to fuse:" in text and "C[i, j] += A[i, k]" in text and "allows fusion" not in text
    data = json.loads(run("--loops", str(path), "--size", "N=512", "--json", "-").output)
    nests = parse(loops, N=512)
    best = TileFusion(*nests).best(device_model("h100").shared_per_block // 4)
    assert data["nests"] == 1 and data["tile"]["tile"] == list(best.tile) and data["tile"]["traffic"] == best.traffic
    assert f"{best.tile}, {best.tiles:,} tiles of" in text
    path.write_text("for i in range(1, 64):\n    for j in range(1, 63):\n        A[i, j] = A[i - 1, j + 1]\n")
    text = run("--loops", str(path)).output
    assert text.startswith("RAW on A: A[i, j] then A[i - 1, j + 1], distance (1, -1)\nOne nest")
    assert "Tiles are not legal" in text and "Tiles for" not in text


def test_bad_options(module):
    assert "gpu: no preset for 'v100'; known are a100, h100, h200, b200, " in said("--gpu", "v100")
    assert "no preset 'qwen9'" in said("--preset", "qwen9") and "qwen3-0.6b" in said("--preset", "qwen9")
    assert said("--phase", "train") == "--phase train: expected one of decode, prefill"
    assert said("--dtype", "int8") == "--dtype int8: expected one of bfloat16, float16, float32"
    assert "tokens: expected at least 1, not 0" in said("--tokens", "0")
    assert "context: expected at least 8 tokens" in said("--phase", "prefill", "--tokens", "8", "--context", "4")
    assert said("--iters", "0") == "--iters 0: expected at least 1"
    assert "expected one of them" in said("--preset", "qwen3-0.6b", "--module", "a:b")
    assert "predicted for the device that it is measured on" in said("--measure", "--device", "cpu", "--gpu", "h100")
    assert "expected package.module:function or file.py:function" in said("--module", "mine")
    assert said("--module", "nowhere.py:make") == "--module nowhere.py:make: there is no file nowhere.py"
    assert "cannot import nowhere" in said("--module", "nowhere:make")
    assert "has no function 'other'" in said("--module", f"{module}:other")
    assert "expected (module, arguments), not int" in said("--module", f"{module}:nothing")
    traced = said("--module", f"{module}:branch")
    assert "it branches on a tensor's value" in traced and "supported are an nn.Module" in traced
