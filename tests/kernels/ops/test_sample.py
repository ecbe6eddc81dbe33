"""The op `sample`: which tokens survive, how often each is drawn, and that a row depends on nothing but itself."""

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nanovllm.kernels.ops.sample import (
    BLOCK,
    BLOCK_COUNTERS,
    apply_penalties,
    as_blocks,
    block_scores,
    exponentials,
    filter_logits,
    philox,
    sample,
    uniform,
)

# The package's attribute of this name is the op; the module holds the chunk size.
SAMPLE_MODULE = sys.modules["nanovllm.kernels.ops.sample"]
DEVICES = ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])
REPO = Path(__file__).resolve().parents[3]


def tensors(rows, top_k=None, top_p=None, min_p=None, temperature=1.0, seeds=0, positions=0, device="cpu"):
    """Arguments of `sample` after the logits, from scalars (the same in every row) or sequences."""

    def column(value, dtype):
        if value is None:
            return None
        return torch.as_tensor(value, dtype=dtype).expand(rows).contiguous().to(device)

    return (
        column(temperature, torch.float32),
        column(top_k, torch.int32),
        column(top_p, torch.float32),
        column(min_p, torch.float32),
        column(seeds, torch.int64),
        column(positions, torch.int64),
    )


def reference_probabilities(logits, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """Probabilities after the filters, in Python floats: a dict {token: probability} of the survivors."""
    best = max(logits)
    weights = {i: math.exp((x - best) / temperature) for i, x in enumerate(logits) if x > -math.inf}
    order = sorted(weights, key=lambda i: (-logits[i], i))
    if top_k is not None and 0 < top_k < len(logits):
        kth = sorted(logits, reverse=True)[top_k - 1]
        order = [i for i in order if logits[i] >= kth]
    if top_p is not None and top_p < 1:
        total, before, kept = math.fsum(weights[i] for i in order), 0.0, []
        for i in order:
            if before >= top_p * total and kept:
                break
            kept.append(i)
            before += weights[i]
        order = kept
    if min_p is not None:
        order = [i for i in order if weights[i] >= min_p]
    total = math.fsum(weights[i] for i in order)
    return {i: weights[i] / total for i in order}


def chi_square_is_plausible(counts, expected):
    """Pearson's test at about one in a million; cells below five expected are pooled (Wilson-Hilferty quantile)."""
    small = expected < 5
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    df = len(counts) - 1
    if df == 0:
        return True
    statistic = ((counts - expected) ** 2 / expected).sum()
    return statistic < df * (1 - 2 / (9 * df) + 4.75 * math.sqrt(2 / (9 * df))) ** 3


# ------------------------------------------------------------------------------------------------ random numbers


@pytest.mark.parametrize(
    "rounds, counter, key, words",
    [  # kat_vectors of Random123, "philox4x32 7" and "philox4x32 10"
        (7, "00000000 00000000 00000000 00000000", "00000000 00000000", "5f6fb709 0d893f64 4f121f81 4f730a48"),
        (7, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "5207ddc2 45165e59 4d8ee751 8c52f662"),
        (7, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "4dfccaba 190a87f0 c47362ba b6b5242a"),
        (10, "00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        (10, "ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (10, "243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
@pytest.mark.parametrize("device", DEVICES)
def test_philox_gives_the_published_words(rounds, counter, key, words, device):
    counter = [torch.tensor([int(w, 16)], device=device) for w in counter.split()]
    low, high = (int(w, 16) for w in key.split())
    signed = np.array([high << 32 | low], dtype=np.uint64).view(np.int64)
    got = philox(*counter, torch.from_numpy(signed).to(device), rounds)
    assert [f"{w.item():08x}" for w in got] == words.split()


def test_uniform_is_inside_the_open_interval_and_as_documented():
    words = torch.tensor([0, 1, 2, 3, 2**24 + 1, 2**31, 2**32 - 257, 2**32 - 256, 2**32 - 1])
    words = torch.cat(
        [words, torch.arange(4096), torch.randint(2**32, (100_000,), generator=torch.Generator().manual_seed(0))]
    )
    u = uniform(words)
    assert u.dtype == torch.float32 and u.min() == 2.0**-33 and u.max() == 1 - 2.0**-24
    numpy = np.minimum(words.numpy().astype(np.uint32).astype(np.float32) + np.float32(0.5), np.float32(2**32 - 256))
    assert np.array_equal(u.numpy(), numpy * np.float32(2.0**-32))
    small = torch.arange(2**16)  # no bit is lost
    assert torch.equal(uniform(small).double() * 2.0**32, small + 0.5)


@pytest.mark.parametrize("first_counter", [0, BLOCK_COUNTERS])
def test_variates_are_exponential(first_counter):
    values = (
        exponentials(torch.arange(100), torch.arange(100) * 7, torch.arange(5000)[None], first_counter)
        .double()
        .flatten()
    )
    assert values.isfinite().all() and values.min() > 0
    cdf = -torch.expm1(-values.sort().values)
    ranks = (torch.arange(len(cdf)) + 0.5) / len(cdf)
    # Kolmogorov-Smirnov; sqrt(n) * distance exceeds 2.6 once in a million.
    assert (cdf - ranks).abs().max() * math.sqrt(len(cdf)) < 2.6


def test_the_extremes_of_random_words_are_finite():
    values = -torch.log1p(-uniform(torch.tensor([0, 2**32 - 1])))
    assert values.tolist() == pytest.approx([2.0**-33, 24 * math.log(2)]) and values.log().isfinite().all()


def test_which_word_an_index_gets():
    seeds, positions = torch.tensor([5, -7]), torch.tensor([3, 2**31])
    zero = torch.tensor(0)
    for first in (0, BLOCK_COUNTERS):
        values = exponentials(seeds, positions, torch.arange(3000)[None], first)
        some = exponentials(seeds, positions, torch.tensor([[700, 2, 2999], [1024, 0, 5]]), first)
        assert torch.equal(some, torch.stack([values[0, [700, 2, 2999]], values[1, [1024, 0, 5]]]))
        for row, index in ((0, 0), (0, 255), (1, 256), (1, 1023), (0, 1024), (1, 2999)):
            counter = torch.tensor(first + index // 1024 * 256 + index % 256)
            word = philox(counter, positions[row], zero, zero, seeds[row])[index % 1024 // 256]
            assert values[row, index] == -torch.log1p(-uniform(word))


def test_no_counter_serves_a_block_and_a_column():
    largest = 2**31 - 1  # more columns than a row may have
    assert largest // (4 * BLOCK) * BLOCK + BLOCK - 1 < BLOCK_COUNTERS
    assert BLOCK_COUNTERS + largest // BLOCK // 4 + BLOCK < 2**32


TRITON_CHECK = """
import sys

import numpy as np
import torch
import triton
import triton.language as tl

from nanovllm.kernels.ops.sample import philox, uniform


@triton.jit
def kernel(seeds, positions, words, uniforms, vocab, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    position = tl.load(positions + row).to(tl.uint32)
    zero = columns.to(tl.uint32) * 0
    word, _, _, _ = tl.philox(tl.load(seeds + row), columns.to(tl.uint32), zero + position, zero, zero)
    u = tl.minimum(word.to(tl.float32) + 0.5, 4294967040.0) * 2.3283064365386963e-10
    tl.store(words + row * vocab + columns, word.to(tl.int64), mask=columns < vocab)
    tl.store(uniforms + row * vocab + columns, u, mask=columns < vocab)


device = sys.argv[1]
vocab = 1000
seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF, 1 << 32, 42], device=device)
positions = torch.tensor([0, 1, 2, 40000, 2**31, 2**32 - 1, 7, 151935], device=device)
words = torch.empty(len(seeds), vocab, dtype=torch.int64, device=device)
uniforms = torch.empty(len(seeds), vocab, device=device)
kernel[(len(seeds),)](seeds, positions, words, uniforms, vocab, BLOCK=1024)
zero = torch.zeros(1, 1, dtype=torch.int64, device=device)
ours = philox(torch.arange(vocab, device=device)[None], positions[:, None], zero, zero, seeds[:, None])[0]
assert torch.equal(words, ours), "words differ"
assert torch.equal(uniforms.view(torch.int32), uniform(ours).view(torch.int32)), "uniforms differ"
print("equal")
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("device", DEVICES)
def test_a_triton_kernel_draws_the_same_bits(device, tmp_path):
    # In a process of its own: the interpreter is switched on by an environment variable that triton reads once.
    script = tmp_path / "triton_philox.py"
    script.write_text(TRITON_CHECK)
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([str(REPO), os.environ.get("PYTHONPATH", "")]))
    env["TRITON_INTERPRET"] = "1" if device == "cpu" else "0"
    done = subprocess.run([sys.executable, script, device], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and done.stdout.strip() == "equal", done.stdout + done.stderr


# ------------------------------------------------------------------------------------------------ which survive

logit = st.one_of(st.integers(-8, 8).map(lambda i: i / 2), st.sampled_from([-1000.0, 1000.0, 0.0, -math.inf, 300.25]))
rows_of_logits = st.lists(logit, min_size=1, max_size=40).filter(lambda row: max(row) > -math.inf)
filters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.25, 0.5, 1.0, 1.5, 4.0]),
        "top_k": st.one_of(st.none(), st.integers(-1, 45)),
        "top_p": st.one_of(st.none(), st.floats(0.01, 1.0)),
        "min_p": st.one_of(st.none(), st.floats(0.0, 1.0)),
    }
)


def survivors(row, **arguments):
    return filter_logits(torch.tensor([row]), *tensors(1, **arguments)[:4])[0]


def away_from_boundaries(row, temperature, top_k, top_p, min_p):
    """Whether the choice is clear: no cumulated mass near top_p, no ratio near min_p, where float32 may round across."""
    before = reference_probabilities(row, temperature, top_k)
    if top_p is not None and top_p < 1:
        mass = np.cumsum(sorted(before.values(), reverse=True))
        if np.abs(mass - top_p).min() < 2e-3:
            return False
    best = max(before.values())
    return min_p is None or all(abs(w / best - min_p) > 2e-3 for w in before.values())


@settings(max_examples=300, deadline=None)
@given(rows_of_logits, filters)
def test_survivors_and_their_weights_match_a_slow_reference(row, arguments):
    assume(away_from_boundaries(row, **arguments))
    expected = reference_probabilities(row, **arguments)
    log_weights = survivors(row, **arguments).double()
    finite = {i for i, w in enumerate(log_weights.tolist()) if w > -math.inf}
    # Weights that underflow entirely are nobody's concern.
    assert finite >= {i for i, p in expected.items() if p > 1e-30}
    assert all(log_weights[i] < -20 for i in finite - expected.keys())
    probabilities = log_weights.softmax(0)
    for i, p in expected.items():
        assert probabilities[i].item() == pytest.approx(p, rel=1e-4, abs=1e-12)


@settings(max_examples=300, deadline=None)
@given(rows_of_logits, filters)
def test_transformers_logits_processors_keep_the_same_tokens(row, arguments):
    transformers = pytest.importorskip("transformers")
    assume(away_from_boundaries(row, **arguments))
    scores = transformers.TemperatureLogitsWarper(arguments["temperature"])(None, torch.tensor([row]))
    if arguments["top_k"] is not None and arguments["top_k"] > 0:
        scores = transformers.TopKLogitsWarper(arguments["top_k"])(None, scores)
    if arguments["top_p"] is not None and arguments["top_p"] < 1:
        scores = transformers.TopPLogitsWarper(arguments["top_p"])(None, scores)
    if arguments["min_p"] is not None and arguments["min_p"] > 0:
        scores = transformers.MinPLogitsWarper(arguments["min_p"])(None, scores)
    theirs = torch.tensor(row)[scores[0] > -torch.inf]
    ours = torch.tensor(row)[survivors(row, **arguments) > -torch.inf]
    # As values, not ids: which of several equal tokens transformers' top-p keeps depends on an unstable sort.
    assert ours.sort().values.tolist() == theirs.sort().values.tolist()


@pytest.mark.parametrize("seed", range(5))
def test_transformers_agrees_on_many_random_rows(seed):
    transformers = pytest.importorskip("transformers")
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(200, 300, generator=generator) * 3).bfloat16().float()  # bfloat16 makes ties
    for k, p, m in [(7, 1.0, 0.0), (0, 0.83, 0.0), (0, 1.0, 0.07), (40, 0.6, 0.0), (25, 0.9, 0.1), (299, 0.999, 0.003)]:
        ours = filter_logits(logits, *tensors(200, top_k=k, top_p=p, min_p=m, temperature=0.7)[:4]) > -torch.inf
        scores = logits / 0.7
        scores = transformers.TopKLogitsWarper(k)(None, scores) if k else scores
        scores = transformers.TopPLogitsWarper(p)(None, scores) if p < 1 else scores
        scores = transformers.MinPLogitsWarper(m)(None, scores) if m else scores
        # A row in a few hundred has a cumulated mass within rounding of p.
        differ = [
            i
            for i in range(200)
            if sorted(logits[i][ours[i]].tolist()) != sorted(logits[i][scores[i] > -torch.inf].tolist())
        ]
        assert all(not away_from_boundaries(logits[i].tolist(), 0.7, k, p, m) for i in differ)
        assert len(differ) <= 4


def test_edges_of_the_filters():
    row = [1.0, 3.0, 3.0, 2.0, 3.0, -math.inf]

    def kept(**arguments):
        return (survivors(row, **arguments) > -torch.inf).nonzero().flatten().tolist()

    assert kept() == [0, 1, 2, 3, 4]
    assert kept(top_k=1) == [1, 2, 4]  # ties with the k-th stay
    assert kept(top_k=4) == [1, 2, 3, 4]
    assert kept(top_k=100) == kept(top_k=0) == kept(top_k=-1) == kept(top_p=1.0) == kept(min_p=0.0) == kept()
    assert kept(top_p=1e-9) == kept(top_p=0.0) == [1]  # always one, the lowest id
    assert kept(top_k=1, top_p=0.6) == [1, 2]
    assert kept(min_p=1.0) == [1, 2, 4]
    assert kept(min_p=math.exp(-1) + 1e-4) == [1, 2, 4] and kept(min_p=math.exp(-1) - 1e-4) == [1, 2, 3, 4]
    assert (survivors([0.0] * 4, top_p=0.5) > -torch.inf).tolist() == [
        True,
        True,
        False,
        False,
    ]  # mass equal to p suffices
    # top_p 1 is off, also for weights too small to count in the sum.
    assert survivors([0.0, -100.0, -math.inf], top_p=1.0).tolist() == [0.0, -100.0, -math.inf]
    assert survivors([-math.inf] * 3, top_k=2, top_p=0.5, min_p=0.5).isneginf().all()


def test_large_logits_and_tiny_temperatures_stay_exact():
    row = [30000.0, 29999.0, 10.0, -30000.0]
    assert survivors(row, temperature=1e-9)[0] == 0 and survivors(row, temperature=1e-45)[1:].isneginf().all()
    assert survivors(row)[:2].tolist() == [0.0, -1.0]
    got = sample(torch.tensor([row] * 64), *tensors(64, temperature=1e-9, top_p=0.9, seeds=range(64)))
    assert (got == 0).all()


# ------------------------------------------------------------------------------------------------ how often

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


@pytest.mark.parametrize("vary", ["seeds", "positions"])
@pytest.mark.parametrize("case", CASES)
def test_frequencies_match_the_filtered_softmax(case, vary):
    draws, vocab = 40_000, 50
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)).mul(2)
    logits[7] = logits[11]
    logits[20] = -torch.inf
    counters = {"seeds": 1234567890123, "positions": 5} | {vary: range(draws)}
    tokens = sample(logits.expand(draws, vocab), *tensors(draws, **CASES[case], **counters))
    expected = np.zeros(vocab)
    for i, p in reference_probabilities(logits.tolist(), **CASES[case]).items():
        expected[i] = p * draws
    counts = np.bincount(tokens.numpy(), minlength=vocab)
    assert counts[expected == 0].sum() == 0
    assert chi_square_is_plausible(counts, expected)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_frequencies_over_several_blocks(case, spread):
    """Tokens of every block, and the blocks themselves: of unequal weight, one of a single token, one of none."""
    draws, vocab = 20_000, 3 * BLOCK + 1
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(5)).mul(spread)
    logits[BLOCK : 2 * BLOCK] += torch.linspace(-3, 3, BLOCK)
    logits[2 * BLOCK : 3 * BLOCK] = -torch.inf
    tokens = sample(logits.expand(draws, vocab), *tensors(draws, **CASES[case], seeds=7, positions=range(draws)))
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
    """A likely token beside 100,000, each of 1e-9 of its weight: 1e-4 together, which single draws of 32 bits would hardly see."""
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


@pytest.mark.parametrize("vocab", [1, 255, 256, 257, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
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


# ------------------------------------------------------------------------------------------------ rows are alone


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
@pytest.mark.parametrize("vocab", [61, 1000, 32771])
def test_a_row_draws_the_same_whatever_else_is_in_the_batch(vocab, device):
    rows = 256 if vocab < 2000 or device == "cuda" else 80
    logits, arguments = varied_batch(rows, vocab, device)
    whole = sample(logits, *arguments)
    for i in range(0, rows, 1 if vocab < 2000 and device == "cpu" else 7):
        one_logits, one = take(logits, arguments, slice(i, i + 1))
        assert sample(one_logits, *one) == whole[i]
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).to(device)
    some_logits, some = take(logits, arguments, order[: rows // 2 + 3])
    assert torch.equal(sample(some_logits, *some), whole[order[: rows // 2 + 3]])


def test_chunks_do_not_show(monkeypatch):
    logits, arguments = varied_batch(100, 500)
    whole = sample(logits, *arguments)
    for rows in (1, 7, 99, 100):
        monkeypatch.setattr(SAMPLE_MODULE, "CHUNK_ELEMENTS", rows * 500)
        assert torch.equal(sample(logits, *arguments), whole)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_computed_in_float32(dtype):
    logits, arguments = varied_batch(50, 400)
    logits = logits.to(dtype)
    assert torch.equal(sample(logits, *arguments), sample(logits.float(), *arguments))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_workspace_is_a_small_multiple_of_a_chunk():
    logits, arguments = varied_batch(256, 151_936, "cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    sample(logits, *arguments)
    assert torch.cuda.max_memory_allocated() - before < 300 * 2**20


# ------------------------------------------------------------------------------------------------ penalties

token_lists = st.lists(st.integers(0, 11), max_size=12)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.floats(-20, 20, width=32), min_size=12, max_size=12),
    token_lists,
    token_lists,
    st.sampled_from([1.0, 1.3, 0.7, 2.0]),
    st.sampled_from([0.0, 0.5, -2.0]),
    st.sampled_from([0.0, 0.25, -1.5]),
)
def test_penalties_match_a_slow_reference(row, prompt, output, repetition, presence, frequency):
    expected = []
    for token, x in enumerate(row):
        if token in prompt or token in output:
            x = x / repetition if x > 0 else x * repetition
        expected.append(x - frequency * output.count(token) - presence * (token in output))
    mask = torch.zeros(1, 12, dtype=torch.bool)
    mask[0, prompt] = True
    counts = torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=12)[None].int()
    penalties = torch.tensor([[repetition], [presence], [frequency]])
    got = apply_penalties(torch.tensor([row]), mask, counts, *penalties)
    assert got[0].tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    if not presence and not frequency and prompt + output:
        transformers = pytest.importorskip("transformers")
        processor = transformers.RepetitionPenaltyLogitsProcessor(repetition)
        assert torch.equal(got, processor(torch.tensor([prompt + output]), torch.tensor([row])))


def test_neutral_penalties_change_no_bit():
    logits = torch.randn(3, 50)
    logits[0, 3] = -torch.inf
    mask, counts = torch.rand(3, 50) > 0.5, torch.randint(0, 5, (3, 50), dtype=torch.int32)
    got = apply_penalties(logits, mask, counts, torch.ones(3), torch.zeros(3), torch.zeros(3))
    assert torch.equal(got, logits)
