"""The kernel of packed/box.cuh: values on Hopper, plans and machine code anywhere."""

import itertools
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from nanovllm.kernels.cuda.packed import linear_packed, product_libraries
from nanovllm.kernels.cuda.packed.packed_cuda_plan import (
    BOX_FRAGMENTS,
    BOX_WARPS,
    box_plan,
    box_shared_bytes,
    box_tiles,
    plan_boxes,
)
from nanovllm.kernels.ops.gguf_blocks import GGUF_TYPES, PLANES, dequantise_gguf
from tests.kernels.cuda.checks import (
    check,
    check_fused,
    check_gated,
    check_machine_code,
    make,
    replayed,
    resources_of_kernels,
)

BF16 = torch.bfloat16
SUPPORT = product_libraries.packed_support
SOURCES = {kind: Path(product_libraries.FOLDER) / f"box_{kind.lower()}.cu" for kind in ("int4", "Q4_K")}
REGISTERS = {"int4": 96, "Q4_K": 64}


@pytest.fixture
def poisoned(monkeypatch):
    """New tensors of floats are full of NaN."""
    empty = torch.empty

    def filled(*size, **options):
        made = empty(*size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", filled)


def make_boxes(kind, rows, size, device, **options):
    """As `make`; Q4_K with scales and minima of 6 bits, as in files, and weights that are not rounded. The third result
    is what magnitudes of weights and minima add up to, of which float32 rounds a part.
    """
    operands, values = make(kind, rows, size, device, **options)
    if kind == "int4":
        return operands, values, values.abs()
    of, weight = GGUF_TYPES[kind], operands[1]
    for name in ("sc", "mn"):
        of.plane(weight, name, size).bitwise_and_(63)
    values = dequantise_gguf(weight, kind + PLANES, size, torch.float64)
    minima = weight.clone()
    of.plane(minima, "q", size).zero_()
    return operands, values, values.abs() + 2 * dequantise_gguf(minima, kind + PLANES, size, torch.float64).abs()


def check_sums(sums, x, values, parts):
    """Float32 sums of a token and the product in float64: each 256 columns of x are rounded to a part of the
    largest of them, and are off by a 65,024th of it at most.
    """
    exact, magnitude = x.double() @ values.t(), x.double().abs() @ parts.t()
    largest = x.double().abs().view(-1, 256).amax(1).repeat_interleave(256)
    rounded = (largest / 65024) @ values.abs().t()
    assert ((sums.double() - exact).abs() <= 1.01 * rounded + magnitude * 2**-18).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind, scale_dtype", [("int4", BF16), ("int4", torch.float16), ("Q4_K", BF16)])
@pytest.mark.parametrize(
    "rows, size", [(4096, 12288), (100, 5120), (16406, 1024), (24, 4096), (1000, 1024), (66, 9216)]
)
def test_values(rows, size, kind, scale_dtype, hopper, launches, poisoned):
    """Small, large and uneven numbers; few blocks and many; tiles, halves and columns that end early."""
    operands, values, parts = make_boxes(kind, rows, size, hopper, scale_dtype=scale_dtype)
    if kind == "int4":
        operands[2][rows // 2], values[rows // 2] = 0, 0
    bias = torch.randn(rows, dtype=BF16, device=hopper)
    multiprocessors = 132 if rows > 100 and size > 1024 else 2
    for factor in (1, 1e-20, 1e6, 0):
        x = torch.randn(1, size, device=hopper) * factor
        x = (x * torch.where(torch.rand_like(x) < 0.02, 30, 1)).to(BF16)
        weight = linear_packed.kernel_weight(x, *operands)
        for stages in (2, 3):
            plan = box_plan(rows, multiprocessors, False, stages, kind)
            sums = linear_packed.run_product(x, weight, None, sums=True, plan=plan)
            assert sums.shape == (1, 1, rows)
            check_sums(sums[0], x, values, parts)
            for _ in range(5):
                again = linear_packed.run_product(x, weight, None, sums=True, plan=plan)
                assert torch.equal(sums, again), "other bits in another run"
            check(linear_packed.run_product(x, weight, bias, plan=plan), x, values, bias)
            if factor == 1:
                plain = linear_packed.run_product(x, weight, None, plan=plan)
                halves = box_plan(rows, multiprocessors, True, stages, kind)
                gated = linear_packed.run_product(x, weight, None, gated=True, plan=halves)
                check_gated(gated, plain, x, parts)
    assert launches


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int4", "Q4_K"])
@pytest.mark.parametrize("rows, size", [(4096, 4096), (6144, 4096), (24576, 4096), (4096, 12288)])
def test_the_ops_take_boxes(rows, size, kind, hopper):
    operands, values, parts = make_boxes(kind, rows, size, hopper)
    x = torch.randn(1, size, dtype=BF16, device=hopper)
    weight = linear_packed.kernel_weight(x, *operands)
    for gated, sums in ((False, False), (True, False), (False, True)):
        assert linear_packed.plan_of(weight, x, rows, 1, gated, sums).fragments == BOX_FRAGMENTS
    plain = linear(x, operands)
    check(plain, x, values)
    if rows <= 6144:
        check_fused(x, operands, plain, parts)
    else:
        check_gated(linear_packed.linear_packed_silu_and_mul(x, *operands), plain, x, parts)


def linear(x, operands):
    storage, weight, scale, _ = operands
    return (
        linear_packed.linear_gguf(x, weight, storage) if scale is None else linear_packed.linear_int4(x, weight, scale)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int4", "Q4_K"])
@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
def test_a_number_that_is_not_finite_makes_nans(number, kind, hopper):
    operands, _, _ = make_boxes(kind, 4096, 4096, hopper)
    x = torch.randn(1, 4096, dtype=BF16, device=hopper)
    assert linear(x, operands).isfinite().all()
    x[0, 300] = float(number)
    assert linear(x, operands).isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int4", "Q4_K"])
def test_views_of_x(kind, hopper):
    operands, values, _ = make_boxes(kind, 4096, 4096, hopper)
    x = torch.randn(1, 10000, dtype=BF16, device=hopper)
    for view in (x[:, 8:4104], x[:, 3:4099], x[:, :8192:2], x.view(1, 1, 10000)[..., :4096]):
        check(linear(view, operands).view(1, -1), view.reshape(1, -1), values)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["int4", "Q4_K"])
def test_a_graph_replays_it_with_another_token(kind, hopper):
    operands, values, _ = make_boxes(kind, 6144, 4096, hopper)
    x = torch.randn(1, 4096, dtype=BF16, device=hopper)
    check(replayed(lambda: linear(x, operands), x), x, values)


def test_plans_have_room():
    """A block of every shape fits, its tiles too, and as many blocks as multiprocessors are there where tiles are."""
    header = (Path(product_libraries.FOLDER) / "packed.cuh").read_text()
    assert f"BOX_WARPS = {BOX_WARPS};" in header
    for rows, kind in itertools.product((24576, 4096, 6144, 151936, 24, 1000), ("int4", "Q4_K")):
        for gated in (False, True):
            for stages in (2, 3, 5):
                plan, tiles = box_plan(rows, 132, gated, stages, kind), box_tiles(rows, gated)
                assert plan.fragments == BOX_FRAGMENTS and plan.row_warps <= tiles
                assert plan.row_warps == tiles or plan.row_warps % 132 == 0
                assert box_shared_bytes(plan, tiles, kind) <= 227 * 1024


@pytest.mark.parametrize("kind, stages", [("int4", 2), ("Q4_K", 3)])
def test_plans_are_made_for_the_shapes_that_were_timed(kind, stages):
    for rows, groups in ((4096, 32), (6144, 32), (24576, 32), (4096, 96)):
        plan = plan_boxes(kind, rows, groups, 132, False)
        assert plan is not None and (plan.row_warps, plan.stages, plan.splits) == (132, stages, 1)
    for rows, groups in ((4095, 32), (24577, 32), (4096, 31), (4096, 40), (4096, 128)):
        assert plan_boxes(kind, rows, groups, 132, False) is None


def test_which_calls_take_boxes(monkeypatch):
    def takes(x, operands):
        return linear_packed.takes_boxes(linear_packed.kernel_weight(x, *operands), x, x.shape[0])

    x = torch.randn(2, 4096, dtype=BF16)
    plain, _ = make("int4", 32, 4096, "cpu")
    assert not takes(x[:1], plain)  # not on Hopper
    monkeypatch.setattr(linear_packed, "_has_wide", lambda _: True)
    assert takes(x[:1], plain)
    assert takes(x[:1], make("int4", 32, 4096, "cpu", scale_dtype=torch.float16)[0])
    assert not takes(x, plain)
    assert not takes(x[:1].half(), make("int4", 32, 4096, "cpu", scale_dtype=torch.float16)[0])
    assert not takes(x[:1], make("int4", 32, 4096, "cpu", zeros=True)[0])
    assert not takes(x[:1], make("int8", 32, 4096, "cpu")[0])
    for kind in GGUF_TYPES:
        assert takes(x[:1], make(kind, 32, 4096, "cpu")[0]) == (kind == "Q4_K")
    assert not takes(x, make("Q4_K", 32, 4096, "cpu")[0])
    assert not takes(x[:1, :1152], make("int4", 32, 1152, "cpu")[0])  # 9 groups
    for group in (256, 4096):
        assert not takes(x[:1], make("int4", 32, 4096, "cpu", group=group)[0])
    storage, weight, scale, _ = plain
    assert not takes(x[:1], (storage, weight, torch.cat((scale, scale), 1)[:, 1:33], None))  # at places of 2 bytes


@pytest.mark.parametrize("kind, stages, stage_bytes", [("int4", (2, 4), 33808), ("Q4_K", (3, 3), 37904)])
@pytest.mark.parametrize("gated, sums", [(True, False), (False, True), (False, False)])
def test_what_the_kernel_is_told(gated, sums, kind, stages, stage_bytes, monkeypatch):
    told = []
    monkeypatch.setattr(linear_packed, "product_kernel", lambda *_: lambda *arguments: told.append(arguments[-1]))
    operands, _ = make(kind, 4096, 4096, "cpu")
    x = torch.randn(1, 4096, dtype=BF16)
    plan = plan_boxes(kind, 4096, 32, 132, gated)
    y = linear_packed.run_product(x, linear_packed.kernel_weight(x, *operands), None, gated=gated, sums=sums, plan=plan)
    assert y.shape == ((1, 1, 4096) if sums else (1, 2048) if gated else (1, 4096))
    assert told[0][11:13] == (stages[gated], 132) and told[0][-5:-3] == (1, BOX_WARPS) and told[0][-2] == BOX_FRAGMENTS
    assert told[0][-3] == stages[gated] * stage_bytes + 16 * 512 + 2 * 1024  # two tiles a block


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int4", "Q4_K"])
def test_other_blocks_have_room_beside_boxes(kind, tmp_path):
    """16 warps of 96 registers a thread leave 64 for each thread of 8 warps, of 64 registers room for as many."""
    for registers, stack, spilled in resources_of_kernels(SOURCES[kind], "sm_90a", tmp_path).values():
        assert registers <= REGISTERS[kind] and stack == spilled == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int4", "Q4_K"])
def test_boxes_multiply_integers_on_tensor_cores(kind):
    product, load = "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32", "cp.async.bulk.tensor.3d"
    check_machine_code(SOURCES[kind], "sm_90a", [product], load)
