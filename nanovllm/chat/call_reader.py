"""Reads one tool call, `{"name": ..., "arguments": {...}}`, while it is written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from nanovllm.chat.deltas import ArgumentsDelta, CallDelta, Delta
from nanovllm.chat.tags import BLANKS

_ARGUMENTS = ("arguments", "parameters")
_STRING = re.compile(r'[^"\\\n]*')
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
        self._state: Callable[[str, int], int] = self._object
        self._then: Callable[[str], Callable[[str, int], int] | None] = self._key_read
        self._key = ""
        self._string = ""
        self._name: str | None = None
        self._arguments: str | None = None
        """What is known of the arguments and was not given out; None: they have not begun."""
        self._emits = False
        self._depth = 0
        self._in_string = self._escaped = False
        self._held = ""
        """The part of `_broken_end` that was read."""

    def feed(self, text: str, at: int = 0) -> tuple[list[Delta], int]:
        """Read on from text[at:]; returns what is certain now, and where reading ended."""
        start = at
        while at < len(text) and not (self.done or self.invalid):
            at = self._state(text, at)
        if not self.started:
            self.raw += text[start:at]
        return self._take(), at

    # ------------------------------------------------------------------------------------------------ the object
    # Each state takes text from `at` on, and returns where the next state goes on.

    def _fail(self, at: int) -> int:
        self.invalid = True
        return at

    def _object(self, text: str, at: int) -> int:
        if text[at] in BLANKS:
            return at + 1
        if text[at] != "{":
            return self._fail(at)
        self._state = self._key_or_end
        return at + 1

    def _key_or_end(self, text: str, at: int) -> int:
        if text[at] in BLANKS:
            return at + 1
        if text[at] == "}":
            return self._end(at + 1)
        if text[at] != '"':
            return self._fail(at)
        self._string, self._then, self._state = "", self._key_read, self._quoted
        return at + 1

    def _quoted(self, text: str, at: int) -> int:
        """The rest of a string whose value is wanted."""
        if not self._escaped:
            end = at
            while end < len(text) and text[end] not in '"\\':
                end += 1
            self._string += text[at:end]
            if end == len(text):
                return end
            at = end
        if text[at] == '"' and not self._escaped:
            state = self._then(self._string)
            if state is None:
                return self._fail(at)
            self._state = state
            return at + 1
        self._string += text[at]
        self._escaped = not self._escaped and text[at] == "\\"
        return at + 1

    def _key_read(self, raw: str) -> Callable[[str, int], int]:
        self._key = raw
        return self._colon

    def _colon(self, text: str, at: int) -> int:
        if text[at] in BLANKS:
            return at + 1
        if text[at] != ":":
            return self._fail(at)
        self._state = self._value
        return at + 1

    def _value(self, text: str, at: int) -> int:
        first = text[at]
        if first in BLANKS:
            return at + 1
        self._depth, self._in_string, self._emits = 0, False, False
        if self._key == "name" and self._name is None:
            if first != '"':
                return self._fail(at)
            self._string, self._then, self._state = "", self._name_read, self._quoted
            return at + 1
        if self._key in _ARGUMENTS and self._arguments is None:
            if first == '"':
                self._string, self._then, self._state = "", self._arguments_read, self._quoted
                return at + 1
            self._emits = first == "{"
            if self._emits:
                self._arguments = ""
                self._start()
            elif first != "n":  # null stands for no arguments
                return self._fail(at)
        if first in ",}]:":
            return self._fail(at)
        self._state = self._nested if first in '{["' else self._scalar
        return at

    def _name_read(self, raw: str) -> Callable[[str, int], int] | None:
        self._name = _decoded(raw) or None
        self._start()
        return None if self._name is None else self._after_value

    def _arguments_read(self, raw: str) -> Callable[[str, int], int] | None:
        """Some models write the object as a string."""
        text = _decoded(raw)
        if text is None or not text.lstrip(BLANKS).startswith("{"):
            return None
        self._arguments = text
        self._start()
        return self._after_value

    def _scalar(self, text: str, at: int) -> int:
        match = _SCALAR.match(text, at)
        assert match is not None
        if match.end() < len(text):
            self._state = self._after_value
        return match.end()

    def _after_value(self, text: str, at: int) -> int:
        if text[at] in BLANKS:
            return at + 1
        if text[at] == "}":
            return self._end(at + 1)
        if text[at] != ",":
            return self._fail(at)
        self._state = self._key_or_end
        return at + 1

    def _end(self, at: int) -> int:
        if self._name is None or (self._arguments is None and self._needs_arguments):
            return self._fail(at)
        if self._arguments is None:
            self._arguments = "{}"
        self._start()
        self.done = True
        return at

    # ------------------------------------------------------------------------------------------------ values

    def _start(self) -> None:
        """Start the call if all that it needs is there."""
        if self.started or self._name is None or self._arguments is None:
            return
        self.started = True
        self._deltas.append(CallDelta(self._index, self._name))
        arguments, self._arguments = self._arguments, ""
        self._emit(arguments)

    def _emit(self, piece: str) -> None:
        if not self.started:
            self._arguments = (self._arguments or "") + piece
        else:
            self._pieces.append(piece)

    def _pass(self, piece: str) -> None:
        if self._emits:
            self._emit(piece)

    def _nested(self, text: str, at: int) -> int:
        """An object, an array or a string of which nothing is wanted but its text, if it is the arguments."""
        if self._in_string:
            return self._in_nested_string(text, at)
        match = _OUTSIDE.match(text, at)
        assert match is not None
        end = match.end()
        if end < len(text):
            self._in_string = text[end] == '"'
            self._depth += (text[end] in "{[") - (text[end] in "}]")
            end += 1
            if not self._in_string and self._depth == 0:
                self._state = self._after_value
        self._pass(text[at:end])
        return end

    def _in_nested_string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            self._pass(text[at])
            return at + 1
        if self._held:
            if text[at] == self._broken_end[len(self._held)]:
                self._held += text[at]
                self.done = self.ended_by_tag = self._held == self._broken_end
                return at + 1
            self._pass(self._held)  # it has no quote and no backslash
            self._held = ""
            return at
        match = _STRING.match(text, at)
        assert match is not None
        end = match.end()
        self._pass(text[at:end])
        if end == len(text):
            return end
        if text[end] == "\n" and self._broken_end and self._emits and self.started:
            self._held = "\n"
            return end + 1
        self._escaped = text[end] == "\\"
        self._pass(text[end])
        if text[end] == '"':
            self._in_string = False
            if self._depth == 0:
                self._state = self._after_value
        return end + 1

    def finish(self) -> list[Delta]:
        """The text has ended inside of a call that has started: returns what was kept back."""
        self._pass(self._held)
        self._held = ""
        return self._take()

    def _take(self) -> list[Delta]:
        deltas, pieces, self._deltas, self._pieces = self._deltas, "".join(self._pieces), [], []
        return [*deltas, ArgumentsDelta(self._index, pieces)] if pieces else deltas


def _decoded(raw: str) -> str | None:
    """The text of a JSON string, or None if it is none."""
    try:
        return json.loads(f'"{raw}"', strict=False)
    except ValueError:
        return None
