"""Which tokens the filters and penalties of the op `sample` keep, and with which weights."""

import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from nanovllm.kernels.ops.sample import apply_penalties, filter_logits, sample
from tests.kernels.ops.sampling import reference_probabilities, tensors

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
    """Whether the choice is clear: no cumulated mass near top_p and no ratio near min_p, where float32 rounds."""
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


@pytest.mark.parametrize("seed", range(2))
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
