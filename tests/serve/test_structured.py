"""Constrained answers and tools through the server."""

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import msgspec
import pytest
from llguidance import LLParserLimits

from nanovllm import SamplingParams
from nanovllm.frontend.core_messages import params_to_send
from nanovllm.serve.options import ServeOptions
from nanovllm.structured import constraint_maker
from nanovllm.structured.grammar_check import GrammarChecker
from nanovllm.structured_outputs import GrammarsBusyError
from tests.serve.running import LONG, RunningServer, slow_client
from tests.waiting import wait_until

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


def test_an_output_config_of_messages(server):
    """Anthropic's field for a JSON schema, streamed and whole."""
    body = dict(messages=MESSAGES, max_tokens=100, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    for (block,) in (server.post("/v1/messages", **body | {"temperature": t})["content"] for t in (0, 1)):
        assert set(json.loads(block["text"])) == {"a"}
    deltas = [e["delta"] for e in server.events("/v1/messages", **body) if e["type"] == "content_block_delta"]
    assert set(json.loads("".join(delta["text"] for delta in deltas))) == {"a"}
    assert server.post("/v1/messages", **body | {"output_config": {"format": None}})["content"]


@pytest.mark.parametrize(
    "given, said",
    [
        ({"effort": "low"}, "output_config: 'effort' is not supported"),
        ({"format": {"type": "json_object"}}, "output_config: format must be"),
        ({"format": {"type": "json_schema", "schema": 1}}, "output_config: format must be"),
        ({"format": {"type": "json_schema", "schema": {"type": "strin"}}}, "output_config: there is no type 'strin'"),
    ],
)
def test_an_output_config_that_is_refused(server, given, said):
    status, error = server.refused("/v1/messages", messages=MESSAGES, max_tokens=9, output_config=given)
    assert status == 400 and said in error["message"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
@pytest.mark.parametrize("given", [FORMAT, {"type": "json_object"}])
def test_a_response_format_is_left_out_where_a_tool_must_be_called(server, given, choice):
    """As vLLM does: it is of the text, and the answer has none."""
    body = dict(messages=MESSAGES, tools=[F], tool_choice=choice, max_tokens=100, temperature=0)
    expected = server.post("/v1/chat/completions", **body)["choices"][0]
    found = server.post("/v1/chat/completions", response_format=given, **body)["choices"][0]
    calls = [[c["function"] for c in chosen["message"]["tool_calls"]] for chosen in (found, expected)]
    assert calls[0] == calls[1] and found["finish_reason"] == expected["finish_reason"]
    assert {call["name"] for call in calls[0]} == {"f"} and not found["message"]["content"]


def test_a_grammar_that_breaks_is_an_error_and_no_token_beyond_it_is_told(server):
    tokenizer = server.engine.tokenizer
    allowed = [tokenizer.convert_tokens_to_ids("a"), tokenizer.eos_token_id]
    body = dict(prompt="x", max_tokens=8, structured_outputs={"regex": "[ac][bd]"}, allowed_token_ids=allowed)
    said = "structured_outputs: the grammar and allowed_token_ids have no token in common"
    error = {"message": said, "type": "invalid_request_error", "param": "structured_outputs", "code": None}
    for n in (1, 2):
        assert server.refused("/v1/completions", **body, n=n) == (400, error)
        *chunks, last, done = server.events("/v1/completions", **body, n=n)
        texts = [""] * n
        for (choice,) in (chunk["choices"] for chunk in chunks):
            assert choice["finish_reason"] is None
            texts[choice["index"]] += choice["text"]
        assert texts == ["a"] * n and last == {"error": error} and done == "[DONE]"
    server.assert_idle()


def test_a_grammar_without_a_first_token_is_a_400_in_a_stream_too(server):
    allowed = [server.engine.tokenizer.convert_tokens_to_ids("z")]
    body = dict(max_tokens=8, structured_outputs={"regex": "ab"}, allowed_token_ids=allowed, stream=True)
    for path, asked in (("completions", dict(prompt="x")), ("chat/completions", dict(messages=MESSAGES))):
        status, error = server.refused(f"/v1/{path}", **body, **asked)
        assert status == 400 and error["param"] == "structured_outputs" and "no token in common" in error["message"]


def test_a_grammar_that_grows_too_complex_says_so_on_every_route(server, monkeypatch):
    """It compiles, but with the first tokens its lexer outgrows the library's limits, which are low here."""
    limits = LLParserLimits(max_lexer_states=60, verbose_errors=False)
    monkeypatch.setattr(constraint_maker, "parser_limits", lambda: limits)
    said = "the grammar is too complex: lexer error: too many states"
    status, error = server.refused(
        "/v1/completions", prompt="x", max_tokens=150, structured_outputs={"regex": "[a-z]{190}"}
    )
    assert (
        status == 400 and f"structured_outputs: {said}" in error["message"] and error["param"] == "structured_outputs"
    )
    parameters = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-z]{191}$"}}}
    tools = [{"name": "f", "input_schema": parameters | {"required": ["a"]}}]
    body = dict(messages=MESSAGES, max_tokens=100, tools=tools, tool_choice={"type": "any"})
    status, error = server.refused("/v1/messages", **body)
    assert status == 400 and error["type"] == "invalid_request_error" and f"tools: {said}" in error["message"]
    last = server.events("/v1/messages", **body)[-1]
    assert last["type"] == "error" and last["error"] == error


UNIQUE = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}


