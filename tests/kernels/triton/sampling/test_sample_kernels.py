"""The Triton kernel of `sample` draws the reference's tokens."""

import itertools

import pytest
import torch

triton = pytest.importorskip("triton")

from nanovllm.kernels.ops.sample import BLOCK, exponentials
from nanovllm.kernels.ops.sample import sample as sample_op
from nanovllm.kernels.triton import counters
from nanovllm.kernels.triton.sampling import filter_threshold
from nanovllm.kernels.triton.sampling.sample import sample
from tests.kernels.triton.common import DEVICE, graph_of
from tests.kernels.triton.common import randn as normal

pytestmark = [pytest.mark.triton, pytest.mark.slow]

ROWS = 256 if DEVICE == "cuda" else 6
VOCABULARIES = [1, 1000, 2600] + ([1024, 32003, 49152, 151936] if DEVICE == "cuda" else [])
DTYPES = [torch.float32, torch.bfloat16] + ([torch.float16] if DEVICE == "cuda" else [])
FILTERS = {
    "none": "", "top-k": "k", "top-p": "p", "min-p": "m", "top-k and top-p": "kp", "all": "kpm",
}  # fmt: skip


def column(values, dtype):
    return torch.as_tensor(values, dtype=dtype).to(DEVICE)


def pick(generator, rows, choices, dtype):
    return column([choices[i] for i in torch.randint(len(choices), (rows,), generator=generator).tolist()], dtype)


def arguments(rows, vocab_size, filters, seed=0):
    """Parameters of `sample` after the logits: every extreme of each, mixed at random over the rows."""
    g = torch.Generator().manual_seed(seed)
    return (
        pick(g, rows, [0.0, 1e-6, 1e-3, 0.6, 1.0, 1.0, 1.7, 50.0, 1e3], torch.float32),
        pick(g, rows, [-1, 0, 1, 2, 20, 50, 700, vocab_size - 1, vocab_size, 2**31 - 1], torch.int32)
        if "k" in filters
        else None,
        pick(g, rows, [1e-30, 1e-3, 0.3, 0.9, 0.95, 0.999, 1 - 2**-24, 1.0], torch.float32) if "p" in filters else None,
        pick(g, rows, [0.0, 1e-8, 0.05, 0.5, 1.0], torch.float32) if "m" in filters else None,
        torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g).to(DEVICE),
        torch.randint(0, 2**40, (rows,), generator=g).to(DEVICE),
    )


def randn(rows, vocab_size, dtype, scale=3.0, seed=0):
    return normal(rows, vocab_size, dtype=dtype, seed=seed, scale=scale)


NAMES = ("logits", "temperature", "top_k", "top_p", "min_p", "seeds", "positions")


def agree(logits, args):
    """The kernel's tokens are the reference's, but for a block in a million that wins by a rounding of its weight."""
    got, expected = sample(logits, *args), sample_op.native(logits, *args)
    assert got.dtype == torch.int64 and got.shape == expected.shape
    wrong = (got != expected).nonzero().flatten().tolist()
    told = f"rows {wrong}: {got[wrong].tolist()} instead of {expected[wrong].tolist()}"
    assert len(wrong) <= 1, told
    if wrong:
        row = slice(wrong[0], wrong[0] + 1)
        one = {name: None if a is None else a[row] for name, a in zip(NAMES, (logits, *args), strict=True)}
        assert sample_op.compare(got[row], one, logits.dtype) is None, told


def of_turns():
    """(dtype, size of the vocabulary, filters): on a GPU each two in one of three dtypes, by turns. Each triple has
    kernels of its own to compile.
    """
    for (i, dtype), (j, size), (k, name) in itertools.product(*map(enumerate, (DTYPES, VOCABULARIES, FILTERS))):
        if DEVICE == "cpu" or (i + j + k) % len(DTYPES) == 0:
            yield pytest.param(dtype, size, name, id=f"{dtype}-{size}-{name}")


@pytest.mark.parametrize("dtype, vocab_size, filters", list(of_turns()))
def test_the_tokens_are_the_references(dtype, vocab_size, filters):
    for rows, scale in ((1, 3.0), (ROWS, 3.0 if dtype == torch.float32 else 0.02)):  # 0.02: nearly flat
        logits = randn(rows, vocab_size, dtype, scale, seed=rows)
        agree(logits, arguments(rows, vocab_size, FILTERS[filters], seed=vocab_size))


@pytest.mark.parametrize("vocab_size", [256 * 256, 300_001])
def test_blocks_of_more_than_one_random_counter(vocab_size):
    # 1,173 blocks: the fifth 256 of them begin the second round of counters. Rows with a stride that nothing divides.
    logits = randn(4, vocab_size + 5, torch.float32, 0.6)[:, :vocab_size]
    agree(logits, arguments(4, vocab_size, "", seed=3))


@pytest.mark.parametrize("filters", ["k", "p", "kp"])
def test_equal_logits(filters):
    # Few values, so that both thresholds fall on ties, whose lowest ids top-p keeps.
    for vocab_size in (6000,) if DEVICE == "cpu" else (1000, 100_000):
        for levels in (1, 3, 40):
            g = torch.Generator().manual_seed(levels)
            logits = (torch.randint(levels, (ROWS, vocab_size), generator=g).float() / 8 - 2).to(DEVICE)
            logits[:, ::7] = -0.0  # equals 0
            agree(logits, arguments(ROWS, vocab_size, filters, seed=levels))


