"""What the kernel of `packed_to_fp8` compiles to at the shapes of real models, without a GPU."""

import re
from functools import partial

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under TRITON_INTERPRET", allow_module_level=True)

from nanovllm.kernels.ops.gguf_blocks import GGUF_TYPES, PLANES
from nanovllm.kernels.triton.gemm.packed_to_fp8 import packed_to_fp8
from tests.kernels.triton.compiled import compiled, launches_of, resources

OUTPUTS, SIZE, HALF = 24576, 4096, torch.float16


def empty(*shape, dtype=torch.uint8):
    return torch.empty(shape, dtype=dtype)


def cases():
    """(name, call) of each form of a weight."""
    factor, scale = empty(OUTPUTS, dtype=torch.float32), empty(OUTPUTS, SIZE // 128, dtype=HALF)
    forms = {
        "int4": (empty(OUTPUTS, SIZE // 2), scale, None),
        "int4 zeros": (empty(OUTPUTS, SIZE // 2), scale, empty(*scale.shape)),
        "int8": (empty(OUTPUTS, SIZE), scale, None),
    }
    for kind in ("Q4_K", "Q6_K", "Q8_0"):
        forms[kind + PLANES] = empty(OUTPUTS, GGUF_TYPES[kind].plane_offsets(SIZE)[1]), None, None
    for name, operands in forms.items():
        yield name, partial(packed_to_fp8, name.removesuffix(" zeros"), *operands, SIZE, factor)


@pytest.mark.parametrize("capability", [90, pytest.param(100, marks=pytest.mark.slow)])
def test_two_numbers_are_rounded_at_a_time_and_a_word_is_stored(capability, tmp_path):
    launches = launches_of(list(cases()))
    assert len(launches) == 6
    for name, kernel, args, options in launches:
        named = dict(zip(kernel.arg_names, args)) | {"CONVERTS": True}
        binary = compiled(kernel, tuple(named.values()), {"num_warps": options["num_warps"]}, capability)
        registers, stack, local = resources(binary, tmp_path)
        assert stack == local == 0 and registers <= 64, (name, registers)
        ptx = binary.asm["ptx"]
        weights = named["ROWS"] * named["COLUMNS"] // (32 * options["num_warps"])  # of a thread
        assert len(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32", ptx)) == weights // 2, name
        stores = re.findall(r"st\.global\.(\S+)", ptx)
        wide = "v2.b32" if named["PER"] == 8 else "b32"
        assert stores == [wide] * (weights // named["PER"]), (name, stores)
        assert "st.shared" not in ptx and "div." not in ptx, name


def test_it_compiles_where_no_instruction_rounds(tmp_path):
    (_, kernel, args, options), *_ = launches_of(list(cases())[:1])
    binary = compiled(kernel, args, {"num_warps": options["num_warps"]}, 80)
    assert resources(binary, tmp_path)[1:] == (0, 0) and "e4m3" not in binary.asm["ptx"]
