"""Two weights in different blocks of GGUF multiplied in one launch, and what a block then has in shared memory."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from nanovllm.kernels.cuda.packed import linear_packed, product_libraries
from nanovllm.kernels.cuda.packed.packed_cuda_plan import (
    RING_FEW_STAGES,
    PackedCudaPlan,
    phases_of,
    plan_ring,
    plan_stacked_ring,
)
from tests.kernels.cuda.checks import check, check_fused, make, replayed, resources_of_kernels

BF16 = torch.bfloat16
SUPPORT = product_libraries.packed_support
FEW = (1, 2, 3, 5, 8)


def both(first, second, rows, size, device):
    """(the arguments of `linear_gguf` behind x, but the bias, of two weights; both in float64, one below the other)"""
    (kind, weight, *_), values = make(first, rows[0], size, device)
    (below_kind, below, *_), more = make(second, rows[1], size, device)
    return (weight, kind), (below, below_kind), torch.cat([values, more])


@pytest.fixture
def stacked(monkeypatch):
    """How often two weights had one launch."""
    seen = []
    original = linear_packed.stacked_kernel
    monkeypatch.setattr(
        linear_packed, "stacked_kernel", lambda device: lambda *args: seen.append(1) or original(device)(*args)
    )
    return seen


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [(5120, 1024), (1000, 33), (17, 1000), (1, 1), (16, 16), (2048, 2048)])
@pytest.mark.parametrize("size", [256, 512, 2560, 4096])
@pytest.mark.parametrize("kinds", [("Q4_K", "Q6_K"), ("Q6_K", "Q4_K")])
def test_values(kinds, rows, size, device, launches, stacked):
    first, second, values = both(*kinds, rows, size, device)
    for tokens in FEW:
        x = torch.randn(tokens, size, dtype=BF16, device=device)
        bias = torch.randn(sum(rows), dtype=BF16, device=device)
        for b in (None, bias):
            got = linear_packed.linear_gguf(x, *first, b, *second)
            check(got, x, values, b)
            assert all(torch.equal(got, linear_packed.linear_gguf(x, *first, b, *second)) for _ in range(3)), (
                "other bits"
            )
    assert len(stacked) == 8 * len(FEW) and not launches


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kinds", [(a, b) for a in ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K") for b in ("Q5_0", "Q4_K", "Q5_K", "Q6_K")]
)
def test_other_pairs_and_more_tokens_have_two(kinds, device, stacked):
    first, second, values = both(*kinds, (72, 40), 1024, device)
    one = {"Q4_K", "Q6_K"} == set(kinds)
    for tokens in (1, 8, 9, 16, 17, 300):
        x = torch.randn(tokens, 1024, dtype=BF16, device=device)
        bias = torch.randn(112, dtype=BF16, device=device)
        check(linear_packed.linear_gguf(x, *first, bias, *second), x, values, bias)
    assert len(stacked) == 2 * one


@pytest.mark.gpu
def test_strides_dimensions_and_a_graph(device, stacked):
    first, second, values = both("Q4_K", "Q6_K", (200, 100), 1024, device)
    wide = torch.randn(4, 3000, dtype=BF16, device=device)
    for x in (wide[:, 8:1032], wide[:, 3:1027], wide.view(2, 2, 3000)[..., :1024], wide[:1, :1024].expand(4, -1)):
        got = linear_packed.linear_gguf(x, *first, None, *second)
        assert got.shape == (*x.shape[:-1], 300)
        check(got.view(4, 300), x.reshape(4, 1024), values)
    x = torch.randn(1, 1024, dtype=BF16, device=device)
    check(replayed(lambda: linear_packed.linear_gguf(x, *first, None, *second), x), x, values)
    assert len(stacked) == 6


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
@pytest.mark.parametrize("rows, size", [(16406, 512), (4096, 4096), (4090, 12288), (72, 49152), (34, 256)])
def test_scales_of_whole_rows_and_of_phases(kind, rows, size, device):
    """Plans of one token and of several: alone, gated, with sums, with the norm behind; 49,152 columns have phases."""
    operands, values = make(kind, rows, size, device)
    for tokens in (1, 8):
        x = torch.randn(tokens, size, dtype=BF16, device=device)
        plain = linear_packed.linear_gguf(x, operands[1], kind + "/planes")
        check(plain, x, values)
        weight = linear_packed.kernel_weight(x, *operands)
        plans = [None, PackedCudaPlan(2, 12, 3, 1), PackedCudaPlan(4, 4, 1, 1), PackedCudaPlan(1, 8, 2, 1)]
        if kind == "Q4_K" and tokens == 1 and size <= 4096:
            plans += [PackedCudaPlan(4, 8, 1, 1, RING_FEW_STAGES), PackedCudaPlan(1, 8, 2, 1, RING_FEW_STAGES)]
        for plan in plans:
            check(linear_packed.run_product(x, weight, None, sums=True, plan=plan).sum(0).to(BF16), x, values)
        check_fused(x, operands, plain, values)


def test_plans_have_room():
    """Blocks of the products of a layer have all scales of their rows, and as many have room as one wave needs."""
    for tokens in FEW:
        plan = plan_stacked_ring((5120, 1024), 32, tokens, 132)
        blocks, needed = 0, 0
        for rows, kind in ((5120, "Q4_K"), (1024, "Q6_K")):
            weight = linear_packed.planes_of(4096, make(kind, 1, 4096, "cpu")[0][1], kind + "/planes")
            columns = 512 // weight.bits
            turns = 4096 // columns // (plan.warps // plan.row_warps)
            phases = phases_of(plan, turns, tokens, columns, weight.scales, weight.section)
            assert phases.section_bytes == weight.section[4] > 0 and phases.panel[4] % 32 == 16
            blocks += -(-rows // (16 * plan.row_warps))
            needed = max(needed, phases.shared_bytes)
        assert needed <= 227 * 1024
        assert blocks <= 132 * (228 * 1024 // (needed + 1024))
    for columns in (4096, 5120):  # gate and up of one token: three blocks of 8 warps have room
        weight = linear_packed.planes_of(columns, make("Q4_K", 1, columns, "cpu")[0][1], "Q4_K/planes")
        plan = plan_ring("Q4_K", 24576, columns // 128, 1, 132, False)
        phases = phases_of(plan, columns // 256, 1, 128, weight.scales, weight.section)
        assert (plan.warps, plan.stages, phases.section_bytes) == (8, 4, weight.section[4])
        assert 3 * (phases.shared_bytes + 1024) <= 228 * 1024
    assert plan_ring("Q4_K", 25600, 32, 1, 132, False).stages == plan_ring("Q4_K", 24576, 42, 1, 132, False).stages == 0
    assert plan_stacked_ring((5120, 1024), 32, 9, 132) is None
    one = [plan_stacked_ring(rows, 32, 1, 132) for rows in ((5120, 1024), (2048, 1024), (17, 1))]
    assert [(p.row_warps, p.warps, p.splits) for p in one] == [(1, 4, 1), (1, 8, 1), (1, 8, 1)]
    assert plan_stacked_ring((1 << 17, 1024), 32, 1, 132) is None
    large = linear_packed.planes_of(49152, make("Q6_K", 1, 49152, "cpu")[0][1], "Q6_K/planes")
    plan = plan_ring("Q6_K", 8192, 384, 1, 132, True)
    assert phases_of(plan, 64, 1, 128, large.scales, large.section).section_bytes == 0


@pytest.mark.slow
def test_registers_of_whole_rows(tmp_path):
    """None is spilled; three blocks of 8 warps have room, and with several tokens one of 12."""
    usage = resources_of_kernels(Path(product_libraries.FOLDER) / "ring.cu", "sm_90a", tmp_path)
    whole = {name: used for name, used in usage.items() if "ELb1E" in name or "stacked" in name}
    assert len(whole) == 7 and all(stack == spilled == 0 for _, stack, spilled in whole.values())
    assert max(registers for registers, *_ in whole.values()) <= 168
