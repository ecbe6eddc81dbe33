"""The attention layer on the reference, its caches' dtypes, and what bad arguments are told."""

import importlib

import pytest
import torch

from nanovllm.engine.batch import DeviceBatch
from nanovllm.kernels import Provider, all_ops, resolve_kernels
from nanovllm.kernels.op.registry import temporary
from nanovllm.kernels.ops.checks import values_checked
from nanovllm.kernels.ops.paged_kv import PagedKV
from nanovllm.kernels.ops.qk_norm_rope import qk_norm_rope
from nanovllm.kernels.ops.qk_norm_rope_store import qk_norm_rope_store
from nanovllm.kernels.ops.rotary import rotary_embedding
from nanovllm.kernels.ops.store_kvcache import store_kvcache
from nanovllm.layers.attention import Attention, AttentionMetadata, LayerCache
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.model_config import RopeConfig
from tests.kernels.flat import NATIVE as FLAT
from tests.native import NATIVE
from tests.providers import registered

ATTENTION = importlib.import_module("nanovllm.kernels.ops.attention")
F8 = torch.float8_e4m3fn
LENS, BLOCK, HEADS, KV_HEADS, DIM = [1, 17, 40], 16, 4, 2, 8


def batch(dtype=torch.float64, cache_dtype=None, seed=0):
    """(q, k, v of every token, an empty cache of NaN, block table): sequences of LENS tokens."""
    g = torch.Generator().manual_seed(seed)
    n = sum(LENS)
    q, k, v = (torch.randn(n, h, DIM, generator=g, dtype=dtype) for h in (HEADS, KV_HEADS, KV_HEADS))
    cache = LayerCache(
        *(torch.full((10, BLOCK, KV_HEADS, DIM), float("nan")).to(cache_dtype or dtype) for _ in range(2))
    )
    table = torch.randperm(10, generator=g)[:9].view(3, 3).int()
    return q, k, v, cache, table


def slots(table):
    return torch.cat(
        [table[i].long()[torch.arange(n) // BLOCK] * BLOCK + torch.arange(n) % BLOCK for i, n in enumerate(LENS)]
    )


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
    padded = ATTENTION._decode_padded(given[0], kv, n, 0.3, options.get("window"), options.get("soft_cap"))
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


@pytest.mark.parametrize("riding", [False, True])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("fused", [(), ("qk_norm_rope_store",), ("qk_norm_rope_store", "qk_norm_rope_attention")])
def test_from_the_projection(fused, norm, riding):
    """Whatever is fused: the same as rotating first. The op for decoding is used for steps that only decode, and
    beside riders.
    """
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
    if (
        riding
    ):  # the second sequence begins, then the third's beginning rides on the first two's ends, then comes its end
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
        got[part] = layer.of_projection(positions[part], q[part], k[part], v[part], rotary, *norms, cache, metadata)
    for i in range(3):
        mine = slice(starts[i], starts[i + 1])
        torch.testing.assert_close(got[mine], expected(rotated[0][mine], rotated[1][mine], v[mine], 0.3, window=30))
    if riding:
        assert calls == [fused[0], fused[0], fused[-1], fused[-1]] if fused else not calls
    else:
        assert calls == [fused[0], fused[-1]] if fused else not calls


@pytest.mark.parametrize("takes", [False, True])
@pytest.mark.parametrize("riding", [False, True])
def test_only_what_rides_is_said_to_run_beside_others(riding, takes):
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
    tokens = slice(0, 4) if riding else slice(1, 4)
    rotary = RotaryEmbedding(RopeConfig(10000.0), DIM, 64, NATIVE)
    positions = torch.tensor([0, 0, 1, 2])[tokens]
    layer.of_projection(
        positions, q[tokens], k[tokens], v[tokens], rotary, None, None, cache, step.metadata if riding else runs
    )
    assert calls == [{"concurrent": True} if riding and takes else {}]


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
        layer.of_projection(
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


def call(**changes):
    q, _, _, cache, table = batch(torch.float32)
    arguments = {
        "q": q[:3], "k_cache": cache.k, "v_cache": cache.v, "block_table": table,
        "context_lens": torch.tensor(LENS, dtype=torch.int32), "max_context_len": 48, "scale": 0.3,
    }  # fmt: skip
    return FLAT.attention_decode(**{**arguments, **changes})


WIDE = torch.zeros(10, BLOCK, KV_HEADS, DIM)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"q": torch.zeros(3, 3, DIM)}, "q: expected a multiple of the cache's 2 heads, got 3"),
        (
            {"v_cache": torch.zeros(10, BLOCK, KV_HEADS, DIM).half()},
            "v_cache: expected shape, dtype and strides of k_cache",
        ),
        ({"k_cache": torch.zeros(10, KV_HEADS, DIM)}, "k_cache: expected .num_blocks, block_size"),
        ({"k_cache": WIDE.int(), "v_cache": WIDE.int()}, "k_cache: expected float8_e4m3fn, .* got torch.int32"),
        ({"block_table": torch.zeros(3, 3, dtype=torch.int64)}, "block_table: expected int32"),
        ({"block_table": torch.zeros(2, 3, dtype=torch.int32)}, r"block_table: expected int32 \[3, max_blocks\]"),
        ({"context_lens": torch.tensor(LENS)}, "context_lens: expected contiguous int32"),
        ({"window": 0}, "window: expected None or a whole number of tokens from 1 to .*, got 0"),
        ({"window": 2.5}, "window: expected None or a whole number of tokens .*, got 2.5"),
        ({"window": 1 << 40}, "window: .*, got 1099511627776"),
        ({"scale": 0.0}, "scale: expected a positive finite number, got 0.0"),
        ({"scale": -0.3}, "scale: .* got -0.3"),
        ({"scale": float("nan")}, "scale: .* got nan"),
        ({"k_cache": WIDE[:, :, :0], "v_cache": WIDE[:, :, :0]}, "k_cache: expected at least one KV head"),
        ({"k_scale": torch.tensor([0.0])}, r"k_scale: expected positive numbers, got \[0.0\]"),
        ({"v_scale": torch.tensor([1.0, -2.0])}, r"v_scale: expected positive numbers, got \[1.0, -2.0\]"),
        ({"soft_cap": -1.0}, "soft_cap: expected None or a positive finite number, got -1.0"),
        ({"soft_cap": float("inf")}, "soft_cap: expected None or a positive finite number, got inf"),
        (
            {"k_scale": torch.ones(3)},
            r"k_scale: expected contiguous float32 of shape \[1\] or \[2\], got float32 \[3\]",
        ),
    ],
)
def test_wrong_layouts_are_always_named(changes, said):
    with pytest.raises(ValueError, match=said):
        call(**changes)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture(params=[None, "0", "1"])
