"""Arguments, references and checks of `qk_norm_rope_attention`, for the tests of the kernels for any GPU."""

import torch

from nanovllm.kernels.ops import qk_norm_rope_attention as OP
from tests.kernels.flat import flat
from tests.kernels.triton.attention.cases import (
    BF16,
    F8,
    F16,
    F32,
    check,
    given_bits,
    int32,
    paged,
    qk_norm_rope_attention,
    with_scales,
)
from tests.kernels.triton.common import DEVICE, GPU

MAX_POSITION = 24576 if GPU else 4096
LOOSE = 1.5e-2
NATIVE = flat("qk_norm_rope_attention", OP.native)


def angles(head_dim, dtype=F32):
    frequencies = 1e6 ** (-torch.arange(0, head_dim, 2, device=DEVICE, dtype=torch.float64) / head_dim)
    table = torch.arange(MAX_POSITION, device=DEVICE)[:, None] * frequencies
    return torch.cat((table.cos(), table.sin()), -1).to(dtype)


def make(lens, num_heads, num_kv_heads, head_dim, block_size, dtype, cache_dtype=None, norm=True, **options):
    """Arguments; the slot of each sequence's last token holds NaN, since that token comes with the call."""
    k_cache, v_cache, table = paged(lens, num_kv_heads, head_dim, block_size, cache_dtype or dtype, seed=len(lens))
    for i, length in enumerate(lens):
        if length:
            block = int(table[i, (length - 1) // block_size])
            for cache in (k_cache, v_cache):
                raw = cache.view(torch.uint8) if cache.dtype == F8 else cache
                raw[block, (length - 1) % block_size] = 0x7F if cache.dtype == F8 else float("nan")
    generator = torch.Generator().manual_seed(7)
    qkv = torch.randn(len(lens), num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(DEVICE, dtype)
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)
    weights = [(torch.rand(head_dim, generator=generator) + 0.5).to(DEVICE, dtype) if norm else None for _ in range(2)]
    return {
        "q": q, "k": k, "v": v, "cos_sin_cache": angles(head_dim), "k_cache": k_cache, "v_cache": v_cache,
        "block_table": table, "context_lens": int32(lens), "max_context_len": max(*lens, 1), "scale": head_dim**-0.5,
        "q_weight": weights[0], "k_weight": weights[1], "eps": 1e-6, **with_scales(options),
    }  # fmt: skip


def copied(given):
    return given | {name: given[name].clone() for name in ("k_cache", "v_cache")}


def expected_of(given):
    """The reference in float64 if nothing is quantised, else in the dtypes of the call, whose rounding then counts."""
    given = copied(given)
    if given["k_cache"].dtype != given["q"].dtype:
        return NATIVE(**given)
    wide = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in given.items()}
    wide |= {n: given[n] for n in ("k_scale", "v_scale") if n in given}
    return NATIVE(**wide | {"cos_sin_cache": angles(given["q"].shape[2], torch.float64)})


def difference(got, expected):
    return ((got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()


def check_call(given, plan=None):
    expected, used, dtype = expected_of(given), copied(given), given["q"].dtype
    got = qk_norm_rope_attention(**used, plan=plan)
    assert got.is_contiguous() and got.dtype == dtype and not got.isnan().any()
    if dtype == BF16:  # rounded after the norm, its weight and the rotation, before the scores
        assert difference(got, expected) < LOOSE
    else:
        tolerance = F32 if dtype == F32 else BF16
        check(got.to(tolerance), expected.double(), tolerance)
    check_caches(used, given)
    for _ in range(2 if GPU else 1):
        again = copied(given)
        assert torch.equal(got, qk_norm_rope_attention(**again, plan=plan))
        assert all(torch.equal(given_bits(again[n]), given_bits(used[n])) for n in ("k_cache", "v_cache"))


def check_caches(used, given):
    """The new tokens' slots hold what the separate ops store there, but for a last bit of k. No other slot changed."""
    stored = copied(given)
    NATIVE(**stored)
    rtol = {F32: 3e-6, F16: 2e-3, BF16: 1.6e-2, F8: 0.13}[given["k_cache"].dtype]
    rounding = {F32: 3e-6, F16: 2e-3, BF16: 1.6e-2}[given["q"].dtype]
    for name in ("k_cache", "v_cache"):
        # Where the rotation cancels, a last bit of a product is many of the result.
        atol = 4 * rounding + 2**-9 * (given[name].dtype == F8) if name == "k_cache" else 1e-5
        before, after = given_bits(given[name]), given_bits(used[name])
        new = (given_bits(stored[name]) != before).any(-1).any(-1)
        assert new.sum() == (given["context_lens"] > 0).sum()
        assert torch.equal(after[~new], before[~new])
        got, expected = (c.float()[new] for c in (used[name], stored[name]))
        torch.testing.assert_close(got, expected, rtol=rtol if name == "k_cache" else 0, atol=atol)
        assert given["q"].dtype == F32 or (got == expected).double().mean() > 0.97
