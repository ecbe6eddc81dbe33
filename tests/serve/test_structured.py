"""Constrained answers and tools through the server."""

import json
import re

import msgspec
import pytest

from nanovllm import SamplingParams
from nanovllm.frontend.core_messages import params_to_send
from nanovllm.structured.grammar_check import GrammarChecker
from nanovllm.structured_outputs import GrammarsBusyError

MESSAGES = [{"role": "user", "content": "hello there"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["a"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
REFUSED = {"type": "json_schema", "json_schema": {"schema": {"type": "array", "uniqueItems": True}}}
F = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


def schema(**keywords):
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": keywords}}}


def content(server, **body):
    body = dict(messages=MESSAGES, max_tokens=100, seed=1) | body
    return server.post("/v1/chat/completions", **body)["choices"][0]


def test_formats_of_both_endpoints(server):
    choice = content(server, response_format=FORMAT)
    assert set(json.loads(choice["message"]["content"])) == {"a"} and choice["finish_reason"] == "stop"
    assert content(server, structured_outputs={"choice": ["yes", "no"]})["message"]["content"] in ("yes", "no")
    body = dict(prompt="x", max_tokens=50, structured_outputs={"regex": "[ab]{5}"}, n=2)
    texts = [choice["text"] for choice in server.post("/v1/completions", **body)["choices"]]
    assert len(texts) == 2 and all(re.fullmatch("[ab]{5}", text) for text in texts)
    body = dict(prompt="x", max_tokens=8, allowed_token_ids=[70], return_token_ids=True)
    assert server.post("/v1/completions", **body)["choices"][0]["text"]


def test_a_tool_that_must_be_called(server):
    named = {"type": "function", "function": {"name": "f"}}
    for tool_choice, reason in (("required", "tool_calls"), (named, "stop")):
        body = dict(tools=[F], tool_choice=tool_choice, parallel_tool_calls=False)
        choice = content(server, **body)
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "f" and set(json.loads(call["function"]["arguments"])) == {"a"}
        assert choice["message"]["content"] is None and choice["finish_reason"] == reason
        events = server.events("/v1/chat/completions", messages=MESSAGES, max_tokens=100, seed=1, **body)[:-1]
        deltas = [d for e in events for d in e["choices"][0]["delta"].get("tool_calls", ())]
        assert deltas[0]["function"]["name"] == "f" and deltas[0]["id"].startswith("call_")
        assert "".join(d["function"].get("arguments", "") for d in deltas) == call["function"]["arguments"]


def test_a_grammar_that_breaks_ends_the_answer_before_a_token_that_it_does_not_allow(server):
    tokenizer = server.engine.tokenizer
    allowed = [tokenizer.convert_tokens_to_ids("a"), tokenizer.eos_token_id]
    body = dict(prompt="x", max_tokens=8, structured_outputs={"regex": "[ac][bd]"}, allowed_token_ids=allowed)
    (choice,) = server.post("/v1/completions", **body)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("a", "abort", None)
    ends = [event["choices"][0] for event in server.events("/v1/completions", **body)[:-1]]
    assert "".join(end["text"] for end in ends) == "a" and ends[-1]["finish_reason"] == "abort"


@pytest.mark.parametrize(
    "body, said",
    [
        (dict(structured_outputs={"grammar": "root ::= root"}), "structured_outputs: no text matches the grammar"),
        (dict(response_format={"type": "xml"}), "response_format"),
        (dict(response_format={"type": "text", "schema": {}}), "'schema' is no field of type 'text'"),
        (dict(response_format=FORMAT, structured_outputs={"choice": ["a"]}), "exclude each other"),
        (dict(response_format=REFUSED), "response_format: the keyword 'uniqueItems' is not supported; leave it out"),
        (schema(type="strin"), "response_format: there is no type 'strin'; use string, number"),
        (schema(type="string", format="foo"), "response_format: the format 'foo' is not known; leave it out"),
        (
            schema(**{"not": {}, "if": {}}),
            "format: the keywords 'if', 'not' are not supported; leave them out",
        ),
        (
            schema(type="string", minLength=2, maxLength=1),
            "format: no value matches the schema: minLength (2) is",
        ),
        (schema(**{"$ref": "#/x"}), "response_format: $ref: the schema has no '/x'"),
        (schema(**{"$ref": "http://x/y"}), "response_format: $ref: 'http://x/y' is not read"),
        (schema(type="number", multipleOf=0), "response_format: multipleOf: must be above 0"),
        (
            dict(structured_outputs={"regexp": "x"}),
            "outputs: there is no field 'regexp'; did you mean 'regex'",
        ),
        (
            dict(structured_outputs={"regex": "x", "whitespace_pattern": " "}),
            "outputs: whitespace_pattern=' ': JSON",
        ),
        (dict(structured_outputs={"json": {"type": "integer", "multipleOf": 9999991}}), "more than 2 seconds"),
        (dict(structured_outputs={"choice": ["a"]}, ignore_eos=True), "ignore_eos"),
        (dict(structured_outputs={"choice": ["a"]}, tools=[F], tool_choice="required"), "exclude each other"),
        (
            dict(response_format=FORMAT, tools=[F], tool_choice="required"),
            'response_format: it and tool_choice="required"',
        ),
        (dict(response_format=FORMAT | {"json_schema": {"schema": {}, "strickt": 1}}), "no field 'strickt'"),
        (dict(allowed_token_ids=[99999]), "outside the vocabulary"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_served_is_a_400(server, body, said):
    status, error = server.refused("/v1/chat/completions", messages=MESSAGES, **body)
    assert status == 400 and said in error["message"] and "backtrace" not in error["message"]


def test_a_grammar_that_has_to_wait_too_long_is_a_503(server, monkeypatch):
    def check(self, spec):
        raise GrammarsBusyError("structured_outputs: other grammars are being compiled; try again later")

    monkeypatch.setattr(GrammarChecker, "check", check)
    answer = server.client.post("/v1/completions", json={"prompt": "x", "structured_outputs": {"choice": ["busy"]}})
    assert answer.status_code == 503 and answer.headers["retry-after"] == "2"
    assert "try again later" in answer.json()["error"]["message"]


def test_parameters_travel_to_another_process():
    params = SamplingParams(structured_outputs={"json": SCHEMA, "reasoning": "open"}, allowed_token_ids=[3, 4])
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(params_to_send(params)))
    assert SamplingParams(**sent) == params
    endless = params_to_send(SamplingParams(top_k=2**70, max_tokens=10**30))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(endless)) == {"top_k": 2**63 - 1, "max_tokens": 2**63 - 1}
