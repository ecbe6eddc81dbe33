"""Arguments of the decode ops with everything poisoned that nobody may use, and their results in float64."""

from __future__ import annotations

import torch

from nanovllm.kernels.ops.checks import FP8
from nanovllm.kernels.triton.attention.decode_plan import DecodeSizes, plan_decode
from tests.kernels.triton.attention.cases import (
    BF16,
    F16,
    F32,
    attention_decode,
    cached_rows,
    check,
    given_bits,
    qk_norm_rope_attention,
)
from tests.kernels.triton.common import DEVICE, GPU

MAX_POSITION = 8192


def angles(head_dim, device, dtype=torch.float32):
    """[MAX_POSITION, head_dim]: cosines, then sines."""
    frequencies = 1e6 ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim)
    table = torch.arange(MAX_POSITION, device=device)[:, None] * frequencies
    return torch.cat((table.cos(), table.sin()), -1).to(dtype)


def make(
    lens, group, kv_heads, head_dim, block_size, dtype, norm=True, device=DEVICE, seed=0, spare=0, new=True,
    scales=None, cache_dtype=None, window=None, soft_cap=None,
):  # fmt: skip
    """Arguments of `qk_norm_rope_attention`, or unless `new` of `attention_decode`.

    Blocks are shuffled. NaN: slots without a token, those of the new tokens, blocks of no sequence. Table entries
    without a token: 2^30. q, k and v are views of a fused projection's rows.

    Args:
        spare: tokens that each sequence has room for beside its own.
        scales: for a float8 cache, or one of `cache_dtype`; keys' and values': 0 none, 1 one, 2 one a head.
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
        cache = stored(cache / scale.to(device)[:, None], cache_dtype or (dtype if scales is None else FP8))
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


def stored(x, dtype):
    return x.float().clamp(-448, 448).to(dtype) if dtype == FP8 else x.to(dtype)


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
            key = _rounded_key(given["k"][i], given.get("k_weight"), table[n - 1], eps)
            new[int(slots[-1])] = pair = tuple(
                stored(x.float() / s, caches[0].dtype) for x, s in zip((key, given["v"][i]), scales)
            )
        if "k" in given and after is None:
            keys, values = (
                torch.cat((cached_rows(x, slots[:-1]).double(), y[None].double())) * s
                for x, y, s in zip(caches, pair, scales)
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


def check_caches(used, given, new):
    """The slots of new tokens hold what `expected` has for them, but for a last bit of a key; no other has changed."""
    for name, index in (("k_cache", 0), ("v_cache", 1)):
        before, after = given[name].flatten(0, 1), used[name].flatten(0, 1)
        changed = (given_bits(after) != given_bits(before)).flatten(1).any(1)
        assert set(changed.nonzero()[:, 0].tolist()) == set(new), "slots that were written"
        if not new:
            continue
        want = torch.stack([given_bits(pair[index]) for pair in new.values()]).view(given[name].dtype)
        got = cached_rows(used[name], list(new))
        if got.dtype == FP8:
            steps = [torch.where(x < 128, x, 128 - x) for x in (y.view(torch.uint8).int() for y in (got, want))]
            apart = (steps[0] - steps[1]).abs()
            # A key's last bit of 16 may differ, by which it is rounded to the other side.
            assert apart.max() <= 1 - index and (apart > 0).double().mean() < 0.01, f"up to {apart.max()} steps off"
        else:
            # Where the rotation cancels, a last bit of a product is many of the result.
            rounding = {F32: 3e-6, F16: 2e-3, BF16: 1.6e-2}[got.dtype]
            atol = min(4 * rounding, 4e-2)
            torch.testing.assert_close(got, want, rtol=rounding * (1 - index), atol=atol * (1 - index))
            assert got.dtype == F32 or (got == want).double().mean() > 0.97


def copied(given):
    return given | {name: given[name].clone() for name in ("k_cache", "v_cache")}


def run(given, plan=None):
    """The op that the arguments are of."""
    return (qk_norm_rope_attention if "k" in given else attention_decode)(**given, plan=plan)


def difference(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()


def portable_plan(given):
    """For the kernel for any GPU, where the one for Hopper would be launched."""
    num_seqs, heads, dim = given["q"].shape
    kv_heads = given["k_cache"].shape[2]
    itemsize = given["k_cache"].element_size()
    return plan_decode(DecodeSizes(num_seqs, kv_heads, heads // kv_heads, dim, itemsize, False, 132), "k" in given)


LOOSE = 1.5e-2


def check_call(given, plan=None, again=False, error=None):
    """The result and what is stored. On a GPU, or with `again`, both are the same bits in further calls.

    error: of the result, and a third of that of any row; by default what the kernel for any GPU may have.
    """
    used, dtype = copied(given), given["q"].dtype
    got = run(used, plan)
    want, new = expected(given, used if given["k_cache"].dtype != dtype else None)
    assert got.is_contiguous() and got.dtype == dtype and not got.isnan().any()
    if error is not None:
        rows = (got.double() - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1).clamp(min=1e-30)
        assert difference(got, want) < error and rows.max() < 3 * error, f"sequence {rows.argmax()}: {rows.max()}"
    elif dtype == BF16 and new:  # rounded after the norm, its weight and the rotation, before the scores
        assert difference(got, want) < LOOSE
    else:
        tolerance = BF16 if dtype != F32 and new else dtype
        check(got.to(tolerance), want, tolerance)
    check_caches(used, given, new)
    for _ in range(2 if GPU or again else 0):
        repeated = copied(given)
        assert torch.equal(got, run(repeated, plan))
        assert all(torch.equal(given_bits(repeated[n]), given_bits(used[n])) for n in ("k_cache", "v_cache"))
