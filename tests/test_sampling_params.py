"""SamplingParams: what is accepted, what is normalised, and errors that name argument, value and remedy."""

import copy
import dataclasses
import inspect
import pickle

import numpy as np
import pytest

import nanovllm
from nanovllm.arguments import reject_unknown
from nanovllm.sampling_params import SamplingParams
from nanovllm.wording import brief


def test_defaults_are_plain_sampling():
    p = SamplingParams()
    assert (p.n, p.temperature, p.max_tokens, p.stop, p.stop_token_ids, p.seed) == (1, 1.0, 64, (), (), None)
    assert not (p.greedy or p.uses_filters or p.uses_penalties)


def test_values_are_normalised():
    numbers = dict(temperature=1, top_k=np.int32(5), top_p=np.float32(0.5), seed=np.int64(7))
    p = SamplingParams(**numbers, stop="END", stop_token_ids=[np.int64(3), 4])
    assert type(p.temperature) is float and type(p.top_k) is int and type(p.seed) is int and type(p.top_p) is float
    assert p.stop == ("END",) and p.stop_token_ids == (3, 4)
    assert all(type(i) is int for i in p.stop_token_ids)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


def test_positional_and_frozen():
    p = SamplingParams(2, 0.5)
    assert (p.n, p.temperature) == (2, 0.5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.temperature = 0.0
    with pytest.raises((AttributeError, TypeError)):
        p.unheard_of = 1


def test_copies_and_signature_survive_the_keyword_check():
    p = SamplingParams(temperature=0.3, stop=["x"])
    assert copy.deepcopy(p) == p and pickle.loads(pickle.dumps(p)) == p and hash(p) == hash(copy.copy(p))
    assert dataclasses.replace(p, top_k=3).top_k == 3
    assert list(inspect.signature(SamplingParams).parameters)[:3] == ["n", "temperature", "top_k"]
    with pytest.raises(ValueError, match="top_p=2"):
        dataclasses.replace(p, top_p=2)


@pytest.mark.parametrize(
    "kwargs, greedy, filters, penalties",
    [
        (dict(temperature=0), True, False, False),
        (dict(temperature=0, top_k=5, top_p=0.5, min_p=0.1), True, False, False),
        (dict(top_k=1), False, True, False),
        (dict(top_k=-1), False, False, False),
        (dict(top_p=0.99), False, True, False),
        (dict(min_p=0.01), False, True, False),
        (dict(repetition_penalty=1.1), False, False, True),
        (dict(presence_penalty=-0.1), False, False, True),
        (dict(frequency_penalty=0.1, temperature=0), True, False, True),
    ],
)
def test_properties(kwargs, greedy, filters, penalties):
    p = SamplingParams(**kwargs)
    assert (p.greedy, p.uses_filters, p.uses_penalties) == (greedy, filters, penalties)


NAN, INF = float("nan"), float("inf")
BAD = [
    ("n", [0, -1, 129, 1.0, True, "1", None]),
    ("temperature", [-0.1, NAN, INF, "0.5", True, None, 10**400]),
    ("top_k", [-2, 1.5, True, "5", None]),
    ("top_p", [0, 0.0, -0.5, 1.0001, NAN, "0.9", True, None]),
    ("min_p", [-0.01, 1.01, NAN, "0", False, None]),
    ("repetition_penalty", [0, -1, NAN, INF, "1", True, None]),
    ("presence_penalty", [-2.01, 2.01, NAN, "0", True, None]),
    ("frequency_penalty", [-2.01, 2.01, NAN, "0", True, None]),
    ("max_tokens", [0, -1, 1.5, True, "16"]),
    ("min_tokens", [-1, 0.0, True, "1", None, 65]),
    ("seed", [-2, -1.0, 2**63, 0.5, True, "seed"]),
    ("logprobs", [-2, 1.0, True, "5"]),
    ("prompt_logprobs", [-2, 1.0, True, "5"]),
    ("ignore_eos", [1, "True", None]),
    ("skip_special_tokens", [0, "no", None]),
    ("include_stop_str_in_output", [0, "no", None]),
    ("bad_words", ["damn", [""], ["a", "  "], [1], 5, {"a"}]),
    ("logit_bias", [5, [1], {-1: 1}, {"1": 1}, {True: 1}, {1.0: 1}]),
    ("stop", ["", ["a", ""], [1], 5, {"a"}, b"END"]),
    ("stop_token_ids", [5, "5", [-1], [1.0], [True], ["5"], {5}]),
]


@pytest.mark.parametrize("name, value", [(name, value) for name, values in BAD for value in values])
def test_bad_values_are_named_with_a_remedy(name, value):
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    stated = f"{name}={brief(value)}: "
    assert str(error.value).startswith(stated) and str(error.value).removeprefix(stated).strip()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (dict(stop=["x"] * 65), "stop: 65 strings, at most 64 are allowed; leave some out"),
        (dict(stop=["x", "y" * 1025]), "stop: a string of 1025 characters, at most 1024 are allowed; shorten it"),
        (dict(bad_words=["x"] * 1025), "bad_words: 1025 strings, at most 1024 are allowed; leave some out"),
        (dict(logit_bias=dict.fromkeys(range(1025), 1)), "logit_bias: 1025 tokens, at most 1024 are allowed; leave"),
        *((dict(logit_bias={3: bad}), f"logit_bias[3]={bad}: must be a number from -100 to 100; pass -100 to ban the")
          for bad in (-101, NAN, True)),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)  # fmt: skip
