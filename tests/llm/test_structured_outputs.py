"""Outputs keep to their grammar, beside others, with everything else that a request may ask for."""

import json
import re

import pytest

from nanovllm import SamplingParams
from tests.llm.small_llm import GREEDY, MESSAGES, PROMPTS, greedy_text

pytestmark = pytest.mark.any_device

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
F = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
G = {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "maxProperties": 0}}}


def test_every_kind_beside_sequences_without_a_constraint(llm, reference):
    kinds = {
        r'\{"a": \d\d?, "b": "(x|yy)"\}': dict(json=SCHEMA),
        "yes|no": dict(choice=["yes", "no"]),
        r"\d{3}-\d{4}": dict(regex=r"^\d{3}-\d{4}$"),
        "a(b|c)d": dict(grammar='start: "a" ("b" | "c") "d"'),
        "a(b|c)e": dict(grammar='root ::= "a" ("b" | "c") "e"'),
    }
    params = [
        SamplingParams(max_tokens=60, seed=i, n=2, temperature=1.5, structured_outputs=kind)
        for i, kind in enumerate(kinds.values())
    ]
    outputs = llm.generate([*PROMPTS, *["hello"] * len(params)], [*[GREEDY] * 3, *params], use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs):
        assert output["token_ids"] == greedy_text(reference, prompt)[0]
    for pattern, output in zip(kinds, outputs[3:]):
        for completion in output.outputs:
            assert re.fullmatch(pattern, completion.text) and completion.finish_reason == "stop"


@pytest.mark.parametrize(
    "others, pattern",
    [
        (dict(min_tokens=8), "[ab]{8,}"),
        (dict(temperature=0, repetition_penalty=1.5, presence_penalty=0.5), "[ab]+"),
        (dict(logprobs=2, top_k=3, top_p=0.9), "[ab]+"),
        (dict(logit_bias={64: 50.0}), "[ab]+"),  # of a token that the grammar does not allow
        (dict(bad_words=["a", "aa"]), "b[ab]*"),
        (dict(stop=["ba"]), "[ab]*"),
    ],
    ids=str,
)
def test_with_what_else_changes_sampling(llm, others, pattern):
    params = SamplingParams(**dict(max_tokens=30, seed=5, structured_outputs={"regex": "[ab]+"}) | others)
    (out,) = llm.generate(["x"], params, use_tqdm=False)
    assert re.fullmatch(pattern, out["text"]) and out["finish_reason"] in ("stop", "length")
    assert (out["logprobs"] is None) == (params.logprobs is None)


@pytest.mark.parametrize("others", [{}, dict(logprobs=0)], ids=["by the device", "by the host"])
def test_the_end_token_comes_only_where_nothing_else_may(llm, others):
    params = SamplingParams(max_tokens=40, min_tokens=20, structured_outputs={"regex": "abc"}, **others)
    (out,) = llm.generate(["x"], params, use_tqdm=False)
    assert out["text"] == "abc" and out["finish_reason"] == "stop" and out["stop_reason"] is None


def test_allowed_tokens(llm):
    params = SamplingParams(max_tokens=12, seed=0, allowed_token_ids=[70, 80, 90])
    (out,) = llm.generate(["x"], params, use_tqdm=False)
    assert set(out["token_ids"]) <= {70, 80, 90} and out["finish_reason"] == "length"
    with pytest.raises(ValueError, match="allowed_token_ids: 99999 is outside the vocabulary"):
        llm.generate(["x"], SamplingParams(allowed_token_ids=[99999]), use_tqdm=False)


def test_a_stream_keeps_to_its_grammar(llm):
    text = "".join(llm.stream("x", SamplingParams(structured_outputs={"json": SCHEMA}, max_tokens=60)))
    assert set(json.loads(text)) == {"a", "b"}


def test_a_model_that_must_call_a_tool_does(llm):
    params = SamplingParams(max_tokens=100, seed=2)
    (out,) = llm.chat(MESSAGES, params, use_tqdm=False, tools=[F, G], tool_choice="required", parallel_tool_calls=False)
    (call,) = out["message"].tool_calls
    assert call.name in ("f", "g") and isinstance(json.loads(call.arguments), dict)
    named = {"type": "function", "function": {"name": "f"}}
    (out,) = llm.chat(MESSAGES, params, use_tqdm=False, tools=[F, G], tool_choice=named)
    assert out["message"].tool_calls[0].name == "f" and out["message"].content is None
    (out,) = llm.chat(MESSAGES, params, use_tqdm=False)
    assert out["message"].content == (out["text"] or None) and not out["message"].tool_calls
    with pytest.raises(ValueError, match="exclude each other"):
        params = SamplingParams(structured_outputs={"json": SCHEMA})
        llm.chat(MESSAGES, params, tools=[F], tool_choice="required")


def test_reasoning_is_free_and_the_answer_is_not(llm):
    template = "{{ messages[0]['content'] }}<think>"
    params = SamplingParams(max_tokens=30, seed=1, structured_outputs={"regex": "[ab]{3}"}, logit_bias={30: 0.0})
    (out,) = llm.chat(MESSAGES, params, use_tqdm=False, chat_template=template)
    message = out["message"]  # the model knows nothing of </think>: all of it is reasoning
    assert message.reasoning_content and message.content is None and not re.fullmatch("[ab]{3}", out["text"])


def test_wrong_grammars_start_nothing(llm):
    for wrong, words in ((dict(regex="("), "unclosed"), (dict(json={"type": "array", "uniqueItems": True}), "unique")):
        with pytest.raises(ValueError, match=words):
            llm.generate(["x", "y"], [GREEDY, SamplingParams(structured_outputs=wrong)], use_tqdm=False)
    assert not llm.engine.has_unfinished
