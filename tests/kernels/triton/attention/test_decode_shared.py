"""Decode attention that reads shared blocks once: against float64, and against the kernels that read these blocks for
each sequence.

With a GPU the tests run there at real shapes, else in the interpreter (`test_interpreted.py`).
"""

import random

import pytest
import torch

triton = pytest.importorskip("triton")
from nanovllm.kernels.triton.attention.call import DecodeCall
from nanovllm.kernels.triton.attention.decode_launch import launch_shared, launch_shared_pass
from nanovllm.kernels.triton.attention.decode_plan import SharedPlan
from tests.kernels.flat import flat
from tests.kernels.triton.attention import decode_calls as calls
from tests.kernels.triton.attention.cases import (
    BF16,
    F16,
    F32,
    SINGLE_TILES,
    attention_decode_shared,
    check,
    cut,
    int32,
    qk_norm_rope_attention,
    qk_norm_rope_attention_shared,
)
from tests.kernels.triton.attention.decode_calls import copied, difference
from tests.kernels.triton.common import DEVICE, GPU, by_turns, graph_of

pytestmark = pytest.mark.triton

PREFIXES = ("groups", "group_rows", "shared_lens")


def make(
    groups, own, group, kv_heads, head_dim, block_size, dtype, num_groups=None, new=False, **options
):  # fmt: skip
    """Arguments of `attention_decode_shared`, or with `new` of the fused op.

    Slots that hold no token are NaN, and so is that of the new one.

    Args:
        groups: (rows, blocks) each.
        own: tokens of each row behind the shared ones.
    """
    tokens = {row: blocks * block_size for rows, blocks in groups for row in rows}
    lens = [n + tokens.get(row, 0) for row, n in enumerate(own)]
    given = calls.make(lens, group, kv_heads, head_dim, block_size, dtype, new=new, **options)
    table = given["block_table"]
    for rows, blocks in groups:
        table[rows, :blocks] = table[rows[0], :blocks].clone()
    unused = torch.ones(len(given["k_cache"]), dtype=torch.bool, device=DEVICE)
    for row, n in enumerate(lens):
        unused[table[row, : -(-n // block_size)].long()] = False
    for cache in (given["k_cache"], given["v_cache"]):
        cache.view(torch.uint8)[unused] = 0xFF
    in_groups = [row for rows, _ in groups for row in rows]
    described, place = [], 0
    for rows, blocks in groups:
        described.append([place, len(rows), blocks * block_size])
        place += len(rows)
    described += [[0, 0, 0]] * ((num_groups or len(groups)) - len(groups))
    random.Random(3).shuffle(described)  # groups come in any order, and some have no rows
    return given | {
        "groups": int32(described).view(-1, 3),
        "group_rows": int32(in_groups + [10**6] * (len(own) - len(in_groups))),
        "shared_lens": int32([tokens.get(row, 0) for row in range(len(own))]),
    }


def without_groups(given):
    return {n: x for n, x in given.items() if n not in PREFIXES}


def check_plain(given, plan=None, rest=None, again=False):
    got = attention_decode_shared(**given, plan=plan, rest=rest)
    check(got, calls.expected(given)[0], given["q"].dtype)
    for _ in range(3 if GPU or again else 0):
        assert torch.equal(got, attention_decode_shared(**given, plan=plan, rest=rest))


def check_fused(given, plan=None, rest=None):
    used = copied(given)
    got = qk_norm_rope_attention_shared(**used, plan=plan, rest=rest)
    want, new = calls.expected(given, used if given["k_cache"].dtype != given["q"].dtype else None)
    most = 1e-5 if got.dtype == F32 else calls.LOOSE
    assert got.is_contiguous() and not got.isnan().any()
    assert difference(got, want) < most
    calls.check_caches(used, given, new)
    if GPU:
        assert torch.equal(got, qk_norm_rope_attention_shared(**copied(given), plan=plan, rest=rest))


def shared_plan(programs, pieces, tile=16):
    """A plan for small batches."""
    return SharedPlan(16, tile, 4, 1, programs, pieces)


SMALL = shared_plan(3, 4)
CASES = [
    # A pair alone, one token each behind the shared block.
    ([([0, 1], 1)], [1, 1], 1, 2, 64, 16, F32, SMALL, SINGLE_TILES, {}),
    # Groups of odd sizes, rows without a group, a sequence without tokens, in any order; groups without rows.
    ([([7, 2, 4], 3), ([1, 6], 1)], [5, 20, 1, 33, 16, 0, 40, 17], 2, 1, 64, 16, F32, None, None, {"num_groups": 9}),
    # Row tiles that straddle sequences; more pieces than are merged at a time; programs with parts of several row
    # tiles.
    ([([*range(7)], 4), ([7, 9], 2)], [3] * 10, 3, 1, 64, 16, F32, shared_plan(4, 5), cut(2, merge_registers=1), {}),
    # Fewer pieces than programs. Tiles of two blocks: half of the last one lies beyond the shared tokens.
    ([([2, 0, 1], 5)], [9, 40, 1], 4, 1, 64, 16, F32, shared_plan(7, 2, 32), cut(3, 32), {}),
    ([(list(range(4)), 2), ([4, 5], 1)], [5, 1, 9, 2, 30, 3], 7, 1, 96, 32, F16, SMALL, None, {"soft_cap": 5.0}),
    ([([0, 2], 2)], [5, 9, 1], 3, 2, 80, 32, F16, None, SINGLE_TILES, {}),
    ([([0, 2], 2)], [5, 9, 20], 2, 1, 64, 16, F16, shared_plan(3, 4, 32), None, {"scales": (0, 0), "norm": False}),
    ([([1, 2], 2)], [5, 9, 20], 2, 2, 64, 16, F32, SMALL, cut(30), {"scales": (1, 2)}),
    ([([1, 2], 2)], [5, 9, 30], 2, 2, 64, 16, F32, SMALL, None, {"cache_dtype": F16, "scales": (0, 2)}),
    ([([1, 2], 2)], [5, 9, 30], 2, 2, 64, 16, F32, None, None, {"window": 11}),
    ([], [5, 9], 2, 2, 64, 16, F32, None, None, {"num_groups": 2}),
    ([], [5, 9], 2, 2, 64, 16, F32, None, None, {}),
]


@pytest.mark.parametrize("i", range(len(CASES)))
def test_small(i):
    """On a GPU one of the ops, by turns: each has two kernels of its own to compile."""
    *shape, plan, rest, options = CASES[i]
    if not GPU or i % 2 == 0:
        check_plain(make(*shape, **options), plan, rest)
    if not GPU or i % 2 == 1:
        check_fused(make(*shape, new=True, **options), plan, rest)


def test_the_shared_part_is_read_once():
    """What a group shares is read from its first sequence's table, and from nowhere else."""

    def unchecked(q, kv, shared, scale):
        return launch_shared(DecodeCall.of(q, kv, scale, None, None, shared=shared), None, None)

    given = make([([1, 0, 2], 2)], [5, 9, 30], 2, 2, 64, 16, F32)
    expected = attention_decode_shared(**given)
    table = given["block_table"].clone()
    table[[0, 2], :2] = 10**6  # far outside of the cache
    assert torch.equal(flat("attention_decode_shared", unchecked)(**given | {"block_table": table}), expected)


def test_no_row_has_more_pieces_than_there_is_room_for():
    """The second group's stretch of tiles begins in the middle of a program's."""
    given = make([([0, 1], 1), ([2, 3], 6)], [1, 1, 1, 1], 1, 1, 64, 16, F32)
    given["groups"] = given["groups"][given["groups"][:, 0].argsort()].contiguous()
    check_plain(given, shared_plan(8, 2))
    for most, pieces in ((2, 2), (9, 6)):

        def first_pass(q, kv, shared, scale, most=most):
            return launch_shared_pass(DecodeCall.of(q, kv, scale, None, None, shared=shared), shared_plan(8, most))

        parts = flat("attention_decode_shared", first_pass)(**given)
        assert pieces == parts.counts[2:].max() <= len(parts.acc)


def test_large_logits():
    given = make([([0, 1], 3)], [7, 20], 2, 2, 64, 16, F32)
    given |= {"q": given["q"] * 60, "k_cache": given["k_cache"] * 60}
    check(attention_decode_shared(**given, plan=SMALL), calls.expected(given)[0], F32)


def random_groups(rng, count, most_groups, most_blocks):
    rows = rng.sample(range(count), rng.randint(0, count))
    groups = []
    while len(rows) > 1 and len(groups) < most_groups:
        size = rng.randint(2, len(rows)) if rng.random() < 0.5 else 2
        groups.append((rows[:size], rng.randint(1, most_blocks)))
        rows = rows[size:]
    return groups


@pytest.mark.parametrize("seed", range(2))
def test_random_groups_and_plans(seed):
    rng = random.Random(seed)
    count = rng.randint(4, 9)
    groups = random_groups(rng, count, 5, 4)
    own = [rng.randint(1, 25) for _ in range(count)]
    programs = rng.randint(1, 6)
    plan = shared_plan(programs, rng.randint(2, programs + 1))
    check_plain(make(groups, own, 2, 1, 64, 16, F32, num_groups=6), plan, again=True)


def checked(**changes):
    given = make([([1, 2], 2)], [40, 9, 30], 1, 1, 64, 16, F32)
    return attention_decode_shared(**given | {n: torch.as_tensor(x, device=DEVICE) for n, x in changes.items()})


INT32 = r"expected contiguous int32 \["


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"q": torch.zeros(2, 1, 64)}, r"q: expected \[3, num_heads, head_dim\], .* got \[2, 1, 64\]"),
        ({"groups": int32([[0, 0], [0, 0]])}, rf"groups: {INT32}num_groups, 3\], got .* \[2, 2\]"),
        ({"group_rows": torch.zeros(3)}, rf"group_rows: {INT32}3\], got torch.float32"),
        ({"shared_lens": int32([0, 0])}, rf"shared_lens: {INT32}3\], got .* \[2\]"),
    ],
)
def test_wrong_shapes_are_always_named(changes, said):
    with pytest.raises(ValueError, match=said):
        checked(**changes)


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"groups": [[0, 2, 33]]}, "group 0 shares 33 tokens, expected a multiple of 16"),
        ({"groups": [[2, 2, 32]]}, "group 0 has rows 2 to 3 of 3"),
        ({"groups": [[0, 2, 48]]}, "group 0 shares 48 tokens, but sequence 1 has 41"),
        ({"group_rows": [0, 1, 2]}, "sequence 1 has other blocks than the first of"),
        ({"group_rows": [1, 1, 2]}, "expected each of 0 to 2 once at most, got 1 in group 0"),
        ({"shared_lens": [0, 32, 16]}, "sequence 2 shares 16 tokens, expected 32"),
        ({"shared_lens": [32, 32, 32]}, "sequence 0 shares 32 tokens, expected 0"),
        ({"context_lens": [5, 41, 90]}, "sequence 2 has length 90"),
    ],
)
def test_groups_that_do_not_fit_are_named_on_request(changes, said, monkeypatch):
    monkeypatch.setenv("NANOVLLM_CHECK", "1")
    checked()
    with pytest.raises(ValueError, match=said):
        checked(**{n: int32(x) for n, x in changes.items()})


