"""The Triton attention kernels on shapes that hypothesis makes up, in Triton's interpreter, against float64 softmax
attention.

Every cache slot that holds no token is NaN, and tables are wider than they need be. The interpreter is chosen when
Triton is
imported, by an environment variable, so it gets a process of its own: `test_in_the_interpreter`.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")
INTERPRETED = triton.knobs.runtime.interpret

from nanovllm.kernels.triton.attention import decode, prefill
from nanovllm.kernels.triton.attention.decode_plan import DecodePlan
from nanovllm.kernels.triton.attention.prefill_plan import PrefillPlan
from tests.interpreter import check_interpreted
from tests.kernels.flat import flat

attention_decode = flat("attention_decode", decode.attention_decode)
attention_prefill = flat("attention_prefill", prefill.attention_prefill)

F32, F16, F8 = torch.float32, torch.float16, torch.float8_e4m3fn
TOLERANCE = {F32: 5e-6, F16: 2e-3}
DECODE_PLANS = [
    None,
    DecodePlan(2, 16, 4, 1, 4, False),
    DecodePlan(7, 32, 4, 1, 16, False),
    DecodePlan(30, 16, 4, 1, 16, False, 2),
]
PREFILL_PLANS = [None, PrefillPlan(16, 16, 4, 1), PrefillPlan(16, 64, 4, 1), PrefillPlan(64, 32, 4, 1)]
SHAPES = dict(
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    dim=st.sampled_from([64, 80, 96, 128, 256]),
    block_size=st.sampled_from([16, 32, 48, 64, 256]),
    dtype=st.sampled_from([F32, F16]),
    fp8=st.booleans(),
    window=st.none() | st.integers(1, 90),
    soft_cap=st.none() | st.floats(0.5, 50),
    seed=st.integers(0, 1000),
)


def paged(lens, kv_heads, dim, block_size, dtype, generator):
    """(k_cache, v_cache, block_table, every sequence's keys and values in float64)."""
    counts = [-(-n // block_size) for n in lens]
    num_blocks, width = sum(counts) + 2, max(counts) + 1
    order = torch.randperm(num_blocks, generator=generator)
    table = torch.randint(num_blocks, (len(lens), width), generator=generator, dtype=torch.int32)
    caches = torch.full((2, num_blocks, block_size, kv_heads, dim), float("nan"), dtype=dtype)
    tokens = []
    for i, (n, count) in enumerate(zip(lens, counts)):
        mine, order = order[:count], order[count:]
        table[i, :count] = mine
        x = torch.randn(2, n, kv_heads, dim, generator=generator).to(dtype)
        for j in range(n):
            caches[:, mine[j // block_size], j % block_size] = x[:, j]
        tokens.append(x.double())
    return caches[0], caches[1], table, tokens


def attended(q, k, v, window, soft_cap):
    """Queries [count, heads, dim], the last tokens of a sequence, causal over its k and v [length, kv_heads, dim]:
    float64.

    Zeros for those before the first token.
    """
    count, heads, dim = q.shape
    length, kv_heads = k.shape[:2]
    if not length:
        return torch.zeros(q.shape, dtype=torch.float64)
    k, v = (x.repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for x in (k, v))
    scores = q.double().transpose(0, 1) @ k.mT * dim**-0.5
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    position, token = torch.arange(length - count, length)[:, None], torch.arange(length)
    hidden = token > position
    if window is not None:
        hidden = hidden | (token <= position - window)
    seen = (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1)
    return seen.masked_fill((position < 0)[..., None], 0)


def check(call, runs, lens, *, kv_heads, group, dim, block_size, dtype, fp8, window, soft_cap, seed):
    generator = torch.Generator().manual_seed(seed)
    k, v, table, tokens = paged(lens, kv_heads, dim, block_size, F8 if fp8 else dtype, generator)
    q = torch.randn(sum(runs), kv_heads * group + 1, dim, generator=generator).to(dtype)[:, 1:]  # not contiguous
    lengths = torch.tensor(lens, dtype=torch.int32)
    got = call(q, k, v, table, lengths, scale=dim**-0.5, window=window, soft_cap=soft_cap)
    assert got.shape == q.shape and got.dtype == dtype and got.is_contiguous()
    starts = [sum(runs[:i]) for i in range(len(runs))]
    for start, count, (keys, values) in zip(starts, runs, tokens):
        expected = attended(q[start : start + count], keys, values, window, soft_cap)
        error = (got[start : start + count].double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1)
        assert not count or error.max() < TOLERANCE[dtype], error.max()


@settings(max_examples=60, deadline=None)
@given(
    lens=st.lists(st.integers(0, 80), min_size=1, max_size=3),
    n=st.just(1) | st.integers(2, 9),
    plan=st.sampled_from(DECODE_PLANS),
    **SHAPES,
)
def test_decode(lens, n, plan, **shape):
    def call(q, k, v, table, lengths, **options):
        return attention_decode(q, k, v, table, lengths, max(lens), plan=plan, **options)

    check(call, [n] * len(lens), lens, **shape)


@settings(max_examples=60, deadline=None)
@given(
    runs=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=3),
    plan=st.sampled_from(PREFILL_PLANS),
    **SHAPES,
)
def test_prefill(runs, plan, **shape):
    new = [count for count, _ in runs]
    starts = torch.tensor([0, *new]).cumsum(0).int()

    def call(q, k, v, table, lengths, **options):
        return attention_prefill(q, k, v, table, lengths, max(lens), starts, max(new), plan=plan, **options)

    lens = [count + cached for count, cached in runs]
    check(call, new, lens, **shape)


def test_in_the_interpreter():
    check_interpreted(__file__)


# Only what can run here is collected, so that nothing is reported as skipped.
if INTERPRETED:
    del test_in_the_interpreter
else:
    del test_decode, test_prefill