def checked(request, monkeypatch):
    """On a CPU nothing depends on the variable."""
    monkeypatch.delenv("NANOVLLM_CHECK", raising=False)
    if request.param is not None:
        monkeypatch.setenv("NANOVLLM_CHECK", request.param)


@pytest.mark.parametrize(
    "changes, said",
    [
        (
            {"context_lens": int32(1, 99, 40)},
            r"sequence 1 has length 99, expected 0 to 48 \(3 blocks of 16 in block_table\)",
        ),
        ({"context_lens": int32(1, 9, -4)}, "sequence 2 has length -4"),
        ({"max_context_len": 39}, r"sequence 2 has length 40, expected 0 to 39 \(max_context_len=39\)"),
    ],
)
def test_wrong_lengths_are_named(changes, said, checked):
    call()
    call(context_lens=int32(0, 17, 0))  # padding
    with pytest.raises(ValueError, match=said):
        call(**changes)


def test_wrong_blocks_and_slots_are_named(checked):
    q, k, v, cache, table = batch(torch.float32)
    bad, negative = table.clone(), table.clone()
    bad[2, 1], negative[1, 0] = 10, -1
    unused = table.clone()
    unused[0, 1:] = 99  # past the sequence's only block
    where = slots(table)
    where[5] = 160
    call(block_table=unused)
    with pytest.raises(
        ValueError, match=r"sequence 2 has block 10 in column 1, expected 0 to 9 \(tokens 16 to 31 of 40\)"
    ):
        call(block_table=bad)
    with pytest.raises(ValueError, match="sequence 1 has block -1 in column 0, expected 0 to 9"):
        call(block_table=negative)
    with pytest.raises(ValueError, match=r"slot_mapping: token 5 has slot 160 \(block 10\), expected 0 to 159"):
        store_kvcache.native(k, v, cache.k, cache.v, where)
    where[5] = -1
    with pytest.raises(ValueError, match=r"slot_mapping: token 5 has slot -1 \(block -1\), expected 0 to 159"):
        store_kvcache.native(k, v, cache.k, cache.v, where)
    assert cache.k.isnan().all()


