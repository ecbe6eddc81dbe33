"""The kernels of experts in 8-bit floats: against the dequantised weights in float64."""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels.ops import moe_experts_fp8 as fp8_op
from nanovllm.kernels.triton.moe.fp8_experts import moe_experts_fp8
from tests.kernels.triton.common import DEVICE, GPU, randn, strided
from tests.kernels.triton.moe.test_experts import TOLERANCE, chosen

pytestmark = pytest.mark.triton


def matrices(num_experts, rows, columns, seed):
    weight = randn(num_experts, rows, columns, dtype=torch.float32, seed=seed, scale=100.0).clamp_(-448, 448)
    weight[0, 0, :3] = torch.tensor([0.0, 2.0**-9, -(2.0**-6)])  # zero, and subnormal numbers
    blocks = num_experts, -(-rows // 128), -(-columns // 128)
    scale = randn(*blocks, dtype=torch.float32, seed=seed + 9).exp() * columns**-0.5 / 100
    scale[-1] = 0.0  # an expert of nothing
    return weight.to(torch.float8_e4m3fn), scale


def check(tokens, num_experts, top_k, intermediate, hidden, dtype, routing="uniform"):
    x = randn(tokens, hidden, dtype=dtype)
    planes = *matrices(num_experts, 2 * intermediate, hidden, 1), *matrices(num_experts, hidden, intermediate, 2)
    weights = randn(tokens, top_k, dtype=torch.float32, seed=3).softmax(-1)
    experts = chosen(routing, tokens, num_experts, top_k)
    want = fp8_op.native(x.double(), *planes, weights.double(), experts)
    got = moe_experts_fp8(strided(x), *planes, weights, experts)
    assert got.dtype == dtype and want.abs().max() > 0.1
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * want.abs().max())
    assert torch.equal(got, moe_experts_fp8(x, *planes, weights, experts))
    return x, planes, weights, experts, got


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_few_tokens(dtype, poison):
    check(1, 3, 2, 128, 160, dtype)
    if GPU:
        check(1, 128, 8, 768, 2048, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("routing", ["uniform", "skewed"])
def test_blocks(dtype, routing, poison):
    check(7, 4, 2, 128, 96, dtype, routing)
    if GPU:
        check(1000, 128, 8, 768, 2048, dtype, routing)


def test_experts_that_do_not_exist_are_not_read(poison):
    x, planes, weights, experts, got = check(6, 4, 2, 128, 64, torch.float16)
    wrong = experts.clone()
    wrong[4] = torch.tensor([4, -3])
    others = torch.arange(6) != 4
    assert torch.equal(moe_experts_fp8(x, *planes, weights, wrong)[others], got[others])
    one = moe_experts_fp8(x[4:5], *planes, weights[4:5], wrong[4:5])
    assert torch.equal(one, torch.zeros_like(one))


@pytest.mark.parametrize("hidden, dtype", [(64, torch.float32), (40, torch.float16)])
def test_what_is_left_to_the_reference(hidden, dtype):
    x = randn(3, hidden, dtype=dtype)
    planes = *matrices(2, 256, hidden, 1), *matrices(2, hidden, 128, 2)
    weights, experts = torch.ones(3, 1, device=DEVICE), torch.zeros(3, 1, dtype=torch.int32, device=DEVICE)
    arguments = x, *planes, weights, experts
    assert torch.equal(moe_experts_fp8(*arguments), fp8_op.native(*arguments))


@pytest.mark.parametrize("which", [1, 3])
def test_scales_of_another_shape(which):
    planes = [*matrices(2, 256, 64, 1), *matrices(2, 64, 128, 2)]
    planes[which] = planes[which][:, :, :0]
    x, weights, experts = randn(1, 64, dtype=torch.float16), torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32)
    name = "gate_up_scale" if which == 1 else "down_scale"
    for call in (moe_experts_fp8, fp8_op.native):
        with pytest.raises(ValueError, match=rf"{name}: expected \[2, .*\] for .*, not \[2, "):
            call(x, *planes, weights.to(DEVICE), experts.to(DEVICE))
