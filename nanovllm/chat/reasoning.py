"""Reasoning apart from the answer: `<think>...</think>` at the beginning."""

from __future__ import annotations

from nanovllm.chat.deltas import ContentDelta, Delta, ReasoningDelta
from nanovllm.chat.tags import BLANKS, TextUntil

START, END = "<think>", "</think>"


def opens_reasoning(prompt: str) -> bool:
    """Whether a rendered prompt ends with an open `<think>`, so that the model's text begins inside of the block."""
    return prompt.rstrip(BLANKS).endswith(START)


def may_reason(prompt: str, chat_template: str | None) -> bool:
    """Whether the model may begin its answer with a `<think>` block of its own.

    The template knows the tag, and the prompt does not end with a closed block, which says that the model must not.
    """
    return START in (chat_template or "") and not prompt.rstrip(BLANKS).endswith((START, END))


class ReasoningParser:
    """Splits a text into `ReasoningDelta` and `ContentDelta`. White space beside the tags is left out.

    Args:
        opened: the prompt ends with `<think>`; see `opens_reasoning`. A `<think>` that the model repeats is left out.
    """

    def __init__(self, opened: bool = False) -> None:
        self._opened = opened
        self._start: str | None = ""
        """The text's beginning without white space, as long as it may be `<think>`; None afterwards."""
        self._blanks: list[str] = []
        """The white space before it."""
        self._inside: TextUntil | None = None
        self._skips_blanks = False

    def feed(self, text: str) -> list[Delta]:
        if self._start is not None:
            text = self._begin(self._start + text, final=False)
        if self._inside is None:
            return self._content(text)
        piece, tag, rest = self._inside.feed(self._without_blanks(text))
        deltas: list[Delta] = [ReasoningDelta(piece)] if piece else []
        if tag is None:
            return deltas
        self._inside, self._skips_blanks = None, True
        return deltas + self._content(rest)

    def finish(self) -> list[Delta]:
        rest = ""
        if self._start is not None:
            rest = self._begin(self._start, final=True)
            if self._inside is None:
                return self._content(rest)
        if self._inside is None:
            return []
        rest = (self._inside.feed(rest)[0] + self._inside.finish()).rstrip(BLANKS)
        return [ReasoningDelta(rest)] if rest else []

    def _begin(self, text: str, final: bool) -> str:
        """Decide whether the text begins inside of a block; returns the text to go on with."""
        stripped = text.lstrip(BLANKS)
        self._blanks.append(text[: len(text) - len(stripped)])
        if not final and len(stripped) < len(START) and START.startswith(stripped):
            self._start = stripped
            return ""
        self._start = None
        opens = stripped.startswith(START)
        if not (opens or self._opened):
            return "".join((*self._blanks, stripped))
        self._inside, self._skips_blanks = TextUntil(END), True
        return stripped[len(START) :] if opens else stripped

    def _content(self, text: str) -> list[Delta]:
        text = self._without_blanks(text)
        return [ContentDelta(text)] if text else []

    def _without_blanks(self, text: str) -> str:
        if self._skips_blanks:
            text = text.lstrip(BLANKS)
            self._skips_blanks = not text
        return text
