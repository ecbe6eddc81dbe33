"""Draws of `generate(do_sample=True)` on a patched model: their distribution is that of transformers, seeds repeat
them, and what the op does not do stays with transformers.
"""

import copy
import io

import numpy as np
import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from transformers.generation.logits_process import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from nanovllm.adapters.transformers import OPS, apply
from nanovllm.kernels import all_ops
from nanovllm.kernels.ops.sample import filter_logits
from tests.adapters.models import prompts, shared, tiny
from tests.devices import DEVICE
from tests.kernels.ops.sampling import chi_square_is_plausible
from tests.providers import registered

NEW = 6
USUAL = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
CASES = {
    "no filter": {"top_k": 0},
    "temperature": {"top_k": 0, "temperature": 0.7},
    "a high temperature": {"top_k": 0, "temperature": 2.5},
    "top-k": {"top_k": 5},
    "top-k beyond the vocabulary": {"top_k": 1000},
    "top-p": {"top_k": 0, "top_p": 0.8},
    "min-p": {"top_k": 0, "min_p": 0.1},
    "top-p 0": {"top_k": 0, "top_p": 0.0},
    "usual": USUAL,
    "all": {"temperature": 1.7, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    "normalised": {**USUAL, "renormalize_logits": True},
    "penalties": {**USUAL, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    "forbidden": {**USUAL, "suppress_tokens": list(range(3, 60)), "bad_words_ids": [[70]]},
    "top-h before": {**USUAL, "top_h": 0.5},
    "typical after": {**USUAL, "typical_p": 0.6},
    "eta after": {**USUAL, "eta_cutoff": 0.05, "epsilon_cutoff": 0.02},
}


class OddTopK(TopKLogitsWarper):
    """It has the attributes of one that is known."""

    def __call__(self, input_ids, scores):
        return super().__call__(input_ids, -scores)


class Rounding(LogitsProcessor):
    """Many scores are equal."""

    def __call__(self, input_ids, scores):
        return scores.round()


LAST = {"top_k": 0, "min_p": 0.02}
OWN_PROCESSORS = {
    "a second temperature": ([TemperatureLogitsWarper(1.3)], USUAL),
    "a second temperature, the last": ([TopPLogitsWarper(0.9), TemperatureLogitsWarper(1.3)], LAST),
    "another class": ([OddTopK(30)], LAST),
    "two tokens kept": ([TopPLogitsWarper(0.0, min_tokens_to_keep=2)], LAST),
    "another value": ([TopKLogitsWarper(5, filter_value=-2.0)], {"top_k": 0}),
    "equal scores": ([Rounding()], {**USUAL, "top_p": 0.7}),
}


@pytest.fixture
def model():
    return tiny("Qwen3").requires_grad_(False)


def theirs(model, ids, **options):
    """The probabilities of the next token, as transformers computes them: [rows, vocabulary]."""
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=True, output_scores=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    return out.scores[0].softmax(-1)


def sampled(model, seed=5, given=None, **options):
    torch.manual_seed(seed)
    return model.generate(**(given or prompts()), max_new_tokens=NEW, do_sample=True, **{**USUAL, **options})


def recording(calls):
    def provider(*args):
        calls.append([x if x is None else x.clone() for x in args])
        return all_ops()["sample"].native(*args)

    return provider


@pytest.mark.parametrize("case", [*CASES, *OWN_PROCESSORS])
def test_the_op_gets_the_distribution_of_transformers(case):
    """In every step, up to the rounding of float32. Of equal scores top-p may keep others, but as many."""
    model, calls = shared("Qwen3"), []
    own, options = ([], CASES[case]) if case in CASES else OWN_PROCESSORS[case]
    options = {**options, "logits_processor": LogitsProcessorList(own)}
    with registered("sample", recording(calls)), apply(model, ops={"sample": "mine"}):
        torch.manual_seed(5)
        tokens = model.generate(**prompts(), max_new_tokens=NEW, do_sample=True, **options)
    assert len(calls) == NEW
    for step, call in enumerate(calls):
        got = filter_logits(*call[:5]).softmax(-1)
        expected = theirs(model, tokens[:, : 9 + step], **options)
        if case == "equal scores":
            got, expected = got.sort(-1).values, expected.sort(-1).values
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-6)
        assert torch.equal(got > 0, expected > 0)
    seeds, positions = zip(*(call[5:] for call in calls))
    assert len(seeds[0].unique()) == 3 and all(torch.equal(seed, seeds[0]) for seed in seeds)
    assert [position.tolist() for position in positions] == [[step] * 3 for step in range(NEW)]


@pytest.mark.parametrize("provider", ["native", "usual", pytest.param("triton", marks=pytest.mark.triton)])
@pytest.mark.parametrize("case", ["no filter", "usual", "all", "penalties", "typical after"])
def test_frequencies(case, provider):
    """Of the first token, in rows of the same prompt."""
    device = DEVICE if provider == "triton" else "cpu"
    model = tiny("Llama").requires_grad_(False).to(device)
    ids, draws = prompts(batch=1)["input_ids"].to(device), 300 if provider == "triton" and device == "cpu" else 4000
    expected = theirs(model, ids, **CASES[case])[0].double().cpu().numpy() * draws
    with apply(model, ops={"sample": () if provider == "usual" else provider}) as report:
        assert [row.op for row in report.replaced] == ["sample"]
        torch.manual_seed(1)
        tokens = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=True, num_return_sequences=draws,
            **CASES[case],
        )  # fmt: skip
    counts = np.bincount(tokens[:, -1].cpu().numpy(), minlength=99)
    assert counts[expected == 0].sum() == 0
    assert chi_square_is_plausible(counts, expected)