def prefill(**changes):
    q, _, _, cache, table = batch(torch.float32)
    arguments = {
        "q": q[:12], "k_cache": cache.k, "v_cache": cache.v, "block_table": table, "cu_seqlens_q": int32(0, 1, 5, 12),
        "context_lens": int32(*LENS), "max_context_len": 48, "max_query_len": 7, "scale": 0.3,
    }  # fmt: skip
    return FLAT.attention_prefill(**{**arguments, **changes})


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"cu_seqlens_q": int32(1, 2, 5, 12)}, "cu_seqlens_q: expected 0 as the start of the first run, got 1"),
        (
            {"cu_seqlens_q": int32(0, 6, 5, 12)},
            "cu_seqlens_q: sequence 1 ends at token 5, expected at least 6, where it starts",
        ),
        (
            {"cu_seqlens_q": int32(0, 1, 5, 11)},
            "cu_seqlens_q: sequence 2 ends at token 11, expected 12, the tokens of q",
        ),
        ({"cu_seqlens_q": int32(0, 1, 8, 15)}, "cu_seqlens_q: sequence 2 ends at token 15, expected 12"),
        (
            {"cu_seqlens_q": torch.zeros(8).int()[::2]},
            r"cu_seqlens_q: expected contiguous int32 \[4\], got torch.int32 \[4\]",
        ),
        ({"max_query_len": 6}, "max_query_len: expected at least 7, the query tokens of sequence 2, got 6"),
        ({"context_lens": int32(1, 3, 40)}, "context_lens: sequence 1 has length 3, shorter than its 4 query tokens"),
        ({"context_lens": int32(1, 17, 49)}, "context_lens: sequence 2 has length 49, expected 0 to 48"),
        ({"context_lens": int32(1, -17, 40)}, "context_lens: sequence 1 has length -17"),
    ],
)
def test_runs_that_do_not_fit_are_named(changes, said, checked):
    prefill()
    prefill(context_lens=int32(0, 17, 0))  # padding
    prefill(cu_seqlens_q=int32(0, 0, 5, 12))
    with pytest.raises(ValueError, match=said):
        prefill(**changes)


def test_as_many_queries_for_each_sequence():
    q, _, _, _, _ = batch(torch.float32)
    for wrong in (q[:2], q[:4], q[:0]):
        with pytest.raises(
            ValueError, match=rf"q: expected \[n \* 3, .* of the 3 sequences .* got \[{len(wrong)}, 4, 8\]"
        ):
            call(q=wrong)
    # What is built upon it takes one query token a sequence.
    for wrong in (q[:2], q[:6]):
        with pytest.raises(
            ValueError, match=rf"q: expected \[3, .* a query token for each .* got \[{len(wrong)}, 4, 8\]"
        ):
            fused(q=wrong)
        with pytest.raises(
            ValueError, match=rf"q: expected \[3, .* a query token for each .* got \[{len(wrong)}, 4, 8\]"
        ):
            shared(q=wrong)


def fused(lens=LENS, rows=48, **changes):
    q, k, v, cache, table = batch(torch.float32)
    arguments = {
        "q": q[:3], "k": k[:3], "v": v[:3], "cos_sin_cache": torch.zeros(rows, DIM), "k_cache": cache.k,
        "v_cache": cache.v,
        "block_table": table, "context_lens": int32(*lens), "max_context_len": 48, "scale": 0.3,
    }  # fmt: skip
    return FLAT.qk_norm_rope_attention(**{**arguments, **changes})


def shared(**changes):
    q, _, _, cache, table = batch(torch.float32)
    arguments = {
        "q": q[:3], "k_cache": cache.k, "v_cache": cache.v, "block_table": table, "context_lens": int32(*LENS),
        "groups": torch.zeros(1, 3, dtype=torch.int32), "group_rows": int32(0, 1, 2), "shared_lens": int32(0, 0, 0),
        "max_context_len": 48, "scale": 0.3,
    }  # fmt: skip
    return FLAT.attention_decode_shared(**{**arguments, **changes})


def test_wrong_positions_are_named(checked):
    q, k, v, cache, table = batch(torch.float32)
    angles, weight, where = torch.zeros(48, DIM), torch.ones(DIM), slots(table)
    for bad in (48, -1):
        positions = torch.zeros(len(q), dtype=torch.int64)
        positions[4] = bad
        said = f"positions: token 4 has position {bad}, expected 0 to 47, the rows of cos_sin_cache"
        with pytest.raises(ValueError, match=said):
            rotary_embedding.native(positions, q, k, angles)
        with pytest.raises(ValueError, match=said):
            qk_norm_rope.native(positions, q, k, weight, weight, 1e-6, angles)
        with pytest.raises(ValueError, match=said):
            qk_norm_rope_store.native(positions, q, k, v, angles, cache.k, cache.v, where)
    assert cache.k.isnan().all()
    fused(rows=40)
    with pytest.raises(
        ValueError, match=r"sequence 2 has length 40, expected 1 to 39 \(39 positions in cos_sin_cache\)"
    ):
        fused(rows=39)
    with pytest.raises(ValueError, match=r"context_lens: sequence 1 has length 0, expected 1 to 48"):
        fused(lens=(1, 0, 40))  # the new token counts
    with pytest.raises(ValueError, match=r"q: expected \[3, num_heads, head_dim\]"):
        fused(q=q[:2], k=k[:2], v=v[:2])


def test_on_a_gpu_values_are_checked_on_request(monkeypatch):
    capturing = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    cuda = torch.device("cuda", 0)
    for value, expected in ((None, False), ("", False), ("0", False), ("1", True)):
        monkeypatch.delenv("NANOVLLM_CHECK", raising=False)
        if value is not None:
            monkeypatch.setenv("NANOVLLM_CHECK", value)
        assert values_checked(cuda) is expected and values_checked(torch.device("cpu"))
    capturing = True
    assert not values_checked(cuda)
