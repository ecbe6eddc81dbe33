"""Products with packed weights in CUDA C++: values on a GPU, the machine code where nvcc is, plans anywhere."""

import re
from contextlib import contextmanager
from dataclasses import replace
from itertools import product as product_of
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from nanovllm.kernels.cuda.packed import linear_packed, product_libraries
from nanovllm.kernels.cuda.packed.packed_cuda_plan import (
    MAX_TOKENS,
    RING_FEW_STAGES,
    RING_STAGES,
    WIDE_STAGES,
    WIDE_TOKENS,
    PackedCudaPlan,
    ScalePlane,
    phases_of,
    plan_packed_cuda,
    plan_ring,
    plan_wide,
    turns_of_a_phase,
    wide_plan,
    wide_shared_bytes,
    wide_width,
)
from nanovllm.kernels.ops.gguf_blocks import GGUF_TYPES
from nanovllm.kernels.triton.launch_arguments import cdiv
from tests.kernels.cuda.checks import (
    check,
    check_fused,
    check_gated,
    check_machine_code,
    make,
    nvcc,
    replayed,
    resources_of_kernels,
    views_of_1024_columns,
)

KINDS = ("int4", "int8", *GGUF_TYPES)
BF16 = torch.bfloat16


SUPPORT = product_libraries.packed_support


def least_stages(plan, tokens):
    """Of the kernel of wide.cuh: two for each group of warps that share columns, four where steps may be pairs."""
    pairs = tokens <= (64 if plan.row_warps == 3 else 32)
    return plan.warps // 4 // plan.row_warps * (4 if pairs else 2)


def product(x, operands, bias=None):
    kind, weight, scale, zero = operands
    if scale is None:
        return linear_packed.linear_gguf(x, weight, kind, bias)
    return (linear_packed.linear_int4 if kind == "int4" else linear_packed.linear_int8)(x, weight, scale, zero, bias)


