"""How the decode kernel for Hopper cuts a batch into equal parts: the compiled search, run on the CPU, against the row written out."""

import functools
import random

import pytest
import torch

pytest.importorskip("numpy")
triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("Gluon kernels are not interpreted", allow_module_level=True)
pytest.importorskip("triton.experimental.gluon")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon._runtime import GluonASTSource  # noqa: E402

from nanovllm.kernels.triton_attention.common import padded_count  # noqa: E402
from nanovllm.kernels.triton_attention.decode_hopper_pieces import find_part  # noqa: E402
from tests.kernels.ptx_arithmetic import UnknownInstruction  # noqa: E402
from tests.kernels.ptx_emulator import Machine  # noqa: E402
from tests.kernels.ptx_launch import Memory, unknown  # noqa: E402

TILE = 64


@gluon.jit
def parts_kernel(
    out_ptr, lens_ptr, num_seqs, most_parts, least, NEW: gl.constexpr, SEQS_PAD: gl.constexpr, TILE: gl.constexpr
):
    found = find_part(gl.program_id(0), lens_ptr, num_seqs, most_parts, least, NEW, SEQS_PAD, TILE)
    for i in gl.static_range(6):
        gl.store(out_ptr + gl.program_id(0) * 6 + i, found[i])


@functools.cache
def compiled(new, seqs_pad):
    constants = {"NEW": new, "SEQS_PAD": seqs_pad, "TILE": TILE}
    signature = {"out_ptr": "*i32", "lens_ptr": "*i32", **dict.fromkeys(("num_seqs", "most_parts", "least"), "i32")}
    source = GluonASTSource(parts_kernel, signature | dict.fromkeys(constants, "constexpr"), constants, {})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})


def found(lens, new, parts, least):
    """What each of `parts` programs finds."""
    binary, memory = compiled(new, padded_count(len(lens))), Memory()
    out = memory.place("out", bytes(24 * parts))
    at = memory.place("lens", torch.tensor(lens, dtype=torch.int32))
    array = memory.finish()
    parameters = [out, at, len(lens), parts, least, 0, 0]
    machine = Machine(binary.asm["ptx"], 4, parameters, array, {}, binary.metadata.shared, memory.arrays())
    try:
        for part in range(parts):
            machine.run((part, 0, 0), (parts, 1, 1), random.Random(part))
    except UnknownInstruction as e:
        unknown(e)
    return memory.read("out", torch.int32, (parts, 6)).tolist()


def row(lens, new):
    """Of each sequence (it, -1) for its beginning and its end, and (it, a tile) for each of its tiles, one at least."""
    return [(seq, tile) for seq, n in enumerate(lens) for tile in range(-1, max(1, -(-max(n - new, 0) // TILE)))]


@pytest.mark.parametrize("new", [True, False], ids=["new", "cached"])
@pytest.mark.parametrize("count", [1, 2, 7, 40, 256, 300])
def test_parts_are_equal_and_have_every_tile_once(count, new):
    rng = random.Random(count + new)
    for longest, parts, least in ((700, 33, 1), (70, 5, 1), (1, 9, 1), (3000, 12, 4), (200, 40, 7)):
        lens = [rng.randint(0, longest) for _ in range(count)]
        units = row(lens, new)
        share = max(-(-len(units) // parts), least)
        for part, (seq, length, tile, tiles, first_unit, units_of_a_part) in enumerate(found(lens, new, parts, least)):
            wanted = [unit for unit in units[part * share : (part + 1) * share] if unit[1] >= 0]
            assert units_of_a_part == share and tiles == len(wanted)
            if wanted:
                assert (seq, tile) == wanted[0] and length == lens[seq] and units[first_unit] == (seq, 0)
