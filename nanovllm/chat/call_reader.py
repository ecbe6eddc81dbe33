"""Reads one tool call, `{"name": ..., "arguments": {...}}`, while it is written."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from typing import Any

from nanovllm.chat.deltas import ArgumentsDelta, CallDelta, Delta
from nanovllm.chat.tags import BLANKS

_ARGUMENTS = ("arguments", "parameters")
_STRING = re.compile(r'[^"\\\n]*')
_NO_QUOTE = re.compile(r'[^"\\]*')
_OUTSIDE = re.compile(r'[^"{}\[\]]*')
_SCALAR = re.compile(r"[^,}\]\s]*")


class CallReader:
    """Cuts name and arguments out of a JSON object. The arguments are never written anew: they stay as they came.

    The call has started when its name is known and its arguments begin, in any order. From there on it stays a call,
    even if what follows is no JSON.

    Args:
        index: the index of the call.
        needs_arguments: an object without arguments is no call; else its arguments are `{}`.
        end_tag: ends the call also inside of a string that has a raw line break, which no JSON string has.

    Attributes:
        done, invalid: the object has ended; it is no call. The reader takes no more text then.
        started: whether the call has started.
        ended_by_tag: the end tag ended it.
        raw: what was read, if the call has not started.
    """

    def __init__(self, index: int, needs_arguments: bool = False, end_tag: str = "") -> None:
        self.done = self.invalid = self.started = self.ended_by_tag = False
        self.raw = ""
        self._index = index
        self._needs_arguments = needs_arguments
        self._broken_end = "\n" + end_tag if end_tag else ""
        self._deltas: list[Delta] = []
        self._pieces: list[str] = []
        """Pieces of the arguments, to be given out after `_deltas`."""
        self._name: str | None = None
        self._arguments: str | None = None
        """What is known of the arguments and was not given out; None: they have not begun."""
        self._emits = False
        """Whether the value that is read is the arguments."""
        self._held = ""
        """The part of `_broken_end` that was read."""
        self._text, self._at = "", 0
        """Of `feed`, and where reading is."""
        self._reading = self._object()

    def feed(self, text: str, at: int = 0) -> tuple[list[Delta], int]:
        """Read on from text[at:]; returns what is certain now, and where reading ended."""
        self._text, self._at = text, at
        if not (self.done or self.invalid):
            next(self._reading, None)
        if not self.started:
            self.raw += text[at : self._at]
        return self._take(), self._at

    def finish(self) -> list[Delta]:
        """The text has ended inside of a call that has started: returns what was kept back."""
        self._pass(self._held)
        self._held = ""
        return self._take()

    def _take(self) -> list[Delta]:
        deltas, pieces, self._deltas, self._pieces = self._deltas, "".join(self._pieces), [], []
        return [*deltas, ArgumentsDelta(self._index, pieces)] if pieces else deltas

    def _start(self) -> None:
        """Start the call if all that it needs is there."""
        if not self.started and self._name is not None and self._arguments is not None:
            self.started = True
            self._deltas.append(CallDelta(self._index, self._name))
            self._pieces.append(self._arguments)

    def _pass(self, piece: str) -> None:
        """Give a piece of a value out, if the value is the arguments."""
        if self._emits and self.started:
            self._pieces.append(piece)
        elif self._emits:
            self._arguments = (self._arguments or "") + piece

    # ------------------------------------------------------------------------------------------------ the object
    # Generators that read the text from `_at` on, and yield when they need more of it.

    def _more(self) -> Generator[None]:
        """Wait for a character."""
        while self._at == len(self._text):
            yield

    def _peek(self) -> Generator[None, None, str]:
        """The next character that is no white space. It is not passed."""
        while True:
            yield from self._more()
            if self._text[self._at] not in BLANKS:
                return self._text[self._at]
            self._at += 1

    def _match(self, pattern: re.Pattern[str]) -> str:
        """Pass what matches here; maybe nothing."""
        found: Any = pattern.match(self._text, self._at)
        self._at = found.end()
        return found[0]

    def _char(self) -> str:
        self._at += 1
        return self._text[self._at - 1]

    def _fail(self) -> Generator[None]:
        """It is no call: nothing more is read."""
        self.invalid = True
        yield

    def _object(self) -> Generator[None]:
        if (yield from self._peek()) != "{":
            yield from self._fail()
        self._at += 1
        while (char := (yield from self._peek())) != "}":
            if char != '"':
                yield from self._fail()
            key = yield from self._quoted()
            self._at += 1
            if (yield from self._peek()) != ":":
                yield from self._fail()
            self._at += 1
            yield from self._value(key, (yield from self._peek()))
            if (char := (yield from self._peek())) not in ",}":
                yield from self._fail()
            self._at += char == ","
        self._at += 1
        if self._name is None or (self._arguments is None and self._needs_arguments):
            yield from self._fail()
        if self._arguments is None:
            self._arguments = "{}"
        self._start()
        self.done = True

    def _value(self, key: str, first: str) -> Generator[None]:
        """first: the first character of the value."""
        is_arguments = key in _ARGUMENTS and self._arguments is None
        if key == "name" and self._name is None:
            self._name = _decoded((yield from self._quoted())) if first == '"' else None
            if not self._name:
                yield from self._fail()
            self._at += 1
            self._start()
        elif is_arguments and first == '"':  # some models write the object as a string
            text = _decoded((yield from self._quoted())) or ""
            if not text.lstrip(BLANKS).startswith("{"):
                yield from self._fail()
            self._at += 1
            self._arguments = text
            self._start()
        elif first in ",}]:" or (is_arguments and first not in "{n"):  # null stands for no arguments
            yield from self._fail()
        elif first in '{["':
            self._emits = is_arguments
            if is_arguments:
                self._arguments = ""
                self._start()
            yield from self._nested()
        else:
            self._match(_SCALAR)
            while self._at == len(self._text):
                yield
                self._match(_SCALAR)

    def _quoted(self) -> Generator[None, None, str]:
        """A string whose value is wanted, without its quotes. The second one is not passed."""
        self._at += 1
        raw = ""
        while True:
            yield from self._more()
            raw += self._match(_NO_QUOTE)
            if self._at == len(self._text):
                continue
            if self._text[self._at] == '"':
                return raw
            raw += self._char()
            yield from self._more()
            raw += self._char()

    def _nested(self) -> Generator[None]:
        """An object, an array or a string of which nothing is wanted but its text, if it is the arguments."""
        depth = 0
        while True:
            yield from self._more()
            self._pass(self._match(_OUTSIDE))
            if self._at == len(self._text):
                continue
            char = self._char()
            self._pass(char)
            if char == '"':
                yield from self._in_nested_string()
            else:
                depth += 1 if char in "{[" else -1
            if depth == 0:
                return

    def _in_nested_string(self) -> Generator[None]:
        """The rest of a string, with its quote."""
        while True:
            yield from self._more()
            self._pass(self._match(_STRING))
            if self._at == len(self._text):
                continue
            if self._text[self._at] == "\n" and self._broken_end and self._emits and self.started:
                yield from self._line_break()
                continue
            char = self._char()
            self._pass(char)
            if char == '"':
                return
            if char == "\\":
                yield from self._more()
                self._pass(self._char())

    def _line_break(self) -> Generator[None]:
        """A raw line break in a string: the end tag may follow."""
        for char in self._broken_end:
            yield from self._more()
            if self._text[self._at] != char:
                self._pass(self._held)  # it has no quote and no backslash
                self._held = ""
                return
            self._held += self._char()
        self.done = self.ended_by_tag = True
        yield


def _decoded(raw: str) -> str | None:
    """The text of a JSON string, or None if it is none."""
    try:
        return json.loads(f'"{raw}"', strict=False)
    except ValueError:
        return None
