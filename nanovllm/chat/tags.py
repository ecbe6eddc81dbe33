"""Text up to a tag, when the text comes in pieces."""

from __future__ import annotations

BLANKS = " \t\r\n"


class TextUntil:
    """Passes text on until one of some tags comes. The white space before a tag belongs to neither.

    It keeps back what may be the beginning of a tag, and the white space before it.
    """

    def __init__(self, *tags: str) -> None:
        self._tags = tags
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None, str]:
        """(text to pass on, the tag that came or None, the text after the tag)"""
        text = self._held + text
        found = [(at, tag) for tag in self._tags if (at := text.find(tag)) >= 0]
        if found:
            at, tag = min(found)
            self._held = ""
            return text[:at].rstrip(BLANKS), tag, text[at + len(tag) :]
        longest = min(len(text), max(map(len, self._tags)) - 1)
        part = next((n for n in range(longest, 0, -1) if any(t.startswith(text[-n:]) for t in self._tags)), 0)
        passed = text[: len(text) - part].rstrip(BLANKS)
        self._held = text[len(passed) :]
        return passed, None, ""

    def finish(self) -> str:
        """What was kept back."""
        held, self._held = self._held, ""
        return held
