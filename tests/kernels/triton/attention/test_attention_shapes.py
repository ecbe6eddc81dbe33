"""The Triton attention kernels on shapes that hypothesis makes up, in Triton's interpreter, against float64 softmax
attention. Every cache slot that holds no token is NaN, and tables are wider than they need be."""

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")

from nanovllm.kernels.triton.attention.prefill_plan import PrefillPlan
from tests.kernels.triton.attention.cases import (
    F8,
    F16,
    F32,
    attention_decode,
    attention_prefill,
    cut,
    int32,
    paged,
    queries,
    reference,
    starts_of,
)

pytestmark = [pytest.mark.triton, pytest.mark.slow]

TOLERANCE = {F32: 1e-5, F16: 2e-3}  # a soft cap of 50 adds up to 5e-6 to a score
DECODE_PLANS = [None, cut(2, merge_registers=4), cut(7, 32), cut(30, least=2)]
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


# Shrinking a failure takes many minutes in the interpreter.
RANDOM_SHAPES = settings(max_examples=20, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])


def check(call, runs, lens, *, kv_heads, group, dim, block_size, dtype, fp8, seed, **options):
    k, v, table = paged(lens, kv_heads, dim, block_size, F8 if fp8 else dtype, seed)
    q = queries(sum(runs), kv_heads * group, dim, dtype, seed)
    got = call(q, k, v, table, int32(lens), max(lens), scale=dim**-0.5, **options)
    assert got.shape == q.shape and got.dtype == dtype and got.is_contiguous()
    expected = reference(q, k, v, table, lens, runs, **options)
    error = (got.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1)
    assert not len(q) or error.max() < TOLERANCE[dtype], error.max()


@RANDOM_SHAPES
@given(
    lens=st.lists(st.integers(0, 80), min_size=1, max_size=3),
    n=st.just(1) | st.integers(2, 9),
    plan=st.sampled_from(DECODE_PLANS),
    **SHAPES,
)
def test_decode(lens, n, plan, **shape):
    def call(*args, **options):
        return attention_decode(*args, plan=plan, **options)

    check(call, [n] * len(lens), lens, **shape)


@RANDOM_SHAPES
@given(
    runs=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 60)), min_size=1, max_size=3),
    plan=st.sampled_from(PREFILL_PLANS),
    **SHAPES,
)
def test_prefill(runs, plan, **shape):
    new = [count for count, _ in runs]

    def call(*args, **options):
        return attention_prefill(*args, starts_of(new), max(new), plan=plan, **options)

    check(call, new, [count + cached for count, cached in runs], **shape)
