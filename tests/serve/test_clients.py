"""The official clients of OpenAI and Anthropic."""

from typing import Literal

import pydantic
import pytest

MESSAGES = [{"role": "user", "content": "hello there"}]


@pytest.fixture(scope="module", autouse=True)
def packages():
    """Imported by the process that runs these tests; each process of a parallel run collects them."""
    global openai, anthropic
    openai = pytest.importorskip("openai", reason="pip install openai")
    anthropic = pytest.importorskip("anthropic", reason="pip install anthropic")


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def test_models(client):
    assert [m.id for m in client.models.list()] == ["model"]
    assert client.models.retrieve("model").id == "model"
    with pytest.raises(openai.NotFoundError, match="no such model"):
        client.models.retrieve("other")


def test_chat(client):
    asked = dict(model="model", messages=MESSAGES, max_tokens=12, temperature=0, seed=1)
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert len(whole.choices[0].logprobs.content) == whole.usage.completion_tokens
    text, usage = "", None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content and usage == whole.usage
    with client.chat.completions.stream(**asked, stop=[text[4:6]]) as stream:  # the client's own accumulator
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text.partition(text[4:6])[0]
    assert final.choices[0].finish_reason == "stop"


def test_errors(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="model", messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature" and caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="'temperature'"):
        client.chat.completions.create(model="model", messages=MESSAGES, extra_body={"temperatur": 1})


def test_responses(client, server):
    asked = dict(model="model", input="hello there", max_output_tokens=12, temperature=0)
    whole = client.responses.create(**asked, instructions="be brief")
    chat = [{"role": "system", "content": "be brief"}, *MESSAGES]
    expected = server.post("/v1/chat/completions", messages=chat, max_tokens=12, temperature=0)
    assert whole.output_text == expected["choices"][0]["message"]["content"]
    assert whole.status == ("completed" if expected["choices"][0]["finish_reason"] == "stop" else "incomplete")
    with client.responses.stream(**asked, instructions="be brief") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response() if "response.completed" in kinds else None
    assert kinds[:2] == ["response.created", "response.in_progress"] and "response.output_text.delta" in kinds
    assert kinds[-1] == f"response.{whole.status}" and (final is None or final.output_text == whole.output_text)
    items = [*MESSAGES, {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]},
             {"role": "user", "content": [{"type": "input_text", "text": "again"}]}]  # fmt: skip
    assert client.responses.create(**asked | {"input": items}).usage.input_tokens > 5
    for wrong in (
        {"text": {"verbosity": "low"}},
        {"reasoning": {"summary": "detailed"}},
        {"previous_response_id": "resp_1"},
        {"store": True},
        {"max_output_tokens": -1},
        {"background": True},
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**asked | wrong)
        assert caught.value.param == next(iter(wrong))


def test_logprobs_of_responses(server):
    same = dict(temperature=0, ignore_eos=True, top_logprobs=2)
    chat = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "hello"}], max_tokens=12,
                       logprobs=True, **same)  # fmt: skip
    expected = chat["choices"][0]["logprobs"]["content"]
    body = dict(input="hello", max_output_tokens=12, include=["message.output_text.logprobs"], **same)
    (part,) = server.post("/v1/responses", **body)["output"][0]["content"]
    assert part["logprobs"] == expected and len(expected) == 12 and len(expected[0]["top_logprobs"]) == 2
    events = server.events("/v1/responses", **body)
    told = [row for e in events if e["type"] == "response.output_text.delta" for row in e["logprobs"]]
    (done,) = (e for e in events if e["type"] == "response.output_text.done")
    assert told == expected[: len(told)] and told and done["logprobs"] == expected
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == expected
    (part,) = server.post("/v1/responses", input="hello", max_output_tokens=3)["output"][0]["content"]
    assert part["logprobs"] == []
    for wrong, param in ((body | {"include": []}, "top_logprobs"), (body | {"top_logprobs": 999}, "top_logprobs"),
                         (body | {"include": ["message.input_image.image_url"]}, "include")):  # fmt: skip
        status, error = server.refused("/v1/responses", **wrong)
        assert (status, error["param"]) == (400, param)


