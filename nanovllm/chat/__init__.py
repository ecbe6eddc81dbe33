"""What a chat model writes, taken apart while it is written: text, reasoning, tool calls. Nothing here needs torch.

    plan = ToolPlan.of(tools, tool_choice, chat_template)     # checks the request's fields; ValueError: they are wrong
    parser = AnswerParser(reasoning=opens_reasoning(prompt_text), tools=plan.parser())
    for text in stream:
        deltas = parser.feed(text)                            # ContentDelta, ReasoningDelta, CallDelta, ArgumentsDelta
    deltas = parser.finish()
    message = collect(all_deltas)                             # content, reasoning_content, tool_calls
    reason = plan.finish_reason(engine_reason, bool(message.tool_calls))

A whole answer is one `feed` and `finish`: `parse(parser, text)`. However a text is cut into pieces, the collected
message is the same. `plan.template_tools` goes to the chat template. `plan.grammar`, if it is not None, goes to
`SamplingParams(structured_outputs=...)`: the model must call a tool (tool_choice "required" or a named function).
Reasoning is for models whose template knows `<think>` (`may_reason`, `opens_reasoning`). Deltas have no call ids: the
server makes them.
"""

from nanovllm.chat.answer import AnswerParser
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
    "AnswerParser", "ArgumentsDelta", "CallDelta", "ContentDelta", "Delta", "HermesToolParser", "LlamaToolParser",
    "Message", "ReasoningDelta", "ReasoningParser", "ToolCall", "ToolParser", "ToolPlan", "collect", "may_reason",
    "opens_reasoning", "parse", "tool_format",
]  # fmt: skip
