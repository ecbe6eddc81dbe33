"""Tool calls: every way of cutting a text into pieces gives the same message."""

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanovllm.chat import (
    AnswerParser,
    ArgumentsDelta,
    CallDelta,
    HermesToolParser,
    LlamaToolParser,
    Message,
    ReasoningParser,
    ToolCall,
    collect,
    parse,
    tool_format,
)

WEATHER = ToolCall("weather", '{"city": "Rom}", "days": [1, {"a": "\\"{"}]}')
CALL = f'<tool_call>\n{{"name": "weather", "arguments": {WEATHER.arguments}}}\n</tool_call>'
NOW = '<tool_call>\n{"name": "now"}\n</tool_call>'


def in_pieces(parser, text, cuts):
    edges = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    deltas = [delta for a, b in zip(edges, edges[1:]) for delta in parser.feed(text[a:b])]
    return collect([*deltas, *parser.finish()])


def parsers():
    return [
        HermesToolParser(), LlamaToolParser(), ReasoningParser(), ReasoningParser(opened=True),
        AnswerParser(ReasoningParser(), HermesToolParser()), AnswerParser(ReasoningParser(True), LlamaToolParser()),
    ]  # fmt: skip


# Texts out of what the parsers look for, so that they nearly are calls, or are broken ones.
PIECES = (
    "<tool_call>", "</tool_call>", "<tool", "<think>", "</think>", "<|python_tag|>", '{"name": "f", ', '"arguments": ',
    '"parameters": ', '{"a": "b"}', "{", "}", "[", "]", '"', "\\", "\n", " ", ";", ",", ":", "null", "text", "<", "é",
    CALL, '{"name": "f", "parameters": {}}', '"{\\"a\\": 1}"',
)  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join), st.lists(st.integers(0, 400), max_size=12))
@example("<tool_call>" + '{"name": "f", "arguments": {"a": "b\n</tool_call', [14, 40, 45])
def test_cutting_a_text_changes_nothing(text, cuts):
    for whole, pieces, single in zip(parsers(), parsers(), parsers()):
        expected = parse(whole, text)
        assert in_pieces(pieces, text, cuts) == expected
        assert in_pieces(single, text, range(len(text))) == expected


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists)), st.text("ab <{\n"))
def test_any_arguments_come_through_as_they_are(arguments, text):
    raw = json.dumps(arguments, ensure_ascii=False)
    message = parse(HermesToolParser(), f'{text}<tool_call>{{"name": "f", "arguments": {raw}}}</tool_call>')
    assert message == Message(text.rstrip(" \n") or None, None, (ToolCall("f", raw),))
    assert parse(LlamaToolParser(), f'{{"name": "f", "parameters": {raw}}}').tool_calls == (ToolCall("f", raw),)


@pytest.mark.parametrize(
    "text, content, calls",
    [
        ("no call", "no call", []),
        (" \n", " \n", []),
        (CALL, None, [WEATHER]),
        (f"I look.\n{CALL}\n{NOW}\n\nDone.\n", "I look.Done.\n", [WEATHER, ToolCall("now", "{}")]),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', None, [ToolCall("f", '{"a": 1}')]),
        ('<tool_call>{"id": [{}], "name": "\\u0066", "arguments": null}', None, [ToolCall("f", "{}")]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', None, [ToolCall("f", '{"a": 1}')]),
        ('<tool_call>{"name": "f", "arguments": {}}}</tool_call>ok', "ok", [ToolCall("f", "{}")]),  # a brace too many
        ('<tool_call>{"name": "f"}<tool_call>{"name": "g"}', None, [ToolCall("f", "{}"), ToolCall("g", "{}")]),
        # Unfinished: what is there of the arguments is kept.
        ('<tool_call>\n{"name": "f", "arguments": {"a": "b', None, [ToolCall("f", '{"a": "b')]),
        ('x<tool_call>\n{"name": "f", "arg', 'x<tool_call>\n{"name": "f", "arg', []),
        ("x <tool_c", "x <tool_c", []),
        # No JSON.
        ("<tool_call>\nf(1)\n</tool_call>", "<tool_call>\nf(1)\n</tool_call>", []),
        ('<tool_call>{"name": 1}</tool_call>', '<tool_call>{"name": 1}</tool_call>', []),
        ('<tool_call>{"name": "f", "arguments": [1]}', '<tool_call>{"name": "f", "arguments": [1]}', []),
        ('<tool_call>{"name": "f", "arguments": {"a": "b}}\n</tool_call>end', "end", [ToolCall("f", '{"a": "b}}')]),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}',
            None,
            [ToolCall("f", '{"a": "</tool_call>"}')],
        ),
    ],
)
def test_hermes(text, content, calls):
    assert parse(HermesToolParser(), text) == Message(content, None, tuple(calls))


@pytest.mark.parametrize(
    "text, content, calls",
    [
        ('{"name": "f", "parameters": {"a": "}"}}', None, [ToolCall("f", '{"a": "}"}')]),
        (
            '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}',
            None,
            [ToolCall("f", "{}"), ToolCall("g", "{}")],
        ),
        ('{"name": "Bob", "age": 3}', '{"name": "Bob", "age": 3}', []),  # JSON that is no call
        ('Say {"name": "f", "parameters": {}}', 'Say {"name": "f", "parameters": {}}', []),
        ('Sure.\n<|python_tag|>{"name": "f", "parameters": {}}', "Sure.", [ToolCall("f", "{}")]),
        ('{"name": "f", "parameters": {"a', None, [ToolCall("f", '{"a')]),
        ('{"name": "f", "parame', '{"name": "f", "parame', []),
        (" {} x", " {} x", []),
    ],
)
def test_llama(text, content, calls):
    assert parse(LlamaToolParser(), text) == Message(content, None, tuple(calls))


def test_arguments_stream_as_soon_as_they_are_known():
    parser = HermesToolParser()
    assert parser.feed('<tool_call>{"name": "f", "arguments": {"a"') == [CallDelta(0, "f"), ArgumentsDelta(0, '{"a"')]
    assert parser.feed(": 1") == [ArgumentsDelta(0, ": 1")]
    assert parser.feed("}}</tool_call>") == [ArgumentsDelta(0, "}")] and parser.finish() == []


def test_calls_beyond_the_limit_are_left_out():
    assert parse(HermesToolParser(max_calls=1), CALL + NOW + "end") == Message("end", None, (WEATHER,))


@pytest.mark.parametrize(
    "parser, call", [(HermesToolParser, CALL), (LlamaToolParser, '{"name": "f", "parameters": {}}; ')]
)
@pytest.mark.parametrize("cut", ["", " ", "<tool", '<tool_call>\n{"na', '{"na'])
def test_where_a_call_must_come_the_beginning_of_one_is_no_text(parser, call, cut):
    """`max_tokens` cuts calls off that a grammar demands."""
    for before in ("", call):
        message = parse(parser(only_calls=True), before + cut)
        assert message.content is None and len(message.tool_calls) == bool(before)


def test_the_format_is_read_off_the_template():
    assert tool_format("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert tool_format("{% if tools %}<tool_call><function=f>{% endif %}") is None
    assert tool_format("{% if tools %}<|python_tag|>{% endif %}") == "llama3"
    assert tool_format("{{ messages }}") is None and tool_format(None) is None
