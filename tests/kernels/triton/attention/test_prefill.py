"""The Triton prefill kernels against float64 softmax attention, with NaN in every cache slot that holds no token.

With a GPU the tests run there at real shapes, else in the interpreter (`test_interpreted.py`). The interpreter does not
run the kernel for Hopper: `test_prefill_hopper_ptx.py` does.
"""

import pytest
import torch

triton = pytest.importorskip("triton")

from nanovllm.kernels.triton.attention.prefill_plan import HopperPrefillPlan, PrefillPlan, plan_prefill
from tests.kernels.triton.attention.cases import (
    BF16,
    F8,
    F16,
    F32,
    TOLERANCE,
    attention_prefill,
    check,
    int32,
    mixed,
    paged,
    poison,
    queries,
    reference,
    starts_of,
)
from tests.kernels.triton.common import DEVICE, GPU, by_turns, graph_of

pytestmark = pytest.mark.triton

HOPPER = GPU and torch.cuda.get_device_capability()[0] == 9


def room(k_cache, table):
    """Tokens that a sequence can have."""
    return table.shape[1] * k_cache.shape[1]


def check_prefill(
    query_lens, lens, heads, kv_heads, dim, block_size, dtype, plan=None, *, cache_dtype=None, scale_q=1.0, **options
):
    k, v, table = paged(lens, kv_heads, dim, block_size, cache_dtype or dtype, seed=len(lens))
    q = queries(sum(query_lens), heads, dim, dtype)  # not contiguous
    if scale_q != 1.0:
        q = q * scale_q
    arguments = int32(lens), room(k, table), starts_of(query_lens), max(query_lens), dim**-0.5

    def run():
        poison(q)
        return attention_prefill(q, k, v, table, *arguments, plan=plan, **options)

    got = run()
    check(got, reference(q, k, v, table, lens, query_lens, **options), dtype, rows=4, floor=0.1)
    for _ in range(2 if GPU else 1):
        assert torch.equal(got, run())


def run_lengths():
    """Six runs, every second one after a cached prefix."""
    new, cached = mixed(6, 700), mixed(6, 500, seed=1)
    return new, [n + (c if i % 2 else 0) for i, (n, c) in enumerate(zip(new, cached))]


@pytest.mark.parametrize(
    "query_lens, lens, heads, kv_heads, dim, block_size, dtype, plan, options",
    [
        ([1], [1], 2, 2, 64, 16, F32, None, {}),
        ([5], [50], 9, 3, 80, 16, F32, None, {"window": 20}),
        ([1, 17, 40], [1, 17, 100], 4, 2, 64, 16, F32, PrefillPlan(16, 32, 4, 1), {}),
        ([33, 1, 2], [33, 70, 2], 7, 1, 96, 64, F16, PrefillPlan(64, 16, 4, 2), {"soft_cap": 5.0, "window": 33}),
        ([33, 1, 2], [33, 70, 2], 8, 8, 64, 32, F16, PrefillPlan(16, 16, 4, 2), {"soft_cap": 5.0}),
        ([20, 31], [20, 64], 4, 1, 64, 16, F16, PrefillPlan(64, 32, 4, 2), {}),  # a tile of two blocks
        ([20, 31], [20, 64], 4, 1, 64, 48, F16, PrefillPlan(64, 32, 4, 2), {}),  # a tile of a block and a half
        ([40], [64], 2, 1, 64, 32, F16, PrefillPlan(16, 16, 4, 1), {"window": 1}),
        ([3, 2, 4], [30, 0, 4], 4, 2, 64, 16, F32, None, {}),  # a sequence without tokens gets zeros
        ([30, 33], [60, 33], 4, 2, 64, 16, F32, None, {"scale_q": 2000.0}),  # large logits
    ],
)
def test_small(query_lens, lens, heads, kv_heads, dim, block_size, dtype, plan, options):
    check_prefill(query_lens, lens, heads, kv_heads, dim, block_size, dtype, plan, **options)


@pytest.mark.parametrize("dtype, scales", [(F16, None), (F32, [0.5]), (F16, [0.25, 3.0])])
def test_fp8_cache(dtype, scales):
    scale = scales and torch.tensor(scales, device=DEVICE)
    other = scale.flip(0) * 0.5 if scales else None
    check_prefill([20, 3], [50, 3], 4, 2, 64, 16, dtype, cache_dtype=F8, k_scale=scale, v_scale=other)


