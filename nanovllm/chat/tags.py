"""Text up to a tag, when the text comes in pieces."""

from __future__ import annotations

BLANKS = " \t\r\n"


class TextUntil:
    """Passes text on until one of some tags comes. The white space before a tag belongs to neither.

    It keeps back what may be the beginning of a tag, and the white space before it.

    Args:
        tags: all begin with the same character.
    """

    def __init__(self, *tags: str) -> None:
        self._tags = tags
        self._first = tags[0][0]
        self._longest = max(map(len, tags)) - 1
        self._blanks: list[str] = []
        """White space that is kept back: pieces, so that much of it costs no more than it is long."""
        self._part = ""
        """The beginning of a tag that is kept back, after `_blanks`."""

    def feed(self, text: str) -> tuple[str, str | None, str]:
        """(text to pass on, the tag that came or None, the text after the tag)"""
        text = self._part + text
        self._part = ""
        if self._first in text:
            found = [(at, tag) for tag in self._tags if (at := text.find(tag)) >= 0]
            if found:
                at, tag = min(found)
                passed = self._passed(text[:at])
                self._blanks = []
                return passed, tag, text[at + len(tag) :]
            most = range(min(len(text), self._longest), 0, -1)
            part = next((n for n in most if any(tag.startswith(text[-n:]) for tag in self._tags)), 0)
            text, self._part = text[: len(text) - part], text[len(text) - part :]
        return self._passed(text), None, ""

    def _passed(self, text: str) -> str:
        """The text with the white space before it; that at its end is kept back."""
        stripped = text.rstrip(BLANKS)
        passed = "".join((*self._blanks, stripped)) if stripped else ""
        if stripped:
            self._blanks = []
        if len(stripped) < len(text):
            self._blanks.append(text[len(stripped) :])
        return passed

    def finish(self) -> str:
        """What was kept back."""
        held = "".join((*self._blanks, self._part))
        self._blanks, self._part = [], ""
        return held
