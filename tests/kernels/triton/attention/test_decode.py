"""The Triton decode attention kernel against float64 softmax attention, with NaN in every cache slot that holds no
token. With a GPU the tests run there at real shapes, else in the interpreter (`test_interpreted.py`)."""

import pytest
import torch

triton = pytest.importorskip("triton")

from tests.kernels.triton.attention.cases import (
    BF16,
    F8,
    F16,
    F32,
    SINGLE_TILES,
    attention_decode,
    check,
    cut,
    int32,
    mixed,
    paged,
    poison,
    queries,
    reference,
    with_scales,
)
from tests.kernels.triton.common import DEVICE, by_turns, graph_of

pytestmark = pytest.mark.triton


def check_decode(
    lens, num_heads, num_kv_heads, head_dim, block_size, dtype, plan=None, cache_dtype=None, n=1, **options
):
    """n: query tokens a sequence."""
    k, v, table = paged(lens, num_kv_heads, head_dim, block_size, cache_dtype or dtype, seed=len(lens))
    q = queries(len(lens) * n, num_heads, head_dim, dtype)
    options = with_scales(options)

    def run():
        poison(q)
        return attention_decode(q, k, v, table, int32(lens), max(*lens, 1), head_dim**-0.5, plan=plan, **options)

    got = run()
    check(got, reference(q, k, v, table, lens, **options), dtype)
    # Whichever program merges, and with counters as the last launch left them.
    for _ in range(3 if q.is_cuda else plan is STRADDLING):
        assert torch.equal(got, run())


TWO_BLOCKS, STRADDLING = cut(7, 32), cut(4, 32)
ONE = [
    ([1, 17, 100, 16, 0], 4, 2, 64, 16, F32, None, {}),
    ([100, 3, 1, 64, 33], 4, 2, 64, 16, F32, TWO_BLOCKS, {}),
    ([100, 3, 1, 64, 33], 4, 2, 64, 64, F32, cut(2), {}),  # hardly cut
    ([100, 3, 1, 64, 33], 4, 2, 64, 64, F32, cut(30, least=3), {}),  # to three tiles at least
    ([100, 3, 160], 4, 2, 64, 48, F32, STRADDLING, {}),
    ([90, 0, 5], 9, 3, 80, 32, F16, SINGLE_TILES, {}),  # no power of two anywhere
    ([40, 70], 7, 1, 96, 64, F16, None, {"soft_cap": 5.0, "window": 33}),
    ([35, 70, 2], 4, 1, 64, 16, F32, cut(5), {"window": 20}),  # 15 tokens of a tile are outside
    ([70], 4, 4, 64, 16, F32, cut(5, merge_registers=1), {"window": 1}),
    ([70], 20, 1, 64, 32, F32, cut(3, stages=2), {"soft_cap": 30.0}),
    ([40, 0, 70], 4, 2, 64, 16, F16, STRADDLING, {"cache_dtype": F8}),
    ([40, 70], 4, 2, 64, 16, F32, cut(4), {"cache_dtype": F8, "k_scale": 1, "v_scale": 2}),
    ([90, 5], 9, 3, 80, 32, F16, None, {"cache_dtype": F8, "k_scale": 3, "v_scale": 1, "window": 40, "soft_cap": 9.0}),
    ([90, 5], 4, 2, 64, 32, F32, None, {"cache_dtype": F16, "v_scale": 2}),
]
ONE_BY_ONE = cut(30, merge_registers=1)
FEW = [
    (2, [2, 17, 100, 16, 33], 4, 2, 64, 16, F32, None, {}),
    (4, [1, 17, 0, 2, 3], 4, 2, 64, 16, F32, None, {}),  # lengths below n, also where nothing is cut
    (3, [65, 64, 63], 4, 2, 64, 64, F32, cut(40, merge_registers=1), {}),  # a query before its sequence's last tile
    (5, [90, 0, 5], 9, 3, 80, 32, F16, SINGLE_TILES, {}),  # no power of two anywhere, 15 rows
    (7, [90, 4], 9, 3, 80, 32, F16, SINGLE_TILES, {}),  # 21 rows
    (9, [70, 3], 8, 1, 64, 48, F32, cut(9, 32), {}),  # tiles of 4, 4 and 1 tokens
    (3, [70, 3], 20, 1, 64, 32, F32, cut(5, stages=2), {"soft_cap": 30.0}),  # a tile for each token
    (3, [40, 70, 2], 4, 1, 64, 16, F32, cut(5), {"window": 20}),
    (8, [70, 33, 1], 4, 4, 64, 16, F32, SINGLE_TILES, {"window": 1}),
    # Partial results merged one by one. The first has nothing for some rows, or none has.
    (8, [70, 3], 4, 4, 64, 16, F32, ONE_BY_ONE, {"window": 1}),
    (20, [18], 2, 2, 64, 16, F32, ONE_BY_ONE, {}),
    (20, [65], 2, 2, 64, 16, F32, SINGLE_TILES, {"window": 20}),  # 39 tokens in four tiles
    (5, [40, 70], 7, 1, 96, 64, F16, None, {"soft_cap": 5.0, "window": 33}),
    (4, [40, 0, 70], 4, 2, 64, 16, F16, STRADDLING, {"cache_dtype": F8}),
    (2, [40, 1], 4, 2, 64, 16, F32, SINGLE_TILES, {"cache_dtype": F8, "k_scale": 1, "v_scale": 2, "window": 30}),
    (3, [90, 5], 6, 2, 64, 32, F32, None, {"cache_dtype": F16, "v_scale": 2}),
]


