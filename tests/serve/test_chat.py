"""/v1/chat/completions."""

import pytest

from nanovllm import SamplingParams
from nanovllm.serve.request_params import bad_request

MESSAGES = [{"role": "user", "content": "hello there"}]


def test_whole_and_streamed_answers_are_those_of_chat(server, llm):
    body = dict(messages=MESSAGES, max_tokens=15, temperature=0.8, seed=3, n=2, ignore_eos=True)
    params = SamplingParams(max_tokens=15, temperature=0.8, seed=3, n=2, ignore_eos=True)
    (expected,) = llm.chat(MESSAGES, params, use_tqdm=False)
    whole = server.post("/v1/chat/completions", **body)
    assert [c["message"]["content"] for c in whole["choices"]] == [c.text for c in expected.outputs]
    assert whole["object"] == "chat.completion" and whole["id"].startswith("chatcmpl-")
    assert whole["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)

    *chunks, done = server.events("/v1/chat/completions", **body)
    assert done == "[DONE]"
    for index in range(2):
        own = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in own) == expected.outputs[index].text
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["length"]
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)


def test_log_probabilities(server, llm):
    body = dict(messages=MESSAGES, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3, ignore_eos=True)
    params = SamplingParams(max_tokens=4, temperature=0, logprobs=3, ignore_eos=True)
    (expected,) = llm.chat(MESSAGES, params, use_tqdm=False)
    content = server.post("/v1/chat/completions", **body)["choices"][0]["logprobs"]["content"]
    rows = expected.outputs[0].logprobs
    assert [c["logprob"] for c in content] == pytest.approx([r[t].logprob for r, t in zip(rows, expected["token_ids"])])
    assert all(len(c["top_logprobs"]) == 3 and c["top_logprobs"][0]["token"] == c["token"] for c in content)
    text = b"".join(bytes(c["bytes"]) for c in content).decode(errors="replace")
    assert text.startswith(expected["text"][:2])
    chunks = server.events("/v1/chat/completions", **body)[:-1]
    streamed = [row for c in chunks for row in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == content


@pytest.mark.parametrize(
    "body, param, said",
    [
        (dict(messages=[]), "messages", 'messages: must have at least one message, such as {"role": "user", '),
        (dict(messages="hello"), "messages", "array"),
        (dict(messages=[*MESSAGES, {"content": "x"}]), "messages", "messages[1].role is missing; pass user"),
        (dict(messages=[{"role": 5, "content": "x"}]), "messages", "messages[0].role=5: must be a string"),
        (dict(messages=MESSAGES, top_logprobs=2), "top_logprobs", "top_logprobs=2: needs logprobs=true; add"),
        (dict(messages=MESSAGES, logprobs=True, top_logprobs=99), "top_logprobs", "top_logprobs=99: this engine"),
        (dict(messages=MESSAGES, logprobs=True, top_logprobs=99), None, "start the server with --max-logprobs 99"),
        (dict(messages=MESSAGES, allowed_token_ids=[]), "allowed_token_ids", "or pass null, to allow all"),
        (dict(messages=MESSAGES, max_tokens=0), "max_tokens", "must be at least 1, or null for as many as"),
        (dict(messages=MESSAGES, guided_json={"a": "b" * 99}), "guided_json", "bbb...: pass structured_outputs="),
        (dict(messages=MESSAGES, max_completion_tokens=0), "max_completion_tokens", "max_completion_tokens=0: must"),
        (dict(messages=[{"role": "user", "content": "word " * 999}]), "messages", "max_model_len=256"),
        (dict(messages=[{"role": "user", "content": "word " * 999}]), None, "the server with a larger --max-model-len"),
        (dict(messages=[{"role": "user"}]), "messages", "messages[0]: content is missing: pass a text"),
        (dict(messages=[*MESSAGES, {"role": "system", "content": 5}]), "messages", "messages[1]: content=5: pass"),
        (dict(messages=MESSAGES, chat_template_kwargs={"self": 1}), "chat_template_kwargs", "'self'"),
        (dict(messages=MESSAGES, chat_template_kwargs={"tokenize": True}), "chat_template_kwargs", "tokenize"),
        (dict(messages=MESSAGES, chat_template="{{ 1 }}"), "chat_template", "server's own template"),
        (dict(messages=MESSAGES, structured_outputs={"nonsense": 1}), "structured_outputs", "nonsense"),
        (dict(messages=MESSAGES, functions=[{"name": "f"}]), "functions", "use tools"),
        (dict(messages=MESSAGES, tools=[{"type": "function"}]), "tools", "description of a function"),
        (dict(messages=MESSAGES, prompt_logprobs=1, stream=True), "prompt_logprobs", "leave stream out"),
        (dict(messages=MESSAGES, store=True), "store", "keeps nothing"),
        (dict(messages=MESSAGES, reasoning_effort="high"), "reasoning_effort", "does not reason"),
        (dict(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]), None,
         "image_url"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_named(server, body, param, said):
    status, error = server.refused("/v1/chat/completions", **body)
    assert status == 400 and said in error["message"]
    assert param is None or error["param"] == param


def test_max_completion_tokens_and_parts_of_text(server):
    status, error = server.refused("/v1/chat/completions", messages=MESSAGES, max_completion_tokens=0)
    assert status == 400 and error["code"] is None, "this is no question of the context's length"
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    body = dict(messages=messages, max_completion_tokens=3, ignore_eos=True, top_logprobs=0)
    found = server.post("/v1/chat/completions", **body)
    assert found["usage"]["completion_tokens"] == 3 and found["choices"][0]["finish_reason"] == "length"


def test_the_last_message_goes_on(server, llm):
    messages = [*MESSAGES, {"role": "assistant", "content": "sure"}]
    found = server.post("/tokenize", messages=messages, continue_final_message=True)
    assert llm.tokenizer.decode(found["tokens"]).endswith("<|assistant|>sure")
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    for path in ("/tokenize", "/v1/chat/completions"):
        status, error = server.refused(path, **body)
        assert status == 400 and "add_generation_prompt=false" in error["message"]


def test_a_message_that_quotes_much_of_a_request_takes_no_time():
    said = bad_request(ValueError("a=" * 1_000_000)).message  # in the square of its length it would take hours
    assert said.startswith("a=a=") and said.endswith("...") and len(said) < 5000


def test_a_part_of_an_unknown_type_is_quoted_in_brief(server):
    parts = [{"type": "a=" * 1000, "text": "x"}]
    status, error = server.refused("/v1/chat/completions", messages=[{"role": "user", "content": parts}])
    assert status == 400 and "is not supported" in error["message"] and len(error["message"]) < 200
