"""The gated MLP with kernels chosen by itself."""

import pytest
import torch
import torch.nn.functional as F
import typer
from typer.testing import CliRunner

from nanovllm.layers.compare_mlp import compare_mlp
from nanovllm.layers.custom_mlp import CustomGatedMLP
from tests.commands import run_here
from tests.devices import DEVICES
from tests.providers import registered


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("custom", [True, False])
def test_values(device, custom):
    mlp = CustomGatedMLP(64, 96, use_custom_kernels=custom, device=device)
    gate, up = mlp.gate_up_proj.weight.chunk(2)
    for batch in (1, 5, 33):
        x = torch.randn(batch, 64, device=device)
        expected = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), mlp.down_proj.weight)
        torch.testing.assert_close(mlp(x), expected, rtol=1e-4, atol=1e-5)


def test_kernels_are_chosen_as_for_an_engine():
    native = {"linear_silu_and_mul": "native", "silu_and_mul": "native"}
    assert CustomGatedMLP(8, 8, use_custom_kernels=False).providers == native
    assert CustomGatedMLP(8, 8, kernel_priority={"silu_and_mul": ["native"]}).providers == native
    with pytest.raises(ValueError, match="'triton', which is not available for 'silu_and_mul'"):
        CustomGatedMLP(8, 8, device="cpu", kernel_priority={"silu_and_mul": ["triton"]})


@pytest.mark.parametrize(
    "sizes, message", [((0, 8), "hidden_size=0"), ((8, -3), "intermediate_size=-3"), ((8, 2.5), "=2.5")]
)
def test_sizes_are_positive(sizes, message):
    with pytest.raises(ValueError, match=f"{message}: must be a positive integer"):
        CustomGatedMLP(*sizes)


@pytest.mark.parametrize(
    "option, value, said",
    [
        ("--hidden-size", "0", "1"),
        ("--intermediate-size", "0", "1"),
        ("--dtype", "int8", "bfloat16, float16 or float32"),
    ],
)
def test_the_comparison_says_which_option_is_wrong(option, value, said):
    app = typer.Typer()
    app.command()(compare_mlp)
    done = CliRunner().invoke(app, [option, value], env={"COLUMNS": "200"})
    assert done.exit_code == 2 and option in done.output and said in done.output


def test_what_serves_a_batch_is_said():
    assert CustomGatedMLP(8, 8, use_custom_kernels=False).served_by(torch.randn(3, 8)) == "silu_and_mul: native"
    with registered("linear_silu_and_mul", lambda x, weight: x, num_tokens=lambda weight: range(2, 4)):
        mlp = CustomGatedMLP(8, 8, kernel_priority={"linear_silu_and_mul": ["mine"]})
    served = [mlp.served_by(torch.randn(rows, 8)) for rows in (1, 2, 3, 4)]
    assert served == ["silu_and_mul: native", *["linear_silu_and_mul: mine"] * 2, "silu_and_mul: native"]


def test_the_comparison_runs(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    options = "--hidden-size", "64", "--intermediate-size", "96"
    done = run_here(*options, script="nanovllm/layers/custom_mlp.py")
    assert done.returncode == 0, done.stderr
    assert "4096" in done.stdout and "silu_and_mul: native" in done.stdout and "NO" not in done.stdout
    assert "equal" in done.stdout and "yes" in done.stdout and "…" not in done.stdout, "cut off"
