"""The C++ sampler draws the tokens of the reference: the same random numbers, the same filters."""

import pytest
import torch

from nanovllm.kernels import resolve_kernels
from nanovllm.kernels.cpu.build import cpu_support
from nanovllm.kernels.ops.sample import sample

if (reason := cpu_support(torch.device("cpu"))) is not None:
    pytest.skip(reason, allow_module_level=True)

ROWS = 30
FILTERS = {
    "none": {}, "top-k": dict(top_k=50), "top-p": dict(top_p=0.95), "min-p": dict(min_p=0.05),
    "all": dict(top_k=20, top_p=0.9, min_p=0.02), "greedy": dict(temperature=0.0), "cold": dict(temperature=1e-3),
    "top-p 0": dict(top_p=0.0), "top-k 1": dict(top_k=1), "off": dict(top_k=0, top_p=1.0, min_p=0.0),
}  # fmt: skip


def arguments(temperature=0.8, top_k=None, top_p=None, min_p=None, rows=ROWS):
    def column(value, dtype=torch.float32):
        return None if value is None else torch.full((rows,), value, dtype=dtype)

    numbers = torch.arange(rows) * 7919
    return column(temperature), column(top_k, torch.int32), column(top_p), column(min_p), numbers << 29, numbers


def by(provider, logits, *args):
    with sample.use(provider):
        return sample(logits, *args)


@pytest.mark.parametrize("vocab", [1, 100, 256, 257, 5000])
@pytest.mark.parametrize("filters", FILTERS.values(), ids=FILTERS.keys())
def test_tokens_are_those_of_the_reference(filters, vocab):
    for scale in (0.02, 1.0, 8.0):  # all alike, a model's, one token far ahead
        logits = torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(vocab)) * scale
        logits[1::3, ::7] = -torch.inf
        logits[::4] = logits[::4].round()  # ties
        assert torch.equal(by("cpu", logits, *arguments(**filters)), by("native", logits, *arguments(**filters)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_taken(dtype, caplog):
    """Those of models that run op by op, such as with ranks; many of them are equal."""
    logits = torch.randn(ROWS, 5000, generator=torch.Generator().manual_seed(3)).to(dtype)
    for filters in FILTERS.values():
        assert torch.equal(by("cpu", logits, *arguments(**filters)), by("native", logits, *arguments(**filters)))
    assert resolve_kernels(torch.device("cpu")).sample(logits, *arguments()).shape == (ROWS,) and not caplog.records


def test_a_row_depends_on_nothing_else():
    logits = torch.randn(ROWS, 2000)
    temperature, _, top_p, _, seeds, positions = args = arguments(top_p=0.9)
    every = by("cpu", logits, *args)
    for i in range(ROWS):
        one = slice(i, i + 1)
        row = by("cpu", logits[one], temperature[one], None, top_p[one], None, seeds[one], positions[one])
        assert row.item() == every[i].item()
    strided = torch.cat((logits, logits), 1)[:, :2000]
    assert torch.equal(by("cpu", strided, *args), every)
    assert torch.equal(by("cpu", logits.T.contiguous().T, *args), every)


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_gives_some_valid_id(value):
    logits = torch.full((ROWS, 300), value)
    for filters in FILTERS.values():
        got = by("cpu", logits, *arguments(**filters))
        assert ((got >= 0) & (got < 300)).all()


@pytest.mark.parametrize("wrong", [dict(temperature=-1.0), dict(top_p=1.5), dict(min_p=float("nan"))], ids=str)
def test_wrong_parameters_are_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        by("cpu", torch.randn(ROWS, 10), *arguments(**wrong))
