"""Tools through templates like those of Qwen3 and Llama 3.1: the parts that show tools, calls and reasoning."""

import json

import pytest

from nanovllm import SamplingParams
from nanovllm.chat import AnswerPlan, ToolPlan, parse
from tests.llm.small_llm import MESSAGES, make

pytestmark = pytest.mark.any_device

QWEN = """\
{%- if tools %}{{ '<|im_start|>system\n# Tools\n<tools>' }}
{%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}
{{- '\n</tools>\n<tool_call>\n{"name": <function-name>, "arguments": <object>}\n</tool_call><|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
LLAMA = """\
{%- if tools %}{{ 'Respond in the format {"name": function name, "parameters": dictionary}. <|python_tag|>' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}
{%- for message in messages %}{{ message.role + ': ' + message.content }}{% endfor %}"""


@pytest.fixture(scope="module")
def llm(directory):
    return make(directory, max_model_len=512)


def weather(city: str, days: int = 1):
    """
    Tells the weather.

    Args:
        city: Where.
        days: How many days.
    """


@pytest.mark.parametrize("template, key", [(QWEN, "arguments"), (LLAMA, "parameters")], ids=["qwen", "llama"])
def test_a_call_in_the_format_of_the_template(llm, template, key):
    params = SamplingParams(max_tokens=110, seed=3)
    kind = dict(use_tqdm=False, chat_template=template, tool_choice="required", parallel_tool_calls=False)
    (out,) = llm.chat(MESSAGES, params, tools=[weather], **kind, chat_template_kwargs={"enable_thinking": False})
    assert '"description": "Where."' in out.prompt and f'{{"name": "weather", "{key}": {{"city": "' in out["text"]
    (call,) = out["message"].tool_calls
    assert call.name == "weather"
    if out["finish_reason"] == "stop":
        assert set(json.loads(call.arguments)) <= {"city", "days"}


def test_calls_of_earlier_turns_reach_the_template_as_objects(llm):
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    messages = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    prompt = llm.chat_prompt(messages, chat_template=QWEN)["prompt"]
    assert '<tool_call>\n{"name": "f", "arguments": {"a": [1]}}\n</tool_call>' in prompt
    call["function"]["arguments"] = '{"a'  # a call that was cut: the template gets it as it is
    assert '"arguments": "{\\"a"' in llm.chat_prompt(messages, chat_template=QWEN)["prompt"]


@pytest.mark.parametrize("thinks, reasoning", [(True, "optional"), (False, None)])
def test_whether_the_model_reasons_is_read_off_the_rendered_prompt(llm, thinks, reasoning):
    prompt = llm.chat_prompt(MESSAGES, chat_template=QWEN, enable_thinking=thinks)["prompt"]
    plan = AnswerPlan.of(ToolPlan.of(None), prompt, QWEN)
    params = plan.params(SamplingParams(structured_outputs={"choice": ["yes"]}))
    assert plan.reasoning == reasoning == params.structured_outputs.reasoning
    message = parse(plan.parser(), "<think>\nhm\n</think>\n\nyes")
    assert (message.content == "yes") is thinks


def test_a_function_that_says_nothing_of_itself_is_refused(llm):
    with pytest.raises(ValueError, match="tools: a function cannot be described"):
        llm.chat(MESSAGES, tools=[lambda x: x])
    unsupported = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": unsupported}}]
    with pytest.raises(ValueError, match="tools: .*uniqueItems"):
        llm.chat(MESSAGES, tools=tools, tool_choice="required")
    with pytest.raises(ValueError, match="tool_choice: there is no function 'g'"):
        llm.chat(MESSAGES, tools=[weather], tool_choice={"type": "function", "function": {"name": "g"}})
