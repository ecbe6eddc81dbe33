"""What the product for Hopper compiles to, without a GPU."""

import re

import pytest

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("Gluon kernels are not interpreted", allow_module_level=True)

from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.gemm import hopper_product
from nanovllm.kernels.triton.gemm.hopper_product import plan_hopper_product
from tests.kernels.sass_wgmma import machine_code, touched_in_flight
from tests.kernels.triton.compiled import resources

COMPILED = [
    (8, 4096, 1024, {}), (8, 24576, 4096, {"gated": True}), (32, 6144, 1024, {"gated": True}),
    (32, 1024, 3072, {"split": True}), (64, 6144, 1024, {"gated": True}), (64, 4096, 12288, {"split": True}),
    (64, 6144, 4096, {"bias": True}), (96, 24576, 4096, {"gated": True}), (128, 6144, 1024, {"gated": True}),
    (160, 6144, 1024, {"gated": True}),
    (192, 4096, 12288, {"split": True}), (256, 6144, 1024, {"gated": True}),
]  # fmt: skip


@pytest.mark.parametrize("tokens, rows, size, what", COMPILED, ids=str)
def test_compiles_without_spills(tokens, rows, size, what, tmp_path):
    pytest.importorskip("triton.experimental.gluon")
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from nanovllm.kernels.triton.gemm.hopper_product_kernel import hopper_product_kernel

    gated, split, bias = (what.get(name, False) for name in ("gated", "split", "bias"))
    plan = plan_hopper_product(tokens, rows, size, split, 132)
    padded = tunables.hopper_product_tokens(tokens, plan.block)
    first = hopper_product.FIRST_TILE.get(padded, padded)

    def boxes(*box):
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(box))
        return f"tensordesc<bf16{list(box)},{layout!r}>"

    constants = {
        "OUTPUTS": rows // 2 if gated else rows, "TOKENS": first, "MORE": padded - first, "CHUNKS": plan.chunks,
        "SLOTS": plan.slots,
        "ROUNDS": plan.rounds, "SPLITS": plan.splits, "GATED": gated, "BIAS": bias,
    }  # fmt: skip
    signature = {
        "weight": boxes(plan.chunks, 4, 2, 8, 64) if gated else boxes(plan.chunks, 64, 64),
        "x": boxes(plan.chunks, first, 64), "x_more": boxes(plan.chunks, padded - first or first, 64),
        "bias": "*bf16", "y": "*fp32" if split else "*bf16", "num_tokens": "i32",
        **dict.fromkeys(constants, "constexpr"),
    }  # fmt: skip
    binary = triton.compile(
        GluonASTSource(hopper_product_kernel, signature, constants, {}),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4},
    )
    assert binary.metadata.shared <= 227 << 10
    ptx = binary.asm["ptx"]
    # The weights are asked for before the wait, the tokens after it; every tile is multiplied where it lies.
    wait = ptx.index("griddepcontrol.wait")
    copies = [m.start() for m in re.finditer("cp.async.bulk.tensor", ptx)]
    assert sum(at < wait for at in copies) == plan.slots and sum(at > wait for at in copies) >= plan.slots
    assert ptx.count("wgmma.mma_async") == 4 * plan.chunks * plan.slots * (1 if padded == first else 2)
    _, stack, local = resources(binary, tmp_path)
    assert stack == local == 0
    assert touched_in_flight(machine_code(binary)) == []
