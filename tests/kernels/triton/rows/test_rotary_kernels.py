"""Rotation, the cache store and the embedding against the references; a captured step of kernels that start early."""

import itertools

import pytest
import torch
import torch.nn.functional as F

triton = pytest.importorskip("triton")
import nanovllm.kernels.triton.rows as ops
from nanovllm.kernels.ops.qk_norm_rope import qk_norm_rope as native_qk_norm_rope
from nanovllm.kernels.ops.rotary import rotary_embedding as native_rotary_embedding
from nanovllm.kernels.triton.rows.plans import POLICY
from nanovllm.kernels.triton.sampling.sample import sample
from tests.kernels.triton.common import DEVICE, DTYPES, GPU, graph_of, randn
from tests.kernels.triton.rows.comparisons import MANY, like

pytestmark = [pytest.mark.triton, pytest.mark.slow, pytest.mark.usefixtures("poison")]


# ((heads, KV heads, head_dim), numbers of tokens, policy)
ROTATED = [((*heads,), (0, 1, 6), POLICY) for heads in ((16, 8, 128), (9, 3, 64), (1, 1, 32), (5, 5, 96))]
ROTATED += [((*heads,), (2, 3), MANY) for heads in ((16, 8, 128), (32, 8, 64), (12, 4, 128), (8, 8, 96))]
if GPU:
    ROTATED += [(heads, (256, 3000), policy) for heads, tokens, policy in ROTATED if 0 in tokens]


