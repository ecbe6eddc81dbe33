"""The reference of every op: against transformers' modules to the bit, and against float64 to rounding.

The op `sample` has a file of its own.
"""

import importlib
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.kernels.ops.paged_kv import PagedKV
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.model_config import RopeConfig
from tests.devices import DEVICES
from tests.native import NATIVE

ATTENTION = importlib.import_module("nanovllm.kernels.ops.attention")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Of a value of about 1, after a few roundings in the dtype.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request):
    return request.param


def randn(*shape, dtype=torch.float32, device="cpu", seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def close(got, expected, dtype):
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


# ---- elementwise and norms


def rms_norm_float64(x, weight, eps):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def test_rms_norm(dtype, device):
    for shape, scale in (((1, 16), 1e-3), ((3, 4, 128), 30.0), ((0, 48), 1.0), ((7, 33), 1.0), ((2, 64), 6e4)):
        x = (randn(*shape, device=device).clamp(-1, 1) * scale).to(dtype)  # squares of 6e4 are beyond float16
        weight, before = randn(shape[-1], dtype=dtype, device=device, seed=1), x.clone()
        close(NATIVE.rms_norm(x, weight, 1e-6), rms_norm_float64(x, weight, 1e-6), dtype)
        assert torch.equal(x, before)


def test_rms_norm_is_that_of_transformers(dtype, device):
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    x = randn(9, 3, 64, dtype=dtype, device=device)
    for module in (LlamaRMSNorm(64, 1e-5), Qwen3RMSNorm(64, 1e-5)):
        module.weight.data = randn(64, dtype=dtype, device=device, seed=1)
        assert torch.equal(NATIVE.rms_norm(x, module.weight.data, 1e-5), module(x))


def test_add_rms_norm_is_the_sum_and_its_norm(dtype, device):
    x, residual = (randn(7, 48, dtype=dtype, device=device, seed=s) for s in (0, 1))
    weight = randn(48, dtype=dtype, device=device, seed=2)
    total = x + residual
    normed, new_residual = NATIVE.add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    assert torch.equal(new_residual, total)
    assert torch.equal(normed, NATIVE.rms_norm(total, weight, 1e-6))


def test_silu_and_mul(dtype, device):
    for x in (randn(2, 3, 34) * 3, randn(0, 8), torch.tensor([[-200.0, 200.0, 3.0, 3.0]])):
        x = x.to(device, dtype)
        gate, up = x.double().chunk(2, dim=-1)
        close(NATIVE.silu_and_mul(x), gate / (1 + (-gate).exp()) * up, dtype)
        own_gate, own_up = x.chunk(2, dim=-1)
        assert torch.equal(NATIVE.silu_and_mul(x), torch.nn.SiLU()(own_gate) * own_up)  # transformers' roundings


def test_embedding(dtype, device):
    weight = randn(13, 6, dtype=dtype, device=device)
    ids = torch.tensor([0, 12, 5, 5], device=device)
    assert torch.equal(NATIVE.embedding(ids, weight), weight[ids])
    assert NATIVE.embedding(ids[:0], weight).shape == (0, 6)


# ---- rotary embedding


def rotary_inputs(dtype, device, head_dim=16, heads=6, kv_heads=2, max_position=300):
    with torch.device(device):
        table = RotaryEmbedding(RopeConfig(theta=10000.0), head_dim, max_position, NATIVE).cos_sin_cache
    positions = torch.tensor([0, 1, 2, 17, 17, 299], device=device)
    q = randn(6, heads, head_dim, dtype=dtype, device=device)
    k = randn(6, kv_heads, head_dim, dtype=dtype, device=device, seed=1)
    return positions, q, k, table


def test_rotary_embedding_against_complex_rotation(dtype, device):
    positions, q, k, table = rotary_inputs(dtype, device)
    frequency = 10000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64, device=device) / 16)
    turn = torch.polar(torch.ones(6, 8, dtype=torch.float64, device=device), positions[:, None] * frequency)
    for x, got in zip((q, k), NATIVE.rotary_embedding(positions, q, k, table)):
        pairs = torch.complex(*x.double().chunk(2, dim=-1)) * turn[:, None]
        expected = torch.cat((pairs.real, pairs.imag), dim=-1)
        assert got.dtype == dtype and got.shape == x.shape
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=max(4 * TOLERANCE[dtype], 1e-4))


