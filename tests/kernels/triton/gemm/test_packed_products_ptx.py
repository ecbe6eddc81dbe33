"""The compiled products with packed weights, run on the CPU from their PTX: what the interpreter cannot show of them.

The interpreter decodes weights by other statements, since it knows no assembly.
"""

import random

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under TRITON_INTERPRET", allow_module_level=True)

from nanovllm.kernels.ops import linear_fp8, linear_gguf, linear_int4, linear_int8
from nanovllm.kernels.ops.gguf_blocks import GGUF_TYPES, gguf_planes
from nanovllm.kernels.triton.gemm import packed_products
from nanovllm.kernels.triton.gemm.packed_plan import PackedPlan
from tests.kernels.ptx_arithmetic import UnknownInstruction
from tests.kernels.ptx_emulator import Machine
from tests.kernels.ptx_launch import Memory, unknown
from tests.kernels.triton.compiled import compiled, launches_of

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
OUTPUTS, SIZE = 40, 256
TWO_WARPS = PackedPlan(32, 2, 3, 1)
FOUR_WARPS = PackedPlan(64, 4, 3, 1)


def emulated(call, y_dtype):
    """The result of a call that launches one kernel, by its PTX for Hopper."""
    results = []
    ((_, kernel, args, options),) = launches_of([("", lambda: results.append(call()))])
    (y,) = results
    named = dict(zip(kernel.arg_names, args)) | {"PDL": True}
    binary = compiled(kernel, tuple(named.values()), {"num_warps": options["num_warps"]}, 90)
    memory, placed, parameters = Memory(), {}, []
    for parameter, value in zip(kernel.params, named.values()):
        if parameter.is_constexpr or value is None or (type(value) is int and value == 1):
            continue
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if storage.data_ptr() not in placed:
                whole = torch.empty(0, dtype=torch.uint8).set_(storage)
                placed[storage.data_ptr()] = parameter.name, memory.place(parameter.name, whole)
            value = placed[storage.data_ptr()][1] + value.storage_offset() * value.element_size()
        parameters.append(value)
    array = memory.finish()
    late = [name for name, _ in placed.values() if name != "weight"]
    machine = Machine(
        binary.asm["ptx"], options["num_warps"], [*parameters, 0, 0], array, {}, binary.metadata.shared,
        memory.arrays(), late,
    )  # fmt: skip
    grid = -(-y.shape[1] // named["ROWS"]), 1, -(-y.shape[0] // named["TOKENS"])
    try:
        for block in np.ndindex(grid):
            machine.run(block, grid, random.Random(sum(block)))
    except UnknownInstruction as e:
        unknown(e)
    return memory.read("y", y_dtype, y.shape)


def integers(high, *shape):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def check(op, x, plan, **arguments):
    tolerance = {torch.bfloat16: 4e-3, torch.float16: 8e-4}[x.dtype]
    got = emulated(lambda: getattr(packed_products, op.name)(x, plan=plan, **arguments), x.dtype)
    wide = {k: v.double() if getattr(v, "dtype", None) in FLOATS else v for k, v in arguments.items()}
    want = op.native(x.double(), **wide)
    assert (got.double() - want).norm() < tolerance * want.norm()


def inputs(dtype, tokens):
    x = torch.randn(tokens, SIZE, generator=torch.Generator().manual_seed(0)).to(dtype)
    return x, (torch.arange(OUTPUTS * 2).view(OUTPUTS, 2) % 5 / 64).to(torch.float16)


@pytest.mark.parametrize("dtype, plan, tokens", [(torch.float16, TWO_WARPS, 3), (torch.bfloat16, FOUR_WARPS, 40)])
def test_groups(dtype, plan, tokens):
    x, scale = inputs(dtype, tokens)
    codes = integers(254, OUTPUTS, SIZE)
    codes = codes + (codes >= 127).to(torch.uint8)  # not those of NaN
    check(linear_fp8, x, plan, weight=codes.view(torch.float8_e4m3fn), scale=scale[:, :1].float())
    check(linear_int8, x, plan, weight=codes, scale=scale, zero=integers(256, OUTPUTS, 2))
    check(linear_int4, x, plan, weight=codes[:, ::2].contiguous(), scale=scale)
    check(linear_int4, x, plan, weight=codes[:, ::2].contiguous(), scale=scale, zero=integers(16, OUTPUTS, 2))


@pytest.mark.parametrize("dtype, plan, tokens", [(torch.float16, TWO_WARPS, 3), (torch.bfloat16, FOUR_WARPS, 40)])
def test_parts(dtype, plan, tokens):
    x, _ = inputs(dtype, tokens)
    scale = torch.rand(OUTPUTS, 8, generator=torch.Generator().manual_seed(2)).half()
    words, zero = integers(256, OUTPUTS, SIZE // 2), integers(16, OUTPUTS, 8)
    check(linear_int4, x, plan, weight=words, scale=scale, zero=zero)
    for name in ("Q4_0", "Q4_K", "Q6_K"):
        of = GGUF_TYPES[name]
        blocks = integers(256, OUTPUTS, SIZE // of.block_size, of.block_bytes)
        at = 0
        for field, n in of.fields:
            if field in ("d", "m"):
                blocks[..., at : at + n] = scale[:, : blocks.shape[1], None].contiguous().view(torch.uint8)
            at += n
        weight, kind = gguf_planes(blocks.flatten(1), name)
        check(linear_gguf, x, plan, weight=weight, kind=kind)
