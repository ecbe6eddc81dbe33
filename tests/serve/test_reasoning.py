"""Answers of a model that reasons: thoughts are apart from the text, and their tokens are counted."""

import pytest

from nanovllm.serve.options import ServeOptions
from tests import tiny
from tests.serve.running import RunningServer

ASKED = dict(max_tokens=12, ignore_eos=True, temperature=0)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    directory = tmp_path_factory.mktemp("thinking")
    tiny.save_with_tokenizer(directory)
    template = directory / "chat_template.jinja"
    template.write_text(template.read_text() + "{% if add_generation_prompt %}<think>{% endif %}")
    with RunningServer(directory) as running:
        running.path = directory
        yield running
        running.assert_idle()


def test_reasoning_tokens_are_counted(thinking):
    body = dict(messages=[{"role": "user", "content": "hello there"}], **ASKED)
    whole = thinking.post("/v1/chat/completions", **body)
    message = whole["choices"][0]["message"]
    assert message["content"] == "" and len(message["reasoning_content"]) > 5, "the thoughts did not end"
    assert message["reasoning"] == message["reasoning_content"], "vLLM's name"
    count = len(tiny.tokenizer().encode(message["reasoning_content"]))
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}
    *chunks, last, done = thinking.events("/v1/chat/completions", **body, stream_options={"include_usage": True})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    for name in ("reasoning_content", "reasoning"):
        assert "".join(delta.get(name, "") for delta in deltas) == message["reasoning_content"]
    assert done == "[DONE]" and last["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}
    hidden = thinking.post("/v1/chat/completions", **body, include_reasoning=False)
    assert hidden["choices"][0]["message"] == {"role": "assistant", "content": ""} and hidden["usage"] == whole["usage"]
    response = thinking.post("/v1/responses", input="hello there", max_output_tokens=12, ignore_eos=True, temperature=0)
    assert response["output"][0]["type"] == "reasoning"
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": count}


def test_anthropic_thoughts_that_are_omitted(thinking):
    """Their block stays, without its text; the tokens are the same."""
    body = dict(messages=[{"role": "user", "content": "hello there"}], max_tokens=12, temperature=0)
    shown = dict(type="adaptive", display="summarized")
    whole = thinking.post("/v1/messages", **body, thinking=shown)
    hidden = thinking.post("/v1/messages", **body, thinking=dict(type="enabled", budget_tokens=9, display="omitted"))
    assert len(whole["content"][0]["thinking"]) > 5 and hidden["usage"]["output_tokens"] == 12
    assert hidden["content"] == [{"type": "thinking", "thinking": "", "signature": ""}]
    for thought, kinds in (shown, True), (dict(type="adaptive", display="omitted"), False):
        events = thinking.events("/v1/messages", **body, thinking=thought)
        deltas = [e["delta"]["thinking"] for e in events if e["type"] == "content_block_delta"]
        assert bool(deltas) == kinds and "".join(deltas) == whole["content"][0]["thinking"] * kinds
        assert [e["type"] for e in events if e["type"].startswith("content_block_st")] == [
            "content_block_start", "content_block_stop"
        ]  # fmt: skip


def test_thoughts_of_earlier_answers_have_either_name(thinking):
    """Templates read `reasoning_content`; a client of vLLM sends `reasoning` back."""
    template = "{% for m in messages %}[{{ m.reasoning_content }}|{{ m.content }}]{% endfor %}"
    with RunningServer(thinking.path, ServeOptions(chat_template=template)) as server:
        for given, shown in [
            (dict(reasoning="why"), "why"), (dict(reasoning_content="how"), "how"),
            (dict(reasoning="why", reasoning_content="how"), "how"),
        ]:  # fmt: skip
            message = dict(role="assistant", content="so", **given)
            found = server.post("/tokenize", messages=[message])["tokens"]
            assert found == tiny.tokenizer().encode(f"[{shown}|so]")


def test_an_answer_without_thoughts_has_no_reasoning_tokens(server):
    whole = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "hello"}], max_tokens=3)
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