def test_rotary_embedding_is_that_of_transformers(dtype, device):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    positions, q, k, table = rotary_inputs(dtype, device)
    config = LlamaConfig(hidden_size=96, num_attention_heads=6, head_dim=16, max_position_embeddings=300)
    cos, sin = LlamaRotaryEmbedding(config).to(device)(q, positions[None])
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    for got, want in zip(NATIVE.rotary_embedding(positions, q, k, table), expected):
        torch.testing.assert_close(got, want[0].transpose(0, 1), rtol=0, atol=TOLERANCE[dtype])


# ---- KV cache and attention


def test_store_kvcache_writes_its_slots_and_nothing_else(dtype, device):
    k, v = randn(5, 4, 8, dtype=dtype, device=device).split(2, 1)  # views of the fused projection
    k_cache, v_cache = (torch.full((4, 4, 2, 8), 7.0, dtype=dtype, device=device) for _ in range(2))
    slots = [3, 4, 15, 0, 9]
    NATIVE.store_kvcache(k, v, k_cache, v_cache, torch.tensor(slots, device=device))
    for cache, new in ((k_cache, k), (v_cache, v)):
        for slot in range(16):
            row = cache[slot // 4, slot % 4]
            assert torch.equal(row, new[slots.index(slot)]) if slot in slots else (row == 7).all()


def paged(context_lens, heads, kv_heads, head_dim, block_size, query_lens, dtype, device, seed=0):
    """Random sequences in shuffled blocks; every cache slot that belongs to no token is NaN."""
    g = torch.Generator().manual_seed(seed)
    counts = [-(-n // block_size) for n in context_lens]
    order = torch.randperm(sum(counts) + 3, generator=g)
    table = torch.full((len(counts), max(counts)), int(order[-1]), dtype=torch.int32)
    k_cache, v_cache = (torch.full((len(order), block_size, kv_heads, head_dim), math.nan) for _ in range(2))
    keys, values, used = [], [], 0
    for i, (count, n) in enumerate(zip(counts, context_lens)):
        table[i, :count] = order[used : used + count]
        used += count
        keys.append(torch.randn(n, kv_heads, head_dim, generator=g).to(dtype))
        values.append(torch.randn(n, kv_heads, head_dim, generator=g).to(dtype))
        for t in range(n):
            k_cache[table[i, t // block_size], t % block_size] = keys[-1][t].float()
            v_cache[table[i, t // block_size], t % block_size] = values[-1][t].float()
    return SimpleNamespace(
        q=torch.randn(sum(query_lens), heads, head_dim, generator=g).to(device, dtype),
        k_cache=k_cache.to(device, dtype), v_cache=v_cache.to(device, dtype), table=table.to(device),
        keys=keys, values=values, query_lens=tuple(query_lens), context_lens=tuple(context_lens), scale=head_dim**-0.5,
    )  # fmt: skip


def attention_float64(case):
    """Softmax attention of each run of queries over its own sequence, causal, one query and head at a time."""
    out, row = [], 0
    for keys, values, num_new, length in zip(case.keys, case.values, case.query_lens, case.context_lens):
        group = case.q.shape[1] // keys.shape[1]
        for j in range(num_new):
            end = max(0, length - num_new + j + 1)
            heads = []
            for h in range(case.q.shape[1]):
                scores = keys[:end, h // group].double() @ case.q[row, h].cpu().double() * case.scale
                heads.append(scores.softmax(0) @ values[:end, h // group].double())
            out.append(torch.stack(heads))
            row += 1
    return torch.stack(out)


def decode(case, max_context_len=None, **options):
    lens = torch.tensor(case.context_lens, dtype=torch.int32, device=case.q.device)
    kv = PagedKV(case.k_cache, case.v_cache, case.table, lens, max_context_len or max(case.context_lens))
    # What CUDA graphs capture runs on a CPU as well, so it is held to the same here.
    attention_close(
        ATTENTION.decode_padded(case.q, kv, len(case.q) // len(lens), case.scale, None, None, **options), case
    )
    return NATIVE.attention_decode(case.q, kv, case.scale)


def prefill(case, **options):
    lens = torch.tensor(case.context_lens, dtype=torch.int32, device=case.q.device)
    starts = torch.tensor((0, *itertools.accumulate(case.query_lens)), dtype=torch.int32, device=case.q.device)
    kv = PagedKV(case.k_cache, case.v_cache, case.table, lens, max(case.context_lens))
    if options:
        return ATTENTION.prefill_one_by_one(case.q, kv, starts, case.scale, None, None, **options)
    return NATIVE.attention_prefill(case.q, kv, starts, max(case.query_lens), case.scale)


def attention_close(got, case):
    dtype = case.q.dtype
    close(got.cpu(), attention_float64(case), dtype)


def test_attention(dtype, device):
    """Decodes; few query tokens, also of sequences that have fewer or none; prompts, and chunks of prompts."""
    case = paged([1, 16, 17, 3, 79], 9, 3, 24, 16, [1] * 5, dtype, device)
    case.scale = 1.7
    attention_close(decode(case), case)
    case = paged([1, 16, 17, 3, 79, 0], 7, 1, 16, 4, [5] * 6, dtype, device)
    attention_close(decode(case), case)
    case = paged([5, 1, 12, 11, 30, 5], 8, 2, 16, 4, [5, 1, 12, 4, 7, 1], dtype, device)
    case.scale = 1.7
    attention_close(prefill(case), case)


@pytest.mark.parametrize("bound", [21, 32])
def test_decode_attention_with_a_loose_bound_on_the_context(bound, device):
    """As CUDA graphs use it: more columns than any sequence has blocks, and more than one row in the padding block."""
    case = paged([21, 3, 8], 4, 2, 16, 4, [1] * 3, torch.float32, device)
    padding = case.table.new_full((3, 8 - case.table.shape[1]), int(case.table[1, -1]))
    case.table = torch.cat((case.table, padding), dim=1)
    attention_close(decode(case, max_context_len=bound), case)


def test_attention_in_pieces(device):
    for n, piece_bytes in ((1, 1), (3, 3 * 24 * 2 * 16 * 4)):
        case = paged([21, 3, 8, 1, 20], 4, 2, 16, 4, [n] * 5, torch.float32, device)
        attention_close(decode(case, piece_bytes=piece_bytes), case)
    for piece_bytes in (1, 3 * 4 * 4 * 29):
        case = paged([29, 12, 17], 4, 2, 16, 4, [11, 12, 5], torch.float32, device)
        attention_close(prefill(case, piece_bytes=piece_bytes), case)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_attention_of_random_shapes(data):
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.sampled_from((1, 2, 4, 7)))
    block_size, head_dim = data.draw(st.sampled_from((1, 2, 16))), data.draw(st.sampled_from((8, 10)))
    contexts = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    queries = [data.draw(st.integers(1, n)) for n in contexts]
    shape = kv_heads * group, kv_heads, head_dim, block_size
    case = paged(contexts, *shape, queries, torch.float32, "cpu", seed=len(contexts))
    attention_close(prefill(case), case)
    case = paged(contexts, *shape, [data.draw(st.integers(1, 5))] * len(contexts), torch.float32, "cpu", seed=1)
    attention_close(decode(case), case)
