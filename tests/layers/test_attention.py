"""The attention layer on the reference, its caches' dtypes, and what bad arguments are told."""

import importlib

import pytest
import torch

from nanovllm.engine.batch import DeviceBatch
from nanovllm.kernels import Provider, all_ops, resolve_kernels
from nanovllm.kernels.op.registry import temporary
from nanovllm.kernels.ops.paged_kv import PagedKV
from nanovllm.kernels.ops.store_kvcache import store_kvcache
from nanovllm.layers.attention import Attention, AttentionMetadata, LayerCache
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.model_config import RopeConfig
from tests.kernels.flat import NATIVE as FLAT
from tests.layers.paged_batch import DIM, HEADS, KV_HEADS, LENS, batch, slots
from tests.native import NATIVE
from tests.providers import registered

ATTENTION = importlib.import_module("nanovllm.kernels.ops.attention")
F8 = torch.float8_e4m3fn


def expected(q, k, v, scale, window=None, soft_cap=None):
    """Softmax attention of one sequence, written out: every row of q causal over k and v."""
    out = torch.zeros_like(q)
    n = len(q)
    for h in range(HEADS):
        s = q[:, h] @ k[:, h // (HEADS // KV_HEADS)].T * scale
        if soft_cap is not None:
            s = soft_cap * torch.tanh(s / soft_cap)
        position, token = torch.arange(n)[:, None], torch.arange(n)
        hidden = token > position
        if window is not None:
            hidden |= token <= position - window
        out[:, h] = s.masked_fill(hidden, -float("inf")).softmax(-1) @ v[:, h // (HEADS // KV_HEADS)]
    return out


@pytest.mark.parametrize(
    "options", [{}, {"window": 7}, {"soft_cap": 0.5}, {"window": 1}, {"window": 20, "soft_cap": 3.0}]
)
@pytest.mark.parametrize("scaled", [False, True])
def test_prefill_then_decode(options, scaled):
    """All but each sequence's last token as runs, then the last ones as a decode step."""
    q, k, v, cache, table = batch()
    if scaled:
        factors = torch.rand(2, KV_HEADS, generator=torch.Generator().manual_seed(1)) + 0.5
        cache = LayerCache(cache.k, cache.v, factors[0], factors[1][:1])
    layer = Attention(0.3, NATIVE, **options)
    runs = [n - 1 for n in LENS]
    starts = torch.tensor([0, *LENS]).cumsum(0)
    last = starts[1:] - 1
    rest = torch.tensor([i for i in range(sum(LENS)) if i not in last.tolist()])
    cu = torch.tensor([0, *runs]).cumsum(0).int()
    first = AttentionMetadata(0, slots(table)[rest], table, torch.tensor(runs).int(), 0, cu, max(runs))
    second = AttentionMetadata(3, slots(table)[last], table, torch.tensor(LENS).int(), max(LENS))
    got = torch.empty_like(q)
    got[rest] = layer(q[rest], k[rest], v[rest], cache, first)
    got[last] = layer(q[last], k[last], v[last], cache, second)
    for i in range(3):
        mine = slice(starts[i], starts[i + 1])
        torch.testing.assert_close(got[mine], expected(q[mine], k[mine], v[mine], 0.3, **options), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "options", [{}, {"window": 7}, {"soft_cap": 0.5}, {"window": 1}, {"window": 20, "soft_cap": 3.0}]
)
@pytest.mark.parametrize("n", [1, 2, 5, 18, 40])
def test_the_last_tokens_of_each_sequence(n, options):
    """Few query tokens, where the host knows the lengths and where it does not; zeros before a sequence's first
    token.
    """
    q, k, v, cache, table = batch()
    store_kvcache.native(k, v, cache.k, cache.v, slots(table))
    queries, want, start = torch.randn(3, n, HEADS, DIM, dtype=torch.float64), torch.zeros(3, n, HEADS, DIM).double(), 0
    for i, length in enumerate(LENS):
        mine, few = slice(start, start + length), min(n, length)
        queries[i, n - few :] = q[mine][length - few :]
        want[i, n - few :] = expected(q[mine], k[mine], v[mine], 0.3, **options)[length - few :]
        start += length
    given = queries.flatten(0, 1), cache.k, cache.v, table, torch.tensor(LENS).int(), 48, 0.3
    kv = PagedKV(*given[1:6])
    padded = ATTENTION.decode_padded(given[0], kv, n, 0.3, options.get("window"), options.get("soft_cap"))
    for got in (FLAT.attention_decode(*given, **options), padded):
        torch.testing.assert_close(got.unflatten(0, (3, n)), want, rtol=1e-6, atol=1e-7)
        assert got.is_contiguous() and not got[: max(0, n - 1)].any()


@pytest.mark.parametrize("cache_dtype, error", [(F8, 0.06), (torch.bfloat16, 0.006), (torch.float16, 1e-3)])
def test_narrow_caches_lose_what_their_mantissa_lacks(cache_dtype, error):
    q, k, v, cache, table = batch(torch.float32, cache_dtype)
    layer = Attention(DIM**-0.5, NATIVE)
    cu = torch.tensor([0, *LENS]).cumsum(0).int()
    got = layer(q, k, v, cache, AttentionMetadata(0, slots(table), table, torch.tensor(LENS).int(), 0, cu, max(LENS)))
    want = torch.cat([expected(*(x[s:e] for x in (q, k, v)), DIM**-0.5) for s, e in zip(cu[:-1], cu[1:])])
    relative = ((got - want).norm() / want.norm()).item()
    assert error / 20 < relative < error


@pytest.mark.parametrize("piggybacked", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("fused", [(), ("qk_norm_rope_store",), ("qk_norm_rope_store", "qk_norm_rope_attention")])
def test_from_the_projection(fused, norm, piggybacked):
    """Every fusion gives what rotating first gives. The op for decodes runs in decode steps, piggybacked or not."""
    q, k, v, cache, table = batch(torch.float32)
    calls = []

    def recorded(name):
        def fn(*args, **kwargs):
            calls.append(name)
            return all_ops()[name].native(*args, **kwargs)

        return fn

    with temporary():
        for name in fused:
            all_ops()[name].add(Provider("recorded", recorded(name)))
        kernels = resolve_kernels(torch.device("cpu"), True, {name: ["recorded"] for name in fused})
    layer = Attention(0.3, kernels, window=30)
    rotary = RotaryEmbedding(RopeConfig(10000.0), DIM, 64, NATIVE)
    norms = [RMSNorm(DIM, 1e-6, NATIVE) if norm else None for _ in range(2)]
    for n in filter(None, norms):
        torch.nn.init.uniform_(n.weight, 0.5, 1.5)
    positions = torch.cat([torch.arange(n) for n in LENS])
    rotated = rotary(positions, q, k, *norms)
    starts = torch.tensor([0, *LENS]).cumsum(0)
    last = starts[1:] - 1
    rest = torch.tensor([i for i in range(sum(LENS)) if i not in last.tolist()])
    cu = torch.tensor([0, *(n - 1 for n in LENS)]).cumsum(0).int()
    lens = torch.tensor(LENS).int()
    slot = slots(table)
    if piggybacked:  # the second prompt begins; the third's prompt is piggybacked on two decodes; its decode follows
        n = LENS[1] - 1
        runs, alone = (torch.tensor([0, length - 1]).int() for length in LENS[1:])
        third = AttentionMetadata(0, slot[rest[n:]], table[2:], lens[2:] - 1, 0, alone, LENS[2] - 1)
        steps = [
            (rest[:n], AttentionMetadata(0, slot[rest[:n]], table[1:2], lens[1:2] - 1, 0, runs, n)),
            (
                torch.cat((last[:2], rest[n:])),
                AttentionMetadata(2, slot[last[:2]], table[:2], lens[:2], LENS[1], piggybacked=third),
            ),
            (last[2:], AttentionMetadata(1, slot[last[2:]], table[2:], lens[2:], LENS[2])),
        ]
    else:
        steps = [
            (rest, AttentionMetadata(0, slot[rest], table, lens - 1, 0, cu, max(LENS) - 1)),
            (last, AttentionMetadata(3, slot[last], table, lens, max(LENS))),
        ]
    got = torch.empty_like(q)
    for part, metadata in steps:
        got[part] = layer.after_projection(positions[part], q[part], k[part], v[part], rotary, *norms, cache, metadata)
    for i in range(3):
        mine = slice(starts[i], starts[i + 1])
        torch.testing.assert_close(got[mine], expected(rotated[0][mine], rotated[1][mine], v[mine], 0.3, window=30))
    if piggybacked:
        assert calls == [fused[0], fused[0], fused[-1], fused[-1]] if fused else not calls
    else:
        assert calls == [fused[0], fused[-1]] if fused else not calls


@pytest.mark.parametrize("takes", [False, True])
@pytest.mark.parametrize("piggybacked", [False, True])
def test_only_piggybacked_runs_are_concurrent(piggybacked, takes):
    calls = []

    def recorded(*args, **kwargs):
        calls.append(kwargs)
        return all_ops()["attention_prefill"].native(*args)

    with registered("attention_prefill", recorded, takes_concurrent=takes):
        layer = Attention(0.3, resolve_kernels(torch.device("cpu"), True, {"attention_prefill": ["mine"]}))
    q, k, v, cache, table = batch(torch.float32)
    runs = AttentionMetadata(
        0, slots(table)[1:4], table[1:2], torch.tensor([3]).int(), 0, torch.tensor([0, 3]).int(), 3
    )
    decodes = AttentionMetadata(1, slots(table)[:1], table[:1], torch.tensor([1]).int(), 1)
    step = DeviceBatch(torch.zeros(1), torch.zeros(1), decodes).with_piggybacked(
        DeviceBatch(torch.zeros(3), torch.zeros(3), runs)
    )
    tokens = slice(0, 4) if piggybacked else slice(1, 4)
    rotary = RotaryEmbedding(RopeConfig(10000.0), DIM, 64, NATIVE)
    positions = torch.tensor([0, 0, 1, 2])[tokens]
    layer.after_projection(
        positions, q[tokens], k[tokens], v[tokens], rotary, None, None, cache, step.metadata if piggybacked else runs
    )
    assert calls == [{"concurrent": True} if piggybacked and takes else {}]


@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"positions": torch.arange(2)}, r"positions, q, k, v: expected .*, not positions torch.int64 \[2\]"),
        ({"k": torch.zeros(2, 2, 8)}, r"expected a position, key and value .*, k torch.float32 \[2, 2, 8\]"),
        ({"v": torch.zeros(3, 3, 8)}, r"expected a position, key and value .*, v torch.float32 \[3, 3, 8\]"),
        ({"v": torch.zeros(3, 2, 8).half()}, r"of one head_dim and dtype, not .*, v torch.float16 \[3, 2, 8\]"),
        ({"q": torch.zeros(3, 4, 16)}, r"of one head_dim and dtype, not .* q torch.float32 \[3, 4, 16\]"),
        (
            {n: torch.zeros(3, h, 16) for n, h in (("q", 4), ("k", 2), ("v", 2))},
            "q: expected a head_dim of 8, .* not 16",
        ),
    ],
)
def test_a_projection_that_does_not_fit(wrong, said):
    *_, cache, table = batch(torch.float32)
    given = {
        "positions": torch.arange(3),
        "q": torch.zeros(3, 4, 8),
        "k": torch.zeros(3, 2, 8),
        "v": torch.zeros(3, 2, 8),
    }
    rotary = RotaryEmbedding(RopeConfig(theta=10000.0), DIM, 64, NATIVE)
    metadata = AttentionMetadata(3, torch.arange(3), table, torch.ones(3, dtype=torch.int32), 1)
    layer = Attention(0.3, NATIVE)
    with pytest.raises(ValueError, match=said):
        layer.after_projection(
            **{**given, **wrong}, rotary=rotary, q_norm=None, k_norm=None, cache=cache, metadata=metadata
        )


