"""The gated MLP with kernels chosen by itself."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from nanovllm.layers.custom_mlp import CustomGatedMLP

DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])


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
    native = {"gated_mlp": "native", "silu_and_mul": "native"}
    assert CustomGatedMLP(8, 8, use_custom_kernels=False).providers == native
    assert CustomGatedMLP(8, 8, kernel_priority={"silu_and_mul": ["native"]}).providers == native
    with pytest.raises(ValueError, match="'triton', which is not available for 'silu_and_mul'"):
        CustomGatedMLP(8, 8, device="cpu", kernel_priority={"silu_and_mul": ["triton"]})


@pytest.mark.parametrize("most", [None, 4])
def test_a_kernel_for_the_whole_block_runs_in_the_layer(tmp_path, most):
    """A plugin's, which is used up to as many tokens as it says, and not at all beside a provider that is named for a part."""
    limit = f"whole.max_tokens = lambda down: {most}" if most else ""
    plugin = tmp_path / f"whole_{most}.py"
    plugin.write_text(f"""
from nanovllm.kernels import all_ops
op = all_ops()["gated_mlp"]
seen = []
def whole(x, gate_up, down, activation="silu"):
    seen.append(len(x))
    return op.native(x, gate_up, down, activation)
{limit}
op.provider("whole_{most}")(whole)
""")
    from nanovllm.kernels import all_ops, resolve_kernels
    from nanovllm.layers.custom_mlp import GatedMLP

    def mlp(priority=None):
        made = GatedMLP(16, 24, resolve_kernels(torch.device("cpu"), priority=priority, plugins=[str(plugin)]))
        for parameter in made.parameters():
            parameter.data.normal_()
        return made

    providers = all_ops()["gated_mlp"].providers
    try:
        made = mlp()
        seen = providers[f"whole_{most}"].fn.__globals__["seen"]
        for rows in (4, 5):
            x = torch.randn(rows, 16)
            gate, up = F.linear(x, made.gate_up_proj.weight).chunk(2, -1)
            torch.testing.assert_close(made(x), F.linear(F.silu(gate) * up, made.down_proj.weight))
        assert seen == ([4] if most else [4, 5])
        mlp({"silu_and_mul": ["native"]})(torch.randn(4, 16))
        assert len(seen) == (1 if most else 2)
    finally:
        providers.pop(f"whole_{most}", None)


def test_the_comparison_runs():
    command = [sys.executable, "-m", "nanovllm.layers.custom_mlp", "--hidden-size", "64", "--intermediate-size", "96"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "4096" in done.stdout and "native" in done.stdout and "NO" not in done.stdout
    done = subprocess.run([*command, "--dtype", "int8"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "expected bfloat16, float16 or float32" in done.stderr