@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static", "disable_compile": True}], ids=str)
def test_a_seed_repeats_the_draws(model, cache, captured):
    with apply(model, ops=OPS):
        first, again, other = (sampled(model, seed, **cache) for seed in (5, 5, 6))
        following = model.generate(**prompts(), max_new_tokens=NEW, do_sample=True, **USUAL, **cache)
    assert torch.equal(first, again) and not torch.equal(first, other) and not torch.equal(first, following)
    with apply(model, ops=OPS), torch.inference_mode():
        assert torch.equal(sampled(model, **cache), first)


def test_rows_end_at_different_steps(model):
    """What follows an end is padding; the rows still going on draw what they would have drawn."""
    with apply(model, ops="sample"):
        whole = sampled(model)
        end = int(whole[1, 9 + 2])
        got = sampled(model, eos_token_id=end, pad_token_id=0)
    lengths = []
    for row, drawn in zip(got[:, 9:].tolist(), whole[:, 9:].tolist()):
        length = drawn.index(end) + 1 if end in drawn else len(row)
        assert row == [*drawn[:length], *[0] * (len(row) - length)]
        lengths.append(length)
    assert len(set(lengths)) > 1 and max(lengths) == got.shape[1] - 9


def test_what_a_call_returns(model):
    class Streamer:
        got: list[int] = []

        def put(self, tokens):
            self.got += tokens.flatten().tolist()

        def end(self):
            self.got.append(-1)

    given = prompts(batch=1)
    with apply(model, ops="sample") as report:
        tokens = sampled(model, given=given)
        assert torch.equal(sampled(model, given=given, streamer=Streamer()), tokens)
        assert Streamer.got == [*tokens[0].tolist(), -1]
        out = sampled(model, given=given, return_dict_in_generate=True, output_logits=True, output_scores=False)
        assert torch.equal(out.sequences, tokens) and len(out.logits) == NEW and out.scores is None
        assert not any("transformers drew" in note for note in report.notes)
    expected = model(tokens[:, :-1]).logits[0, -NEW:]
    torch.testing.assert_close(torch.cat(out.logits), expected, rtol=0, atol=1e-4)


LEFT = {
    "beams": ({"num_beams": 2}, "its mode is beam_sample"),
    "scores": ({"output_scores": True, "return_dict_in_generate": True}, "it returns the scores"),
    "lookup": ({"prompt_lookup_num_tokens": 2}, "its mode is assisted_generation"),
    "drafts": ({"assistant_model": ...}, "did something else with the scores"),
}


