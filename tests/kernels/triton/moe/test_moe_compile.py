"""What the kernels of a mixture of experts compile to at Qwen3-30B-A3B's shape, without a GPU."""

import re

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under TRITON_INTERPRET", allow_module_level=True)

from nanovllm.kernels.triton.moe.experts import moe_experts, moe_experts_fp8
from nanovllm.kernels.triton.moe.route import moe_route
from tests.kernels.sass_wgmma import machine_code, touched_in_flight
from tests.kernels.triton.compiled import compiled, in_turn, launches_of, parameter, resources, tensors, wide

# Shared memory a program may have: on sm_80 what the smallest GPU of compute capability 8 has.
SHARED = {80: 99 << 10, 90: 227 << 10, 100: 227 << 10}
EXPERTS, TOP_K, HIDDEN = 128, 8, 2048


def cases(dtype):
    """(name, call): a decode step of one token and of some, and prompts; whole, and split over two ranks."""
    t = tensors(dtype)
    for tokens, intermediate in ((1, 768), (2, 384), (8, 768), (300, 768), (600, 384), (8192, 768)):
        gate_up, down = t(EXPERTS, 2 * intermediate, HIDDEN), t(EXPERTS, HIDDEN, intermediate)
        x, weights = t(tokens, HIDDEN), torch.empty(tokens, TOP_K)
        experts = torch.empty(tokens, TOP_K, dtype=torch.int32)
        arguments = x, parameter(gate_up), parameter(down), weights, experts
        yield f"{tokens} tokens, {intermediate}", lambda arguments=arguments: moe_experts(*arguments)
    yield "route", lambda: moe_route(t(8, EXPERTS), TOP_K, True)


def fp8_cases(dtype):
    """The same with experts in 8-bit floats."""
    for tokens, intermediate in ((1, 768), (2, 384), (8, 768), (300, 768), (8192, 768)):
        planes = []
        for rows, columns in ((2 * intermediate, HIDDEN), (HIDDEN, intermediate)):
            weight = torch.empty(EXPERTS, rows, columns, dtype=torch.float8_e4m3fn)
            planes += [parameter(weight), parameter(torch.empty(EXPERTS, rows // 128, columns // 128))]
        routed = torch.empty(tokens, TOP_K), torch.empty(tokens, TOP_K, dtype=torch.int32)
        arguments = torch.empty(tokens, HIDDEN, dtype=dtype), *planes, *routed
        yield f"{tokens} tokens, {intermediate}, fp8", lambda arguments=arguments: moe_experts_fp8(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype, capability, turn",
    [
        (torch.bfloat16, 90, slice(0, None, 2)), (torch.bfloat16, 80, slice(0, None, 8)),
        (torch.bfloat16, 100, slice(1, None, 8)), (torch.float32, 90, slice(2, None, 8)),
    ],
    ids=str,
)  # fmt: skip
def test_no_spills_and_wide_loads(dtype, capability, turn, tmp_path):
    """Every kernel; of bfloat16 half of the launches on sm_90. Elsewhere they take turns."""
    distinct = {}
    for name, kernel, args, options in launches_of([*cases(dtype), *(fp8_cases(dtype) if dtype.itemsize == 2 else ())]):
        named = dict(zip(kernel.arg_names, args)) | {"PDL": capability >= 90}
        options = {k: v for k, v in options.items() if k != "launch_pdl"}
        constants = (v for n, v in named.items() if n.isupper())
        key = kernel.__name__, named.get("scale") is None, *constants, *options.values()
        distinct.setdefault(key, (name, kernel, named, options))
    for name, kernel, named, options in in_turn(list(distinct.values()), turn):
        binary = compiled(kernel, tuple(named.values()), options, capability)
        registers, stack, local = resources(binary, tmp_path)
        what = f"{name}, {kernel.__name__}: {registers} registers, {stack} stack, {local} local"
        # ptxas keeps 8 bytes on the stack for one shape on sm_100, where it stops at 72 registers of 255.
        assert local == 0 and stack <= (8 if capability == 100 else 0) and registers <= 255, what
        assert binary.metadata.shared <= SHARED[capability], f"{what}, {binary.metadata.shared} bytes shared"
        ptx = binary.asm["ptx"]
        assert ("griddepcontrol.wait" in ptx) == (capability >= 90), what
        assert ".atom" not in ptx.replace("atom.shared", "").replace("red.shared", ""), f"{what}: sums to memory"
        copies = re.findall(r"cp\.async\.cg\.shared\.global[^,]*,[^,]*, 0x10", ptx)
        if kernel.__name__.endswith("block_kernel"):
            assert copies and ("wgmma" in ptx) == (capability == 90 and dtype != torch.float32), what
            if "wgmma" in ptx:
                assert touched_in_flight(machine_code(binary)) == [], what
        elif kernel.__name__.startswith("pair_"):
            # 16-byte loads of the weights that a thread has
            rows = named["ROWS"] * (named["SLOTS"] if "SLOTS" in named else 2)
            itemsize = dtype.itemsize if named["scale"] is None else 1
            assert wide(ptx, "ld") >= rows * named["SIZE"] * itemsize // (16 * 32 * options["num_warps"]), what
    assert {kernel.__name__ for _, kernel, *_ in distinct.values()} == {
        "pair_gate_up_kernel", "pair_down_kernel", "count_kernel", "sort_kernel", "block_kernel", "sum_kernel",
        "route_kernel", *(["fp8_block_kernel"] if dtype.itemsize == 2 else ()),
    }  # fmt: skip