@pytest.mark.parametrize("options", [{}, {"window": 300}])
def test_company_counts_by_the_longest_run_only(options):
    """With the same max_query_len, and so the same plan, a sequence has the same bits alone and beside others."""
    k, v, table = paged([400, 90, 33, 5], 2, 64, 16, F16)
    q, starts, lens = queries(3 + 20 + 33 + 2, 4, 64, F16), [0, 3, 23, 56, 58], int32([400, 90, 33, 5])

    def run(first, end, longest):
        rows = slice(starts[first], starts[end])
        here = int32([start - starts[first] for start in starts[first : end + 1]])
        arguments = k, v, table[first:end], lens[first:end], room(k, table), here, longest, 0.125
        return attention_prefill(q[rows], *arguments, **options)

    together = run(0, 4, 33)
    for i in range(4):
        assert torch.equal(run(i, i + 1, 33), together[starts[i] : starts[i + 1]])
    # Another longest run is another plan, whose sums are taken in another order.
    assert plan_prefill(2, 64, 2, 3) != plan_prefill(2, 64, 2, 33)
    assert not torch.equal(run(0, 1, 3), together[:3])


def test_no_tokens():
    k, v, table = paged([3], 2, 64, 16, F32)
    got = attention_prefill(queries(0, 4, 64, F32), k, v, table, int32([3]), 3, int32([0, 0]), 0, 0.125)
    assert got.shape == (0, 4, 64)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"cu_seqlens_q": torch.zeros(2)}, "cu_seqlens_q: expected contiguous int32 \\[2\\], got torch.float32"),
        ({"cu_seqlens_q": torch.zeros(3, dtype=torch.int32)}, "cu_seqlens_q: .* got torch.int32 \\[3\\]"),
        ({"cu_seqlens_q": int32([1, 3])}, "cu_seqlens_q: expected 0 as the start of the first run, got 1"),
        ({"cu_seqlens_q": int32([0, 2])}, "cu_seqlens_q: sequence 0 ends at token 2, expected 3"),
        ({"max_query_len": 2}, "max_query_len: expected at least 3, the query tokens of sequence 0, got 2"),
        ({"context_lens": int32([2])}, "context_lens: sequence 0 has length 2, shorter than its 3 query tokens"),
        ({"context_lens": int32([33])}, "context_lens: sequence 0 has length 33, expected 0 to 32"),
        ({"window": 0}, "window: expected None or a whole number of tokens from 1"),
        ({"soft_cap": -1.0}, "soft_cap"),
        ({"k_scale": torch.ones(3)}, "k_scale: expected contiguous float32 of shape \\[1\\] or \\[2\\]"),
    ],
)
def test_bad_input(change, message, monkeypatch):
    monkeypatch.setenv("NANOVLLM_CHECK", "1")
    k, v, table = paged([3], 2, 64, 16, F32)
    arguments = dict(
        q=queries(3, 4, 64, F32), k_cache=k, v_cache=v, block_table=table, cu_seqlens_q=int32([0, 3]),
        context_lens=int32([3]), max_context_len=32, max_query_len=3, scale=0.125,
    )  # fmt: skip
    with pytest.raises(ValueError, match=message):
        attention_prefill(**{**arguments, **change})
    attention_prefill(**{**arguments, "context_lens": int32([0])})  # padding


# ---- a GPU

