"""What the decode kernels share: the walk over a range of KV tiles, and the merge of partial results.

Softmax runs in base 2: scores are multiplied by scale * log2(e), so that exp2, one instruction, replaces exp. A partial
result is (acc, m, total): the sum of p @ v with p = exp2(score - m), the running maximum m, and the sum of p. Partials merge in
split order whoever merges them, so the bits do not depend on which program arrives last.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

LOG2E = 1.4426950408889634
_COUNTERS = 1 << 16


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter: few programs, but more than one
    return torch.cuda.get_device_properties(device).multi_processor_count


def padded_count(count: int) -> int:
    """The next power of eight: few, since a kernel is compiled for each."""
    size = 1
    while size < count:
        size *= 8
    return size


# The arrival counters of a stream. They outlive a launch: each launch leaves them zero for the next.
_counters: dict[tuple[torch.device, int], torch.Tensor] = {}


def arrival_counters(device: torch.device, count: int) -> torch.Tensor:
    """int32 zeros that every kernel leaves zero: [at least count].

    One buffer a stream, since launches on one stream do not overlap. During a graph capture a buffer cannot be created (its
    zeros would be recorded, not written), so a first call inside a capture records a memset with every launch instead.
    """
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    buffer = _counters.get((device, stream))
    if buffer is None or len(buffer) < count:
        buffer = torch.zeros(max(count, _COUNTERS), dtype=torch.int32, device=device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return buffer
        _kept.append(buffer)
        _counters[device, stream] = buffer
    return buffer


# Graphs hold addresses, not references: no buffer that one may have recorded is ever freed.
_kept: list[torch.Tensor] = []


@triton.jit
def soft_cap_scores(scores, SOFT_CAP: tl.constexpr):
    """scores * log2(e) -> SOFT_CAP * tanh(scores / SOFT_CAP) * log2(e). tanh(x) = 1 - 2 / (1 + e^2x)."""
    return (SOFT_CAP * 1.4426950408889634) * (1 - 2 / (1 + tl.exp2(scores * (2 / SOFT_CAP))))


@triton.jit
def attend(
    q,  # [ROWS, DIM_PAD]
    k_ptr,
    v_ptr,
    table_ptr,
    first_tile,
    end_tile,
    first_token,
    end_token,
    stride_block,
    stride_slot,
    scale,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """q against the tokens [first_token, end_token) that lie in the tiles [first_tile, end_tile), each of which has one."""
    ROWS: tl.constexpr = q.shape[0]
    DIM_PAD: tl.constexpr = q.shape[1]
    offs_t = tl.arange(0, TILE)
    offs_d = tl.arange(0, DIM_PAD)
    offsets = (offs_t * stride_slot)[:, None] + offs_d[None, :]
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PAD], tl.float32)
    # Read a tile ahead: the address of a tile's first load would otherwise wait for the table.
    block = tl.load(table_ptr + first_tile * TILE // BLOCK_SIZE)
    for tile in tl.range(first_tile, end_tile, num_stages=STAGES):
        tokens = tile * TILE + offs_t
        live = (tokens >= first_token) & (tokens < end_token)
        if TILE <= BLOCK_SIZE:
            base = block.to(tl.int64) * stride_block + (tile * TILE % BLOCK_SIZE) * stride_slot
            k_tile = (k_ptr + base) + offsets
            v_tile = (v_ptr + base) + offsets
            block = tl.load(table_ptr + tl.minimum(tile + 1, end_tile - 1) * TILE // BLOCK_SIZE)
        else:
            blocks = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
            rows = (blocks * stride_block + tokens % BLOCK_SIZE * stride_slot)[:, None] + offs_d[None, :]
            k_tile = k_ptr + rows
            v_tile = v_ptr + rows
        if DIM_PAD == HEAD_DIM:
            mask = live[:, None]
        else:
            mask = live[:, None] & (offs_d < HEAD_DIM)[None, :]
        # Dead slots may hold NaN, and 0 * NaN is NaN: they are not read.
        k = tl.load(k_tile, mask=mask, other=0.0)
        v = tl.load(v_tile, mask=mask, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if SOFT_CAP > 0:
            scores = soft_cap_scores(scores, SOFT_CAP)
        scores = tl.where(live[None, :], scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp2(scores - new_m[:, None])
        alpha = tl.exp2(m - new_m)
        total = total * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
        m = new_m
    return acc, m, total


@triton.jit
def load_queries(q_ptr, stride_head, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM_PAD: tl.constexpr):
    """The query heads of one KV head as the rows of a tile: [ROWS, DIM_PAD], zero beyond GROUP and HEAD_DIM."""
    rows = tl.arange(0, ROWS)[:, None]
    dims = tl.arange(0, DIM_PAD)[None, :]
    return tl.load(q_ptr + rows * stride_head + dims, mask=(rows < GROUP) & (dims < HEAD_DIM), other=0.0)


@triton.jit
def store_rows(out_ptr, value, stride_row, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    rows = tl.arange(0, value.shape[0])[:, None]
    dims = tl.arange(0, value.shape[1])[None, :]
    mask = (rows < GROUP) & (dims < HEAD_DIM)
    tl.store(out_ptr + rows * stride_row + dims, value.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_partial(acc_ptr, ml_ptr, index, acc, m, total, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr):
    """acc_ptr [slots, GROUP, HEAD_DIM] float32, ml_ptr [slots, 2, GROUP] float32."""
    store_rows(acc_ptr + index * GROUP * HEAD_DIM, acc, HEAD_DIM, GROUP, HEAD_DIM)
    rows = tl.arange(0, acc.shape[0])
    tl.store(ml_ptr + index * 2 * GROUP + rows, m, mask=rows < GROUP)
    tl.store(ml_ptr + index * 2 * GROUP + GROUP + rows, total, mask=rows < GROUP)


@triton.jit
def merge_partials(
    acc_ptr,
    ml_ptr,
    first,
    step,
    count,
    GROUP: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The merged output [GROUP_PAD, DIM_PAD] of `count` partials; partial i has the slot first + i * step."""
    groups = tl.minimum(tl.arange(0, GROUP_PAD), GROUP - 1)
    dims = tl.arange(0, DIM_PAD)
    m = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    acc = tl.zeros([GROUP_PAD, DIM_PAD], tl.float32)
    for start in range(0, count, CHUNK):
        i = start + tl.arange(0, CHUNK)
        slots = first + i * step
        live = (i < count)[:, None]
        # Other programs wrote these: the first-level cache, which is not coherent, is passed by.
        ml = ml_ptr + slots[:, None] * (2 * GROUP) + groups[None, :]
        part_m = tl.load(ml, mask=live, other=float("-inf"), cache_modifier=".cg")  # [CHUNK, GROUP_PAD]
        part_total = tl.load(ml + GROUP, mask=live, other=0.0, cache_modifier=".cg")
        rows = slots[:, None] * GROUP + groups[None, :]
        part_acc = tl.load(
            acc_ptr + rows[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=live[:, :, None] & (dims < HEAD_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_m = tl.maximum(m, tl.max(part_m, 0))
        alpha = tl.exp2(m - new_m)
        weights = tl.exp2(part_m - new_m[None, :])
        total = total * alpha + tl.sum(part_total * weights, 0)
        acc = acc * alpha[:, None] + tl.sum(part_acc * weights[:, :, None], 0)
        m = new_m
    return acc / total[:, None]
