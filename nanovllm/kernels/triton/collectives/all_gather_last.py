"""Columns of all ranks side by side, in one kernel: every rank writes its columns into the memory of all others.

As in `all_reduce`, a value has arrived when its place no longer holds EMPTY, the bits of -0.0. A rank sends 0.0 instead
of -0.0, and writes 0.0 for it to its own result too, so results are equal to the bit on all ranks.

A program exchanges one block of columns of one row, whose places it uses in turns, two of them. In turn n it writes to
place n % 2 of the others, waits until its own place n % 2 is full, copies it to the result, and empties it. Another
rank writes to this place again in turn n + 2, after it has read what this rank sent in turn n + 1, so after this kernel
has ended. (`all_reduce` takes three turns, since it empties places while it waits. Here the memory matters more.) A
block is the same columns whatever the number of rows, so calls of more and fewer rows can alternate.

Each program sends before it waits, and waits only for the program of its own number on the other ranks. GPUs start
programs in the order of their numbers, as far as was seen. So the first program that has not ended on all ranks has
started on all of them, or starts once earlier programs end, and it ends.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.ops.all_gather_last import check_gather
from nanovllm.kernels.ops.all_reduce import RankGroup
from nanovllm.kernels.triton.collectives.peer_memory import EMPTY, INTEGERS, PLACES, PeerMemory, peer_memory
from nanovllm.kernels.triton.early_start import launched_early
from nanovllm.kernels.triton.launch_arguments import cdiv, matrix_of

_MOST_BYTES = 20 << 20
"""That a rank sends to each other rank in a call; beyond, torch.distributed gathers."""
_MOST_ROWS = 256
_BLOCK_BYTES = 8192
_WARPS = 8


@triton.jit
def _all_gather_last_kernel(
    x, y, addresses, turns, x_stride, y_stride, n, length, place_width, most_rows,
    RANK: tl.constexpr, RANKS: tl.constexpr, BITS: tl.constexpr, PLACE: tl.constexpr, EMPTY: tl.constexpr,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BITS: an element as an integer; PLACE: what a place holds. EARLY: with programmatic dependent launch."""
    dtype = y.dtype.element_ty
    blocks = tl.cdiv(n, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    col = block * BLOCK + tl.arange(0, BLOCK)
    in_place = col < place_width
    if EARLY:
        gdc_launch_dependents()
    own = tl.multiple_of(tl.load(addresses + RANK).to(tl.pointer_type(PLACE)), 16)
    if EARLY:
        gdc_wait()  # addresses never change; everything below depends on earlier kernels
    turn = tl.load(turns + tl.program_id(0))
    bits = tl.load(x + row * x_stride + col, col < n, other=0.0).to(BITS, bitcast=True)
    bits = tl.where(bits == EMPTY, 0, bits).to(BITS)
    # Senders are numbered without the one that they send to.
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            there = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(PLACE)), 16)
            place = ((turn * (RANKS - 1) + (RANK - (RANK > rank))) * most_rows + row) * place_width
            tl.store(there + place + col, bits.to(PLACE), in_place)
    y += row * y_stride
    tl.store(y + RANK * n + col, bits.to(dtype, bitcast=True), (col < n) & (RANK * n + col < length))
    last = tl.minimum((block + 1) * BLOCK, place_width) - 1
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            place = ((turn * (RANKS - 1) + (rank - (rank > RANK))) * most_rows + row) * place_width
            awaited = own + place + col
            came = tl.load(awaited, in_place, other=0, volatile=True)
            while tl.max((came == EMPTY).to(tl.int32), 0) != 0:
                # Many programs wait at a time: each of them polls one value, and then reads all.
                while tl.load(own + place + last, volatile=True) == EMPTY:
                    pass
                came = tl.load(awaited, in_place, other=0, volatile=True)
            tl.store(awaited, tl.full([BLOCK], EMPTY, PLACE), in_place)
            tl.store(y + rank * n + col, came.to(BITS).to(dtype, bitcast=True), (col < n) & (rank * n + col < length))
    tl.store(turns + tl.program_id(0), 1 - turn)


class _GatherPlaces:
    """The memory that rows of n columns of one dtype are exchanged through, and whose turn each block is at."""

    def __init__(self, group: RankGroup, name: str, n: int, dtype: torch.dtype, device: torch.device) -> None:
        nbytes, others = dtype.itemsize, group.size - 1
        self.width = 16 * cdiv(n, 16)  # so that places can be written 16 bytes at a time for any n
        self.blocks = cdiv(n, _BLOCK_BYTES // nbytes)
        self.rows = min(_MOST_ROWS, _MOST_BYTES // (self.width * nbytes))
        numel = 2 * others * self.rows * self.width
        self.memory: PeerMemory | None = None
        if self.rows:
            self.memory = peer_memory(group, name, numel, PLACES[nbytes][0], EMPTY[nbytes], device)
        self.turns = torch.zeros(self.rows * self.blocks, dtype=torch.int32, device=device)
        if self.memory is None:
            self.rows = 0


def _places(x: torch.Tensor, group: RankGroup) -> _GatherPlaces | None:
    """The places for the rows of x; None: they are too many or too wide.

    They are made at the first call, which all ranks make at the same time, and never in a graph capture.
    """
    if not x.dtype.is_floating_point or x.dtype.itemsize not in INTEGERS:
        return None
    rows, n = x.shape
    name = f"all_gather_last/{n}/{x.dtype}"
    places: Any = group.provider_state.get(name)
    if places is None:
        places = group.provider_state[name] = _GatherPlaces(group, name, n, x.dtype, x.device)
    return places if rows <= places.rows else None


def all_gather_last(x: torch.Tensor, length: int, group: RankGroup, out: torch.Tensor | None = None) -> torch.Tensor:
    """The op `all_gather_last`. More than 256 rows, or 20 MiB of a rank, are gathered by torch.distributed.

    The kernel makes 0.0 of -0.0, which is equal to it.
    """
    check_gather(x, length, group, out)
    places = None if group.size == 1 or not x.numel() else _places(x, group)
    if places is None:
        return group.all_gather_last(x, length, out)
    assert places.memory is not None
    x, rows, stride = matrix_of(x)
    y = out
    if y is None or y.stride(1) != 1:
        y = torch.empty(rows, length, dtype=x.dtype, device=x.device)
    n, nbytes = x.shape[1], x.dtype.itemsize
    early = launched_early(x, rows)
    _all_gather_last_kernel[(rows * places.blocks,)](
        x, y, places.memory.addresses, places.turns, stride, y.stride(0), n, length, places.width, places.rows,
        group.rank, group.size, INTEGERS[nbytes][1], PLACES[nbytes][1], EMPTY[nbytes],
        _BLOCK_BYTES // nbytes, early, num_warps=_WARPS, launch_pdl=early,
    )  # fmt: skip
    return y if out is None or y is out else out.copy_(y)
