"""float8 caches and the fused store: the Triton kernels against the reference, bit by bit, and the reference against
torch.
"""

import pytest
import torch

pytest.importorskip("triton")

from nanovllm.kernels.ops.qk_norm_rope_store import qk_norm_rope_store
from nanovllm.kernels.ops.store_kvcache import quantised, store_kvcache
from nanovllm.kernels.triton.rows import move_rows as triton_cache
from nanovllm.kernels.triton.rows import rotary as triton_rotary
from nanovllm.kernels.triton.rows.plans import POLICY, RowPolicy
from tests.kernels.triton.common import DEVICE

pytestmark = pytest.mark.triton
F8 = torch.float8_e4m3fn
SHAPES = [(1, 4, 2, 64), (5, 9, 3, 80), (3, 7, 1, 96), (0, 4, 2, 64), (2, 4, 4, 256)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def by_turns(shapes, others):
    """Every shape in every dtype, and each with one of the others."""
    return [
        (shape, dtype, others[(i + j) % len(others)])
        for i, shape in enumerate(shapes)
        for j, dtype in enumerate(DTYPES)
    ]


def bits(cache):
    return cache.view(torch.uint8) if cache.dtype == F8 else cache


def make(tokens, heads, kv_heads, dim, dtype, cache_dtype, scales, seed=0):
    """(q, k, v, caches, slots, k_scale, v_scale); magnitudes differ a lot from token to token."""
    g = torch.Generator().manual_seed(seed)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, dim, generator=g) * torch.randn(tokens, 1, 1, generator=g).exp() * 3
    q, k, v = qkv.to(dtype).to(DEVICE).split((heads, kv_heads, kv_heads), 1)
    caches = [torch.randn(4, 16, kv_heads, dim, generator=g).to(cache_dtype).to(DEVICE) for _ in range(2)]
    slots = torch.randperm(64, generator=g)[:tokens].to(DEVICE)
    count = {"none": 0, "one": 1, "heads": kv_heads}[scales]
    made = [(torch.rand(count, generator=g) + 0.01).to(DEVICE) if count else None for _ in range(2)]
    return q, k, v, caches, slots, *made


@pytest.mark.parametrize("shape, dtype, scales", by_turns(SHAPES, ["none", "one", "heads"]))
def test_store(shape, dtype, scales):
    for cache_dtype in (dtype, F8):
        _, k, v, caches, slots, *factors = make(*shape, dtype, cache_dtype, scales)
        expected, got = ([c.clone() for c in caches] for _ in range(2))
        store_kvcache.native(k, v, *expected, slots, *factors)
        triton_cache.store_kvcache(k, v, *got, slots, *factors)
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, expected))


# A token's heads by one program, in several tiles of q or of all.
@pytest.mark.parametrize(
    "shape, dtype, norm", by_turns([(3, 8, 4, 128), (3, 16, 16, 64), (4, 24, 8, 64)], [True, False])
)
def test_fused_store_of_many_tokens(shape, dtype, norm):
    test_fused_store(shape, dtype, norm, RowPolicy(few_tokens=0))


@pytest.mark.parametrize("shape, dtype, norm", by_turns(SHAPES, [True, False]))
def test_fused_store(shape, dtype, norm, policy=POLICY):
    dim = shape[3]
    g = torch.Generator().manual_seed(1)
    table = torch.randn(100, dim, generator=g).to(DEVICE)
    positions = torch.randint(0, 100, (shape[0],), generator=g).to(DEVICE)
    weights = [(torch.rand(dim, generator=g) + 0.5).to(dtype).to(DEVICE) if norm else None for _ in range(2)]
    for cache_dtype, scales in ((dtype, "none"), (F8, "none"), (F8, "heads"), (F8, "one")):
        q, k, v, caches, slots, *factors = make(*shape, dtype, cache_dtype, scales)
        expected, got = ([c.clone() for c in caches] for _ in range(2))
        want = qk_norm_rope_store.native(positions, q, k, v, table, *expected, slots, *weights, 1e-6, *factors)
        out = triton_rotary.qk_norm_rope_store(
            positions, q, k, v, table, *got, slots, *weights, 1e-6, *factors, policy=policy
        )
        assert out.is_contiguous() and out.dtype == dtype
        tolerance = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
        torch.testing.assert_close(out, want, rtol=tolerance, atol=tolerance * 4)
        assert torch.equal(bits(got[1]), bits(expected[1])), "v"
        keys, wanted = got[0].float(), expected[0].float()
        # A key at the edge of two float8 values may fall on either side: one step of 2^-3 of its size, and few of them.
        step = 0.13 if cache_dtype == F8 else tolerance * 2
        torch.testing.assert_close(keys, wanted, rtol=step, atol=tolerance * 4 + 2**-9 * (cache_dtype == F8))
        if cache_dtype == F8:
            assert (keys != wanted).float().mean() < 0.02
        untouched = torch.ones(64, dtype=torch.bool)
        untouched[slots.cpu()] = False
        for cache, before in zip(got, caches):
            assert torch.equal(bits(cache).flatten(0, 1)[untouched], bits(before).flatten(0, 1)[untouched])


def test_every_float8_value_and_every_rounding():
    exact = torch.arange(256, dtype=torch.uint8).view(F8).float()
    finite = exact[exact.isfinite()].sort().values
    ties = (finite[1:] + finite[:-1]) / 2
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e30, -1e-30])
    x = torch.cat((exact, ties, ties.nextafter(torch.tensor(9e9)), ties.nextafter(torch.tensor(-9e9)), special))
    x = torch.cat((x, torch.zeros(-len(x) % 16))).view(-1, 1, 16).to(DEVICE)
    caches = [torch.zeros(len(x), 1, 1, 16, dtype=F8, device=DEVICE) for _ in range(2)]
    triton_cache.store_kvcache(x, -x, *caches, torch.arange(len(x), device=DEVICE))
    for cache, value in zip(caches, (x, -x)):
        expected, got = quantised(value, F8, None), cache.view(value.shape)
        nan = value.isnan()
        assert torch.equal(got.float()[~nan], expected.float()[~nan]) and got.float()[nan].isnan().all()
        assert expected.float()[~nan].abs().max() == 448


def test_only_both_norms_or_neither():
    q, k, v, caches, slots, *_ = make(1, 4, 2, 64, torch.float32, torch.float32, "none")
    table, positions = torch.zeros(4, 64, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    for function in (qk_norm_rope_store.native, triton_rotary.qk_norm_rope_store):
        with pytest.raises(ValueError, match="q_weight, k_weight: expected both or neither"):
            function(positions, q, k, v, table, *caches, slots, torch.ones(64, device=DEVICE))