def test_lists_and_biases_have_limits(arguments, words):
    with pytest.raises(ValueError) as error:
        SamplingParams(**arguments)
    assert str(error.value).startswith(words)


@pytest.mark.parametrize(
    "arguments, answer",
    [
        (dict(max_new_tokens=5), "max_new_tokens=5: use max_tokens"),
        (dict(do_sample=False), "do_sample=False: use temperature=0 for do_sample=False"),
        (dict(use_beam_search=True), "use_beam_search=True: beam search is not supported; use n"),
        (dict(best_of=4), "best_of=4: use n and logprobs=0, and choose the best by cumulative_logprob"),
        (dict(guided_decoding={"json": {}}), "guided_decoding={'json': {}}: use structured_outputs"),
        (dict(logits_processors=[print]), "logits_processors=[<built-in function print>]: logits cannot be changed by"),
        (dict(extra_args={"a": 1}), "extra_args={'a': 1}: these are for plugins of another engine; leave it out"),
        (dict(guidance_scale=2), "guidance_scale=2: this change of the logits is not supported; use logit_bias"),
        (dict(detokenize=False), "detokenize=False: pass skip_tokenizer_init=True to LLM"),
    ],
    ids=str,
)
def test_keywords_of_other_libraries_are_answered_by_their_own_name(arguments, answer):
    with pytest.raises(TypeError) as error:
        SamplingParams(**arguments)
    assert str(error.value).startswith(f"SamplingParams got {answer}")


def test_keywords_of_vllm_that_change_nothing_are_taken(caplog):
    with caplog.at_level("INFO"):
        params = SamplingParams(detokenize=True, best_of=1, guided_decoding=None, temperature=0.5)
    assert params == SamplingParams(temperature=0.5)
    (record,) = caplog.records
    for word in ("detokenize=True", "best_of=1", "guided_decoding=None", "without effect"):
        assert word in record.message


def test_the_length_at_which_a_sequence_ends():
    assert SamplingParams(max_tokens=None, min_tokens=10**6).most_tokens(5, 100) == 100
    assert SamplingParams(max_tokens=7).most_tokens(5, 100) == 12 and SamplingParams().most_tokens(90, 100) == 100


def test_bias_and_bad_words_are_kept_as_plain_values():
    bias = {np.int64(3): 1, 4: np.float32(-0.5)}
    params = SamplingParams(logit_bias=bias, bad_words=["a b"])
    bias[5] = 1
    assert params.logit_bias == {3: 1.0, 4: -0.5} and params.bad_words == ("a b",) and params.changes_logits
    assert {type(key) for key in params.logit_bias} == {int} and isinstance(hash(params), int)
    assert not SamplingParams(logit_bias={}, bad_words=[]).changes_logits


def test_edge_values_are_accepted():
    SamplingParams(n=128, stop=["x" * 1024] * 64, temperature=1e-9, top_p=1e-9, min_p=1, top_k=10**12, seed=2**63 - 1)
    SamplingParams(top_p=1, presence_penalty=-2, frequency_penalty=2, max_tokens=5, min_tokens=5, stop=())
    SamplingParams(logprobs=0, prompt_logprobs=0, stop_token_ids=())


@pytest.mark.parametrize(
    "given, meant",
    [
        ("temprature", "temperature"),
        ("topk", "top_k"),
        ("TOP_P", "top_p"),
        ("repetition", "repetition_penalty"),
    ],
)
def test_an_unknown_keyword_names_the_nearest(given, meant):
    with pytest.raises(TypeError, match=f"SamplingParams.*'{given}'.*'{meant}'"):
        SamplingParams(**{given: 1})


def test_a_keyword_near_nothing_lists_the_known():
    with pytest.raises(TypeError, match="'xyzzy'; known are alpha, beta"):
        reject_unknown("Thing", ["alpha", "xyzzy"], ["alpha", "beta"])
    reject_unknown("Thing", ["beta"], (name for name in ["alpha", "beta"]))


def test_twice_given_and_too_many_remain_errors():
    with pytest.raises(TypeError, match="multiple values"):
        SamplingParams(1, n=2)
    with pytest.raises(TypeError):
        SamplingParams(*range(40))


def test_copies_as_vllm_makes_them():
    p = SamplingParams(temperature=0.3, stop=["x"], logit_bias={3: 1})
    clone = p.clone()
    assert clone == p and clone is not p and clone.logit_bias is not p.logit_bias
    assert SamplingParams.from_optional(n=None, top_p=None, temperature=0.5) == SamplingParams(temperature=0.5)
    assert SamplingParams.from_optional(max_tokens=None).max_tokens is None
    with pytest.raises(TypeError, match="unknown argument 'top_q'"):
        SamplingParams.from_optional(top_q=1)


def test_names_of_vllms_module():
    from nanovllm.sampling_params import StructuredOutputsParams

    assert StructuredOutputsParams is nanovllm.StructuredOutputsParams is nanovllm.StructuredOutputs
    module = nanovllm.sampling_params
    for find in (
        lambda: exec("from nanovllm.sampling_params import GuidedDecodingParams"), lambda: module.GuidedDecodingParams,
    ):  # fmt: skip
        with pytest.raises((ImportError, AttributeError)) as error:
            find()
        assert str(error.value).endswith("has no GuidedDecodingParams; from nanovllm import StructuredOutputs")
    assert not hasattr(module, "GuidedDecodingParams")  # no ImportError
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from nanovllm.sampling_params import Nothing  # noqa: F401
