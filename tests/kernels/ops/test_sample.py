"""The op `sample`: how often each token is drawn, and that a row depends on nothing but itself."""

import math

import numpy as np
import pytest
import torch

from nanovllm.kernels.ops.sample import (
    BLOCK,
    BLOCK_COUNTERS,
    as_blocks,
    block_scores,
    exponentials,
    filter_logits,
    rows_per_chunk,
    sample,
)
from tests.devices import DEVICES
from tests.kernels.ops.sampling import chi_square_is_plausible, reference_probabilities, tensors

CASES = {
    "temperature 1": dict(),
    "temperature 0.5": dict(temperature=0.5),
    "temperature 3": dict(temperature=3.0),
    "top-k": dict(top_k=7),
    "top-p": dict(top_p=0.8),
    "min-p": dict(min_p=0.05),
    "all": dict(temperature=1.7, top_k=30, top_p=0.9, min_p=0.02),
    "off, but present": dict(top_k=0, top_p=1.0, min_p=0.0),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("vary, spread", [("seeds", 0.5), ("positions", 4.0)])
def test_frequencies_match_the_filtered_softmax(case, vary, spread):
    """Tokens of every block, and the blocks themselves: of unequal weight, one of a single token, one of none."""
    draws, vocab = 20_000, 3 * BLOCK + 1
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(5)).mul(spread)
    logits[7] = logits[11]
    logits[BLOCK : 2 * BLOCK] += torch.linspace(-3, 3, BLOCK)
    logits[2 * BLOCK : 3 * BLOCK] = -torch.inf
    counters = {"seeds": 1234567890123, "positions": 5} | {vary: range(draws)}
    tokens = sample(logits.expand(draws, vocab), *tensors(draws, **CASES[case], **counters))
    expected = np.zeros(vocab)
    for i, p in reference_probabilities(logits.tolist(), **CASES[case]).items():
        expected[i] = p * draws
    counts = np.bincount(tokens.numpy(), minlength=vocab)
    assert counts[expected == 0].sum() == 0
    assert chi_square_is_plausible(counts, expected)
    of_blocks = np.add.reduceat(counts, range(0, vocab, BLOCK)), np.add.reduceat(expected, range(0, vocab, BLOCK))
    assert chi_square_is_plausible(*of_blocks)