def test_a_position_without_angles(monkeypatch):
    monkeypatch.setenv("NANOVLLM_CHECK", "1")
    given = make([([1, 2], 2)], [5, 9, 30], 1, 1, 64, 16, F32, new=True)
    message = r"sequence 2 has length 62, expected 0 to 61 \(61 positions in cos_sin_cache\)"
    with pytest.raises(ValueError, match=message):
        qk_norm_rope_attention_shared(**given | {"cos_sin_cache": given["cos_sin_cache"][:61]})


# ---- a GPU


def batch(count, num_groups, seed=0, blocks=4, longest=300):
    """Rows dealt to groups at random, some to none."""
    rng = random.Random(seed)
    members = [[] for _ in range(num_groups)]
    for row in range(count):
        if rng.random() < 0.9:
            members[rng.randrange(num_groups)].append(row)
    groups = [(rows, rng.randint(1, blocks)) for rows in members if len(rows) > 1]
    return groups, [rng.randint(1, longest) for _ in range(count)]


DIMS, DTYPES, HEADS = [64, 80, 96, 128, 256], [BF16, F16, F32], [(2, 8, 256), (3, 3, 16), (7, 2, 64)]


@pytest.mark.gpu
@pytest.mark.parametrize("dim, dtype, heads", by_turns(DIMS, DTYPES, HEADS, turns=3), ids=str)
def test_shapes(dim, dtype, heads):
    """One op with few sequences and the other with many, by turns.

    Each call has two kernels of its own to compile.
    """
    group, kv_heads, block_size = heads
    turn = (DIMS.index(dim) + DTYPES.index(dtype)) % 2
    for new, (count, num_groups) in zip((turn, not turn), ((5, 1), (70, 3))):
        given = make(*batch(count, num_groups), group, kv_heads, dim, block_size, dtype, 8, new=bool(new))
        (check_fused if new else check_plain)(given)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("options", [{}, {"scales": (1, 2)}, {"soft_cap": 20.0}], ids=str)
