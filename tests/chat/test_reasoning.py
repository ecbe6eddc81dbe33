"""Reasoning is apart from the answer, whoever opened the tag."""

import pytest

from nanovllm.chat import (
    AnswerParser,
    HermesToolParser,
    Message,
    ReasoningParser,
    ToolCall,
    may_reason,
    opens_reasoning,
    parse,
)


@pytest.mark.parametrize(
    "text, opened, content, reasoning",
    [
        ("<think>\nhm\n</think>\n\nyes \n", False, "yes \n", "hm"),
        ("hm\n</think>\n\nyes", True, "yes", "hm"),
        ("<think>hm</think>yes", True, "yes", "hm"),  # the model repeats the tag
        ("<think>\n\n</think>\n\nyes", False, "yes", None),
        (" yes <think>no</think>", False, " yes <think>no</think>", None),
        ("<think>hm <b>", False, None, "hm <b>"),  # unfinished
        ("<think>hm</thi", False, None, "hm</thi"),
        ("<thi", False, "<thi", None),
        ("<thi", True, None, "<thi"),
        ("  ", False, "  ", None),
        ("a</think>b</think>c", True, "b</think>c", "a"),
    ],
)
def test_reasoning(text, opened, content, reasoning):
    assert parse(ReasoningParser(opened), text) == Message(content, reasoning)


def test_a_call_in_the_reasoning_is_no_call():
    call = '<tool_call>{"name": "f"}</tool_call>'
    message = parse(AnswerParser(ReasoningParser(), HermesToolParser()), f"<think>{call}</think>\n{call}")
    assert message == Message(None, call, (ToolCall("f", "{}"),))
    assert parse(AnswerParser(), "<think>x") == Message("<think>x")


def test_whether_the_model_thinks_is_read_off_the_prompt():
    assert opens_reasoning("<|assistant|>\n<think>\n") and not opens_reasoning("<think>\n\n</think>\n\n")
    assert may_reason("<|assistant|>\n", "{{ '<think>' }}") and not may_reason("<|assistant|>\n", "{{ messages }}")
    assert not may_reason("<think>\n\n</think>\n\n", "{{ '<think>' }}")
