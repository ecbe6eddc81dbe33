"""Fused and split linear layers: the shards of all ranks together are the plain layer."""

import pytest
import torch
import torch.nn.functional as F

from nanovllm.distributed.group import SINGLE, Group, split_over
from nanovllm.layers.embed_head import LMHead, VocabParallelEmbedding
from nanovllm.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from tests.layers.stubs import stubbed
from tests.native import NATIVE

HIDDEN = 12


class Rank(Group):
    """A rank that keeps what it would send to the others."""

    def all_reduce(self, x):
        return x

    def all_gather_last(self, x, length, out=None):
        return x


def each_rank(size):
    """Every rank of a group, in turn: layers that are made in the loop's body hold its part."""
    for rank in range(size):
        group = SINGLE if size == 1 else Rank(rank, size)
        with split_over(group):
            yield group


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def load(layer, name, **shards):
    """Load every shard. Memory that no shard is copied to stays NaN, which fails."""
    getattr(layer, name).data.fill_(torch.nan)
    for shard, tensor in shards.items():
        shard = "" if shard == "whole" else shard
        assert layer.source_shape(name, shard) == tuple(tensor.shape)
        part = layer.part(name, shard)
        layer.load_shard(name, shard, tensor if part is None else part.of(tensor))
    assert not getattr(layer, name).isnan().any()
    return layer


def test_the_default_is_a_single_rank():
    assert (SINGLE.rank, SINGLE.size) == (0, 1)
    x = randn(3, 4)
    assert SINGLE.all_reduce(x) is x and SINGLE.all_gather_last(x, 3).shape == (3, 3) and SINGLE.divide(7, "heads") == 7


def test_a_size_that_does_not_divide_is_named():
    with pytest.raises(ValueError, match="7 query heads cannot be divided by tensor_parallel_size=2"):
        with split_over(Rank(0, 2)):
            QKVParallelLinear(HIDDEN, 7, 1, 4)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_gate_and_up(size, bias):
    gate, up, x = randn(8, HIDDEN), randn(16, HIDDEN, seed=1), randn(5, HIDDEN, seed=2)
    gate_bias, up_bias = randn(8, seed=3), randn(16, seed=4)
    halves = []
    for _ in each_rank(size):
        layer = ColumnParallelLinear(HIDDEN, {"gate": 8, "up": 16}, bias)
        load(layer, "weight", gate=gate, up=up)
        if bias:
            load(layer, "bias", gate=gate_bias, up=up_bias)
        else:
            assert layer.bias is None
        halves.append(layer(x).split((8 // size, 16 // size), dim=-1))
    expected = [F.linear(x, gate, gate_bias if bias else None), F.linear(x, up, up_bias if bias else None)]
    for got, want in zip(zip(*halves), expected):
        torch.testing.assert_close(torch.cat(got, -1), want)


@pytest.mark.parametrize(
    "heads, kv_heads, size",
    [(4, 4, 1), (4, 2, 1), (7, 1, 1), (9, 3, 1), (8, 4, 2), (8, 2, 4), (8, 1, 4), (9, 3, 3), (6, 3, 2), (12, 3, 4)],
)
@pytest.mark.parametrize("bias", [False, True])
def test_queries_keys_and_values(heads, kv_heads, size, bias):
    head_dim = 5
    x = randn(3, HIDDEN, seed=9)
    weights = {
        s: randn(n * head_dim, HIDDEN, seed=i) for i, (s, n) in enumerate(zip("qkv", (heads, kv_heads, kv_heads)))
    }
    biases = {s: randn(n * head_dim, seed=5 + i) for i, (s, n) in enumerate(zip("qkv", (heads, kv_heads, kv_heads)))}
    parts = []
    for _ in each_rank(size):
        layer = QKVParallelLinear(HIDDEN, heads, kv_heads, head_dim, bias)
        load(layer, "weight", **weights)
        if bias:
            load(layer, "bias", **biases)
        parts.append(layer(x))
    whole = {s: F.linear(x, weights[s], biases[s] if bias else None).view(3, -1, head_dim) for s in "qkv"}
    torch.testing.assert_close(torch.cat([p[0] for p in parts], 1), whole["q"])
    for i, s in ((1, "k"), (2, "v")):
        for rank, part in enumerate(parts):
            queries = heads // size // part[i].shape[1]  # of a KV head on this rank: it is that of each of them
            for head in range(heads // size):
                own = (rank * (heads // size) + head) // (heads // kv_heads)
                torch.testing.assert_close(part[i][:, head // queries], whole[s][:, own])


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("bias", [False, True])
def test_row_parallel_sums_to_the_whole_with_the_bias_once(size, bias):
    weight, b, x = randn(6, HIDDEN), randn(6, seed=1), randn(5, HIDDEN, seed=2)
    total = 0
    for group in each_rank(size):
        layer = load(RowParallelLinear(HIDDEN, 6, bias), "weight", whole=weight)
        if bias:
            load(layer, "bias", whole=b)
        share = HIDDEN // size
        total = total + layer(x[:, group.rank * share : (group.rank + 1) * share])
    torch.testing.assert_close(total, F.linear(x, weight, b if bias else None))


@pytest.mark.parametrize("vocab, size", [(13, 1), (12, 2), (13, 2), (13, 4)])
def test_embedding_and_head_over_an_odd_vocabulary(vocab, size):
    weight, hidden = randn(vocab, HIDDEN), randn(5, HIDDEN, seed=1)
    ids = torch.arange(vocab)
    embedded, logits = 0, []
    for _ in each_rank(size):
        embedded = embedded + load(VocabParallelEmbedding(vocab, HIDDEN, NATIVE), "weight", whole=weight)(ids)
        logits.append(load(LMHead(vocab, HIDDEN, NATIVE), "weight", whole=weight)(hidden))
    torch.testing.assert_close(embedded, weight)
    # Ranks pad to equal rows; what is cut off after gathering is the padding.
    torch.testing.assert_close(torch.cat(logits, -1)[:, :vocab], hidden @ weight.T)
    assert size > 1 or logits[0].shape == (5, vocab)


@pytest.mark.parametrize("size", [1, 2])
def test_the_head_gathers_by_the_selected_provider(size):
    kernels, _, calls = stubbed({}, recorded=["all_gather_last"])
    weight, hidden = randn(13, HIDDEN), randn(5, HIDDEN, seed=1)
    for group in each_rank(size):
        out = torch.empty(5, 13)
        load(LMHead(13, HIDDEN, kernels), "weight", whole=weight)(hidden, out)
        if size == 1:
            assert not calls
            torch.testing.assert_close(out, hidden @ weight.T)
        else:
            [(_, given)] = calls
            assert given["out"] is out and given["length"] == 13 and given["group"] is group
            assert given["x"].shape == (5, 7)
            calls.clear()


def test_weights_are_converted_to_the_dtype_of_the_layer():
    layer = RowParallelLinear(HIDDEN, 6).to(torch.bfloat16)
    layer.load_shard("weight", "", randn(6, HIDDEN))
    assert torch.equal(layer.weight, randn(6, HIDDEN).to(torch.bfloat16))
