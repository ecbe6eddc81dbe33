"""An answer as a row of blocks (reasoning, text, tool calls), as Anthropic's and OpenAI's newer interface have it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from nanovllm.chat import AnswerParser, ArgumentsDelta, CallDelta, Delta, ReasoningDelta
from nanovllm.outputs import CompletionOutput

Change = Literal["open", "more", "close"]


@dataclass
class Block:
    """A part of an answer.

    Attributes:
        text: a call's arguments if it is one.
        logprobs: of a text's tokens, if they are wanted.
        num_told: how many of them belong to what was there before the last change.
    """

    kind: Literal["reasoning", "text", "call"]
    index: int
    name: str = ""
    text: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    num_told: int = 0
    id: str = field(default_factory=lambda: secrets.token_hex(12))


class Blocks:
    """Sorts the deltas that an answer's parser gives into blocks. One block is open at a time.

    Args:
        logprobs: makes the log-probabilities of a piece's tokens, as a chat has them. None: none are wanted.
    """

    def __init__(
        self, parser: AnswerParser, logprobs: Callable[[CompletionOutput], list[dict[str, Any]]] | None = None
    ) -> None:
        self._parser = parser
        self._logprobs = logprobs
        self._rows: list[dict[str, Any]] = []
        """Of tokens that no block has yet."""
        self._open: Block | None = None
        self._space = ""
        self.all: list[Block] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    @property
    def has_calls(self) -> bool:
        return any(block.kind == "call" for block in self.all)

    def feed(self, piece: CompletionOutput) -> Iterator[tuple[Change, Block, str]]:
        """(what happens, to which block, the new text) for what is new."""
        ended = piece.finish_reason is not None
        if self._logprobs is not None:
            self._rows += self._logprobs(piece)
        for delta in self._parser.feed(piece.text, last=ended):
            yield from self._take(delta)
        if self._open is not None and self._open.kind != "text":
            self._rows = []
        if ended:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
            if self._open is not None and self._open.kind == "text":
                self._open.logprobs += self._rows
            yield from self._close()

    def _take(self, delta: Delta) -> Iterator[tuple[Change, Block, str]]:
        if isinstance(delta, CallDelta):
            yield from self._close()
            yield from self._begin(Block("call", len(self.all), delta.name))
            return
        kind: Literal["reasoning", "text", "call"] = "text"
        if isinstance(delta, ReasoningDelta):
            kind = "reasoning"
        elif isinstance(delta, ArgumentsDelta):
            kind = "call"
        text = delta.text
        if self._open is None or self._open.kind != kind:
            if kind == "text":
                # White space before a text belongs to it at the beginning of an answer, not between two blocks.
                text = text.lstrip() if self.all else self._space + text
                if not text.strip():
                    self._space = text
                    return
            yield from self._close()
            if kind == "text" and self.all:
                del self._rows[: len(self._rows) - _num_covering(self._rows[::-1], text)]
            yield from self._begin(Block(kind, len(self.all)))
        assert self._open is not None
        self._open.text += text
        if kind == "text":
            self._open.num_told = len(self._open.logprobs)
            count = len(self._rows) if self._parser.is_plain else _num_covering(self._rows, text)
            self._open.logprobs += self._rows[:count]
            del self._rows[:count]
        yield "more", self._open, text

    def _begin(self, block: Block) -> Iterator[tuple[Change, Block, str]]:
        self._open = block
        self.all.append(block)
        yield "open", block, ""

    def _close(self) -> Iterator[tuple[Change, Block, str]]:
        if self._open is not None:
            block, self._open = self._open, None
            yield "close", block, ""


def _num_covering(rows: list[dict[str, Any]], text: str) -> int:
    """How many of the tokens make a text; those after them made what the parser has left out or put elsewhere."""
    count, missing = 0, len(text.encode())
    while count < len(rows) and missing > 0:
        missing -= len(rows[count]["bytes"])
        count += 1
    return count
