"""The decode kernel that also normalises, rotates and stores, against float64.

With a GPU the tests run there at real shapes, else in the interpreter (`test_interpreted.py`).
"""

from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")

from tests.kernels.triton.attention.cases import (
    BF16,
    F16,
    F32,
    SINGLE_TILES,
    cut,
    given_bits,
    mixed,
    qk_norm_rope_attention,
)
from tests.kernels.triton.attention.decode_calls import (
    check_call,
    copied,
    difference,
    expected,
    make,
    portable_plan,
    run,
)
from tests.kernels.triton.common import INTERPRETED, by_turns, graph_of

pytestmark = pytest.mark.triton


@pytest.mark.parametrize(
    "lens, group, kv_heads, dim, block_size, dtype, plan, options",
    [
        ([1, 17, 100, 16], 2, 2, 64, 16, F32, None, {"norm": False}),
        ([100, 3, 1, 64, 33], 2, 2, 64, 16, F32, cut(7, 32), {}),  # a tile of two blocks, cut
        ([90, 32, 5], 3, 3, 80, 32, F16, SINGLE_TILES, {}),
        ([40, 70], 7, 1, 96, 64, F16, None, {"soft_cap": 5.0, "window": 33}),
        ([70], 1, 4, 64, 16, F32, cut(5, merge_registers=1), {"window": 1}),
        ([40, 1, 70], 2, 2, 64, 16, F16, cut(4, 32), {"scales": (0, 0)}),
        ([40, 70], 2, 2, 64, 16, F32, None, {"scales": (1, 2)}),
        ([90, 5], 2, 2, 64, 32, F32, None, {"cache_dtype": F16, "scales": (0, 2), "norm": False}),
    ],
)
def test_small(lens, group, kv_heads, dim, block_size, dtype, plan, options):
    given = make(lens, group, kv_heads, dim, block_size, dtype, **options)
    check_call(given, plan, again=len(lens) == 5)
    if plan is not None:
        check_call(given, replace(plan, early=True))


def test_a_sequence_without_tokens_stores_nothing(monkeypatch):
    monkeypatch.setenv("NANOVLLM_CHECK", "1")
    given = make([20, 0, 3], 2, 2, 64, 16, F32)
    used = copied(given)
    got = qk_norm_rope_attention(**used)
    assert (got[1] == 0).all() and not got.isnan().any()
    changed = (given_bits(used["k_cache"]) != given_bits(given["k_cache"])).any(-1).any(-1)
    assert changed.sum() == 2


@pytest.mark.skipif(not INTERPRETED, reason="programs run in any order on a GPU")
def test_only_the_piece_with_the_new_token_needs_it(monkeypatch):
    """The interpreter runs the first piece first. Here it also runs the last one first."""
    from triton.runtime.interpreter import interpreter_builder as builder

    given, plan = make([100, 70], 2, 2, 64, 16, F32), cut(9)
    expected = qk_norm_rope_attention(**copied(given), plan=plan)
    assert not expected.isnan().any()
    place = builder.set_grid_idx
    turned = []

    def turn(*index):
        turned.append(index)
        place(*(n - 1 - i for n, i in zip(builder.grid_dim, index)))

    monkeypatch.setattr(builder, "set_grid_idx", turn)
    assert torch.equal(qk_norm_rope_attention(**copied(given), plan=plan), expected) and len(turned) > 4


def test_bad_arguments():
    given = make([20, 3], 2, 2, 64, 16, F32)
    one = {name: given[name][:1] for name in ("q", "k", "v")}
    for changes, message in (
        ({"k_weight": None}, "q_weight, k_weight: expected both"),
        ({"k": one["k"]}, r"k, v: expected \[2, 2, 64\], got \[1, 2, 64\]"),
        (one, r"q: expected \[2, num_heads, head_dim\], a query token for each .* got \[1, 4, 64\]"),
    ):
        with pytest.raises(ValueError, match=message):
            qk_norm_rope_attention(**given | changes)


