"""What tools and tool_choice mean, and the errors of wrong ones."""

import pytest

from nanovllm.chat import HermesToolParser, LlamaToolParser, ToolPlan, parse

F = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
G = {"type": "function", "function": {"name": "g"}}
NAMED = {"type": "function", "function": {"name": "g"}}


def test_choices():
    assert ToolPlan.of(None).choice == ToolPlan.of([], "auto").choice == "none" and ToolPlan.of(None).parser() is None
    auto = ToolPlan.of([F, G])
    assert auto.choice == "auto" and auto.template_tools == [F, G] and auto.grammar is None
    assert isinstance(auto.parser(), HermesToolParser)
    assert isinstance(ToolPlan.of([F], chat_template="tools <|python_tag|>").parser(), LlamaToolParser)
    none = ToolPlan.of([F], "none")
    assert none.template_tools is None and none.parser() is None and none.grammar is None
    named = ToolPlan.of([F, G], NAMED)
    assert named.name == "g" and '"f"' not in named.grammar and "*" not in named.grammar
    assert "*" in ToolPlan.of([F], "required").grammar
    referring = {"$defs": {"P": {"type": "integer"}}, "properties": {"p": {"$ref": "#/$defs/P"}}}
    tool = {"type": "function", "function": {"name": "h", "parameters": referring}}
    assert 'arguments_0: %json {"type": "object", "$defs"' in ToolPlan.of([tool], "required").grammar
    assert "*" not in ToolPlan.of([F], "required", parallel=False).grammar


@pytest.mark.parametrize("choice, content", [("required", None), (NAMED, None), ("auto", "<tool")])
def test_only_an_answer_that_may_be_text_has_text(choice, content):
    call = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n'
    message = parse(ToolPlan.of([F, G], choice).parser(), call + "<tool")
    assert message.content == content and len(message.tool_calls) == 1


def test_finish_reasons():
    required, named = ToolPlan.of([F], "required"), ToolPlan.of([G], NAMED)
    assert required.finish_reason("stop", True) == "tool_calls" and required.finish_reason("stop", False) == "stop"
    assert required.finish_reason("length", True) == "length" and named.finish_reason("stop", True) == "stop"


@pytest.mark.parametrize(
    "tools, choice, words",
    [
        ("f", None, "tools='f'"),
        ([{}], None, r"tools\[0\]"),
        ([F, F], None, "another tool has this name"),
        ([{"type": "function", "function": {"name": "a b"}}], None, r"name='a b'"),
        ([{"type": "function", "function": {"name": "a", "parameters": "x"}}], None, "parameters='x'"),
        ([F] * 129, None, "at most 128"),
        ([F], "always", "tool_choice='always'"),
        ([F], {"type": "function"}, "tool_choice="),
        ([F], NAMED, "no function 'g'"),
        (None, "required", "needs tools"),
        (None, NAMED, "no function 'g'"),
    ],
)
def test_wrong_fields_are_named(tools, choice, words):
    with pytest.raises(ValueError, match=words):
        ToolPlan.of(tools, choice)
