"""Decode attention over the paged KV cache: the providers of four ops, and which kernel takes a call."""

from __future__ import annotations

import torch

from nanovllm.kernels.ops.checks import check_attention_values, check_decode, check_query_tokens, values_checked
from nanovllm.kernels.ops.paged_kv import NewTokens, PagedKV, SharedPrefixes
from nanovllm.kernels.ops.shared_prefixes import check_shared
from nanovllm.kernels.triton.attention.call import DecodeCall
from nanovllm.kernels.triton.attention.decode_hopper import launch_hopper_decode, refused, takes
from nanovllm.kernels.triton.attention.decode_hopper_plan import HopperDecodePlan
from nanovllm.kernels.triton.attention.decode_launch import launch_decode, launch_shared
from nanovllm.kernels.triton.attention.decode_plan import DecodePlan, SharedPlan
from nanovllm.kernels.triton.attention.launch_helpers import result_for


def attention_decode(
    q: torch.Tensor,
    kv: PagedKV,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    *,
    plan: DecodePlan | HopperDecodePlan | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The op `attention_decode`.

    Args:
        plan: instead of the one that `plan_decode` or `plan_hopper_decode` picks. Its class says which kernel is
            launched. A `HopperDecodePlan` needs a Hopper GPU, and arguments that `decode_hopper.refused` does not name.
        out: contiguous, as q: takes the result, and is returned.

    Safe under CUDA graph capture; a replay may change context_lens (within max_context_len) and block_table. The same
    inputs give the same bits every time. A sequence's bits do depend on the other lengths of the batch, and on the
    number of query tokens. A kernel is compiled for each number of query tokens.
    """
    queries = check_query_tokens(q, kv, scale, window, soft_cap)
    if not kv.block_table.shape[1]:
        return result_for(q, out).zero_()
    return _launch(DecodeCall.of(q, kv, scale, window, soft_cap, queries=queries), plan, out)


def qk_norm_rope_attention(
    q: torch.Tensor,
    new: NewTokens,
    kv: PagedKV,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    *,
    plan: DecodePlan | HopperDecodePlan | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The op `qk_norm_rope_attention`, in one kernel; plan and out as for `attention_decode`.

    q, k and v may have any strides between tokens and heads, and cos_sin_cache between rows. Where the elements of a
    row are not adjacent, of the weights too, they are copied. A sequence of length 0 gets zeros, and nothing is stored
    for it.
    """
    _check_projected(q, new, kv, scale, window, soft_cap)
    if values_checked(q.device):
        check_attention_values(kv, positions=new.cos_sin_cache.shape[0])
    return _launch(DecodeCall.of(q, kv, scale, window, soft_cap, new), plan, out)


def attention_decode_shared(
    q: torch.Tensor, kv: PagedKV, shared: SharedPrefixes, scale: float, window: int | None = None,
    soft_cap: float | None = None, *, plan: SharedPlan | None = None, rest: DecodePlan | None = None,
) -> torch.Tensor:  # fmt: skip
    """The op `attention_decode_shared`: a pass over what groups share, a pass over the rest, which merges the two.

    Args:
        plan, rest: instead of those that `plan_shared` and `plan_rest` pick.

    Safe under CUDA graph capture; a replay may change context_lens, block_table and the groups. The same inputs give
    the same bits every time. A sequence's bits do depend on the rest of the batch. With a window nothing is shared.
    """
    if window is not None:
        return attention_decode(q, kv, scale, window, soft_cap)
    check_decode(q, kv, scale, window, soft_cap)
    check_shared(kv, shared)
    return launch_shared(DecodeCall.of(q, kv, scale, window, soft_cap, shared=shared), plan, rest)


def qk_norm_rope_attention_shared(
    q: torch.Tensor, new: NewTokens, kv: PagedKV, shared: SharedPrefixes, scale: float, window: int | None = None,
    soft_cap: float | None = None, *, plan: SharedPlan | None = None, rest: DecodePlan | None = None,
) -> torch.Tensor:  # fmt: skip
    """The op `qk_norm_rope_attention_shared`, as `attention_decode_shared`.

    Both passes normalise and rotate their own queries.
    """
    if window is not None:
        return qk_norm_rope_attention(q, new, kv, scale, window, soft_cap)
    _check_projected(q, new, kv, scale, window, soft_cap)
    check_shared(kv, shared, new.cos_sin_cache.shape[0])
    return launch_shared(DecodeCall.of(q, kv, scale, window, soft_cap, new, shared=shared), plan, rest)


def _check_projected(q, new, kv, scale, window, soft_cap) -> None:
    check_decode(q, kv, scale, window, soft_cap, new)
    if q.shape[2] % 2:
        raise ValueError(f"q: head_dim must be even, not {q.shape[2]}")


def _launch(call: DecodeCall, plan: DecodePlan | HopperDecodePlan | None, out: torch.Tensor | None) -> torch.Tensor:
    """The kernel for Hopper where it takes the call, else the one for any GPU; with a plan, the plan's."""
    if isinstance(plan, HopperDecodePlan):
        reason = refused(call)
        if reason:
            raise ValueError(f"{reason}; a HopperDecodePlan is for its kernel only")
        return launch_hopper_decode(call, plan, out)
    if plan is None and takes(call):
        return launch_hopper_decode(call, None, out)
    return launch_decode(call, plan, out=out)