def test_a_sequence_without_tokens_gets_zeros():
    q, k, v, cache, table = batch()
    lens = torch.tensor([0, 0, 0], dtype=torch.int32)
    assert not FLAT.attention_decode(q[:3], cache.k, cache.v, table, lens, 40, 0.3).any()
    cu = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    assert not FLAT.attention_prefill(q[:3], cache.k, cache.v, table, lens, 48, cu, 1, 0.3).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scales_are_not_rounded_to_16_bits(dtype):
    """Logits of tens: a key that is rounded after its scale is off by an eighth of one."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, h, 64, generator=g) for n, h in ((1, 2), (32, 1), (32, 1)))
    cache = (4 * torch.stack((k, v))).to(F8).view(2, 2, 16, 1, 64)
    scale, table, lens = (
        torch.tensor([0.37]),
        torch.tensor([[0, 1]], dtype=torch.int32),
        torch.tensor([32], dtype=torch.int32),
    )
    options = (1.0, None, None, scale, scale)
    q = q.to(dtype)
    got = FLAT.attention_decode(q, *cache, table, lens, 32, *options)
    cu = torch.tensor([0, 1], dtype=torch.int32)
    assert torch.equal(FLAT.attention_prefill(q, *cache, table, lens, 32, cu, 1, *options), got)
    keys, values = cache.flatten(1, 2).double()[:, :, 0] * 0.37
    want = (q[0].double() @ keys.T).softmax(-1) @ values
    assert (got[0].double() - want).abs().max() < {torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype] * want.abs().max()
