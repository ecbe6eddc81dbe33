"""An answer as a row of blocks (reasoning, text, tool calls), as Anthropic's and OpenAI's newer interface have it."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from nanovllm.chat import AnswerParser, ArgumentsDelta, CallDelta, Delta, ReasoningDelta
from nanovllm.outputs import CompletionOutput

Change = Literal["open", "more", "close"]


@dataclass
class Block:
    """A part of an answer. `text` is a call's arguments if it is one."""

    kind: Literal["reasoning", "text", "call"]
    index: int
    name: str = ""
    text: str = ""
    id: str = field(default_factory=lambda: secrets.token_hex(12))


class Blocks:
    """Sorts the deltas that an answer's parser gives into blocks. One block is open at a time."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser
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
        for delta in self._parser.feed(piece.text, last=ended):
            yield from self._take(delta)
        if ended:
            self.finish_reason, self.stop_reason = piece.finish_reason, piece.stop_reason
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
            yield from self._begin(Block(kind, len(self.all)))
        assert self._open is not None
        self._open.text += text
        yield "more", self._open, text

    def _begin(self, block: Block) -> Iterator[tuple[Change, Block, str]]:
        self._open = block
        self.all.append(block)
        yield "open", block, ""

    def _close(self) -> Iterator[tuple[Change, Block, str]]:
        if self._open is not None:
            block, self._open = self._open, None
            yield "close", block, ""
