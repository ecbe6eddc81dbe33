"""What parsers of answers give out, piece by piece, and the message that the pieces make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class ContentDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """More of the text that the model writes before its answer (`reasoning_content`)."""

    text: str


@dataclass(frozen=True)
class CallDelta:
    """A tool call begins. Its `ArgumentsDelta`s follow."""

    index: int
    """The number of the call in the answer, from 0."""
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """More of a call's arguments: JSON as the model wrote it, valid or not."""

    index: int
    text: str


Delta = ContentDelta | ReasoningDelta | CallDelta | ArgumentsDelta


class Parser(Protocol):
    """Takes a text apart. It depends on the text alone, not on where the text is cut."""

    def feed(self, text: str) -> list[Delta]:
        """Take more text; returns what is certain now."""
        ...

    def finish(self) -> list[Delta]:
        """No more text will come; returns what was kept back."""
        ...


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str
    """JSON as the model wrote it. It may be invalid, or end early where `max_tokens` ended the answer."""


@dataclass(frozen=True)
class Message:
    """An answer. The fields have the names of OpenAI's message."""

    content: str | None
    """None: there is no text apart from reasoning and calls."""
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()


def collect(deltas: Iterable[Delta]) -> Message:
    """The message that deltas make."""
    content, reasoning, names, arguments = [], [], [], []
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            content.append(delta.text)
        elif isinstance(delta, ReasoningDelta):
            reasoning.append(delta.text)
        elif isinstance(delta, CallDelta):
            names.append(delta.name)
            arguments.append("")
        else:
            arguments[delta.index] += delta.text
    calls = tuple(map(ToolCall, names, arguments))
    return Message("".join(content) or None, "".join(reasoning) or None, calls)


def parse(parser: Parser, text: str) -> Message:
    """The message that a new parser makes of a whole text."""
    return collect([*parser.feed(text), *parser.finish()])
