"""Tool calls out of a model's text: the formats of Qwen (hermes) and Llama 3.

Qwen writes `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` for each call, with text around them. Llama 3
answers with `{"name": ..., "parameters": {...}}`, or several with `;` between them, maybe after `<|python_tag|>`.
What is no call is text: nothing that the model writes is lost but white space beside calls and what follows a call's
object before its end tag.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from nanovllm.chat.call_reader import CallReader
from nanovllm.chat.deltas import ContentDelta, Delta
from nanovllm.chat.tags import BLANKS, TextUntil

ToolFormat = Literal["hermes", "llama3"]
CALL, END_CALL, PYTHON = "<tool_call>", "</tool_call>", "<|python_tag|>"


def tool_format(chat_template: str | None) -> ToolFormat | None:
    """The format of calls that a chat template asks the model for; None: it shows no tools, or in another format."""
    template = chat_template or ""
    if "tools" not in template or "<function=" in template:  # XML calls, as of Qwen3-Coder
        return None
    if CALL in template:
        return "hermes"
    return "llama3" if PYTHON in template or '"parameters"' in template else None


class ToolParser(ABC):
    """What the formats share: text, calls, and which of the two comes now.

    Args:
        max_calls: calls after this many are left out. None: all are kept.
        only_calls: a grammar allows nothing but calls, so text can only be the beginning of a call that was cut off.
            It is left out.
    """

    def __init__(self, max_calls: int | None = None, only_calls: bool = False) -> None:
        self._max_calls = max_calls
        self._only_calls = only_calls
        self._num_calls = 0
        self._reader: CallReader | None = None
        self._blanks: list[str] | None = []
        """White space at the text's beginning, kept until something follows it; None: something did."""

    def feed(self, text: str) -> list[Delta]:
        """Take more text; returns what is certain now."""
        deltas: list[Delta] = []
        while text:
            text = self._take(text, deltas)
        return deltas

    @abstractmethod
    def finish(self) -> list[Delta]:
        """No more text will come; returns what was kept back. An unfinished call keeps the arguments that it has."""

    @abstractmethod
    def _take(self, text: str, deltas: list[Delta]) -> str:
        """Take some of the text; returns the rest."""

    def _read_call(self, reader: CallReader, text: str, deltas: list[Delta], beginning: str) -> str:
        """Read on in a call; returns the rest. beginning: what the text has before the object."""
        found, at = reader.feed(text)
        self._extend(deltas, found)
        if reader.done or reader.invalid:
            self._reader = None
            if reader.started:
                self._num_calls += 1
            else:
                self._content(beginning + reader.raw, deltas)
            self._call_ended(reader)
        return text[at:]

    @abstractmethod
    def _call_ended(self, reader: CallReader) -> None:
        """The reader has no more to read."""

    def _extend(self, deltas: list[Delta], found: list[Delta]) -> None:
        if self._max_calls is None or self._num_calls < self._max_calls:
            deltas += found

    def _content(self, text: str, deltas: list[Delta]) -> None:
        if self._only_calls:
            return
        if self._blanks is not None:
            stripped = text.lstrip(BLANKS)
            # White space after a call is left out; at the beginning of an answer it counts if text follows.
            if not self._num_calls:
                self._blanks.append(text[: len(text) - len(stripped)])
            if not stripped:
                return
            text, self._blanks = "".join((*self._blanks, stripped)), None
        if text:
            deltas.append(ContentDelta(text))

    def _finish(self, held: str, beginning: str = "") -> list[Delta]:
        """held: text that was kept back."""
        deltas: list[Delta] = []
        reader = self._reader
        if reader is not None and reader.started:
            self._extend(deltas, reader.finish())
            return deltas
        self._content(held if reader is None else beginning + reader.raw, deltas)
        if self._blanks and not self._num_calls and (blank := "".join(self._blanks)):
            deltas.append(ContentDelta(blank))
        return deltas


class HermesToolParser(ToolParser):
    """Calls between `<tool_call>` and `</tool_call>`, as Qwen 2.5 and 3 write them."""

    def __init__(self, max_calls: int | None = None, only_calls: bool = False) -> None:
        super().__init__(max_calls, only_calls)
        self._text = TextUntil(CALL)
        self._after: TextUntil | None = None
        """While text between a call's object and its end tag is left out. A model may forget the end tag."""

    def _take(self, text: str, deltas: list[Delta]) -> str:
        if self._reader is not None:
            return self._read_call(self._reader, text, deltas, CALL)
        if self._after is not None:
            _, tag, rest = self._after.feed(text)
            if tag is not None:
                self._after, self._blanks = None, []
            if tag == CALL:
                self._begin_call()
            return rest
        piece, tag, rest = self._text.feed(text)
        self._content(piece, deltas)
        if tag is not None:
            self._begin_call()
        return rest

    def _begin_call(self) -> None:
        self._reader = CallReader(self._num_calls, end_tag=END_CALL)

    def _call_ended(self, reader: CallReader) -> None:
        if not reader.started:
            return
        if reader.ended_by_tag:
            self._blanks = []
        else:
            self._after = TextUntil(END_CALL, CALL)

    def finish(self) -> list[Delta]:
        return self._finish(self._text.finish(), CALL)


class LlamaToolParser(ToolParser):
    """Calls as bare JSON objects at the beginning of an answer or after `<|python_tag|>`, as Llama 3.1 and 3.2 write
    them.
    """

    def __init__(self, max_calls: int | None = None, only_calls: bool = False) -> None:
        super().__init__(max_calls, only_calls)
        self._text = TextUntil(PYTHON)
        self._may_begin = True
        """Whether `{` would begin a call."""
        self._skipped = BLANKS

    def _take(self, text: str, deltas: list[Delta]) -> str:
        if self._reader is not None:
            return self._read_call(self._reader, text, deltas, "")
        if self._may_begin:
            stripped = text.lstrip(self._skipped)
            if not self._num_calls:
                self._content(text[: len(text) - len(stripped)], deltas)
            if stripped:
                self._may_begin = False
                if stripped[0] == "{":
                    self._reader = CallReader(self._num_calls, needs_arguments=True)
            return stripped
        piece, tag, rest = self._text.feed(text)
        self._content(piece, deltas)
        if tag is not None:
            self._may_begin = True
        return rest

    def _call_ended(self, reader: CallReader) -> None:
        if reader.started:
            self._may_begin, self._blanks, self._skipped = True, [], BLANKS + ";"

    def finish(self) -> list[Delta]:
        return self._finish(self._text.finish())