@contextmanager
def filled_with_nan(device):
    """New tensors of floats are full of NaN, those that C++ makes, too. PyTorch's own products may warn."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1000, dtype=BF16, device=device).isnan().all(), "fill_uninitialized_memory is off"
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, size", [(1000, 1024), (520, 2560), (33, 256), (4096, 4096)])
def test_values(kind, rows, size, device, launches):
    operands, values = make(kind, rows, size, device)
    for tokens in (1, 3, 8, 9, 16):
        x = torch.randn(tokens, size, dtype=BF16, device=device)
        bias = torch.randn(rows, dtype=BF16, device=device)
        first = product(x, operands, bias)
        check(first, x, values, bias)
        assert all(torch.equal(first, product(x, operands, bias)) for _ in range(3)), "other bits in another run"
    assert len(launches) == 20


@pytest.mark.gpu
@pytest.mark.parametrize("rows, size", [(24570, 1408), (24570, 1536), (6140, 4096), (4096, 12288)])
@pytest.mark.parametrize("zeros", [False, True])
def test_values_of_many_tokens(rows, size, zeros, hopper, launches):
    """Blocks of 192 and of 64 rows, an odd and an even number of them and of steps, alone, gated and as sums.

    x has room for 32, 64 or 128 tokens. No result may depend on what is behind its tokens and columns: NaN here.
    """
    operands, values = make("int4", rows, size, hopper, zeros=zeros)
    sums = rows == 4096
    for tokens in (17, 32, 33, 64, 100, 128):
        x = torch.full((tokens + 128, size + 128), torch.nan, dtype=BF16, device=hopper)[:tokens, :size].normal_()
        if sums:
            weight = linear_packed.kernel_weight(x, *operands, sums=True)
            first = linear_packed.run_product(x, weight, None, sums=True)
            with filled_with_nan(hopper):
                filled = linear_packed.run_product(x, weight, None, sums=True)
            assert torch.equal(first, filled), "it depends on memory that nothing has written"
            check(first.sum(0).to(BF16), x, values)
            continue
        bias = torch.randn(rows, dtype=BF16, device=hopper)
        first = product(x, operands, bias)
        with filled_with_nan(hopper):
            filled = product(x, operands, bias)
        assert torch.equal(first, filled), "it depends on memory that nothing has written"
        check(first, x, values, bias)
        assert torch.equal(first, product(x, operands, bias)), "other bits in another run"
        check_gated(linear_packed.linear_packed_silu_and_mul(x, *operands), product(x, operands), x, values)
    assert len(launches) == (12 if sums else 30)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, scale_dtype", [(BF16, BF16), (BF16, torch.float16), (torch.float16, torch.float16)])
@pytest.mark.parametrize("group, zeros", [(128, False), (512, True), (2048, False)])
def test_blocks_of_many_tokens(group, zeros, dtype, scale_dtype, hopper):
    """Warpgroups with rows or columns of their own, short last splits, columns that leave some warpgroups none."""
    for size in (2048, 128, 2304):
        group, zeros = (group, zeros) if size == 2048 else (128, False)
        operands, values = make("int4", 200, size, hopper, group, zeros, scale_dtype)
        for tokens in (1, 16, 31, 64, 128):
            x = torch.randn(tokens, size, dtype=dtype, device=hopper)
            weight = linear_packed.kernel_weight(x[:1], *operands)
            for columns, splits, few in product_of((False, True), (1, 4), (False, True)):
                plan = wide_plan(tokens, columns, splits)
                if few:  # stages of x: as few as there may be
                    plan = replace(plan, stages=least_stages(plan, tokens))
                sums = linear_packed.run_product(x, weight, None, sums=True, plan=plan)
                check(sums.sum(0).to(dtype), x, values)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 31, 128])
def test_blocks_of_many_tokens_beside_a_busy_stream(tokens, hopper):
    """Each warp then waits for memory for a time of its own. What it reads of x must not depend on who is late."""
    operands, values = make("int4", 200, 4096, hopper)
    x = torch.randn(tokens, 4096, dtype=BF16, device=hopper)
    weight = linear_packed.kernel_weight(x[:1], *operands)
    larger_than_the_cache, stream = torch.empty(1 << 28, dtype=torch.uint8, device=hopper), torch.cuda.Stream()
    for columns in (False, True):
        plan = wide_plan(tokens, columns)
        first = linear_packed.run_product(x, weight, None, sums=True, plan=plan)
        check(first.sum(0).to(BF16), x, values)
        with torch.cuda.stream(stream):
            for _ in range(50):
                larger_than_the_cache.add_(1)
        again = [linear_packed.run_product(x, weight, None, sums=True, plan=plan) for _ in range(100)]
        stream.synchronize()
        assert all(torch.equal(first, got) for got in again), "other bits in another run"


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int4", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("rows, size", [(16406, 512), (16406, 768), (4090, 1536), (600, 12288)])
def test_values_of_large_blocks(kind, rows, size, device, launches):
    """The plans of many rows, and columns for which x has phases: alone, gated and as sums."""
    operands, values = make(kind, rows, size, device)
    for tokens in (1, 2, 5, 8, 16):
        x = torch.randn(tokens, size, dtype=BF16, device=device)
        check(product(x, operands), x, values)
        weight = linear_packed.kernel_weight(x, *operands)
        check(linear_packed.run_product(x, weight, None, sums=True).sum(0).to(BF16), x, values)
        gated = linear_packed.linear_packed_silu_and_mul(x, *operands)
        check_gated(gated, linear_packed.run_product(x, weight, None), x, values)
    assert len(launches) == 20


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int4", "int8"])
@pytest.mark.parametrize("group", [128, 512, 2048])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("dtype, scale_dtype", [(BF16, BF16), (BF16, torch.float16), (torch.float16, torch.float16)])
def test_groups_zero_points_and_dtypes(kind, group, zeros, dtype, scale_dtype, device, launches):
    operands, values = make(kind, 300, 2048, device, group, zeros, scale_dtype)
    x = torch.randn(5, 2048, dtype=dtype, device=device)
    check(product(x, operands), x, values)
    assert launches


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_fused_products_equal_the_separate_ones(kind, device, launches):
    operands, values = make(kind, 2 * 648, 1280, device)
    for tokens in (1, 7, 16):
        x = torch.randn(tokens, 1280, dtype=BF16, device=device)
        check_fused(x, operands, product(x, operands), values)
    assert len(launches) == 9


@pytest.mark.gpu
def test_any_strides(device, launches):
    operands, values = make("int4", 200, 1024, device)
    wide = torch.randn(4, 3000, dtype=BF16, device=device)
    for x in views_of_1024_columns(wide):
        check(product(x, operands).view(4, 200), x.reshape(4, 1024), values)
    rows = torch.zeros(200, 704, dtype=torch.uint8, device=device)
    rows[:, 16:528] = operands[1]
    apart = torch.zeros(2, 200, 24, dtype=BF16, device=device)
    apart[0, :, 8:16] = apart[1, :, 5:13] = operands[2]
    x = wide[:, :1024]
    assert torch.equal(product(x, ("int4", rows[:, 16:528], apart[0, :, 8:16], None)), product(x, operands))
    check(product(x, ("int4", rows[:, 16:528], apart[1, :, 5:13], None)), x, values)  # not at multiples of 16 bytes
    assert launches


@pytest.mark.gpu
def test_any_strides_of_many_tokens(hopper, launches):
    operands, values = make("int4", 24576, 1024, hopper)
    large = torch.randn(40, 3000, dtype=BF16, device=hopper)
    same = large[:1, :1024].expand(40, -1)
    for x in (large[:, 8:1032], large[:, 3:1027], same, large.view(20, 2, 3000)[..., :1024], large.t()[:1024].t()):
        check(product(x, operands).view(40, -1), x.reshape(40, 1024), values)
    assert len(launches) == 5


@pytest.mark.gpu
def test_what_the_kernel_does_not_take_has_the_other_provider(device, launches):
    x = torch.randn(17, 1024, dtype=BF16, device=device)
    for operands, values, call in (
        (*make("int4", 64, 1024, device), x),  # too many tokens
        (*make("int4", 64, 1024, device, group=32), x[:4]),
        (*make("int8", 64, 96, device, group=96), x[:4, :96]),
        (*make("Q8_0", 64, 96, device), x[:4, :96]),
    ):
        check(product(call, operands), call, values)
    assert not launches


@pytest.mark.gpu
def test_a_graph_replays_it_with_other_tokens(device):
    operands, values = make("Q4_K", 512, 1024, device)
    x = torch.randn(2, 1024, dtype=BF16, device=device)
    check(replayed(lambda: product(x, operands), x), x, values)


def test_plans():
    """Every split has columns, and blocks that share no columns are many where there are many rows."""
    for rows, groups in ((4096, 32), (4096, 96), (1024, 16), (128, 1)):
        plan = plan_packed_cuda(rows, groups, 132, True)
        assert 1 <= plan.splits <= max(1, groups // 4)
    assert plan_packed_cuda(24576, 32, 132, False).splits == 1
    assert turns_of_a_phase(7, 1024) == 7 and turns_of_a_phase(1000, 16 * 1024) % 2 == 0
    assert MAX_TOKENS == 16


@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 16])
@pytest.mark.parametrize("kind", ["int4", "Q4_K", "Q6_K"])
def test_blocks_of_the_ring_have_room(kind, tokens):
    """Threads, registers and shared memory of every plan fit; eight rows of scales are in different banks."""
    header = (Path(product_libraries.FOLDER) / "packed.cuh").read_text()
    assert f"RING_STAGES = {RING_STAGES};" in header and f"RING_FEW_STAGES = {RING_FEW_STAGES};" in header
    assert int(re.search(r"RING_SIX_STAGES = (\d+);", header)[1]) * 24 == RING_STAGES * 16, "as many bytes"
    most_warps = int(re.search(r"RING_WARPS = (\d+);", header)[1])
    planes = {
        "int4": (ScalePlane(2, 0), None, None, None),
        "Q4_K": (ScalePlane(2, 1), ScalePlane(2, 1), ScalePlane(1, -2), ScalePlane(1, -2)),
        "Q6_K": (ScalePlane(2, 1), None, ScalePlane(1, -3), None),
    }[kind]
    for rows, groups in ((24576, 32), (4096, 96), (64, 2048), (151936, 32), (6144, 2)):
        for sums in (False, True):
            plan = plan_ring(kind, rows, groups, tokens, 132, sums)
            assert plan_ring(kind, rows, groups, tokens, 132, sums, small=True) is None
            if plan is None:
                continue
            assert plan.warps <= most_warps and plan.fragments <= (1 if tokens <= 8 else 2)
            turns = cdiv(cdiv(groups, plan.splits), plan.warps // plan.row_warps)
            phases = phases_of(plan, turns, tokens, 128, planes)
            assert 1 <= phases.turns <= turns and phases.shared_bytes <= 227 * 1024 and phases.panel[4] % 32 == 16
    if 1 < tokens <= 8:
        plans = [plan_ring(kind, rows, 32, tokens, 132, False) for rows in (1024, 4096, 6144, 24576, 151936)]
        assert [p.row_warps for p in plans] == [1, 2, 3, 12, 12] and {p.warps for p in plans} == {12}
        assert plan_ring(kind, 4096, 96, tokens, 132, True) == PackedCudaPlan(4, 12, 2, 1)
        assert plan_ring(kind, 5120, 96, tokens, 132, True) == PackedCudaPlan(6, 12, 2, 1)
        assert plan_ring(kind, 256, 8, tokens, 132, True) is None  # few blocks
    if tokens == 1:
        plans = [plan_ring(kind, rows, 32, 1, 132, False) for rows in (1024, 4096, 6144, 24576, 151936)]
        wanted = {"int4": (18, 18, 18, 48, 48), "Q4_K": (18, 18, 14, 48, 44), "Q6_K": (18, 18, 18, 44, 14)}[kind]
        assert [10 * p.row_warps + p.warps for p in plans] == list(wanted)
        assert [p.stages for p in plans] == [0, 0, 0, RING_FEW_STAGES if kind == "Q4_K" else 0, 0]
        assert plan_ring(kind, 6144, 64, 1, 132, False).warps == plan_ring(kind, 4208, 32, 1, 132, False).warps == 8
        assert plan_ring(kind, 151936, 8, 1, 132, False).row_warps == 4  # too few columns to share
    assert ScalePlane(2, 1).room(4) >= 3 * 2 + 14  # four steps from an odd one have parts of three pairs


def test_plans_of_many_tokens():
    """Large weights have a plan if its blocks keep most multiprocessors busy; they have room in shared memory."""
    header = (Path(product_libraries.FOLDER) / "packed.cuh").read_text()
    assert f"WIDE_STAGES = {WIDE_STAGES};" in header and f"WIDE_TOKENS = {WIDE_TOKENS};" in header
    assert [wide_width(tokens) for tokens in (1, 32, 33, 64, 65, 128)] == [32, 32, 64, 64, 128, 128]
    for rows, groups, sums, splits, columns in (
        (24576, 32, False, (1, 1, 1), False),
        (151936, 32, False, (1, 1, 1), False),
        (6144, 32, False, (1, 1, 1), True),
        (4096, 32, True, (4, 4, 4), False),
        (4096, 96, True, (6, 6, 6), False),
    ):
        plans = [plan_wide(rows, groups, tokens, 132, sums) for tokens in (17, 64, WIDE_TOKENS)]
        assert tuple(plan.splits for plan in plans) == splits
        for tokens, plan in zip((17, 64, WIDE_TOKENS), plans, strict=True):
            assert plan == wide_plan(tokens, columns, plan.splits) and plan.fragments == 4
            assert plan.warps % 4 == 1, "one warp copies x"
            assert wide_shared_bytes(plan, tokens) <= 227 * 1024
            assert plan.stages >= least_stages(plan, tokens) and not plan.stages % (plan.warps // 4 // plan.row_warps)
    for rows, groups, sums in ((2048, 96, False), (4096, 32, False), (13440, 32, False), (4096, 16, True)):
        assert plan_wide(rows, groups, 32, 132, sums) is None


@pytest.mark.slow
@pytest.mark.parametrize("source", ["int4", "k_planes", "ring", "ring_int4", "wide", "wide_zero"])
def test_machine_code_multiplies_on_tensor_cores(source):
    wide = source.startswith("wide")
    product = "wgmma.mma_async.sync.aligned.m64n" if wide else "mma.sync.aligned.m16n8k16"
    copied = wide or source.startswith("ring")
    load = "cp.async.cg.shared.global.L2::128B" if copied else "ld.global.nc.L1::no_allocate.L2::128B.v4"
    check_machine_code(Path(product_libraries.FOLDER) / f"{source}.cu", "sm_90a", [product], load)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["wide", "wide_zero"])
def test_registers_of_many_tokens(source, tmp_path):
    """None is spilled. With 32 tokens the kernel that adds sums and norms has room beside a block."""
    usage = resources_of_kernels(Path(product_libraries.FOLDER) / f"{source}.cu", "sm_90a", tmp_path)
    assert all(stack == spilled == 0 for _, stack, spilled in usage.values())
    small = [registers for name, (registers, *_) in usage.items() if "Lb0ELi32E" in name or "Lb1ELi32E" in name]
    assert small and max(small) <= 96


@pytest.mark.slow
@pytest.mark.parametrize("source", ["wide", "wide_zero", "box_int4"])
def test_hopper_code_compiles_for_other_gpus(source, tmp_path):
    """One library has all kernels of the folder: what only Hopper has must not break it elsewhere."""
    nvcc("-arch=sm_120", "-cubin", "-o", tmp_path / "kernels", Path(product_libraries.FOLDER) / f"{source}.cu")
