"""What a client is told of a request that cannot be served: the field, the value and the remedy, in JSON's words."""

import pytest

from nanovllm.serve.errors import ApiError
from tests import tiny
from tests.serve.running import RunningServer

MESSAGES = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    "field, nothing",
    [
        ({"tools": [TOOL]}, []), ({"chat_template_kwargs": {"a": 1}}, {}), ({"add_generation_prompt": True}, False),
        ({"continue_final_message": True}, False),
    ],
)  # fmt: skip
def test_a_prompt_to_tokenize_has_no_use_for_the_fields_of_messages(server, field, nothing):
    (name,) = field
    status, error = server.refused("/tokenize", prompt="hi", **field)
    assert (status, error["param"]) == (400, name)
    assert error["message"] == f"{name}: a prompt has no use for it; leave it out, or pass messages"
    assert server.post("/tokenize", prompt="hi", **{name: nothing}) == server.post("/tokenize", prompt="hi")
    assert server.post("/tokenize", messages=[*MESSAGES, {"role": "assistant", "content": "yes"}], **field)["count"]


@pytest.mark.parametrize(
    "thinking, said",
    [
        ({"type": "disabled", "budget_tokens": 2000}, "'budget_tokens' is not supported beside type='disabled'; leave"),
        ({"type": "adaptive", "effort": "low"}, "'effort' is not supported beside type='adaptive'; leave it out"),
        ({"type": "adaptive", "display": "full"}, "display='full': must be summarized or omitted"),
        ({"type": "enabled", "budget_tokens": "many"}, "budget_tokens='many': must be at least 1"),
        ({"type": "enabled", "budget_tokens": True}, "budget_tokens=true: must be at least 1"),
        ({"type": "between_tools"}, "type='between_tools': must be enabled, adaptive or disabled"),
        ({"type": None}, "type=null: must be enabled, adaptive or disabled"),
        ({"budget_tokens": 2000}, "type is missing: must be enabled, adaptive or disabled"),
        ({}, "type is missing: must be enabled, adaptive or disabled"),
    ],
)
def test_what_thinking_may_not_have(server, thinking, said):
    for path in ("/v1/messages", "/v1/messages/count_tokens"):
        most = {"max_tokens": 1} if path == "/v1/messages" else {}
        status, error = server.refused(path, messages=MESSAGES, thinking=thinking, **most)
        assert status == 400 and error["message"].startswith(f"thinking: {said}")


def test_anthropic_max_tokens_is_never_null(server):
    for number in (0, -1):
        status, error = server.refused("/v1/messages", messages=MESSAGES, max_tokens=number)
        said = f"max_tokens={number}: must be at least 1, which fills the prompt cache too"
        assert (status, error["message"]) == (400, said)


@pytest.mark.parametrize(
    "path, body, said",
    [
        ("completions", {"use_beam_search": True}, "use_beam_search=true: beam search is not supported"),
        ("completions", {"response_format": {"type": True, "x": [None, "None"]}},
         "response_format={'type': true, 'x': [null, 'None']}: type must be"),
        ("completions", {"structured_outputs": {"json_object": 1}}, "json_object=1: must be true or false"),
        ("completions", {"structured_outputs": {"choice": [False, None]}}, "choice=[false, null]: must be a list"),
        ("completions", {"allowed_token_ids": []}, "allowed_token_ids=[]: no token could be sampled; leave it out, or "
         "pass null, to allow all"),
        ("completions", {"logprobs": -3}, "or null for no log-probabilities"),
        ("chat/completions", {"add_generation_prompt": True, "continue_final_message": True},
         "pass add_generation_prompt=false with continue_final_message=true"),
        ("chat/completions", {"store": True}, "store=true: this server keeps nothing; leave it out"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": None}]}]}, "a part of type null is"),
        ("responses", {"tools": [{"type": None}]}, "tools[0]: type=null: only functions are supported"),
    ],
)  # fmt: skip
def test_values_are_named_in_words_of_json(server, path, body, said):
    own = {"completions": {"prompt": "x"}, "chat/completions": {"messages": MESSAGES}, "responses": {"input": "x"}}
    status, error = server.refused(f"/v1/{path}", **own[path] | body)
    assert status == 400 and said in error["message"]


@pytest.mark.parametrize(
    "message, told",
    [
        ("a=None: pass 'None of \\'True\\'' or \"False\"", "a=null: pass 'None of \\'True\\'' or \"False\""),
        ("the vocabulary's size, or None; the users' None", "the vocabulary's size, or null; the users' null"),
        ("NoneType, isTrue and False_ are not (True,False)", "NoneType, isTrue and False_ are not (true,false)"),
        ("x" * 5000, "x" * 4000 + "..."),
    ],
)  # fmt: skip
def test_what_is_quoted_stays(message, told):
    assert ApiError(400, message).message == told


def test_log_probabilities_beyond_the_vocabulary(server):
    for name in ("logprobs", "prompt_logprobs"):
        error = server.refused("/v1/completions", prompt="x", **{name: 10**30})[1]
        most = "this engine reports at most 20 for a token; lower it"
        assert error["message"] == f"{name}={10**30}: {most}" and error["param"] == name
        error = server.refused("/v1/completions", prompt="x", **{name: 30})[1]
        assert error["message"] == f"{name}=30: {most}, or start the server with --max-logprobs 30"
        error = server.refused("/v1/completions", prompt="x", **{name: -1})[1]
        remedy = "ask for 20, or start the server with --max-logprobs -1"
        assert error["message"] == f"{name}=-1: this engine reports at most 20 for a token; {remedy}"


def test_a_priority_is_refused_and_none_is_taken(server):
    for path, body in (
        ("completions", {"prompt": "x"}), ("chat/completions", {"messages": MESSAGES}), ("responses", {"input": "x"})
    ):  # fmt: skip
        for priority in (1, -1):
            status, error = server.refused(f"/v1/{path}", **body, priority=priority)
            said = f"priority={priority}: requests are served in the order of their arrival; leave it out"
            assert (status, error["param"], error["message"]) == (400, "priority", said)
        assert server.post(f"/v1/{path}", **body, priority=0)["usage"]


def test_a_long_value_is_cut(server):
    for name in ("n", "seed", "best_of", "min_tokens", "stop_token_ids"):
        value = -(10**4000)
        error = server.refused("/v1/completions", prompt="x", **{name: [value] if name == "stop_token_ids" else value})[
            1
        ]
        assert error["param"] == name and "..." in error["message"] and len(error["message"]) < 200


def test_a_model_without_a_chat_template(tmp_path):
    tiny.save_with_tokenizer(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    with RunningServer(tmp_path) as running:
        for path in ("/v1/chat/completions", "/tokenize"):
            status, error = running.refused(path, messages=MESSAGES)
            said = "messages: this model has no chat template; send a prompt to /v1/completions"
            assert (status, error["message"]) == (400, said)
        assert running.post("/v1/completions", prompt="x", max_tokens=1)["choices"]