@pytest.mark.parametrize("case", LEFT)
def test_what_stays_with_transformers(case, model):
    """The same tokens for a seed, and the report says why."""
    options, why = LEFT[case]
    if "assistant_model" in options:
        options = {"assistant_model": tiny("Qwen3", seed=1).requires_grad_(False)}
    given = prompts(batch=1)
    expected = sampled(model, given=given, **options)
    with apply(model, ops="sample") as report:
        (row,) = report.replaced
        assert (row.module, row.op, row.count) == ("Qwen3ForCausalLM", "sample", 1)
        for _ in range(2):
            got = sampled(model, given=given, **options)
        assert sum(why in note for note in report.notes) == 1 and why in " ".join(str(report).split())
    for a, b in zip(*([x] if isinstance(x, torch.Tensor) else [x.sequences, *x.scores] for x in (got, expected))):
        assert type(a) is torch.Tensor and torch.equal(a, b)


def test_a_greedy_call_and_training(model):
    provider_calls = []
    with registered("sample", recording(provider_calls)), apply(model, ops={"sample": "mine"}) as report:
        model.generate(**prompts(), max_new_tokens=2, do_sample=False)
        assert not any("transformers drew" in note for note in report.notes)
        model.train()
        sampled(model)
        assert any("training mode" in note for note in report.notes) and not provider_calls
        model.eval()
        sampled(model)
        assert len(provider_calls) == NEW


def test_undo_and_exclude_restore_the_draws(model):
    expected, attributes = sampled(model), set(model.__dict__)
    with apply(model, ops="sample"):
        assert not torch.equal(sampled(model), expected)
        other, file = copy.deepcopy(model), io.BytesIO()
        assert torch.equal(sampled(other), expected)
        with pytest.raises(ValueError, match="applied to it before"):
            apply(model, ops="sample")
        try:
            torch.save(model, file)
        except AttributeError:  # the package `kernels` puts local classes into a model
            file = None
    assert torch.equal(sampled(model), expected) and set(model.__dict__) == attributes
    for exclude in ("sample", ["sample"], "Qwen3ForCausalLM"):
        with apply(model, ops=OPS, exclude=exclude) as report:
            assert "sample" not in {row.op for row in report.rows}
            assert torch.equal(sampled(model), expected)
    with pytest.raises(ValueError, match="exclude: it names every op"):
        apply(model, ops="sample", exclude="sample")
    if file is not None:
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert torch.equal(sampled(loaded), expected)
        with apply(loaded, ops="sample") as report:
            assert report.replaced and not torch.equal(sampled(loaded), expected)


def test_a_model_within_another_module(model):
    class Around(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

    calls = []
    with registered("sample", recording(calls)), apply(Around(), ops={"sample": "mine"}):
        sampled(model)
    assert len(calls) == NEW


def test_a_method_of_other_code_is_left(model):
    model._get_logits_processor = lambda *args, **kwargs: type(model)._get_logits_processor(model, *args, **kwargs)
    expected = sampled(model)
    with apply(model, ops="sample") as report:
        assert not report.replaced and "replaced by other code" in report.left[0].why
        assert torch.equal(sampled(model), expected)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_scores_without_a_distribution_are_an_error(value, model):
    """As without the op: no token is drawn from them."""

    class Spoiling(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.index_fill(0, torch.tensor([1]), value)

    for patched in (False, True):
        with apply(model, ops="sample" if patched else "rms_norm"), pytest.raises(RuntimeError):
            sampled(model, logits_processor=LogitsProcessorList([Spoiling()]))


def test_on_a_cpu_the_compiled_kernel_is_put_in_if_it_is_named(model):
    """It is compiled at its first use, for which a program that only calls `apply` would wait."""
    if torch.cuda.is_available():
        pytest.skip("the model could be on a GPU")
    with apply(model) as report:
        assert not report.replaced
    if all_ops()["sample"].providers["cpu"].support(torch.device("cpu")) is None:
        with apply(model, ops={"sample": "cpu"}) as report:
            assert [(row.op, row.provider) for row in report.replaced] == [("sample", "cpu")]