@pytest.mark.parametrize(
    "n, lens, heads, kv_heads, dim, block_size, dtype, plan, options", [*((1, *case) for case in ONE), *FEW]
)
def test_small(n, lens, heads, kv_heads, dim, block_size, dtype, plan, options):
    check_decode(lens, heads, kv_heads, dim, block_size, dtype, plan, n=n, **options)


def test_few_query_tokens_see_what_one_sees():
    """Every query gets what it gets alone with the tokens up to its own. A query before the first token sees nothing.

    What one query holds, NaN or not, changes no other.
    """
    lens, n = [50, 2, 31], 3
    k, v, table = paged(lens, 2, 64, 16, F32)
    q = queries(len(lens) * n, 4, 64, F32)

    def call(q, lens):
        return attention_decode(q, k, v, table, int32(lens), 50, 0.125, plan=SINGLE_TILES)

    got = call(q, lens)
    for i in range(n):
        alone = call(q[i::n], [max(0, length - (n - 1) + i) for length in lens])
        check(got[i::n].contiguous(), alone.double(), F32)
    assert not got[n].any() and got[n + 1].any()
    q[0] = float("nan")
    mixed_up = call(q, lens)
    assert mixed_up[0].isnan().all() and torch.equal(mixed_up[1:], got[1:])


def test_bad_input(monkeypatch):
    monkeypatch.setenv("NANOVLLM_CHECK", "1")
    k, v, table = paged([20, 3], 2, 64, 16, F32)
    q, lens = queries(3, 4, 64, F32), int32([20, 3])

    def call(q=q[:2], table=table, lens=lens, bound=20):
        return attention_decode(q, k, v, table, lens, bound, 0.125)

    call()
    assert not call(lens=int32([20, 0]))[1].any()  # padding
    assert call(q[:0], table[:0], lens[:0]).shape == (0, 4, 64)
    outside = table.clone()
    outside[1, 0] = 99
    shape = r"q: expected \[n \* 2, .* 2 sequences of .* got \["
    for changes, message in (
        ({"q": q}, shape + r"3, 4, 64\]"),
        ({"q": q[:1]}, shape + r"1, 4, 64\]"),
        ({"q": q[:0]}, shape + r"0, 4, 64\]"),
        ({"table": table[:0], "lens": lens[:0]}, r"q: expected \[n \* 0, "),
        ({"table": table[:1]}, r"block_table: expected int32 \[2, max_blocks\]"),
        ({"table": outside}, "block_table: sequence 1 has block 99 in column 0"),
        ({"bound": 19}, "context_lens: sequence 0 has length 20, expected 0 to 19"),
        ({"lens": int32([20, -3])}, "context_lens: sequence 1 has length -3"),
    ):
        with pytest.raises(ValueError, match=message):
            call(**changes)


def test_large_logits():
    lens = [60, 33]
    k, v, table = paged(lens, 2, 64, 16, F32, scale=60.0)
    q = queries(2, 4, 64, F32) * 60
    got = attention_decode(q, k, v, table, int32(lens), 60, 64**-0.5, plan=cut(9))
    check(got, reference(q, k, v, table, lens), F32)


def test_a_table_without_blocks():
    """Only sequences without tokens can have it: there is nothing to read, and no launch."""
    k, v, table = paged([3, 1], 2, 64, 16, F32)
    lens = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    out = attention_decode(torch.ones(2, 4, 64, device=DEVICE), k, v, table[:, :0], lens, 0, 0.125)
    assert out.shape == (2, 4, 64) and not out.any()


# ---- a GPU