def test_a_position_without_angles(monkeypatch):
    monkeypatch.setenv("NANOVLLM_CHECK", "1")
    given = make([20, 3], 2, 2, 64, 16, F32)
    angles = given["cos_sin_cache"]
    qk_norm_rope_attention(**copied(given) | {"cos_sin_cache": angles[:20]})
    message = r"sequence 0 has length 20, expected 0 to 19 \(19 positions in cos_sin_cache\)"
    with pytest.raises(ValueError, match=message):
        qk_norm_rope_attention(**copied(given) | {"cos_sin_cache": angles[:19]})


# ---- a GPU. `portable`: not the kernel for Hopper, which takes such calls there


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dim, dtype, heads, norm",
    by_turns([64, 80, 96, 128, 256], [BF16, F16, F32], [(2, 8, 256), (3, 3, 16), (7, 2, 64)], [True, False], turns=4),
    ids=str,
)
def test_shapes(dim, dtype, heads, norm):
    """Few sequences with a norm, many without."""
    group, kv_heads, block_size = heads
    lens = mixed(3, 2000) if norm else mixed(70, 1500, seed=1)
    check_call(make(lens, group, kv_heads, dim, block_size, dtype, norm=norm))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("count", [1, 8, 64, 256])
def test_batches(count, dtype):
    check_call(make(mixed(count, 2000), 2, 8, 128, 256, dtype))
    check_call(make(mixed(count, 900), 4, 8, 128, 256, dtype, scales=(1, 2)))
    check_call(make(mixed(count, 900), 2, 8, 128, 256, dtype, window=100, soft_cap=20.0))


@pytest.mark.gpu
@pytest.mark.parametrize("portable", [True, False])
@pytest.mark.parametrize("new", [True, False], ids=["new", "cached"])
def test_replays_with_other_batches(new, portable):
    """One capture, other lengths and tables: as an eager call."""
    count = 40
    given = make([700] * count, 2, 8, 128, 256, BF16, spare=324, new=new)
    plan = portable_plan(given) if portable else None
    for n in ("k_cache", "v_cache"):
        given[n] = torch.randn(given[n].shape, device="cuda").to(BF16)
    given["max_context_len"] = 1024
    replayed = copied(given) | {n: given[n].clone() for n in ("context_lens", "block_table")}
    graph, out = graph_of(lambda: run(replayed, plan))
    for step in range(20):
        lens = torch.tensor([0, *mixed(count - 1, 1024, 100 * step)], dtype=torch.int32, device="cuda")
        table = given["block_table"][torch.randperm(count, device="cuda")]
        for n in ("k_cache", "v_cache"):
            replayed[n].copy_(given[n])
        replayed["context_lens"].copy_(lens)
        replayed["block_table"].copy_(table)
        graph.replay()
        eager = copied(given) | {"context_lens": lens, "block_table": table}
        assert torch.equal(out, run(eager, plan)), step
        assert all(torch.equal(given_bits(eager[n]), given_bits(replayed[n])) for n in ("k_cache", "v_cache")), step
        want, _ = expected(copied(given) | {"context_lens": lens, "block_table": table})
        assert difference(out, want) < 1e-2, step


@pytest.mark.gpu
@pytest.mark.parametrize("portable", [True, False])
@pytest.mark.parametrize("count", [1, 4, 8, 40, 100])
def test_calls_that_read_what_the_one_before_them_stored(count, portable):
    """A call asks for keys before it waits for the kernel before it, which may be this one with the last token."""
    calls = 24
    given = make([230 + 11 * i for i in range(count)], 2, 8, 128, 256, BF16, spare=calls + 1)
    given["max_context_len"] = 2048
    plan = portable_plan(given) if portable else None
    lens = [given["context_lens"] + i for i in range(calls)]
    tokens = [{n: torch.randn_like(given[n]) for n in "qkv"} for _ in range(calls)]
    saved = copied(given)

    def chained(wait=False):
        out = []
        for new, length in zip(tokens, lens):
            out.append(run(given | new | {"context_lens": length}, plan))
            if wait:
                torch.cuda.synchronize()
        return out

    want = chained(wait=True)
    graph, out = graph_of(chained)
    for replay in range(50):
        for name in ("k_cache", "v_cache"):
            given[name].copy_(saved[name])
        graph.replay()
        wrong = [i for i, (a, b) in enumerate(zip(out, want)) if not torch.equal(a, b)]
        assert not wrong, (replay, wrong)