def test_what_an_incomplete_response_cuts_off_is_incomplete(server):
    cut = dict(input="hello there", max_output_tokens=4, ignore_eos=True, temperature=0)
    whole = server.post("/v1/responses", **cut)
    assert [whole["status"], *(item["status"] for item in whole["output"])] == ["incomplete", "incomplete"]
    *_, done, last = server.events("/v1/responses", **cut)
    assert done["type"] == "response.output_item.done" and done["item"]["status"] == "incomplete"
    assert last["response"]["output"][0]["status"] == "incomplete"
    ended = server.post("/v1/responses", input="x", structured_outputs={"choice": ["yes"]})
    assert [ended["status"], *(item["status"] for item in ended["output"])] == ["completed", "completed"]
    schema = {"properties": {"a": {"const": "long" * 8}}, "required": ["a"], "additionalProperties": False}
    call = {"type": "function", "name": "f", "parameters": schema}
    for limit, status in ((50, "incomplete"), (200, "completed")):
        found = server.post("/v1/responses", input="x", tools=[call], tool_choice="required",
                            parallel_tool_calls=False, max_output_tokens=limit)  # fmt: skip
        assert found["status"] == status and [item["status"] for item in found["output"]] == [status], found


def test_messages(claude, server):
    asked = dict(model="model", max_tokens=12, messages=MESSAGES, extra_body={"temperature": 0}, system="be brief")
    whole = claude.messages.create(**asked)
    chat = [{"role": "system", "content": "be brief"}, *MESSAGES]
    expected = server.post("/v1/chat/completions", messages=chat, max_tokens=12, temperature=0)
    assert "".join(block.text for block in whole.content) == expected["choices"][0]["message"]["content"]
    assert whole.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[expected["choices"][0]["finish_reason"]]
    assert whole.usage.output_tokens == expected["usage"]["completion_tokens"]
    with claude.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text and final.stop_reason == whole.stop_reason
    assert claude.messages.count_tokens(
        model="model", messages=MESSAGES, system="be brief"
    ).input_tokens == expected["usage"]["prompt_tokens"]  # fmt: skip
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(**asked | {"stop_sequences": [""]})
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    assert "stop_sequences" in caught.value.body["error"]["message"]
    image = [{"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x"}}]
    with pytest.raises(anthropic.BadRequestError, match="image"):
        claude.messages.create(**asked | {"messages": [{"role": "user", "content": image}]})


def test_an_answer_that_the_client_has_begun_goes_on(claude, server):
    begun = [*MESSAGES, {"role": "assistant", "content": "sure"}]
    found = claude.messages.create(model="model", max_tokens=12, messages=begun, extra_body={"temperature": 0})
    expected = server.post(
        "/v1/chat/completions", messages=begun, max_tokens=12, temperature=0, continue_final_message=True
    )
    assert "".join(block.text for block in found.content) == expected["choices"][0]["message"]["content"]
    assert found.usage.input_tokens == expected["usage"]["prompt_tokens"]


def test_stop_sequences(claude, server):
    text = server.post("/v1/chat/completions", messages=MESSAGES, max_tokens=20, temperature=0, ignore_eos=True)
    stop = text["choices"][0]["message"]["content"][4:7]
    found = claude.messages.create(
        model="model", max_tokens=20, messages=MESSAGES, extra_body={"temperature": 0}, stop_sequences=[stop]
    )
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)


