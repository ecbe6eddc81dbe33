"""The sum over ranks in one kernel, for few rows: every rank writes its rows into the memory of all others.

A rank knows that a value has arrived by the value itself. A place that awaits one holds EMPTY, the bits of -0.0, which
no rank sends: it sends 0.0 instead. So nothing is signalled and no write has to be ordered, which saves a trip between
GPUs. (TensorRT-LLM's Lamport kernels have the same idea.)

A row's places are used in turns, three of them. In turn n a rank writes to place n % 3 of the others, empties its own
place of turn n - 1, and reads its own place n % 3. Another rank writes to the emptied place in turn n + 2, after it has
read what this rank sent in turn n + 1, so after this kernel has ended.

Programs wait for the same row of other ranks. GPUs start programs in the order of their numbers, so the first rows that
wait are on all of them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from nanovllm.kernels.ops.all_reduce import RankGroup
from nanovllm.kernels.triton.collectives.peer_memory import EMPTY, INTEGERS, PLACES, PeerMemory, peer_memory
from nanovllm.kernels.triton.device_math import rounded, to_dtype
from nanovllm.kernels.triton.early_start import are_constant, norm_launched_early
from nanovllm.kernels.triton.launch_arguments import adjacent, matrix_of, next_power_of_2, warps_for
from nanovllm.kernels.triton.rows.norm import add_rms_norm

_MOST_BYTES = 4 << 20
"""That a rank sends to the others in a call; beyond, torch.distributed sums."""
_MOST_ROWS = 1024
_WIDEST = 32768


@triton.jit
def _all_reduce_kernel(
    x, residual, weight, y, total, addresses, turns, x_stride, residual_stride, width, most_rows, eps,
    RANK: tl.constexpr, RANKS: tl.constexpr, NORM: tl.constexpr, BITS: tl.constexpr, PLACE: tl.constexpr,
    EMPTY: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BITS: an element as an integer; PLACE: what a place holds. EARLY: with programmatic dependent launch."""
    dtype = y.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    col = tl.arange(0, BLOCK)
    mask = col < width
    if EARLY:
        gdc_launch_dependents()
    own = tl.multiple_of(tl.load(addresses + RANK).to(tl.pointer_type(PLACE)), 16)
    if NORM:
        w = tl.load(weight + col, mask, other=0.0).to(tl.float32)
    if EARLY:
        gdc_wait()  # weights and addresses never change; everything below depends on earlier kernels
    turn = tl.load(turns + row)
    used = (turn + 2) % 3  # the places of the turn before
    bits = tl.load(x + row * x_stride + col, mask, other=0.0).to(BITS, bitcast=True)
    bits = tl.where(bits == EMPTY, 0, bits).to(BITS)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            there = tl.multiple_of(tl.load(addresses + rank).to(tl.pointer_type(PLACE)), 16)
            tl.store(there + ((turn * RANKS + RANK) * most_rows + row) * width + col, bits.to(PLACE), mask)
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            emptied = own + ((used * RANKS + rank) * most_rows + row) * width + col
            tl.store(emptied, tl.full([BLOCK], EMPTY, PLACE), mask)
    if NORM:
        r = tl.load(residual + row * residual_stride + col, mask, other=0.0).to(tl.float32)
    v = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(RANKS):  # in the same order on all ranks
        if rank == RANK:
            v += bits.to(dtype, bitcast=True).to(tl.float32)
        else:
            awaited = own + ((turn * RANKS + rank) * most_rows + row) * width + col
            came = tl.load(awaited, mask, other=0, volatile=True)
            while tl.max((came == EMPTY).to(tl.int32), 0) != 0:
                came = tl.load(awaited, mask, other=0, volatile=True)
            v += came.to(BITS).to(dtype, bitcast=True).to(tl.float32)
    tl.store(turns + row, (turn + 1) % 3)
    v = rounded(v, dtype)
    if NORM:
        v = rounded(v + r, dtype)
        tl.store(total + row * width + col, to_dtype(v, dtype), mask)
        scale = tl.rsqrt(tl.sum(v * v, 0) / width + eps)
        v = rounded(v * scale, dtype) * w
    tl.store(y + row * width + col, to_dtype(v, dtype), mask)


class _ReducePlaces:
    """The memory that rows of one width and dtype are exchanged through, and whose turn each row is at."""

    def __init__(self, group: RankGroup, name: str, width: int, dtype: torch.dtype, device: torch.device) -> None:
        size, place = group.size, PLACES[dtype.itemsize][0]
        self.rows = min(_MOST_ROWS, _MOST_BYTES // (width * dtype.itemsize * (size - 1)))
        numel = 3 * size * self.rows * width
        self.memory: PeerMemory | None = peer_memory(group, name, numel, place, EMPTY[dtype.itemsize], device)
        self.turns = torch.zeros(self.rows, dtype=torch.int32, device=device)
        if self.memory is None:
            self.rows = 0


def _places(x: torch.Tensor, group: RankGroup) -> _ReducePlaces | None:
    """The places for the rows of x; None: they are too many or too wide.

    They are made at the first call, which all ranks make at the same time, and never in a graph capture.
    """
    width = x.shape[-1]
    if not 0 < width <= _WIDEST or x.dtype.itemsize not in INTEGERS:
        return None
    name = f"all_reduce/{width}/{x.dtype}"
    places: Any = group.provider_state.get(name)
    if places is None:
        places = group.provider_state[name] = _ReducePlaces(group, name, width, x.dtype, x.device)
    return places if x.numel() // width <= places.rows else None


def all_reduce(x: torch.Tensor, group: RankGroup) -> torch.Tensor:
    """The op `all_reduce`. More than a few MB are summed by torch.distributed."""
    if group.size == 1 or not x.numel():
        return x
    places = _places(x, group)
    if places is None:
        return group.all_reduce(x)
    x, rows, stride = matrix_of(x)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, None, y, None, places, rows, stride, 0, 0.0, group)
    return y


def all_reduce_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group: RankGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op `all_reduce_add_rms_norm`. Sums of more than a few MB are torch.distributed's."""
    places = None if group.size == 1 or not x.numel() else _places(x, group)
    if places is None:
        return add_rms_norm(group.all_reduce(x), residual, weight, eps)
    x, rows, stride = matrix_of(x)
    residual, _, residual_stride = matrix_of(residual)
    y, total = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _launch(x, residual, adjacent(weight), y, total, places, rows, stride, residual_stride, eps, group)
    return y, total


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, y: torch.Tensor,
    total: torch.Tensor | None, places: _ReducePlaces, rows: int, stride: int, residual_stride: int, eps: float,
    group: RankGroup,
) -> None:  # fmt: skip
    assert places.memory is not None
    width, norm, nbytes = x.shape[-1], total is not None, x.dtype.itemsize
    block = next_power_of_2(width)
    early = norm_launched_early(x, rows) and are_constant(weight)
    _all_reduce_kernel[(rows,)](
        x, residual, weight, y, total, places.memory.addresses, places.turns, stride, residual_stride, width,
        places.rows, eps, group.rank, group.size, norm, INTEGERS[nbytes][1],
        PLACES[nbytes][1], EMPTY[nbytes], block, early, num_warps=warps_for(block), launch_pdl=early,
    )  # fmt: skip