ANYWHERE = PrefillPlan(rows=64, tile=32, warps=4, stages=2)
OPTIONS = [{"soft_cap": 30.0}, {"window": 1}, {"window": 100}, {"soft_cap": 20.0, "window": 300}]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dim, dtype, heads",
    by_turns(
        [64, 80, 96, 128, 256],
        [BF16, F16, F32],
        [(16, 8, 256), (9, 3, 16), (14, 2, 64), (8, 8, 1024), (6, 1, 32), (4, 1, 128)],
        turns=3,
    ),
    ids=str,
)
def test_shapes(dim, dtype, heads):
    num_heads, kv_heads, block_size = heads
    check_prefill(*run_lengths(), num_heads, kv_heads, dim, block_size, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "concurrent, dim, shape", by_turns([False, True], [64, 96, 128, 256], [(16, 8, 256), (14, 2, 16)]), ids=str
)
def test_the_kernel_for_any_gpu(concurrent, dim, shape):
    heads, kv_heads, block_size = shape
    plan = plan_prefill(heads // kv_heads, dim, 2, 700, concurrent=concurrent)
    check_prefill(*run_lengths(), heads, kv_heads, dim, block_size, BF16, plan)


@pytest.mark.gpu
@pytest.mark.parametrize("i, options", enumerate(OPTIONS))
@pytest.mark.parametrize("j, dtype, plan", [(0, BF16, None), (1, F16, None), (0, BF16, ANYWHERE), (1, F32, None)])
def test_options(i, options, j, dtype, plan):
    """One of two shapes, by turns: the next dtype has the other."""
    if (i + j) % 2 == 0:
        new, cached = mixed(6, 700), mixed(6, 500, seed=1)
        check_prefill(new, [n + c for n, c in zip(new, cached)], 16, 8, 128, 256, dtype, plan, **options)
    else:
        check_prefill([500, 129, 128, 1], [500, 1000, 128, 1], 7, 1, 64, 16, dtype, plan, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_fp8_on_a_gpu(dtype):
    scale = torch.rand(8, device=DEVICE) + 0.5
    for dim in (64, 128) if dtype == F16 else (80, 256) if dtype == F32 else (64, 80, 128, 256):
        check_prefill(*run_lengths(), 16, 8, dim, 256, dtype, cache_dtype=F8, k_scale=scale, v_scale=scale[:1])


@pytest.mark.gpu
def test_very_different_lengths():
    check_prefill([2, 3, 1], [40000, 3, 300], 16, 8, 128, 256, BF16)
    check_prefill([100, 3, 1], [40000, 3, 300], 16, 8, 128, 256, BF16)
    check_prefill([9000, 1, 700], [9100, 1, 700], 4, 1, 128, 256, BF16)
    check_prefill(mixed(5, 30), [50] * 5, 71, 1, 64, 256, BF16)
    check_prefill(mixed(600, 5), [6] * 600, 4, 2, 64, 16, BF16)
    check_prefill([*mixed(300, 5), 200, 1, 400], [*[6] * 300, 900, 77, 400], 4, 2, 64, 16, BF16)
    check_prefill([130, 2, 400], [130, 0, 500], 8, 2, 128, 64, BF16)  # a sequence without tokens


HOPPER_PLANS = [(1, 128, 2), (4, 64, 4), (2, 128, 3), (4, 64, 2, 3)]


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="no Hopper GPU")
@pytest.mark.parametrize("plan", HOPPER_PLANS)
def test_hopper_plans(plan):
    given = [({}, 32, BF16), ({"window": 150}, 256, F16)]
    if HOPPER_PLANS.index(plan) % 2:
        given = [({}, 256, F16), ({"window": 150}, 32, BF16)]
    for options, block_size, dtype in given:
        check_prefill(*run_lengths(), 16, 4, 128, block_size, dtype, HopperPrefillPlan(*plan), **options)


@pytest.mark.gpu
def test_graph_replay():
    """A graph replays with other lengths and tables."""
    heads, kv_heads, longest, count = 16, 8, 700, 4
    q = queries(count * 300, heads, 128, BF16)
    k, v, table = paged([longest] * count, kv_heads, 128, 256, BF16)
    starts, lens = int32([0] * (count + 1)), int32([1] * count)

    def run():
        return attention_prefill(q, k, v, table, lens, room(k, table), starts, 400, 128**-0.5)

    graph, out = graph_of(run)
    for seed in range(3):
        new = mixed(count, 400, seed)
        new[-1] = max(1, count * 300 - sum(new[:-1]))
        new = [min(n, longest) for n in new]
        now = [min(longest, n + 50 * seed) for n in new]
        new_k, new_v, new_table = paged(now, kv_heads, 128, 256, BF16, seed)
        k[: len(new_k)], v[: len(new_v)] = new_k, new_v
        table[:, : new_table.shape[1]] = new_table[:, : table.shape[1]]
        starts.copy_(starts_of(new))
        lens.copy_(int32(now))
        expected = reference(q[: sum(new)], k, v, table, now, new)
        for _ in range(2):
            graph.replay()
            error = (out[: sum(new)].double() - expected).norm() / expected.norm()
            assert error < TOLERANCE[BF16]
