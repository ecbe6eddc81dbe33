"""The decode kernel that also normalises, rotates and stores: against the op's reference, and against float64.

With a GPU the tests run there at real shapes, else in the interpreter (`test_interpreted.py`).
"""

from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")

from tests.kernels.triton.attention.cases import (
    BF16,
    F8,
    F16,
    F32,
    SINGLE_TILES,
    cut,
    given_bits,
    mixed,
    qk_norm_rope_attention,
)
from tests.kernels.triton.attention.projected_calls import check_call, copied, make
from tests.kernels.triton.common import INTERPRETED

pytestmark = pytest.mark.triton


@pytest.mark.parametrize(
    "lens, heads, kv_heads, dim, block_size, dtype, plan, options",
    [
        ([1], 2, 2, 64, 16, F32, None, {}),
        ([1, 17, 100, 16], 4, 2, 64, 16, F32, None, {"norm": False}),
        ([100, 3, 1, 64, 33], 4, 2, 64, 16, F32, cut(7, 32), {}),  # a tile of two blocks, cut
        ([90, 32, 5], 9, 3, 80, 32, F16, SINGLE_TILES, {}),
        ([40, 70], 7, 1, 96, 64, F16, None, {"soft_cap": 5.0, "window": 33}),
        ([70], 4, 4, 64, 16, F32, cut(5, merge_registers=1), {"window": 1}),
        ([40, 1, 70], 4, 2, 64, 16, F16, cut(4, 32), {"cache_dtype": F8}),
        ([40, 70], 4, 2, 64, 16, F32, None, {"cache_dtype": F8, "k_scale": 1, "v_scale": 2}),
        ([90, 5], 4, 2, 64, 32, F32, None, {"cache_dtype": F16, "v_scale": 2, "norm": False}),
    ],
)
def test_small(lens, heads, kv_heads, dim, block_size, dtype, plan, options):
    given = make(lens, heads, kv_heads, dim, block_size, dtype, **options)
    check_call(given, plan)
    if plan is not None:
        check_call(given, replace(plan, early=True))


def test_a_sequence_without_tokens_stores_nothing(monkeypatch):
    monkeypatch.setenv("NANOVLLM_CHECK", "1")
    given = make([20, 0, 3], 4, 2, 64, 16, F32)
    used = copied(given)
    got = qk_norm_rope_attention(**used)
    assert (got[1] == 0).all() and not got.isnan().any()
    changed = (given_bits(used["k_cache"]) != given_bits(given["k_cache"])).any(-1).any(-1)
    assert changed.sum() == 2


@pytest.mark.skipif(not INTERPRETED, reason="programs run in any order on a GPU")
def test_only_the_piece_with_the_new_token_needs_it(monkeypatch):
    """The interpreter runs the first piece first. Here it also runs the last one first."""
    from triton.runtime.interpreter import interpreter_builder as builder

    given, plan = make([100, 70], 4, 2, 64, 16, F32), cut(9)
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
    given = make([20, 3], 4, 2, 64, 16, F32)
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
    given = make([20, 3], 4, 2, 64, 16, F32)
    angles = given["cos_sin_cache"]
    qk_norm_rope_attention(**copied(given) | {"cos_sin_cache": angles[:20]})
    message = r"sequence 0 has length 20, expected 0 to 19 \(19 positions in cos_sin_cache\)"
    with pytest.raises(ValueError, match=message):
        qk_norm_rope_attention(**copied(given) | {"cos_sin_cache": angles[:19]})


# ---- a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
@pytest.mark.parametrize("heads, kv_heads, block_size", [(16, 8, 256), (9, 3, 16), (14, 2, 64)])
def test_shapes(dim, dtype, heads, kv_heads, block_size):
    check_call(make(mixed(3, 2000), heads, kv_heads, dim, block_size, dtype))
    check_call(make(mixed(70, 1500, seed=1), heads, kv_heads, dim, block_size, dtype, norm=False))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("count", [1, 8, 64, 256])
def test_batches(count, dtype):
    check_call(make(mixed(count, 2000), 16, 8, 128, 256, dtype))
    check_call(make(mixed(count, 900), 32, 8, 128, 256, dtype, cache_dtype=F8, k_scale=1, v_scale=8))
    check_call(make(mixed(count, 900), 16, 8, 128, 256, dtype, window=100, soft_cap=20.0))


@pytest.mark.gpu
def test_graph_replays_advance():
    """A captured call replays with longer contexts, reading what its own earlier replays stored."""
    given = make([300, 17, 1000], 16, 8, 128, 256, BF16)
    eager, replayed = copied(given), copied(given) | {"context_lens": given["context_lens"].clone()}
    eager["max_context_len"] = replayed["max_context_len"] = 1024
    saved = {n: replayed[n].clone() for n in ("k_cache", "v_cache")}
    qk_norm_rope_attention(**replayed)  # compiles
    for name, cache in saved.items():
        replayed[name].copy_(cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = qk_norm_rope_attention(**replayed)
    for step in range(12):
        lens = given["context_lens"] + step
        replayed["context_lens"].copy_(lens)
        graph.replay()
        assert torch.equal(out, qk_norm_rope_attention(**eager | {"context_lens": lens}))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 4, 8])
def test_calls_that_read_what_the_one_before_them_stored(count):
    """A call loads keys before it waits for the kernel before it, which may be this one with the last token."""
    calls = 24
    given = make([260 + 30 * i for i in range(count)], 16, 8, 128, 256, BF16)  # of two blocks, to the last call
    given["max_context_len"] = 512
    lens = [given["context_lens"] + i for i in range(calls)]
    tokens = [{n: torch.randn_like(given[n]) for n in "qkv"} for _ in range(calls)]
    saved = {n: given[n].clone() for n in ("k_cache", "v_cache")}

    def run(wait=False):
        out = []
        for new, length in zip(tokens, lens):
            out.append(qk_norm_rope_attention(**given | new | {"context_lens": length}))
            if wait:
                torch.cuda.synchronize()
        return out

    expected = run(wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(50):
        for name, cache in saved.items():
            given[name].copy_(cache)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(out, expected))