def test_batches(options, dtype):
    """Of each batch one op, by turns; the other with other options or another dtype. With options half of the batches,
    by turns.
    """
    turn = (dtype == F32) + len(options)
    for i, (count, num_groups) in enumerate(((256, 1), (256, 50), (40, 8), (16, 2), (300, 2))):
        if options and (i // 2 + turn) % 2:
            continue
        shape = *batch(count, num_groups, seed=count), 2, 8, 128, 256, dtype, 64
        if (i + turn) % 2:
            check_fused(make(*shape, new=True, **options))
        else:
            check_plain(make(*shape, **options))
    check_plain(make(*batch(20, 1, blocks=80), 71, 1, 64, 256, dtype, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("norm", [True, False])
def test_graph_replays_follow_the_groups(norm):
    """A captured call replays with other groups, lengths and tables, with the bits of a call of its own."""
    cases = [make(*batch(64, n, seed=n), 2, 8, 128, 256, BF16, num_groups=64, new=True, norm=norm) for n in (1, 3, 20)]
    cases.append(make([], [5] * 64, 2, 8, 128, 256, BF16, num_groups=64, new=True, norm=norm))
    static = copied(cases[0])
    size = max(len(case["k_cache"]) for case in cases)
    width = max(case["block_table"].shape[1] for case in cases)
    shape = (size, *static["k_cache"].shape[1:])
    static |= {name: torch.zeros(shape, dtype=BF16, device=DEVICE) for name in ("k_cache", "v_cache")}
    static |= {"block_table": torch.zeros(64, width, dtype=torch.int32, device=DEVICE), "max_context_len": width * 256}
    static |= {name: static[name].clone() for name in ("q", "k", "v", "context_lens", *PREFIXES)}

    def fill(case):
        for name in ("q", "k", "v", "context_lens", "q_weight", "k_weight", *PREFIXES):
            if name in static:
                static[name].copy_(case[name])
        for name in ("k_cache", "v_cache"):
            static[name][: len(case[name])] = case[name]
        static["block_table"].zero_()[:, : case["block_table"].shape[1]] = case["block_table"]

    fill(cases[0])
    graph, out = graph_of(lambda: qk_norm_rope_attention_shared(**static))
    for case in cases:
        fill(case)
        expected = qk_norm_rope_attention_shared(**static).clone()
        assert difference(expected, qk_norm_rope_attention(**without_groups(static))) < calls.LOOSE
        for _ in range(10):
            graph.replay()
            assert torch.equal(out, expected)
