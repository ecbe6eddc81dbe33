"""Decode attention over the paged KV cache: the wrapper, and the choice of tile sizes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

from nanovllm.kernels.triton_attention.common import LOG2E, arrival_counters, num_multiprocessors, padded_count
from nanovllm.kernels.triton_attention.decode_kernel import decode_kernel


@dataclass(frozen=True)
class DecodePlan:
    """What is fixed when a launch is captured: it follows from shapes and the bound on the lengths alone."""

    pieces: int
    """The batch is cut into pieces of 1 / `pieces` of its tokens, or shorter where a sequence is."""
    tile: int
    """KV tokens a step."""
    warps: int
    stages: int
    merge_registers: int
    """Registers a thread for the partial results that are merged at a time: few steps for many."""


@functools.cache
def plan_decode(
    num_seqs: int, num_kv_heads: int, group: int, head_dim: int, itemsize: int, multiprocessors: int
) -> DecodePlan:
    """Measured on an H200 with bf16 and head_dim 128; other sizes get tiles of as many bytes."""
    pairs = num_seqs * num_kv_heads
    dim_pad = triton.next_power_of_2(head_dim)
    bytes_per_token = 2 * itemsize * dim_pad
    small_tile = max(16, min(32, 16384 // bytes_per_token))
    large_tile = max(16, min(64, 32768 // bytes_per_token))
    warps = 2 if group <= 16 else 4 if group <= 32 else 8

    def pieces(programs_per_multiprocessor: int) -> int:
        return max(1, programs_per_multiprocessor * multiprocessors // num_kv_heads)

    if itemsize == 4:  # no tensor cores: small tiles and many threads, or registers spill
        return DecodePlan(pieces(2), 16, 4 if group <= 16 else 8, stages=3, merge_registers=16)
    if pairs >= 6 * multiprocessors:
        # Enough sequences to fill several waves: large tiles, since few streams at a time suit DRAM, and cut only what is
        # far longer than the average.
        return DecodePlan(pieces(3), large_tile, warps, stages=3, merge_registers=32)
    if pairs >= 2 * multiprocessors:
        # About one wave: all programs resident at once.
        return DecodePlan(pieces(3), small_tile, 2 * warps, stages=4, merge_registers=32)
    # Latency counts: every sequence is cut, into two pieces a multiprocessor in all, or into single tiles.
    return DecodePlan(pieces(2), small_tile, warps, stages=3, merge_registers=64 if dim_pad <= 128 else 32)


def attention_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    max_context_len: int,
    scale: float,
    *,
    soft_cap: float = 0.0,
    window: int = 0,
    plan: DecodePlan | None = None,
) -> torch.Tensor:
    """One query token a sequence against its cached tokens: see `ops.attention.attention_decode`.

    Args:
        soft_cap: if not 0, scores become soft_cap * tanh(scores / soft_cap).
        window: if not 0, only the last `window` tokens are attended to, the query's own included.
        plan: instead of the one that `plan_decode` picks.

    Safe under CUDA graph capture; a replay may change context_lens (within max_context_len) and block_table. The same
    inputs give the same bits every time; a sequence's bits do depend on the lengths beside it.
    """
    num_seqs, num_heads, head_dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1 and q.stride(2) == 1
    assert block_table.stride(1) == 1 and context_lens.is_contiguous()
    max_tokens = min(max_context_len, window) if window else max_context_len
    if plan is None:
        plan = plan_decode(
            num_seqs, num_kv_heads, group, head_dim, k_cache.element_size(), num_multiprocessors(q.device)
        )
    dim_pad = triton.next_power_of_2(head_dim)
    group_pad = triton.next_power_of_2(group)
    # A window that starts inside a tile reaches into one tile more.
    most_tiles = triton.cdiv(max_tokens, plan.tile) + (1 if window else 0)
    pieces = min(num_seqs - 1 + plan.pieces, num_seqs * most_tiles)
    slots = pieces * num_kv_heads
    out = torch.empty((num_seqs, num_heads, head_dim), dtype=q.dtype, device=q.device)
    decode_kernel[num_kv_heads, pieces](
        out,
        q,
        k_cache,
        v_cache,
        block_table,
        context_lens,
        torch.empty((slots, group, head_dim), dtype=torch.float32, device=q.device),
        torch.empty((slots, 2, group), dtype=torch.float32, device=q.device),
        arrival_counters(q.device, num_seqs * num_kv_heads),
        num_seqs,
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        block_table.stride(0),
        scale * LOG2E,
        PIECES=plan.pieces,
        SEQS_PAD=padded_count(num_seqs),
        GROUP=group,
        GROUP_PAD=group_pad,
        ROWS=max(16, group_pad),
        HEAD_DIM=head_dim,
        DIM_PAD=dim_pad,
        BLOCK_SIZE=block_size,
        TILE=plan.tile,
        CHUNK=max(1, min(32, 32 * plan.warps * plan.merge_registers // (group_pad * dim_pad))),
        SOFT_CAP=soft_cap,
        WINDOW=window,
        STAGES=plan.stages,
        num_warps=plan.warps,
        num_stages=plan.stages,
    )
    return out