@pytest.mark.parametrize("case, dtype", [*zip(ROTATED, itertools.cycle(DTYPES))], ids=str)
def test_rotary_embedding_and_qk_norm_rope(case, dtype):
    (num_heads, num_kv_heads, head_dim), numbers, policy = case
    weights = randn(head_dim, dtype=dtype, seed=1), randn(head_dim, dtype=dtype, seed=2)
    angles = torch.outer(torch.arange(500.0), 1e4 ** -torch.linspace(0, 1, head_dim // 2))
    table = torch.cat((angles.cos(), angles.sin()), -1).to(DEVICE)
    for tokens in numbers:
        qkv = randn(tokens, num_heads + 2 * num_kv_heads, head_dim, dtype=dtype, seed=tokens)
        q, k, _ = qkv.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        positions = torch.randint(500, (tokens,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
        before = qkv.clone()
        got = ops.rotary_embedding(positions, q, k, table, policy)
        for g, native in zip(got, native_rotary_embedding.native(positions, q, k, table)):
            assert torch.equal(g, native) and g.is_contiguous()
        got = ops.qk_norm_rope(positions, q, k, *weights, 1e-6, table, policy)
        for g, native in zip(got, native_qk_norm_rope.native(positions, q, k, *weights, 1e-6, table)):
            like(g, native)
        assert torch.equal(qkv, before)


def test_positions_and_slots_out_of_range_are_named(monkeypatch):
    monkeypatch.setenv("NANOVLLM_CHECK", "1")
    q, k, v = (randn(3, heads, 32, dtype=torch.float32, seed=i) for i, heads in enumerate((4, 2, 2)))
    k_cache, v_cache = torch.zeros(2, 2, 4, 2, 32, device=DEVICE)
    weight, table = torch.ones(32, device=DEVICE), torch.zeros(9, 32, device=DEVICE)
    slots, good = torch.tensor([0, 1, 7], device=DEVICE), torch.tensor([8, 0, 1], device=DEVICE)

    def store(positions, slots=slots):
        return ops.qk_norm_rope_store(positions, q, k, v, table, k_cache, v_cache, slots)

    calls = (
        store,
        lambda positions: ops.rotary_embedding(positions, q, k, table),
        lambda positions: ops.qk_norm_rope(positions, q, k, weight, weight, 1e-6, table),
    )
    for call in calls:
        call(good)
        for bad in (9, -1):
            with pytest.raises(ValueError, match=f"positions: token 1 has position {bad}, expected 0 to 8"):
                call(torch.tensor([8, bad, 1], device=DEVICE))
    for bad in (8, -1):
        wrong = torch.tensor([0, 1, bad], device=DEVICE)
        with pytest.raises(ValueError, match=f"slot_mapping: token 2 has slot {bad} "):
            store(good, wrong)
        with pytest.raises(ValueError, match=f"slot_mapping: token 2 has slot {bad} "):
            ops.store_kvcache(k, v, k_cache, v_cache, wrong)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_store_kvcache(dtype):
    for tokens, num_kv_heads, head_dim in ((0, 2, 32), (1, 8, 128), (11, 3, 64)):
        qkv = randn(tokens, 4 * num_kv_heads, head_dim, dtype=dtype)
        v = qkv[:, 3 * num_kv_heads :]
        k = qkv[:, num_kv_heads : 2 * num_kv_heads].contiguous()
        slots = torch.randperm(20, generator=torch.Generator().manual_seed(0))[:tokens].to(DEVICE)
        k_cache, v_cache = (randn(5, 4, num_kv_heads, head_dim, dtype=dtype, seed=s) for s in (1, 2))
        expected = k_cache.clone(), v_cache.clone()
        expected[0].flatten(0, 1)[slots], expected[1].flatten(0, 1)[slots] = k, v
        assert ops.store_kvcache(k, v, k_cache, v_cache, slots) is None
        assert torch.equal(k_cache, expected[0]) and torch.equal(v_cache, expected[1])
        # A layer of a cache that holds K and V of a slot side by side.
        both = torch.stack((k_cache, v_cache), 2)
        if tokens:
            ops.store_kvcache(v, k, both[:, :, 0], both[:, :, 1], slots)
            assert torch.equal(both[:, :, 0].flatten(0, 1)[slots], v)
            assert torch.equal(both[:, :, 1].flatten(0, 1)[slots], k)


def test_store_kvcache_names_a_cache_it_cannot_write():
    k = randn(1, 2, 32, dtype=torch.float32)
    cache, slots = randn(4, 2, 4, 32, dtype=torch.float32), torch.zeros(1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="^v_cache: "):
        ops.store_kvcache(k, k, cache.transpose(1, 2).contiguous(), cache.transpose(1, 2), slots)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 32])
def test_kernels_that_are_launched_early_wait_for_what_they_read(rows, monkeypatch):
    """A captured step of them, between matrix products: every replay has the bits of one in which none is launched
    early."""
    from nanovllm.kernels.triton import early_start

    monkeypatch.undo()  # no kernel that fills memory between two of the step
    dtype, size, inner, vocab = torch.bfloat16, 1024, 3072, 32000
    table, weight = randn(vocab, size, dtype=dtype), randn(size, dtype=dtype, seed=1)
    weight = torch.nn.Parameter(weight, requires_grad=False)  # read before the kernel before has ended
    ups = [randn(2 * inner, size, dtype=dtype, seed=s, scale=size**-0.5) for s in range(2, 8)]
    downs = [randn(size, inner, dtype=dtype, seed=s, scale=inner**-0.5) for s in range(8, 14)]
    first = torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    ids = first.clone()
    zeros, hot = torch.zeros(rows, dtype=torch.int64, device=DEVICE), torch.ones(rows, device=DEVICE)

    def step():
        x = ops.embedding(ids, table)
        residual = x.clone()
        x = ops.rms_norm(x, weight, 1e-6)
        for up, down in zip(ups, downs):
            x = F.linear(ops.silu_and_mul(F.linear(x, up)), down)
            x, residual = ops.add_rms_norm(x, residual, weight, 1e-6)
        ids.copy_(sample(F.linear(x, table), hot, None, None, None, zeros, zeros))
        return x, residual

    def run(graph, results):
        ids.copy_(first)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        return [t.clone() for t in (*results, ids)]

    early = graph_of(step)
    monkeypatch.setattr(early_start, "has_dependent_launch", lambda device: False)
    expected = run(*graph_of(step))
    assert all(t.isfinite().all() for t in expected[:2])
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(run(*early), expected))
