"""The kernels for Hopper compiled, and arguments with other strides."""

from __future__ import annotations

from dataclasses import replace

import torch

from nanovllm.kernels.ops.checks import FP8
from nanovllm.kernels.ops.paged_kv import NewTokens, PagedKV
from nanovllm.kernels.triton.attention.call import DecodeCall
from nanovllm.kernels.triton.attention.decode_hopper import launch_hopper_decode
from nanovllm.kernels.triton.attention.prefill_hopper import launch_hopper_prefill
from tests.kernels.triton.attention.cases import compile_call
from tests.kernels.triton.attention.decode_calls import MAX_POSITION


def heads_apart(x):
    """x [tokens, heads, dims] with other strides; the next two as well."""
    wide = x.new_full((x.shape[0], 3 * x.shape[1], x.shape[2]), float("nan"))
    wide[:, ::3] = x
    return wide[:, ::3]


def tokens_apart(x):
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def dims_apart(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def compile_hopper_decode(
    plan, count, group=2, head_dim=128, block_size=256, dtype=torch.bfloat16, new=True, norm=True, release=True,
    scales=None, window=None, soft_cap=None,
):  # fmt: skip
    """The decode kernel as it is launched for `count` sequences. scales: as for `make`."""
    kv_heads = 2
    q, k, v = torch.empty(count, (group + 2) * kv_heads, head_dim, dtype=dtype).split([group * kv_heads, 2, 2], 1)
    cache = torch.empty(3, block_size, kv_heads, head_dim, dtype=dtype if scales is None else FP8)
    of_cache = [torch.ones(kv_heads if n == 2 else 1) if n else None for n in scales or (0, 0)]
    lens = torch.ones(count, dtype=torch.int32)
    kv = PagedKV(cache, cache, torch.zeros(count, 16, dtype=torch.int32), lens, 16 * block_size, *of_cache)
    weights = [torch.empty(head_dim, dtype=dtype) if norm else None for _ in range(2)]
    tokens = NewTokens(k, v, torch.empty(MAX_POSITION, head_dim), *weights, 1e-6) if new else None
    call = DecodeCall.of(q, kv, 1.0, window, soft_cap, tokens)
    # Clusters have a launcher of their own, which cannot be recorded.
    alone = replace(plan, cluster=0)
    ((_, binary),) = compile_call(lambda: launch_hopper_decode(call, alone), RELEASE=release, CLUSTER=plan.cluster)
    return binary


def compile_hopper_prefill(plan, heads, kv_heads, dim, block_size, window=None, soft_cap=None, **constants):
    """The prefill kernel as it is launched, but for `constants` of the kernel."""
    q = torch.empty(16, heads, dim, dtype=torch.bfloat16)
    cache = torch.empty(3, block_size, kv_heads, dim, dtype=torch.bfloat16)
    lens, starts = torch.full((2,), 8, dtype=torch.int32), torch.tensor([0, 8, 16], dtype=torch.int32)
    kv = PagedKV(cache, cache, torch.zeros(2, 16, dtype=torch.int32), lens, 16 * block_size)
    arguments = torch.empty_like(q), q, kv, starts, 1.0, window, soft_cap
    ((_, binary),) = compile_call(lambda: launch_hopper_prefill(plan, *arguments), **constants)
    return binary