@pytest.mark.parametrize("strict", [True, False])
def test_strict_tools_have_a_grammar_where_the_model_may_call(server, strict):
    """The keyword is one that no grammar can have."""
    function = {"name": "f", "strict": strict, "parameters": UNIQUE}
    claude = {"name": "f", "strict": strict, "input_schema": UNIQUE}
    for path, body in (
        ("chat/completions", dict(messages=MESSAGES, max_tokens=3, tools=[{"type": "function", "function": function}])),
        ("responses", dict(input="hello", max_output_tokens=3, tools=[{"type": "function", **function}])),
        ("messages", dict(messages=MESSAGES, max_tokens=3, tools=[claude])),
    ):
        if strict:
            status, error = server.refused(f"/v1/{path}", **body)
            assert status == 400 and error["message"].startswith("tools: ") and "uniqueItems" in error["message"]
        else:
            server.post(f"/v1/{path}", **body)


def test_an_answer_beside_strict_tools_is_any_text(server):
    letters = server.post("/tokenize", prompt="abcdefghijklmnop")["tokens"]  # a random model writes no UTF-8
    body = dict(messages=MESSAGES, max_tokens=30, temperature=0, allowed_token_ids=letters)
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": {}}}
    free = server.post("/v1/chat/completions", **body)["choices"]
    bound = server.post("/v1/chat/completions", **body, tools=[{"type": "function", "function": function}])["choices"]
    assert bound == free and free[0]["message"]["content"]


