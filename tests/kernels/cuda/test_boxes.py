"""The kernel of packed/box.cuh: values on Hopper, plans and machine code anywhere."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from nanovllm.kernels.cuda.packed import library, products
from nanovllm.kernels.cuda.packed.plan import BOX_FRAGMENTS, BOX_WARPS, box_plan, box_shared_bytes, box_tiles
from tests.kernels.cuda.checks import check, check_gated, check_machine_code, make, resources_of_kernels

BF16 = torch.bfloat16


SUPPORT = library.packed_support


@pytest.mark.gpu
@pytest.mark.parametrize("scale_dtype", [BF16, torch.float16])
@pytest.mark.parametrize("rows, size", [(4096, 12288), (100, 5120), (16406, 1024), (24, 4096)])
def test_values_of_boxes(rows, size, scale_dtype, hopper, launches):
    """x in 16 bits of the largest of 256 columns: small, large and uneven numbers; few blocks and many."""
    operands, values = make("int4", rows, size, hopper, scale_dtype=scale_dtype)
    for tokens, factor in ((1, 1), (2, 1e-20), (4, 1e6), (5, 1), (8, 1)):
        x = torch.randn(tokens, size, device=hopper) * factor
        x = (x * torch.where(torch.rand_like(x) < 0.02, 30, 1)).to(BF16)
        weight = products._operands(x, *operands)
        exact, magnitude = x.double() @ values.t(), x.double().abs() @ values.abs().t()
        for stages in (2, 3, 4):
            plan = box_plan(rows, tokens, 132 if rows > 100 else 2, False, stages)
            sums = products._run(x, weight, None, sums=True, plan=plan)
            assert ((sums[0].double() - exact).abs() <= magnitude * 2**-13).all()
            assert torch.equal(sums, products._run(x, weight, None, sums=True, plan=plan)), "other bits in another run"
            bias = torch.randn(rows, dtype=BF16, device=hopper)
            plain = products._run(x, weight, bias, plan=plan)
            check(plain, x, values, bias)
        if factor == 1:
            gated = products._run(x, weight, None, gated=True, plan=box_plan(rows, tokens, 132, True, 3))
            check_gated(gated, products._run(x, weight, None, plan=plan), x, values)
    assert launches


@pytest.mark.gpu
def test_a_number_that_is_none_stays_in_its_token_with_boxes(hopper):
    operands, _ = make("int4", 64, 4096, hopper)
    x = torch.randn(3, 4096, dtype=BF16, device=hopper)
    x[1, 300] = float("nan")
    y = products._run(x, products._operands(x, *operands), None, plan=box_plan(64, 3, 132, False, 3))
    assert y[1].isnan().all() and not y[[0, 2]].isnan().any()


def test_boxes_have_room():
    """A block of every shape fits, its tiles too, and as many blocks as multiprocessors are there where tiles are."""
    header = (Path(library.FOLDER) / "packed.cuh").read_text()
    assert f"BOX_WARPS = {BOX_WARPS};" in header
    for rows in (24576, 4096, 6144, 151936, 24, 1000):
        for tokens in (1, 4, 8):
            for gated in (False, True):
                for stages in (2, 3, 4):
                    plan, tiles = box_plan(rows, tokens, 132, gated, stages), box_tiles(rows, gated)
                    assert plan.fragments == BOX_FRAGMENTS and plan.row_warps <= tiles
                    assert plan.row_warps == tiles or plan.row_warps % 132 == 0
                    assert box_shared_bytes(plan, tiles, tokens) <= 227 * 1024


@pytest.mark.parametrize("gated, sums", [(True, False), (False, True), (False, False)])
def test_what_the_kernel_is_told(gated, sums, monkeypatch):
    told = []
    monkeypatch.setattr(products, "product_kernel", lambda *_: lambda *arguments: told.append(arguments[-1]))
    operands, _ = make("int4", 4096, 4096, "cpu")
    x = torch.randn(2, 4096, dtype=BF16)
    plan = box_plan(4096, 2, 132, gated, 3)
    y = products._run(x, products._operands(x, *operands), None, gated=gated, sums=sums, plan=plan)
    assert y.shape == ((1, 2, 4096) if sums else (2, 2048) if gated else (2, 4096))
    assert told[0][11:13] == (3, 132) and told[0][22:24] == (1, BOX_WARPS) and told[0][25] == BOX_FRAGMENTS


@pytest.mark.slow
def test_the_norms_kernel_has_room_beside_boxes(tmp_path):
    """16 warps of 96 registers a thread leave 64 for each thread of 8 warps; nothing much is spilled."""
    for registers, _, spilled in resources_of_kernels(Path(library.FOLDER) / "box_int4.cu", "sm_90a", tmp_path):
        assert registers <= 96 and spilled <= 96


@pytest.mark.slow
def test_boxes_multiply_integers_on_tensor_cores(tmp_path):
    source = Path(library.FOLDER) / "box_int4.cu"
    product, load = "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32", "cp.async.bulk.tensor.3d"
    check_machine_code(source, "sm_90a", tmp_path, [product], load)
