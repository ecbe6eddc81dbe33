"""What the tests of the kernels for Hopper share: arguments with everything poisoned, results in float64, compiled
kernels."""

from __future__ import annotations

from dataclasses import replace

import torch

from nanovllm.kernels.ops.checks import FP8
from nanovllm.kernels.ops.paged_kv import NewTokens, PagedKV
from nanovllm.kernels.triton.attention.call import DecodeCall
from nanovllm.kernels.triton.attention.decode_hopper import launch_hopper
from nanovllm.kernels.triton.attention.prefill_hopper import launch_hopper as launch_hopper_prefill
from tests.kernels.triton.attention.cases import attention_decode, cached_rows, compile_call, qk_norm_rope_attention

MAX_POSITION = 8192


def angles(head_dim, device, dtype=torch.float32):
    """[MAX_POSITION, head_dim]: cosines, then sines."""
    frequencies = 1e6 ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim)
    table = torch.arange(MAX_POSITION, device=device)[:, None] * frequencies
    return torch.cat((table.cos(), table.sin()), -1).to(dtype)


def make(
    lens, group, kv_heads, head_dim, block_size, dtype, norm=True, device="cuda", seed=0, spare=0, new=True,
    scales=None, window=None, soft_cap=None,
):  # fmt: skip
    """Arguments of `qk_norm_rope_attention`, or unless `new` of `attention_decode`.

    Blocks are shuffled. NaN: slots without a token, those of the new tokens, blocks of no sequence. Table entries
    without a token: 2^30. q, k and v are views of a fused projection's rows.

    Args:
        spare: tokens that each sequence has room for beside its own.
        scales: for a float8 cache; keys' and values': 0 none, 1 one, 2 one a head.
    """
    g = torch.Generator().manual_seed(seed)
    counts = [-(-(n + spare) // block_size) if n + spare else 0 for n in lens]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=g)
    table = torch.full((len(lens), max(*counts, 1) + 1), 2**30, dtype=torch.int32)
    at = 0
    for i, n in enumerate(counts):
        table[i, :n] = order[at : at + n].int()
        at += n
    shape = (num_blocks, block_size, kv_heads, head_dim)
    caches, cache_scales = [], {}
    for s in range(2):
        scale = torch.ones(1)
        if scales and scales[s]:
            # Most of the range of float8, subnormals among it.
            scale = 2 ** (torch.rand(kv_heads if scales[s] == 2 else 1, generator=g) * 9 - 8)
            cache_scales["kv"[s] + "_scale"] = scale.to(device)
        fill = torch.Generator(device).manual_seed(seed + s)
        cache = torch.randn(shape, generator=fill, device=device).view(-1, kv_heads, head_dim)
        cache = cache.to(dtype) if scales is None else to_float8(cache / scale.to(device)[:, None])
        live = torch.zeros(num_blocks * block_size, dtype=torch.bool)
        for i, n in enumerate(lens):
            if n > new:
                live[slots_of(table[i], n - new, block_size)] = True
        cache.view(torch.uint8)[~live.to(device)] = 0xFF  # NaN in every format
        caches.append(cache.view(shape))
    qkv = torch.randn(len(lens), (group + 2) * kv_heads, head_dim, generator=g).to(device, dtype)
    q, k, v = qkv.split((group * kv_heads, kv_heads, kv_heads), 1)
    given = {
        "q": q, "k_cache": caches[0], "v_cache": caches[1], "block_table": table.to(device),
        "context_lens": torch.tensor(lens, dtype=torch.int32, device=device), "max_context_len": max(*lens, 1) + spare,
        "scale": head_dim**-0.5, **cache_scales,
    }  # fmt: skip
    given |= {} if window is None else {"window": window}
    given |= {} if soft_cap is None else {"soft_cap": soft_cap}
    if new:
        given |= {"k": k, "v": v, "cos_sin_cache": angles(head_dim, device)}
        if norm:
            weights = [(torch.rand(head_dim, generator=g) + 0.5).to(device, dtype) for _ in range(2)]
            given |= {"q_weight": weights[0], "k_weight": weights[1], "eps": 1e-6}
    return given


def to_float8(x):
    return x.float().clamp(-448, 448).to(FP8)


def slots_of(table, count, block_size):
    positions = torch.arange(count, device=table.device)
    return table[positions // block_size].long() * block_size + positions % block_size


def _rotated(x, weight, angle, eps):
    """[heads, head_dim] float64, normalised with a weight if there is one, and rotated."""
    half = x.shape[-1] // 2
    if weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    cos, sin = angle[:half], angle[half:]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _rounded_key(x, weight, angle, eps):
    """`_rotated`, of x [heads, head_dim] in its dtype, rounded wherever the ops round."""
    dtype, half = x.dtype, x.shape[-1] // 2
    x = x.float()
    if weight is not None:
        x = (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()).to(dtype).float() * weight.float()
        x = x.to(dtype).float()
    cos, sin = (angle.float().to(dtype).float()[i : i + half] for i in (0, half))
    a, b = x[..., :half], x[..., half:]
    first, second = ((p.to(dtype).float(), r.to(dtype).float()) for p, r in ((a * cos, b * sin), (b * cos, a * sin)))
    return torch.cat((first[0] - first[1], second[0] + second[1]), -1).to(dtype)


def expected(given, after=None):
    """(out [num_seqs, num_heads, head_dim] float64, {slot of a new token: its (key, value) as the cache has them}).

    after: k_cache and v_cache as a kernel has left them, from which the new tokens are then read. Float8 is coarse: a
    last bit of a bfloat16 may decide to which side a key is rounded.
    """
    q, new = given["q"].double(), {}
    block_size, kv_heads, head_dim = given["k_cache"].shape[1:]
    table = angles(head_dim, q.device, torch.float64)
    out = torch.zeros_like(q)
    caches = [(after or given)[n] for n in ("k_cache", "v_cache")]
    scales = [given.get(n, torch.ones(1, device=q.device))[:, None] for n in ("k_scale", "v_scale")]
    for i, n in enumerate(given["context_lens"].tolist()):
        if not n:
            continue
        slots = slots_of(given["block_table"][i], n, block_size)
        queries = q[i]
        if "k" in given:
            eps = given.get("eps")
            queries = _rotated(queries, given.get("q_weight"), table[n - 1], eps)
            if caches[0].dtype == FP8:
                key = _rounded_key(given["k"][i], given.get("k_weight"), table[n - 1], eps)
                stored = [to_float8(x.float() / s) for x, s in zip((key, given["v"][i]), scales)]
            else:
                key = _rotated(given["k"][i].double(), given.get("k_weight"), table[n - 1], eps)
                stored = [key, given["v"][i].double()]
            new[int(slots[-1])] = tuple(stored)
        if "k" in given and after is None:
            keys, values = (
                torch.cat((cached_rows(x, slots[:-1]).double(), y[None].double())) * s
                for x, y, s in zip(caches, stored, scales)
            )
        else:
            keys, values = (cached_rows(x, slots).double() * s for x, s in zip(caches, scales))
        scores = torch.einsum("hgd,thd->hgt", queries.view(kv_heads, -1, head_dim), keys)
        scores = scores * given["scale"]
        if "soft_cap" in given:
            scores = given["soft_cap"] * (scores / given["soft_cap"]).tanh()
        if "window" in given:
            scores[..., : max(0, n - given["window"])] = float("-inf")
        weights = torch.softmax(scores, -1)
        out[i] = torch.einsum("hgt,thd->hgd", weights, values).reshape(-1, head_dim)
    return out, new


def check_stored(got, want, exact):
    """A new token's keys or values in the cache, and what `expected` has for it."""
    if got.dtype != FP8:
        torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=0 if exact else 4e-2)
        return
    steps = [torch.where(x < 128, x, 128 - x) for x in (y.view(torch.uint8).int() for y in (got, want))]
    apart = (steps[0] - steps[1]).abs()
    # A key's last bit of 16 may differ, by which it is rounded to the other side.
    assert apart.max() <= (0 if exact else 1) and (apart > 0).double().mean() < 0.01, f"up to {apart.max()} steps off"


def run(given, plan=None):
    """The op that the arguments are of."""
    return (qk_norm_rope_attention if "k" in given else attention_decode)(**given, plan=plan)


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
    ((_, binary),) = compile_call(lambda: launch_hopper(call, alone), RELEASE=release, CLUSTER=plan.cluster)
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