LENS = {3: mixed(3, 2000), 70: mixed(70, 1500, seed=1)}
HEADS = [(16, 8, 256), (9, 3, 16), (14, 2, 64), (8, 8, 1024)]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dim, dtype, heads, count", by_turns([64, 80, 96, 128, 256], [BF16, F16, F32], HEADS, LENS, turns=4), ids=str
)
def test_decode(dim, dtype, heads, count):
    num_heads, kv_heads, block_size = heads
    check_decode(LENS[count], num_heads, kv_heads, dim, block_size, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "shape, heads, count",
    by_turns(
        [(64, BF16), (80, F16), (96, BF16), (128, BF16), (128, F32), (256, BF16), (256, F32)], HEADS[:2], LENS
    ),
    ids=str,
)  # fmt: skip
def test_decode_with_a_float8_cache(shape, heads, count):
    (dim, dtype), (num_heads, kv_heads, block_size) = shape, heads
    options = {"cache_dtype": F8, "k_scale": 1, "v_scale": kv_heads}
    check_decode([*LENS[count], 0], num_heads, kv_heads, dim, block_size, dtype, **options)
    if count == 70:
        check_decode(mixed(300, 900, seed=1), num_heads, kv_heads, dim, block_size, dtype, cache_dtype=F8)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options, dtype, count",
    by_turns([{"soft_cap": 30.0}, {"window": 100}, {"soft_cap": 20.0, "window": 300}], [BF16, F32], [2, 90, 250]),
    ids=str,
)
def test_options(options, dtype, count):
    check_decode(mixed(count, 2000), 16, 8, 128, 256, dtype, **options)


MANY_TOKENS = [
    (2, 16, 8, 128, 256, BF16), (4, 32, 8, 128, 256, BF16), (8, 32, 8, 128, 16, BF16), (8, 16, 2, 128, 256, F16),
    (3, 9, 3, 80, 16, BF16), (5, 14, 2, 64, 64, F16), (4, 16, 8, 256, 256, BF16), (20, 8, 8, 64, 1024, F32),
    (3, 16, 4, 256, 16, F32),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("n, heads, kv_heads, dim, block_size, dtype", MANY_TOKENS)
def test_few_query_tokens(n, heads, kv_heads, dim, block_size, dtype):
    """Two of three batches with their options, by turns."""
    turn = MANY_TOKENS.index((n, heads, kv_heads, dim, block_size, dtype)) % 3
    if turn != 0:
        check_decode([*mixed(3, 2000), 1], heads, kv_heads, dim, block_size, dtype, n=n)
    if turn != 1:
        check_decode([*mixed(70, 900, seed=1), 0], heads, kv_heads, dim, block_size, dtype, n=n, window=300)
    if turn != 2:
        options = {"cache_dtype": F8, "k_scale": 1, "v_scale": kv_heads}
        check_decode([9000, 5], heads, kv_heads, dim, block_size, dtype, n=n, **options)


@pytest.mark.gpu
def test_very_different_lengths():
    check_decode([40000], 16, 8, 128, 256, BF16)
    check_decode([40000, 1, 300, 17, 0], 16, 8, 128, 256, BF16)
    check_decode([5] * 100 + [20000] + [7] * 150, 16, 8, 128, 256, BF16)
    check_decode(mixed(3, 900), 71, 1, 64, 256, BF16)
    check_decode([0] * 40, 16, 8, 128, 256, BF16)
    check_decode(mixed(5, 900), 16, 8, 128, 256, F16, cache_dtype=BF16)


@pytest.mark.gpu
def test_large_queries_and_a_float8_cache():
    """Queries beyond float16's range, which the products are computed in."""
    lens = [900, 33]
    k, v, table = paged(lens, 2, 128, 64, F8, scale=1e-2)
    q = (queries(2, 4, 128, F32) * torch.tensor([1e6, 1e-9], device=DEVICE)[:, None, None]).to(BF16)
    got = attention_decode(q, k, v, table, int32(lens), 900, 128**-0.5)
    check(got, reference(q, k, v, table, lens), BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("count, n", [(1, 1), (3, 1), (100, 1), (1, 4), (5, 3)])
def test_graph_replay(count, n, warm):
    """A graph replays with other lengths and tables, also where the first launch on its stream is the captured one."""
    longest, heads, kv_heads = 3000, 16, 8
    k, v, _ = paged([longest] * count, kv_heads, 128, 256, BF16)
    table = torch.zeros(count, -(-longest // 256), dtype=torch.int32, device=DEVICE)
    lens, q = int32([1] * count), queries(count * n, heads, 128, BF16)

    def run():
        return attention_decode(q, k, v, table, lens, longest, 128**-0.5)

    graph, out = graph_of(run, warm)
    for seed in range(4):
        new_lens = mixed(count, longest, seed)
        new_k, new_v, new_table = paged(new_lens, kv_heads, 128, 256, BF16, seed)
        k[: len(new_k)], v[: len(new_v)] = new_k, new_v
        width = min(table.shape[1], new_table.shape[1])
        table[:, :width] = new_table[:, :width]
        lens.copy_(int32(new_lens))
        expected = reference(q, k, v, table, new_lens)
        for _ in range(3):
            graph.replay()
            check(out, expected, BF16)