def test_the_levels_are_independent():
    """Which token of its block is drawn says nothing about the block."""
    draws, vocab = 20_000, 4 * BLOCK
    tokens = sample(torch.zeros(draws, vocab), *tensors(draws, seeds=range(draws)))
    together = np.bincount((tokens // BLOCK * 16 + tokens % BLOCK // 16).numpy(), minlength=64)
    assert chi_square_is_plausible(together, np.full(64, draws / 64))
    same = (tokens % BLOCK // 64 == tokens // BLOCK).sum().item()  # the words of one counter go to four blocks
    assert abs(same - draws / 4) < 5 * math.sqrt(draws * 3 / 16)


def test_rare_tokens_keep_their_share():
    """A likely token and 100,000 of 1e-9 of its weight each: 1e-4 together, which draws of 32 bits hardly see."""
    vocab, rare = 100_001, 1e-9
    logits = torch.full((1, vocab), math.log(rare))
    logits[0, 0] = 0.0
    blocks = as_blocks(filter_logits(logits, *tensors(1)[:4]))
    n = 100_000
    scores = block_scores(blocks, torch.tensor([3]), torch.tensor([4]))
    noise = -exponentials(
        torch.tensor([3]), torch.tensor([4]), torch.arange(blocks.shape[1])[None], BLOCK_COUNTERS
    ).log()
    weights = (scores - noise).double().exp()[0]
    assert weights[1:].sum().item() == pytest.approx((vocab - BLOCK) * rare, rel=1e-5)
    assert weights[0].item() == pytest.approx(1 + (BLOCK - 1) * rare, rel=1e-6)
    # The draw of a block is a race of exponentials between the first and the rest.
    seeds = torch.arange(n)
    first, rest = (exponentials(seeds, seeds * 3, torch.tensor([[i]]), BLOCK_COUNTERS)[:, 0].double() for i in (0, 1))
    share = 1e-3
    won = (rest / share < first).sum().item()
    assert abs(won - n * share / (1 + share)) < 5 * math.sqrt(n * share)


def test_weights_are_added_in_pairs():
    """The order of the sum is part of the definition: float32 results that another order would not give."""
    g = torch.Generator().manual_seed(0)
    log_weights = as_blocks(-torch.rand(7, 3000, generator=g) * 9)
    seeds = torch.arange(7)
    got = block_scores(log_weights, seeds, seeds)
    largest = log_weights.numpy().max(-1)
    weights = (log_weights - torch.from_numpy(largest)[..., None]).exp().numpy()

    def total(row):
        return row[0] if len(row) == 1 else total(row[: len(row) // 2]) + total(row[len(row) // 2 :])

    sums = torch.from_numpy(np.array([[total(block) for block in row] for row in weights], dtype=np.float32))
    noise = exponentials(seeds, seeds, torch.arange(12)[None], BLOCK_COUNTERS)
    assert torch.equal(got, torch.from_numpy(largest) + (sums / noise).log())
    for row in range(7):
        assert torch.equal(
            block_scores(log_weights[row : row + 1], seeds[row : row + 1], seeds[row : row + 1])[0], got[row]
        )


@pytest.mark.parametrize(
    "vocab, dtype", [(1, torch.float32), (255, torch.float16), (256, torch.float32), (257, torch.bfloat16)]
)
def test_top_k_1_is_the_largest_and_extremes_do_not_overflow(vocab, dtype):
    logits = torch.randn(30, vocab, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[torch.arange(30), torch.arange(30) * 7 % vocab] = 9.0
    expected = torch.arange(30) * 7 % vocab
    for temperature in (1e-6, 0.6, 1e3):
        got = sample(logits, *tensors(30, top_k=1, temperature=temperature, seeds=range(30)))
        assert torch.equal(got, expected)
    far = (logits.float() * 1100).to(dtype)  # about 1e4
    assert torch.equal(sample(far, *tensors(30, temperature=1e-6, seeds=range(30))), expected)
    hot = sample(far, *tensors(30, temperature=1e3, seeds=range(30)))
    assert ((hot >= 0) & (hot < vocab)).all()


def test_the_chi_square_bound_notices_a_wrong_distribution():
    """The test above can fail: its own draws against a temperature 3 % off."""
    draws, vocab = 40_000, 50
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)).mul(2)
    tokens = sample(logits.expand(draws, vocab), *tensors(draws, temperature=1.03, seeds=range(draws)))
    expected = logits.double().softmax(0).numpy() * draws
    assert not chi_square_is_plausible(np.bincount(tokens.numpy(), minlength=vocab), expected)


def test_successive_draws_are_independent():
    """Pairs of draws of one seed at neighbouring positions, and of neighbouring seeds at one position."""
    draws, vocab = 40_000, 6
    logits = torch.tensor([0.0, 0.5, 1.0, 0.2, -1.0, 0.7])
    p = logits.double().softmax(0)
    expected = torch.outer(p, p).flatten().numpy() * (draws // 2)
    for counters in (
        dict(positions=range(draws)),
        dict(seeds=range(draws)),
        dict(seeds=[i << 32 for i in range(draws)]),
    ):
        tokens = sample(logits.expand(draws, vocab), *tensors(draws, **counters)).view(-1, 2)
        counts = np.bincount((tokens[:, 0] * vocab + tokens[:, 1]).numpy(), minlength=vocab * vocab)
        assert chi_square_is_plausible(counts, expected)


def varied_batch(rows, vocab, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)

    def choose(values):
        return torch.tensor(values)[torch.randint(len(values), (rows,), generator=generator)]

    logits = (torch.randn(rows, vocab, generator=generator) * 2).to(device)
    return logits, tensors(
        rows,
        temperature=choose([0.0, 0.3, 1.0, 5.0]),
        top_k=choose([0, -1, 1, 20, vocab, 5 * vocab]),
        top_p=choose([1.0, 0.5, 0.95]),
        min_p=choose([0.0, 0.001, 0.2]),
        seeds=torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator),
        positions=torch.randint(0, 40000, (rows,), generator=generator),
        device=device,
    )


def take(logits, arguments, rows):
    return logits[rows].clone(), tuple(a[rows].clone() for a in arguments)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [61, 32771])  # of the larger one 64 rows are a chunk
def test_a_row_draws_the_same_whatever_else_is_in_the_batch(vocab, device):
    rows = 256 if vocab < 2000 or device == "cuda" else 80
    logits, arguments = varied_batch(rows, vocab, device)
    assert vocab < 2000 or rows > rows_per_chunk(vocab)
    whole = sample(logits, *arguments)
    assert torch.equal(sample(logits.bfloat16(), *arguments), sample(logits.bfloat16().float(), *arguments))
    for i in range(0, rows, 1 if vocab < 2000 and device == "cpu" else 7):
        one_logits, one = take(logits, arguments, slice(i, i + 1))
        assert sample(one_logits, *one) == whole[i]
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).to(device)
    some_logits, some = take(logits, arguments, order[: rows // 2 + 3])
    assert torch.equal(sample(some_logits, *some), whole[order[: rows // 2 + 3]])


def test_none_is_the_same_as_off_in_every_row():
    logits, (temperature, _, _, _, seeds, positions) = varied_batch(200, 300)
    without = sample(logits, temperature, None, None, None, seeds, positions)
    off = tensors(200, top_k=0, top_p=1.0, min_p=0.0)[1:4]
    assert torch.equal(sample(logits, temperature, *off, seeds, positions), without)


def test_seed_and_position_matter_to_the_last_bit():
    logits = torch.zeros(1, 1000)

    def draw(seed, position):
        return sample(logits, *tensors(1, seeds=seed, positions=position)).item()

    values = [draw(seed, position) for seed in (0, 1, 1 << 32, 1 << 62, -1) for position in (0, 1, 1 << 31)]
    assert len(set(values)) >= 13  # of 15; two of them may meet by chance
    assert draw(7, 9) == draw(7, 9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_lowest_of_equal_maxima(dtype, device):
    logits = torch.randn(64, 1003, generator=torch.Generator().manual_seed(0)).to(dtype)
    first = torch.randint(0, 500, (64,), generator=torch.Generator().manual_seed(1))
    for offset in (0, 1, 17, 400):
        logits[torch.arange(64), first + offset] = 9.0
    got = sample(logits.to(device), *tensors(64, temperature=0.0, top_k=3, top_p=0.5, seeds=range(64), device=device))
    assert torch.equal(got.cpu(), first)


def test_logits_are_left_alone_and_odd_ones_give_valid_ids():
    logits, arguments = varied_batch(6, 100)
    logits[0] = -torch.inf
    logits[1] = torch.nan
    logits[2, 5] = torch.inf
    logits[3, :] = -torch.inf
    logits[3, 77] = 0.0
    before = logits.clone()
    got = sample(logits, *arguments)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    assert ((got >= 0) & (got < 100)).all() and got[3] == 77
    assert sample(logits[:0], *(a[:0] for a in arguments)).shape == (0,)


@pytest.mark.gpu
def test_a_cuda_graph_captures_it_and_nothing_synchronises():
    logits, arguments = varied_batch(40, 151_936, "cuda")
    sample(logits, *arguments)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        sample(logits, *arguments)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = sample(logits, *arguments)
    for seed in (1, 2):
        new_logits, new = varied_batch(40, 151_936, "cuda", seed)
        logits.copy_(new_logits)
        for static, fresh in zip(arguments, new):
            static.copy_(fresh)
        graph.replay()
        assert torch.equal(got, sample(new_logits, *new))


@pytest.mark.gpu
def test_workspace_is_a_small_multiple_of_a_chunk():
    logits, arguments = varied_batch(256, 151_936, "cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sample(logits, *arguments)
    assert torch.cuda.max_memory_allocated() - before < 300 * 2**20
