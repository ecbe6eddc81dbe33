"""From conversations to the text of a prompt."""

import pytest

from nanovllm.chat.template import chat_text, check_messages
from tests import tiny

CHATML = "{% for m in messages %}[{{ m['role'] }}]{{ '' + m['content'] }}{% endfor %}"
CALLS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}({{ c.function.arguments.city }}){% endfor %}{% endfor %}"
)


def test_tool_calls_come_back_to_a_template_that_shows_none():
    """Clients send an answer of calls back without content, or with null."""
    tokenizer = tiny.tokenizer()
    function = {"name": "weather", "arguments": '{"city": "Köln"}'}
    call = {"id": "c", "type": "function", "function": function}
    result = {"role": "tool", "tool_call_id": "c", "content": "sunny"}
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
    for content, shown in (({}, text), ({"content": None}, text), ({"content": "Well."}, f"Well.\n{text}")):
        messages = [{"role": "assistant", "tool_calls": [call], **content}, result]
        found = chat_text(tokenizer, "messages", messages, {"chat_template": CHATML, "add_generation_prompt": False})
        assert found == f"[assistant]{shown}[tool]sunny"
        assert chat_text(tokenizer, "messages", messages, {"chat_template": CALLS}) == "(Köln)"


def test_a_role_that_neither_is_usual_nor_in_the_template_is_refused():
    tokenizer = tiny.tokenizer()
    messages = [{"role": "user", "content": "hi"}, {"role": "bot", "content": "hello"}]
    with pytest.raises(ValueError, match=r"^messages\[1\]: role='bot': expected system, .* or function, or a role"):
        chat_text(tokenizer, "messages", messages, {"chat_template": CHATML})
    with pytest.raises(ValueError, match=r"^messages\[0\]: role='m': expected system"):
        chat_text(tokenizer, "messages", [{"role": "m", "content": "hi"}], {"chat_template": CHATML})
    named = CHATML + "{# 'bot' #}"
    assert chat_text(tokenizer, "messages", messages, {"chat_template": named}) == "[user]hi[bot]hello"


def test_an_answer_without_a_text_is_an_empty_one():
    """transformers gives a template no null, and a template may need a content."""
    for answer in ({"content": None}, {}, {"content": None, "tool_calls": []}, {"content": ""}):
        messages = [{"role": "assistant", **answer}, {"role": "user", "content": "hi"}]
        found = chat_text(tiny.tokenizer(), "messages", messages, {"chat_template": CHATML})
        assert found == "[assistant][user]hi"


@pytest.mark.parametrize(
    "calls, said",
    [
        ("f", "tool_calls='f': must be a list of calls, such as"),
        (["f"], "tool_calls[0]='f': must be a call, such as"),
        ([{"name": "f", "arguments": {}}, {"id": "c"}], "tool_calls[1]={'id': 'c'}: must be a call, such as"),
        ([{"type": "function", "function": {"name": None}}], "tool_calls[0]={'type': 'function', 'function': "),
    ],
)
def test_what_is_no_tool_call_is_refused(calls, said):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    with pytest.raises(TypeError) as raised:
        check_messages("messages", messages)
    assert str(raised.value).startswith(f"messages[1]: {said}")
