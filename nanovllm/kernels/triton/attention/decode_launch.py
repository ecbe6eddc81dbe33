"""The launches of decode attention for any GPU: of one kernel, or with shared prefixes of two."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nanovllm.kernels.op.tunable import bucket
from nanovllm.kernels.triton import tunables
from nanovllm.kernels.triton.attention.call import DecodeCall
from nanovllm.kernels.triton.attention.decode_kernel import decode_kernel
from nanovllm.kernels.triton.attention.decode_plan import (
    DecodePlan,
    DecodeSizes,
    SharedPlan,
    plan_decode,
    plan_rest,
    plan_shared,
    tokens_together,
)
from nanovllm.kernels.triton.attention.launch_helpers import (
    LOG2E,
    as_words,
    num_multiprocessors,
    padded_count,
    result_for,
)
from nanovllm.kernels.triton.attention.shared_kernel import shared_kernel
from nanovllm.kernels.triton.counters import arrival_counters
from nanovllm.kernels.triton.early_start import ATTENTION_TOKENS, has_dependent_launch
from nanovllm.kernels.triton.launch_arguments import cdiv, next_power_of_2
from nanovllm.kernels.triton.rows.move_rows import num_scales


@dataclass(frozen=True)
class SharedParts:
    """What `shared_kernel` leaves: the arguments of `shared_start`."""

    lens: torch.Tensor
    """[num_seqs] int32: the leading tokens of each sequence that are done."""
    counts: torch.Tensor
    acc: torch.Tensor
    ml: torch.Tensor


def launch_decode(
    call: DecodeCall,
    plan: DecodePlan | None = None,
    parts: SharedParts | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """One kernel.

    Args:
        plan: instead of the tuned one, or where there is none of the one that `plan_decode` picks.
        parts: results for the leading tokens, to go on from.
        out: as for `decode.attention_decode`.
    """
    q, kv, new, group, head_dim, num_seqs = call.q, call.kv, call.new, call.group, call.head_dim, call.num_seqs
    out = result_for(q, out)
    if not num_seqs:
        return out
    rows, columns = group, kv.num_kv_heads
    if call.queries > 1:
        # For a plan the rows of a tile are the heads of a group, and a KV head with several tiles is as many of them.
        together = tokens_together(call.queries, group)
        rows, columns = together * group, cdiv(call.queries, together) * kv.num_kv_heads
    dtypes = q.dtype, kv.k_cache.dtype
    if plan is None:
        key = bucket(num_seqs), columns, rows, head_dim, *dtypes, kv.block_size, new is not None
        plan = tunables.ATTENTION_DECODE.find(q.device, *key)
    if plan is None:
        plan = plan_decode(_sizes(call, columns, rows), new is not None)
    group_pad = next_power_of_2(rows)
    pieces = min(num_seqs - 1 + plan.pieces, num_seqs * _most_tiles(call, plan.tile))
    slots = pieces * columns
    k_words, v_words = as_words(kv.k_cache), as_words(kv.v_cache)
    k, v, angles = (q, q, q) if new is None else (new.k, new.v, new.cos_sin_cache)
    leading = parts or SharedParts(kv.context_lens, kv.context_lens, out, out)
    dependent = has_dependent_launch(q.device)
    constants = call.constants(dependent)
    decode_kernel[columns, pieces](
        out, q, k_words, v_words, kv.block_table, kv.context_lens, out if kv.k_scale is None else kv.k_scale,
        out if kv.v_scale is None else kv.v_scale,
        torch.empty((slots, rows, head_dim), dtype=torch.float32, device=q.device),
        torch.empty((slots, 2, rows), dtype=torch.float32, device=q.device),
        arrival_counters(q.device, num_seqs * columns), k, v, angles, *call.weights, leading.lens, leading.counts,
        leading.acc, leading.ml, num_seqs, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], angles.stride(0),
        0.0 if new is None else new.eps, *k_words.stride()[:3], kv.block_table.stride(0), call.scale * LOG2E,
        **constants, PIECES=plan.pieces, LEAST=plan.least, SEQS_PAD=padded_count(num_seqs), QUERIES=call.queries,
        GROUP_PAD=group_pad, TILE=plan.tile, CHUNK=plan.chunk(group_pad * constants["DIM_PAD"]),
        WINDOW=call.window or 0, STAGES=plan.stages, V_SCALES=num_scales(kv.v_scale), SHARED=parts is not None,
        EARLY=plan.early and new is not None and parts is None, RELEASE=dependent and q.shape[0] <= ATTENTION_TOKENS,
        num_warps=plan.warps, num_stages=plan.stages, launch_pdl=dependent and (new is None or call.early),
    )  # fmt: skip
    return out


def _sizes(call: DecodeCall, columns: int, rows: int) -> DecodeSizes:
    itemsize, sms = call.kv.k_cache.element_size(), num_multiprocessors(call.q.device)
    return DecodeSizes(call.num_seqs, columns, rows, call.head_dim, itemsize, call.full_precision, sms)


def _most_tiles(call: DecodeCall, tile: int) -> int:
    """Tiles that a sequence attends to at most."""
    longest = max(1, call.kv.longest)
    if call.window is None:
        return cdiv(longest, tile)
    # A window that starts inside a tile reaches into one tile more.
    return cdiv(min(longest, call.window + call.queries - 1), tile) + 1


def launch_shared(call: DecodeCall, plan: SharedPlan | None, rest: DecodePlan | None) -> torch.Tensor:
    """Two kernels: over what the groups of `call.shared` share, and over the tokens behind it, if there are groups."""
    assert call.shared is not None
    if not call.num_seqs or not len(call.shared.groups):
        return launch_decode(call, rest)
    sizes = _sizes(call, call.kv.num_kv_heads, call.group)
    plan = plan or plan_shared(sizes, warpgroups=has_dependent_launch(call.q.device))
    parts = launch_shared_pass(call, plan)
    return launch_decode(call, rest or plan_rest(sizes), parts)


def launch_shared_pass(call: DecodeCall, plan: SharedPlan) -> SharedParts:
    """The first of the two kernels: partial results of every sequence over what its group shares."""
    q, kv, new, shared, num_seqs = call.q, call.kv, call.new, call.shared, call.num_seqs
    assert shared is not None
    num_groups, dependent = len(shared.groups), has_dependent_launch(q.device)
    parts = SharedParts(
        shared.shared_lens,
        torch.empty((num_seqs, call.group), dtype=torch.int32, device=q.device),
        torch.empty((plan.pieces, *q.shape), dtype=torch.float32, device=q.device),
        torch.empty((plan.pieces, 2, *q.shape[:2]), dtype=torch.float32, device=q.device),
    )
    k_words, v_words = as_words(kv.k_cache), as_words(kv.v_cache)
    angles = q if new is None else new.cos_sin_cache
    shared_kernel[kv.num_kv_heads, plan.programs](
        q, k_words, v_words, kv.block_table, kv.context_lens, shared.groups, shared.group_rows,
        parts.acc if kv.k_scale is None else kv.k_scale, parts.acc, parts.ml, parts.counts, angles, call.weights[0],
        num_seqs, num_groups, *q.stride()[:2], angles.stride(0), 0.0 if new is None else new.eps,
        *k_words.stride()[:3], kv.block_table.stride(0), call.scale * LOG2E, **call.constants(dependent),
        PIECES=plan.pieces, GROUPS_PAD=padded_count(num_groups), ROWS=plan.rows, TILE=plan.tile, STAGES=plan.stages,
        num_warps=plan.warps, num_stages=plan.stages, launch_pdl=dependent,
    )  # fmt: skip
    return parts
