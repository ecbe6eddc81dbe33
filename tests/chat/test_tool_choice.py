"""What tools and tool_choice mean, and the errors of wrong ones."""

import pytest

llguidance = pytest.importorskip("llguidance", reason='pip install "nanovllm[structured]"')

from nanovllm import SamplingParams
from nanovllm.chat import AnswerPlan, HermesToolParser, LlamaToolParser, ToolPlan, parse
from nanovllm.structured.grammar import grammar_text
from nanovllm.structured_outputs import StructuredOutputs

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


P = {"type": "object", "properties": {"c": {"enum": ["x"]}}, "required": ["c"], "additionalProperties": False}
STRICT = {"type": "function", "function": {"name": "s", "parameters": P, "strict": True}}
LLAMA = "tools <|python_tag|>"


def hermes(name, arguments):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def allows(grammar, text, reasoning=None):
    """Whether a grammar allows a text, and the text alone."""
    spec = StructuredOutputs(grammar=grammar, reasoning=reasoning)
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar_text(spec), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


def test_arguments_of_strict_tools_match_their_schema_where_the_model_may_call():
    plan = ToolPlan.of([F, STRICT])
    right, wrong, free = hermes("s", '{"c": "x"}'), hermes("s", '{"c": "y"}'), hermes("f", '{"c": "y"}')
    for text in ("", "hi", "hi <tool", right, "hi " + right + " there", right + "\n" + free, free):
        assert allows(plan.grammar, text), text
        assert allows(plan.grammar, text, "optional") and allows(plan.grammar, "a<tool_call>b</think>" + text, "open")
        assert allows(plan.grammar, "<think>a<tool_call>b</think>\n\n" + text, "optional")
    for text in (wrong, "hi " + wrong, right + wrong, hermes("z", "{}"), "<tool_call>text", right[:-20]):
        assert not allows(plan.grammar, text) and not allows(plan.grammar, "<think>a</think>" + text, "optional")
    one = ToolPlan.of([STRICT], parallel=False).grammar
    assert allows(one, "hi " + right) and allows(one, "hi") and not allows(one, right + right)
    assert ToolPlan.of([F]).grammar is ToolPlan.of([STRICT], "none").grammar is None


def test_strict_tools_of_llama():
    plan = ToolPlan.of([F, STRICT], chat_template=LLAMA)
    right, wrong, free = (f'{{"name": "{n}", "parameters": {{"c": "{c}"}}}}' for n, c in ("sx", "sy", "fy"))
    for text in ("", "hi", "hi {", right, free, right + "; " + free):
        assert allows(plan.grammar, text) and allows(plan.grammar, "<think>a</think>" + text, "optional"), text
    for text in (wrong, right + "; " + wrong, "{", " " + wrong, "hi <|python_tag|>" + wrong, right + "hi"):
        assert not allows(plan.grammar, text), text
    one = ToolPlan.of([STRICT], chat_template=LLAMA, parallel=False).grammar
    assert allows(one, right) and allows(one, "hi") and not allows(one, right + "; " + right)


def test_structured_outputs_take_the_place_of_calls_that_are_not_demanded():
    given = SamplingParams(structured_outputs={"choice": ["a"]})
    assert AnswerPlan(ToolPlan.of([STRICT])).params(given).structured_outputs.choice == ("a",)
    assert AnswerPlan(ToolPlan.of([STRICT])).params(SamplingParams()).structured_outputs.grammar is not None
    with pytest.raises(ValueError, match="exclude each other"):
        AnswerPlan(ToolPlan.of([STRICT], "required")).params(given)


def allowed(mode, *names):
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_allowed_tools():
    auto = ToolPlan.of([F, G, STRICT], allowed("auto", "g", "f"))
    assert auto.choice == "auto" and auto.template_tools == [F, G] and auto.grammar is None
    required = ToolPlan.of([F, G], allowed("required", "g"))
    assert required.choice == "required" and '"f"' not in required.grammar and "*" in required.grammar


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
        ([G], {"type": "allowed_tools"}, "allowed_tools=None: must be"),
        ([G], {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [G]}}, "allowed_tools=.*must be"),
        ([G], allowed("auto"), "allowed_tools=.*must be"),
        ([G], allowed("auto", "g", "h"), r"there is no function 'h' in tools, which has \['g'\]"),
        ([G], {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": ["g"]}}, "no function 'g'"),
        (None, allowed("required", "g"), r"no function 'g' in tools, which has \[\]"),
        ([{"type": "function", "function": {"name": "a", "zzz": 1}}], None, r"tools\[0\]: .*no field 'zzz'; known are"),
        ([{"type": "function", "function": {"name": "a", "strict": 1}}], None, r"tools\[0\]: strict=1: must be true"),
        (None, NAMED, "no function 'g'"),
    ],
)
def test_wrong_fields_are_named(tools, choice, words):
    with pytest.raises(ValueError, match=words):
        ToolPlan.of(tools, choice)


@pytest.mark.parametrize(
    "tools, choice, said",
    [
        ([F | {"strict": True}], None, "tools[0] has no field 'strict'; known are type, function"),
        ([{"type": "function", "function": {"name": "f", "schema": {}}}], None,
         "tools[0]: function has no field 'schema'; known are name, description, parameters, strict"),
        ([G], NAMED | {"mode": "any"}, "tool_choice has no field 'mode'; known are type, function"),
        ([G], {"type": "function", "function": {"name": "g", "strict": True}},
         "tool_choice: function has no field 'strict'; known are name"),
        ([G], {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}, "mode": "auto"},
         "tool_choice has no field 'mode'; known are type, allowed_tools"),
    ],
)  # fmt: skip
def test_a_field_that_would_be_ignored_is_refused(tools, choice, said):
    with pytest.raises(ValueError) as raised:
        ToolPlan.of(tools, choice)
    assert str(raised.value) == said
    assert ToolPlan.of([G | {"cache_control": {"type": "ephemeral"}, "strict": None}], NAMED).choice == "named"
