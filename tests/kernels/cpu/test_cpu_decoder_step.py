"""The op decoder_step in C++ against its reference in PyTorch."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from nanovllm.kernels import decoder_step
from nanovllm.kernels.cpu.build import cpu_features, cpu_support

if (reason := cpu_support(torch.device("cpu"))) is not None:
    pytest.skip(reason, allow_module_level=True)

from nanovllm.kernels.cpu.library import PackedMatrix
from nanovllm.kernels.ops.decoder_step import DecoderBatch, DecoderLayerWeights, DecoderWeights

BLOCK = 16


class PlainMatrix:
    """A matrix of the reference: a float32 tensor."""

    def __init__(self, weight):
        self.weight, (self.rows, self.columns) = weight, weight.shape

    def product(self, x):
        return x @ self.weight.T


def random_weights(layers=2, hidden=80, heads=6, kv_heads=2, dim=16, inner=112, norms=False, biases=False, seed=0):
    """The weights twice: for the reference, and packed."""
    g = torch.Generator().manual_seed(seed)
    shapes = dict(q=(heads * dim, hidden), k=(kv_heads * dim, hidden), v=(kv_heads * dim, hidden),
                  o=(hidden, heads * dim), gate=(inner, hidden), up=(inner, hidden), down=(hidden, inner))  # fmt: skip
    plain, packed = [], []
    for _ in range(layers):
        matrices = {n: torch.randn(s, generator=g) * s[1] ** -0.5 for n, s in shapes.items()}
        vectors = {n: torch.rand(hidden, generator=g) + 0.5 for n in ("input_norm", "post_norm")}
        if norms:
            vectors |= {n: torch.rand(dim, generator=g) + 0.5 for n in ("q_norm", "k_norm")}
        if biases:
            vectors |= {f"{n}_bias": torch.randn(s[0], generator=g) * 0.3 for n, s in shapes.items()}
        plain.append(DecoderLayerWeights(**{n: PlainMatrix(m) for n, m in matrices.items()}, **vectors))
        packed.append(DecoderLayerWeights(**{n: PackedMatrix.of(m) for n, m in matrices.items()}, **vectors))
    angles = torch.outer(torch.arange(600.0), 10000.0 ** (-torch.arange(0, dim, 2) / dim))
    rest = torch.rand(hidden, generator=g) + 0.5, torch.cat((angles.cos(), angles.sin()), -1), 1e-6
    return DecoderWeights(plain, *rest), DecoderWeights(packed, *rest)


def random_batch(decodes, runs, seed=0):
    """Contexts of so many tokens: decodes have one new token; runs are (new tokens, tokens before them)."""
    g = torch.Generator().manual_seed(seed)
    lens = [*decodes, *(new + before for new, before in runs)]
    counts = [1] * len(decodes) + [new for new, _ in runs]
    width = max(-(-n // BLOCK) for n in lens)
    order, table = (
        torch.randperm(len(lens) * width, generator=g).int(),
        torch.zeros(len(lens), width, dtype=torch.int32),
    )
    table[:] = order.view(len(lens), width)
    positions = torch.cat([torch.arange(n - new, n) for n, new in zip(lens, counts)])
    rows = torch.repeat_interleave(torch.arange(len(lens)), torch.tensor(counts))
    slots = table[rows, positions // BLOCK].long() * BLOCK + positions % BLOCK
    starts = torch.tensor([0, *(new for new, _ in runs)]).cumsum(0).int() if runs else None
    batch = DecoderBatch(positions, slots, table, torch.tensor(lens, dtype=torch.int32), len(decodes), starts)
    return batch, len(order)


def compare(weights, batch, num_blocks, rows=None, dtype=torch.float32, tolerance=2e-5, seed=1):
    plain, packed = weights
    g = torch.Generator().manual_seed(seed)
    first = plain.layers[0]
    shape = (num_blocks, BLOCK, first.k.rows // plain.head_dim, plain.head_dim)
    caches = [[torch.randn(shape, generator=g).to(dtype) for _ in plain.layers] for _ in range(2)]
    x = torch.randn(len(batch.positions), first.q.columns, generator=g)
    copies = [[c.clone() for c in side] for side in caches]
    with decoder_step.use("native"):
        want = decoder_step(x.clone(), batch, plain, *caches, rows)
    with decoder_step.use("cpu"):
        got = decoder_step(x.clone(), batch, packed, *copies, rows)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    for side, copied in zip(caches, copies):
        for cache, copy in zip(side, copied):
            torch.testing.assert_close(copy.float(), cache.float(), rtol=tolerance, atol=tolerance)


BATCHES = {
    "one": ([1], []), "decodes": ([5, 33, 100, 1, 16, 17, 64], []), "a prompt": ([], [(40, 0)]),
    "short runs": ([], [(2, 0), (7, 30), (1, 90)]), "chunks": ([], [(33, 50), (64, 1)]),
    "mixed": ([70, 3], [(20, 0), (1, 5), (9, 17)]), "long": ([500], [(130, 300)]),
}  # fmt: skip


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("norms, biases", [(False, False), (True, False), (False, True)])
def test_hidden_states_and_caches_are_those_of_the_reference(batch, norms, biases):
    compare(random_weights(norms=norms, biases=biases), *random_batch(*batch))


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("window", [1, 16, 70])
def test_windows_and_layers_without_rotation(batch, window):
    changes = [dict(window=window), dict(rotated=False), dict(window=3, rotated=False)]
    weights = tuple(
        replace(w, layers=[replace(layer, **change) for layer, change in zip(w.layers, changes)])
        for w in random_weights(layers=3)
    )
    compare(weights, *random_batch(*batch))


@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 4), (5, 1), (8, 2), (9, 3)])
@pytest.mark.parametrize("dim", [16, 64, 128])
def test_every_grouping_of_heads(heads, kv_heads, dim):
    weights = random_weights(layers=1, heads=heads, kv_heads=kv_heads, dim=dim)
    compare(weights, *random_batch([20, 50], [(12, 9)]))


MANY_LONG_CONTEXTS = [(9, 590 - 3 * i) for i in range(8)]  # of 16 key heads of 256: 155 MB as float32


def test_contexts_that_are_copied_to_float32_in_several_parts():
    weights = random_weights(layers=1, heads=32, kv_heads=16, dim=256)
    compare(weights, *random_batch([40], MANY_LONG_CONTEXTS), tolerance=5e-5)


def memory_of_a_step(weights, batch, num_blocks, kv_heads, dim):
    """Bytes by which a step of one layer raises the memory of this process at its peak."""

    def peak():
        return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) << 10

    caches = [[torch.zeros(num_blocks, BLOCK, kv_heads, dim)] for _ in range(2)]
    for cache in caches:
        cache[0].fill_(0.5)  # or its pages would be taken in the step
    x = torch.ones(len(batch.positions), 80)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is in use
    before = peak()
    with decoder_step.use("cpu"), ThreadPoolExecutor(1) as fresh:  # a thread keeps the memory of its steps
        fresh.submit(decoder_step, x, batch, weights, *caches).result()
    return peak() - before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_contexts_as_float32_is_bounded():
    _, packed = random_weights(layers=1, heads=32, kv_heads=16, dim=256)
    assert memory_of_a_step(packed, *random_batch([], MANY_LONG_CONTEXTS), 16, 256) < 100 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_attention_and_the_mlp_share_memory():
    """Of 512 tokens queries, keys, values and what is attended to are 20 MiB, the gate and up 24.

    AMX reads three bfloat16 of each activation: of 6,208 and 256 columns 19 MiB more, and 13 if nothing were shared.
    """
    _, packed = random_weights(layers=1, heads=32, kv_heads=8, dim=128, inner=6144)
    most = 58 if "amx_bf16" in cpu_features().split() else 38
    assert memory_of_a_step(packed, *random_batch([], [(512, 0)]), 8, 128) < most << 20


@pytest.mark.parametrize("rows", [[0], [2, 0], [], [3, 3, 3, 3, 1, 0, 2, 3]], ids=str)
def test_rows_of_the_last_layer(rows):
    compare(random_weights(), *random_batch([9, 40], [(2, 3)]), rows=torch.tensor(rows, dtype=torch.int64))


@pytest.mark.parametrize("window", [None, 16])
def test_rows_of_prompts_in_the_last_layer(window):
    weights = (
        replace(w, layers=[replace(layer, window=window) for layer in w.layers]) for w in random_weights(norms=True)
    )
    compare(tuple(weights), *random_batch([70], [(20, 3), (40, 0)]), rows=torch.tensor([60, 0, 20, 7, 7]))


def test_a_row_does_not_depend_on_the_other_rows():
    _, packed = random_weights()
    batch, num_blocks = random_batch([70], [(40, 300)])
    x, found = torch.randn(41, 80), []
    for rows in ([40], [40, 0], [40, 17, 9, 9, 3]):
        caches = [[torch.ones(num_blocks, BLOCK, 2, 16) for _ in range(2)] for _ in range(2)]
        with decoder_step.use("cpu"):
            found.append(decoder_step(x.clone(), batch, packed, *caches, torch.tensor(rows))[0])
    assert all(torch.equal(row, found[0]) for row in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_caches_of_16_bits(dtype):
    compare(random_weights(layers=1), *random_batch([30, 7], [(12, 4)]), dtype=dtype, tolerance=1e-2)


def test_fewer_layers_than_there_are_weights():
    plain, packed = random_weights(layers=3)
    batch, num_blocks = random_batch([20], [])
    caches = [[torch.zeros(num_blocks, BLOCK, 2, 16)] for _ in range(2)]
    x = torch.randn(1, 80)
    one = replace(plain, layers=plain.layers[:1])
    want = decoder_step.native(x.clone(), batch, one, *[[c.clone() for c in side] for side in caches])
    with decoder_step.use("cpu"):
        got = decoder_step(x.clone(), batch, packed, *caches)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


def test_results_do_not_change_from_call_to_call():
    _, packed = random_weights()
    batch, num_blocks = random_batch([40, 8, 90], [(30, 0)])
    x, found = torch.randn(33, 80), []
    for _ in range(20):
        caches = [[torch.ones(num_blocks, BLOCK, 2, 16) for _ in range(2)] for _ in range(2)]
        with decoder_step.use("cpu"):
            found.append(decoder_step(x.clone(), batch, packed, *caches))
    assert all(torch.equal(result, found[0]) for result in found)


def test_matrices_that_are_not_packed_are_named():
    plain, packed = random_weights(layers=1)
    broken = replace(packed, layers=[replace(packed.layers[0], up=plain.layers[0].up)])
    batch, num_blocks = random_batch([3], [])
    caches = [[torch.zeros(num_blocks, BLOCK, 2, 16)] for _ in range(2)]
    with decoder_step.use("cpu"), pytest.raises(TypeError, match="up: expected a PackedMatrix, not PlainMatrix"):
        decoder_step(torch.randn(1, 80), batch, broken, *caches)
    assert {f.name for f in fields(DecoderLayerWeights)} > {"q", "down", "q_bias"}
