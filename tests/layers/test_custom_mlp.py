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
    assert CustomGatedMLP(8, 8, use_custom_kernels=False).providers == {"silu_and_mul": "native"}
    assert CustomGatedMLP(8, 8, kernel_priority={"silu_and_mul": ["native"]}).providers == {"silu_and_mul": "native"}
    with pytest.raises(ValueError, match="'triton', which is not available for 'silu_and_mul'"):
        CustomGatedMLP(8, 8, device="cpu", kernel_priority={"silu_and_mul": ["triton"]})


def test_the_comparison_runs():
    command = [sys.executable, "-m", "nanovllm.layers.custom_mlp", "--hidden-size", "64", "--intermediate-size", "96"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "4096" in done.stdout and "native" in done.stdout and "NO" not in done.stdout
    done = subprocess.run([*command, "--dtype", "int8"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "expected bfloat16, float16 or float32" in done.stderr
