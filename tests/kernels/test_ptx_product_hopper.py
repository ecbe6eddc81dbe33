"""The compiled product of few tokens for Hopper, run on the CPU from its PTX: against float64."""

import random

import pytest
import torch
import torch.nn.functional as F

np = pytest.importorskip("numpy")
triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("Gluon kernels are not interpreted", allow_module_level=True)
pytest.importorskip("triton.experimental.gluon")

from nanovllm.kernels.triton.gemm.hopper_product import FIRST_TILE, HopperProductPlan
from nanovllm.kernels.triton.tunables import hopper_product_tokens
from tests.kernels.ptx_arithmetic import UnknownInstruction
from tests.kernels.ptx_emulator import Machine
from tests.kernels.ptx_launch import Memory, unknown

BF16 = torch.bfloat16


def compiled(plan, tokens, outputs, gated, bias):
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from nanovllm.kernels.triton.gemm.hopper_product_kernel import hopper_product_kernel

    def boxes(*box):
        layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(box))
        return f"tensordesc<bf16{list(box)},{layout!r}>"

    first = FIRST_TILE.get(tokens, tokens)
    constants = {
        "OUTPUTS": outputs, "TOKENS": first, "MORE": tokens - first, "CHUNKS": plan.chunks, "SLOTS": plan.slots,
        "ROUNDS": plan.rounds, "SPLITS": plan.splits,
        "GATED": gated, "BIAS": bias,
    }  # fmt: skip
    signature = {
        "weight": boxes(plan.chunks, 4, 2, 8, 64) if gated else boxes(plan.chunks, 64, 64),
        "x": boxes(plan.chunks, first, 64), "x_more": boxes(plan.chunks, tokens - first or first, 64),
        "bias": "*bf16", "y": "*fp32" if plan.splits > 1 else "*bf16", "num_tokens": "i32", **dict.fromkeys(constants,
        "constexpr"),
    }  # fmt: skip
    source = GluonASTSource(hopper_product_kernel, signature, constants, {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


@pytest.mark.parametrize(
    "tokens, rows, columns, plan, gated, bias",
    [
        (
            5,
            80,
            6,
            HopperProductPlan(1, 2, 2, 2),
            False,
            True,
        ),  # slots that are filled again, columns and rows that there are not
        (8, 64, 5, HopperProductPlan(3, 1, 2, 1), False, False),  # parts of the columns
        (19, 96, 3, HopperProductPlan(1, 1, 3, 1), True, False),
        (
            70,
            136,
            2,
            HopperProductPlan(1, 1, 2, 1, 256),
            False,
            True,
        ),  # a second tile of tokens, that begins inside the first
    ],
)
def test_the_compiled_product(tokens, rows, columns, plan, gated, bias):
    g = torch.Generator().manual_seed(tokens)
    size, outputs, padded = 64 * columns, rows // 2 if gated else rows, hopper_product_tokens(tokens, plan.block)
    given = {
        "x": torch.randn(tokens, size, generator=g).to(BF16), "w": (torch.randn(rows, size,
        generator=g) * size**-0.5).to(BF16),
        "b": torch.randn(rows, generator=g).to(BF16),
    }  # fmt: skip
    kind = torch.float32 if plan.splits > 1 else BF16
    memory = Memory()
    at = {name: memory.place(name, tensor) for name, tensor in given.items()}
    at["y"] = memory.place("y", b"\xff" * (plan.splits * tokens * outputs * kind.itemsize))
    array = memory.finish()
    if gated:
        shape, strides, box = (
            (columns, outputs // 8, 2, 8, 64),
            (64, 8 * size, outputs * size, size, 1),
            (plan.chunks, 4, 2, 8, 64),
        )
    else:
        shape, strides, box = (columns, rows, 64), (64, size, 1), (plan.chunks, 64, 64)
    x_shape, x_strides = (columns, tokens, 64), (64, size, 1)

    def view(name, shape, strides):
        return np.lib.stride_tricks.as_strided(memory.words(name, given[name].numel()), shape, [2 * s for s in strides])

    first = FIRST_TILE.get(padded, padded)
    parameters, descriptors = [0, *shape, *strides], {0: (view("w", shape, strides), box)}
    for tile in (first, padded - first or first):
        descriptors[len(parameters)] = view("x", x_shape, x_strides), (plan.chunks, tile, 64)
        parameters += [0, *x_shape, *x_strides]
    parameters += [at["b"], at["y"], tokens, 0, 0]
    binary = compiled(plan, padded, outputs, gated, bias)
    machine = Machine(binary.asm["ptx"], 4, parameters, array, descriptors, binary.metadata.shared)
    grid = -(-rows // 64), plan.splits, 1
    try:
        for block in np.ndindex(grid):
            machine.run(block, grid, random.Random(sum(block)))
    except UnknownInstruction as e:
        unknown(e)
    got = memory.read("y", kind, (plan.splits, tokens, outputs)).double().sum(0)
    want = F.linear(given["x"].double(), given["w"].double(), given["b"].double() if bias else None)
    if gated:
        gate, up = want.chunk(2, -1)
        want = F.silu(gate) * up
    assert (got - want).norm() < (1e-5 if plan.splits > 1 else 6e-3) * want.norm()