@pytest.mark.parametrize("equal", [3, 700, 5000])  # resolved in each of the three ways
@pytest.mark.parametrize("kept", [1, 2])
def test_top_p_keeps_the_lowest_ids_of_equal_logits(equal, kept):
    ids = torch.randperm(6000, generator=torch.Generator().manual_seed(0))[:equal].sort().values
    logits = torch.zeros(10, 6000, device=DEVICE)
    logits[:, ids.to(DEVICE)] = 100.0  # all of the mass, in equal parts
    _, _, _, _, seeds, positions = arguments(10, 6000, "")
    one = torch.ones(10, device=DEVICE)
    tokens = sample(logits, one, None, one * ((kept - 0.5) / equal), None, seeds, positions)
    assert set(tokens.tolist()) == set(ids[:kept].tolist())


@pytest.mark.parametrize("filters", ["", "k", "p", "kpm"])
def test_barred_tokens(filters):
    logits = randn(ROWS, 3000, torch.float32)
    logits[:, ::2] = -torch.inf
    logits[1] = -torch.inf
    logits[2, 5:] = -torch.inf
    logits[3, :] = -1e30
    logits[4, 7] = 3e38
    agree(logits, arguments(ROWS, 3000, filters))


@pytest.mark.parametrize("filters", ["", "k", "p", "kpm"])
def test_other_non_finite_values_give_a_valid_id(filters):
    logits = randn(ROWS, 3000, torch.float32)
    logits[0] = torch.nan
    logits[1, ::3] = torch.nan
    logits[2, 5] = torch.inf
    logits[3, :] = torch.inf
    for seed in range(4):
        tokens = sample(logits, *arguments(ROWS, 3000, filters, seed=seed))
        assert ((tokens >= 0) & (tokens < 3000)).all()


@pytest.mark.parametrize("filters", ["", "kpm"])
def test_a_row_does_not_depend_on_its_dtype(filters):
    # A batch in which some row has penalties is float32, without it bfloat16: a warp holds other columns then.
    logits = randn(ROWS, 3000, torch.bfloat16)
    args = arguments(ROWS, 3000, filters)
    assert torch.equal(sample(logits, *args), sample(logits.float(), *args))


def test_the_counters_are_left_at_zero():
    for filters in ("", "p"):
        sample(randn(3, 9000, torch.float32), *arguments(3, 9000, filters))
    assert all(not buffer.any() for buffer in counters.buffers.values()) and counters.buffers


@pytest.mark.parametrize("filters", ["", "kpm"])
def test_a_row_does_not_depend_on_the_batch_or_its_memory(filters):
    vocab_size = 151936 if DEVICE == "cuda" else 2500
    logits = randn(ROWS, vocab_size, torch.bfloat16)
    args = arguments(ROWS, vocab_size, filters)
    together = sample(logits, *args)
    wide = torch.zeros(ROWS, vocab_size + 3, dtype=logits.dtype, device=DEVICE)
    wide[:, :vocab_size] = logits
    assert torch.equal(sample(wide[:, :vocab_size], *args), together)
    for row in (0, 1, ROWS - 1):
        alone = sample(logits[row : row + 1], *(None if a is None else a[row : row + 1] for a in args))
        assert alone.item() == together[row].item()


def test_no_rows():
    args = (None if a is None else a[:0] for a in arguments(1, 50, "kpm"))
    assert sample(torch.empty(0, 50, device=DEVICE), *args).shape == (0,)


def test_every_way_to_resolve_is_among_the_cases():
    # 40, 3 and 1 levels in test_equal_logits: few candidates, some that fit into registers, and more than that.
    assert 6000 / 40 < filter_threshold.FEW.value < 6000 / 3 < filter_threshold.CAPACITY < 6000


if DEVICE == "cuda":

    def test_the_noise_is_the_references_to_the_bit():
        # In one block of equal logits the score is the noise; two tokens that differ by a bit would swap.
        rows = 100_000
        seeds, positions = torch.arange(rows, device=DEVICE) * 977, torch.arange(rows, device=DEVICE)
        got = sample(torch.zeros(rows, BLOCK, device=DEVICE), seeds.float() * 0 + 1, None, None, None, seeds, positions)
        noise = exponentials(seeds, positions, torch.arange(BLOCK, device=DEVICE)[None]).log().neg_()
        assert torch.equal(got, noise.argmax(-1))

    def test_the_distribution_is_the_softmax():
        # Over blocks of unequal weight; 5 standard deviations.
        rows, vocab_size = 100_000, 2 * BLOCK + 3
        logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        logits[:BLOCK] -= 1
        p = (logits / 0.8).double().softmax(0)
        row = torch.arange(rows, device=DEVICE)
        tokens = sample(
            logits.expand(rows, -1), torch.full((rows,), 0.8, device=DEVICE), None, None, None, row * 3, row
        )
        counts = torch.bincount(tokens, minlength=vocab_size).double()
        for kind in (torch.arange(vocab_size, device=DEVICE) // BLOCK, torch.arange(vocab_size, device=DEVICE) % 16):
            expected = torch.zeros(16, dtype=torch.float64, device=DEVICE).index_add_(0, kind, p) * rows
            got = torch.zeros(16, dtype=torch.float64, device=DEVICE).index_add_(0, kind, counts)
            assert ((got - expected).abs() <= 5 * expected.sqrt()).all()

    @pytest.mark.parametrize("filters", ["", "kpm"])
    def test_a_graph_replays_with_new_data(filters):
        vocab_size = 151936
        logits = randn(4, vocab_size, torch.bfloat16)
        args = arguments(4, vocab_size, filters)
        graph, tokens = graph_of(lambda: sample(logits, *args))
        for seed in range(5):
            logits.copy_(randn(4, vocab_size, torch.bfloat16, seed=seed))
            args[-1].add_(1)
            graph.replay()
            assert torch.equal(tokens, sample(logits, *args))
            agree(logits, args)
