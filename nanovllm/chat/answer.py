"""A chat model's answer taken apart: reasoning first, then text and tool calls."""

from __future__ import annotations

from nanovllm.chat.deltas import ContentDelta, Delta, Parser
from nanovllm.chat.reasoning import ReasoningParser


class AnswerParser:
    """Reasoning and tool calls out of one text.

    Args:
        reasoning: a `ReasoningParser`, or None: `<think>` is text like any other.
        tools: a parser of tool calls, or None: calls are text like any other.
    """

    def __init__(self, reasoning: ReasoningParser | None = None, tools: Parser | None = None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def is_plain(self) -> bool:
        """Whether all of the text comes out as content, and at once."""
        return self._reasoning is None and self._tools is None

    def feed(self, text: str, last: bool = False) -> list[Delta]:
        """Take more text; returns what is certain now. last: no more will come."""
        deltas: list[Delta] = []
        if text:
            deltas = self._with_calls([ContentDelta(text)] if self._reasoning is None else self._reasoning.feed(text))
        return deltas + self.finish() if last else deltas

    def finish(self) -> list[Delta]:
        """No more text will come; returns what was kept back."""
        deltas = [] if self._reasoning is None else self._with_calls(self._reasoning.finish())
        return deltas if self._tools is None else deltas + self._tools.finish()

    def _with_calls(self, deltas: list[Delta]) -> list[Delta]:
        if self._tools is None:
            return deltas
        found: list[Delta] = []
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                found += self._tools.feed(delta.text)
            else:
                found.append(delta)
        return found
