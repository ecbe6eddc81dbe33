"""`fp8_product`: products of 8-bit floats with scales, against float64, and what the kernel compiles to."""

from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")

from nanovllm.kernels.ops.linear_fp8 import dequantise_fp8
from nanovllm.kernels.triton.gemm.fp8_product import (
    Fp8Plan,
    fp8_product,
    padded_tokens,
    plan_fp8_product,
    rounded_tokens,
    splits_pay,
)
from tests.kernels.triton.common import DEVICE, randn

pytestmark = pytest.mark.triton
FP8 = torch.float8_e4m3fn
SMALL = Fp8Plan(tokens=32, outputs=64, warps=4, stages=2, programs=1, group=2)
TURNED = replace(SMALL, weight_first=True, columns=256)


def operands(tokens, outputs, size, scale_rows, scale_columns):
    """codes, scales, weight, scale; scale_rows, scale_columns: that share a scale of the weight, 0: all."""
    codes = (64 * randn(tokens, size, dtype=torch.float32)).clamp(-448, 448).to(FP8)
    weight = (64 * randn(outputs, size, dtype=torch.float32, seed=1)).clamp(-448, 448).to(FP8)
    codes[0], weight[0] = 0.001953125, -0.005859375  # subnormal numbers
    groups = -(-size // 128) if scale_columns else 1
    scales = (randn(groups, tokens, dtype=torch.float32, seed=2).abs() + 0.1).t()
    rows = -(-outputs // scale_rows) if scale_rows else 1
    return codes, scales, weight, (randn(rows, groups, dtype=torch.float32, seed=3).abs() + 0.1) * size**-0.5 / 4096


def check(num_tokens, codes, scales, weight, scale, bias, dtype, plan):
    out = torch.full((num_tokens, len(weight)), torch.nan, dtype=dtype, device=DEVICE)
    fp8_product(codes, scales, weight, scale, bias, out, plan)
    x = codes.double() * scales.double().repeat_interleave(-(-codes.shape[1] // scales.shape[1]), 1)
    want = x @ dequantise_fp8(weight, scale, torch.float64).T + (0 if bias is None else bias.double())
    # Tensor cores of Hopper keep about 14 bits of a sum.
    error = 1e-2 if DEVICE == "cuda" else {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5}[dtype]
    torch.testing.assert_close(out.double(), want[:num_tokens], rtol=error, atol=error)


@pytest.mark.parametrize(
    "num_tokens, outputs, size, scale_rows, scale_columns",
    [
        (48, 256, 384, 128, 128),
        (45, 144, 256, 128, 128),  # parts of tiles and of blocks, and a part of the tokens
        (33, 80, 256, 1, 128),
        (16, 128, 256, 0, 128),
        (20, 144, 208, 1, 0),  # a part of a tile's columns
        (16, 64, 128, 0, 0),
    ],
)
@pytest.mark.parametrize("plan", [SMALL, TURNED])
def test_product(num_tokens, outputs, size, scale_rows, scale_columns, plan, poison):
    bias = randn(outputs, dtype=torch.bfloat16, seed=4) if num_tokens % 16 else None
    made = operands(-(-num_tokens // 16) * 16, outputs, size, scale_rows, scale_columns)
    check(num_tokens, *made, bias, torch.float32, plan)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_built_in_plan(dtype, poison):
    check(144, *operands(144, 272, 256, 128, 128), None, dtype, None)


@pytest.mark.parametrize("splits", [2, 3])
@pytest.mark.parametrize("scale_columns", [0, 128])
@pytest.mark.parametrize("plan", [SMALL, TURNED])
def test_programs_share_the_columns(splits, scale_columns, plan, poison):
    bias = randn(288, dtype=torch.bfloat16, seed=4)[::2]
    check(45, *operands(48, 144, 656 if scale_columns == 0 else 640, 128, scale_columns), bias, torch.float32,
        replace(plan, splits=splits))  # fmt: skip


@pytest.mark.parametrize("small", [False, True])
def test_built_in_plans_fit_shared_memory_and_keep_multiprocessors_busy(small):
    room = (99 if small else 227) << 10
    for tokens, blocks in ((32, False), (64, True), (64, False), (128, False), (256, False), (257, False)):
        assert tokens == rounded_tokens({32: 17, 64: 33 - blocks, 128: 100, 256: 200, 257: 5000}[tokens], blocks)
        for outputs, size in ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (128, 128)):
            plan = plan_fp8_product(tokens, outputs, size, 132, small)
            stored = 0 if plan.weight_first else 2 * plan.tokens * plan.outputs
            shared = plan.stages * (plan.tokens + plan.outputs) * plan.columns + stored
            assert plan.programs * (shared + 1024) <= room + 1024
            assert plan.weight_first == (tokens <= 32 and not small)
            tiles = -(-tokens // plan.tokens) * -(-outputs // plan.outputs)
            assert plan.splits == 1 or tiles * plan.splits <= 132 * plan.programs
            assert plan.splits <= max(1, size // 128 // 4)
            if tokens <= 128 and size >= 4096 and not small:
                assert tiles * plan.splits > 132
            if tokens <= 128:
                assert padded_tokens(tokens - 9, blocks) % plan.tokens == 0


def test_where_it_is_faster_than_the_library():
    assert all(splits_pay(n, 24576, 132) for n in (17, 64)) and splits_pay(128, 4096, 132)
    assert not splits_pay(65, 6144, 132) and not splits_pay(129, 4096, 132)
