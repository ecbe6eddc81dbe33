"""Options of the server that change what clients get: usage in every stream, and max_tokens that do not fit."""

import pytest

from nanovllm.serve.options import ServeOptions
from tests.serve.running import SIZES, RunningServer

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hello there"}]
LONGEST = SIZES["max_model_len"]


@pytest.fixture(scope="module")
def strict(model_path):
    options = ServeOptions(enable_force_include_usage=True, strict_max_tokens=True)
    with RunningServer(model_path, options) as running:
        yield running
        running.assert_idle()


@pytest.mark.parametrize("path, body", [(CHAT, {"messages": MESSAGES}), (PLAIN, {"prompt": "x"})])
def test_every_stream_ends_with_its_usage(strict, server, path, body):
    body = dict(body, max_tokens=5, ignore_eos=True)
    for options in ({}, {"stream_options": {"include_usage": False}}, {"stream_options": {"include_usage": True}}):
        *chunks, last, done = strict.events(path, **body, **options)
        assert done == "[DONE]" and last["choices"] == [] and last["usage"]["completion_tokens"] == 5
        assert all(chunk["choices"] and chunk["usage"] is None for chunk in chunks)
    *_, before, _ = strict.events(path, **body, stream_options={"continuous_usage_stats": True})[:-1]
    assert before["usage"]["completion_tokens"] > 0, "as in vLLM, which then counts in every chunk"
    assert all("usage" not in event for event in server.events(path, **body)[:-1]), "without the option, no usage"


def test_max_tokens_that_do_not_fit_are_refused(strict, server):
    prompt = [5] * 200
    left = LONGEST - len(prompt)
    fits = strict.post(PLAIN, prompt=prompt, max_tokens=left, ignore_eos=True)
    assert fits["usage"]["completion_tokens"] == left
    status, error = strict.refused(PLAIN, prompt=[prompt[:3], prompt], max_tokens=left + 1)
    assert status == 400 and error["param"] == "max_tokens" and error["code"] == "context_length_exceeded"
    assert error["message"] == (
        f"max_tokens={left + 1}: the prompt has 200 tokens, and prompt and output together have at most {LONGEST};"
        f" pass at most {left}"
    )
    assert server.post(PLAIN, prompt=prompt, max_tokens=left + 1, ignore_eos=True)["usage"] == fits["usage"]
    assert strict.post(PLAIN, prompt=[5] * (LONGEST - 4), ignore_eos=True)["usage"]["completion_tokens"] == 4, "16"


@pytest.mark.parametrize(
    "path, name, body",
    [
        (CHAT, "max_tokens", {"messages": MESSAGES}),
        (CHAT, "max_completion_tokens", {"messages": MESSAGES}),
        ("/v1/messages", "max_tokens", {"messages": MESSAGES}),
        ("/v1/responses", "max_output_tokens", {"input": "hello there"}),
    ],
)
def test_the_field_is_named_as_its_interface_calls_it(strict, path, name, body):
    status, error = strict.refused(path, **body, **{name: 10_000})
    assert status == 400 and error["message"].startswith(f"{name}=10000: the prompt has ")
    if path != "/v1/messages":
        assert error["param"] == name
    assert strict.post(path, **body, **{name: 2})
    if path == CHAT:
        assert strict.post(path, **body)["usage"]["total_tokens"] <= LONGEST, "without the field nothing is refused"
