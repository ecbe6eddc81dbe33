"""SamplingParams: what is accepted, what is normalised, and errors that name argument, value and remedy."""

import copy
import dataclasses
import inspect
import pickle

import numpy as np
import pytest

from nanovllm.arguments import reject_unknown
from nanovllm.sampling_params import SamplingParams


def test_defaults_are_plain_sampling():
    p = SamplingParams()
    assert (p.n, p.temperature, p.max_tokens, p.stop, p.stop_token_ids, p.seed) == (1, 1.0, 64, (), (), None)
    assert not (p.greedy or p.uses_filters or p.uses_penalties)


def test_values_are_normalised():
    p = SamplingParams(
        temperature=1,
        top_k=np.int32(5),
        top_p=np.float32(0.5),
        stop="END",
        stop_token_ids=[np.int64(3), 4],
        seed=np.int64(7),
    )
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
    ("max_tokens", [0, -1, 1.5, True, "16", None]),
    ("min_tokens", [-1, 0.0, True, "1", None, 65]),
    ("seed", [-1, 2**63, 0.5, True, "seed"]),
    ("logprobs", [-1, 1.0, True, "5"]),
    ("prompt_logprobs", [-1, 1.0, True, "5"]),
    ("ignore_eos", [1, "True", None]),
    ("skip_special_tokens", [0, "no", None]),
    ("include_stop_str_in_output", [0, "no", None]),
    ("stop", ["", ["a", ""], [1], 5, {"a"}, b"END"]),
    ("stop_token_ids", [5, "5", [-1], [1.0], [True], ["5"], {5}]),
]


@pytest.mark.parametrize("name, value", [(name, value) for name, values in BAD for value in values])
def test_bad_values_are_named_with_a_remedy(name, value):
    with pytest.raises(ValueError) as error:
        SamplingParams(**{name: value})
    stated, _, remedy = str(error.value).partition(": ")
    assert stated == f"{name}={value!r}"
    assert remedy.strip()


@pytest.mark.parametrize(
    "stop, words",
    [
        (["x"] * 65, "stop: 65 strings, at most 64 are allowed; leave some out"),
        (["x", "y" * 1025], "stop: a string of 1025 characters, at most 1024 are allowed; shorten it"),
    ],
)
def test_stop_strings_have_limits(stop, words):
    with pytest.raises(ValueError) as error:
        SamplingParams(stop=stop)
    assert str(error.value) == words


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(n=128, stop=["x" * 1024] * 64),
        dict(temperature=1e-9),
        dict(top_p=1),
        dict(top_p=1e-9),
        dict(min_p=1),
        dict(top_k=10**12),
        dict(presence_penalty=-2, frequency_penalty=2),
        dict(max_tokens=5, min_tokens=5),
        dict(seed=2**63 - 1),
        dict(logprobs=0, prompt_logprobs=0),
        dict(stop=(), stop_token_ids=()),
    ],
)
def test_edge_values_are_accepted(kwargs):
    SamplingParams(**kwargs)


@pytest.mark.parametrize(
    "given, meant",
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
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