class Pair(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    left: int = pydantic.Field(ge=0, le=99)
    right: Literal["x", "y"]


PARAMETERS = Pair.model_json_schema()


def test_parsed_answers(client):
    asked = dict(model="model", messages=MESSAGES, max_tokens=100, seed=1)
    found = client.chat.completions.parse(**asked, response_format=Pair)
    assert isinstance(found.choices[0].message.parsed, Pair)
    with client.chat.completions.stream(**asked, response_format=Pair) as stream:
        kinds = {event.type for event in stream}
        assert stream.get_final_completion().choices[0].message.parsed == found.choices[0].message.parsed
    assert {"content.delta", "content.done", "chunk"} <= kinds
    parsed = client.responses.parse(model="model", input="hello there", text_format=Pair, max_output_tokens=100)
    assert isinstance(parsed.output_parsed, Pair)


def test_tools(client, claude):
    """Forced calls, since a random model makes none by itself; streamed, whole, and with the result sent back."""
    function = {"name": "pair", "description": "makes a pair", "parameters": PARAMETERS}
    asked = dict(model="model", messages=MESSAGES, max_tokens=100, seed=2, tool_choice="required",
                 tools=[{"type": "function", "function": function}], parallel_tool_calls=False)  # fmt: skip
    message = client.chat.completions.create(**asked).choices[0].message
    (call,) = message.tool_calls
    Pair.model_validate_json(call.function.arguments)
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.message.tool_calls[0].function.arguments == call.function.arguments
    assert streamed.finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    asked |= {"messages": [*MESSAGES, message, result], "tool_choice": "auto"}
    assert client.chat.completions.create(**asked).usage.prompt_tokens > 5

    item = client.responses.create(
        model="model", input="hello", tools=[{"type": "function", **function}], tool_choice="required",
        max_output_tokens=100, parallel_tool_calls=False,
    ).output[0]  # fmt: skip
    assert item.type == "function_call" and Pair.model_validate_json(item.arguments)
    again = [{"role": "user", "content": "hello"}, item, {"type": "function_call_output", "call_id": item.call_id,
                                                          "output": "done"}]  # fmt: skip
    assert client.responses.create(model="model", input=again, max_output_tokens=5).usage.input_tokens > 5

    asked = dict(model="model", max_tokens=100, messages=MESSAGES, tools=[{"name": "pair", "input_schema": PARAMETERS}],
                 tool_choice={"type": "any", "disable_parallel_tool_use": True})  # fmt: skip
    with claude.messages.stream(**asked) as stream:
        final = stream.get_final_message()
    block = final.content[0]
    assert final.stop_reason == "tool_use" and block.type == "tool_use" and Pair.model_validate(block.input)
    whole = claude.messages.create(**asked)
    assert whole.content[0].type == "tool_use" and Pair.model_validate(whole.content[0].input)
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "done"}]}
    asked["messages"] = [*MESSAGES, {"role": "assistant", "content": whole.content}, result]
    assert claude.messages.create(**asked | {"tool_choice": {"type": "none"}}).usage.output_tokens > 0


def test_the_fields_that_vllm_adds_to_responses_and_messages(server):
    body = dict(input="x", max_output_tokens=9, structured_outputs={"regex": "ab1"}, stop="1", request_id="mine")
    found = server.post("/v1/responses", **body)
    assert found["output"][0]["content"][0]["text"] == "ab" and found["id"] == "resp_mine"
    body = dict(input="x", max_output_tokens=4, logit_bias={"65": 100}, temperature=0, ignore_eos=True)
    (text,) = server.post("/v1/responses", **body)["output"][0]["content"]
    assert text["text"] == server.post("/detokenize", tokens=[65] * 4)["prompt"]
    ends = dict(allowed_token_ids=[65], stop_token_ids=[65])
    assert server.post("/v1/responses", input="x", max_output_tokens=4, **ends)["usage"]["output_tokens"] == 1
    for path, body, said in (
        ("responses", {"input": "word " * 999}, "max_model_len=256"),
        ("responses", {"input": "x", "max_output_tokens": 5, "min_tokens": 9}, "above max_output_tokens=5"),
        ("responses", {"input": "x", "stop": [""]}, "stop=['']"),
        ("responses", {"input": "x", "min_p": 2}, "min_p=2.0"),
        ("responses", {"input": "x", "min_tokens": -1}, "min_tokens=-1"),
        ("responses", {"input": "x", "bad_words": [" "]}, "bad_words=[' ']"),
        ("messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "stop_sequences": [""]},
         "stop_sequences=['']"),
        ("messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1,
                      "chat_template_kwargs": {"tokenize": 1}}, "chat_template_kwargs"),
    ):  # fmt: skip
        status, error = server.refused(f"/v1/{path}", **body)
        assert status == 400 and said in error["message"]
        assert error.get("param") in (None, "input", *body)
    assert server.refused("/v1/responses", input="word " * 999)[1]["param"] == "input"