def test_allowed_tools(server):
    parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    functions = [{"name": name, "parameters": parameters} for name in ("f", "g")]
    chat = [{"type": "function", "function": function} for function in functions]
    one = {"type": "function", "function": {"name": "g"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [one]}}
    body = dict(messages=MESSAGES, max_tokens=100, tools=chat, tool_choice=choice, parallel_tool_calls=False)
    (call,) = server.post("/v1/chat/completions", **body)["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "g", "arguments": "{}"}
    flat = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    asked = dict(input="hello", tools=[{"type": "function", **f} for f in functions], parallel_tool_calls=False)
    whole = server.post("/v1/responses", **asked, tool_choice=flat, max_output_tokens=100)
    assert [item["name"] for item in whole["output"]] == ["g"] and whole["tool_choice"] == flat
    for path, wrong in (("chat/completions", body | {"tool_choice": choice | {"allowed_tools": {}}}),
                        ("responses", asked | {"tool_choice": flat | {"tools": []}})):  # fmt: skip
        status, error = server.refused(f"/v1/{path}", **wrong)
        assert status == 400 and error["param"] == "tool_choice"


@pytest.mark.parametrize(
    "path, body, param",
    [
        ("messages", dict(thinking={"type": "enabled", "budget_tokens": 1024}), "this model does not reason"),
        ("messages", dict(tools=[{"name": "f", "zzz": 1}]), "tools[0]: no field 'zzz' is supported"),
        ("chat/completions", dict(tools=[{"type": "function", "function": {"name": "f", "zzz": 1}}]), "no field 'zzz'"),
        ("responses", dict(tools=[{"type": "function", "name": "f", "zzz": 1}]), "no field 'zzz'"),
        ("chat/completions", dict(function_call="auto"), "function_call='auto': use tool_choice"),
        ("chat/completions", dict(function_call="none"), "function_call='none': use tool_choice"),
    ],
)
def test_what_would_be_ignored_is_refused(server, path, body, param):
    asked = {"input": "x"} if path == "responses" else {"messages": MESSAGES, "max_tokens": 3}
    status, error = server.refused(f"/v1/{path}", **asked, **body)
    assert status == 400 and param in error["message"]


def test_an_aborted_request_ends_with_an_error(model_path):
    with RunningServer(model_path, client=slow_client(model_path)) as server:
        for path in ("completions", "chat/completions", "messages"):
            server.hold()
            asked = {"prompt": "hello"} if path == "completions" else {"messages": MESSAGES}
            body = asked | {"max_tokens": 200, "temperature": 0, "stream": True}
            with server.client.stream("POST", f"/v1/{path}", json=body, headers={"x-request-id": "mine"}) as answer:
                lines = answer.iter_lines()
                next(lines)
                server.engine.abort("mine")
                server.go()
                said = "".join(lines)
            assert "the request was aborted" in said and "end_turn" not in said and '"abort"' not in said


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
            dict(response_format={"type": "xml"}, tools=[F], tool_choice="required"),
            "response_format={'type': 'xml'}: type must be",
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


def test_one_client_does_not_keep_others_from_new_grammars(model_path, monkeypatch):
    """Grammars that take long, all of one API key: one of another key is checked after at most two of them."""
    checked, go, real = [], threading.Event(), GrammarChecker.check

    def check(self, spec):
        if threading.current_thread().name.startswith("grammar-checks"):
            checked.append(spec.regex)
            assert go.wait(LONG)
        real(self, spec)

    monkeypatch.setattr(GrammarChecker, "check", check)

    def ask(key, regex):
        body = {"prompt": "x", "max_tokens": 2, "structured_outputs": {"regex": regex}}
        answer = httpx.post(
            f"{server.url}/v1/completions", json=body, headers={"x-api-key": key}, timeout=LONG, trust_env=False
        )
        return answer.status_code, answer.text

    with RunningServer(model_path, ServeOptions(api_keys=("greedy-key", "other-key"))) as server:
        admission = server.server.service.admission
        with ThreadPoolExecutor(12) as threads:
            asked = [threads.submit(ask, "greedy-key", f"[ab]{{{i + 2}}}") for i in range(10)]
            wait_until(lambda: admission.num_open == 10 and checked)
            other = threads.submit(ask, "other-key", "[cd]{9}")
            wait_until(lambda: admission.num_open == 11)
            go.set()
            for answer in (other, *asked):
                assert answer.result()[0] == 200, answer.result()
        server.assert_idle()
    assert len(checked) == 11 and checked.index("[cd]{9}") <= 2


def test_parameters_travel_to_another_process():
    params = SamplingParams(structured_outputs={"json": SCHEMA, "reasoning": "open"}, allowed_token_ids=[3, 4])
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(params_to_send(params)))
    assert SamplingParams(**sent) == params
    endless = params_to_send(SamplingParams(top_k=2**70, max_tokens=10**30))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(endless)) == {"top_k": 2**63 - 1, "max_tokens": 2**63 - 1}
