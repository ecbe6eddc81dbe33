"""What a chat model writes, taken apart while it is written: text, reasoning, tool calls. Nothing here needs torch.

    tools = ToolPlan.of(tools, tool_choice, chat_template)  # checks the request's fields; ValueError: they are wrong
    # tools.template_tools goes to the chat template, which renders `prompt`.
    plan = AnswerPlan.of(tools, prompt, chat_template)
    params = plan.params(params)                    # the model must call a tool, if tool_choice says so
    parser = plan.parser()
    for text in stream:
        deltas = parser.feed(text)                  # ContentDelta, ReasoningDelta, CallDelta, ArgumentsDelta
    deltas = parser.finish()
    message = collect(all_deltas)                   # content, reasoning_content, tool_calls
    reason = tools.finish_reason(engine_reason, bool(message.tool_calls))

A whole answer is one `feed` and `finish`: `parse(parser, text)`. However a text is cut into pieces, the collected
message is the same. `StructuredOutputs.of_response_format` reads OpenAI's `response_format`. Deltas have no call ids:
the server makes them.
"""

from nanovllm.chat.answer import AnswerParser
from nanovllm.chat.answer_plan import AnswerPlan, with_constraints
from nanovllm.chat.deltas import (
    ArgumentsDelta,
    CallDelta,
    ContentDelta,
    Delta,
    Message,
    ReasoningDelta,
    ToolCall,
    collect,
    parse,
)
from nanovllm.chat.reasoning import ReasoningParser, may_reason, opens_reasoning
from nanovllm.chat.tool_choice import ToolPlan
from nanovllm.chat.tools import HermesToolParser, LlamaToolParser, ToolParser, tool_format

__all__ = [
    "AnswerParser", "AnswerPlan", "ArgumentsDelta", "CallDelta", "ContentDelta", "Delta", "HermesToolParser",
    "LlamaToolParser", "Message", "ReasoningDelta", "ReasoningParser", "ToolCall", "ToolParser", "ToolPlan", "collect",
    "may_reason", "opens_reasoning", "parse", "tool_format", "with_constraints",
]  # fmt: skip
