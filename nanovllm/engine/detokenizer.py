"""Token ids to text, token by token, never in the middle of a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\ufffd"  # what a tokenizer decodes an incomplete UTF-8 sequence to


class Detokenizer:
    """Decodes one completion as it grows, and finds its stop strings.

    A token's text can depend on its neighbours (a leading space, bytes of one character spread over tokens), so each
    new piece is the difference between decoding a short run of tokens with and without the new ones. A piece that
    ends in an incomplete character is kept back until the character is whole. `text` is therefore what decoding all
    tokens at once gives.

    Args:
        tokenizer: a transformers tokenizer.
        stop: strings that end the text.
        min_tokens: tokens before a stop string counts.
        include_stop: keep the stop string at the text's end.
    """

    def __init__(
        self,
        tokenizer: Any,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._token_ids: list[int] = []
        self._prefix = 0  # decoding starts here, a little before ...
        self._read = 0  # ... the first token whose text is not in `text` yet
        self.text = ""

    def append(self, token_id: int) -> str | None:
        """Take one more token; returns the stop string that it completed, with `text` cut there, or None."""
        self._token_ids.append(token_id)
        known = self._decode(self._prefix, self._read)
        piece = self._decode(self._prefix, len(self._token_ids))
        if len(piece) <= len(known) or piece.endswith(_UNFINISHED):
            return None
        self._prefix, self._read = self._read, len(self._token_ids)
        return self._extend(piece[len(known) :])

    def finish(self) -> str | None:
        """No more tokens will come: take over what was kept back. Returns a stop string as `append` does."""
        known = self._decode(self._prefix, self._read)
        piece = self._decode(self._prefix, len(self._token_ids))
        self._read = len(self._token_ids)
        return self._extend(piece[len(known) :])

    @property
    def settled_length(self) -> int:
        """Characters of `text` that no stop string can still take back."""
        if self._include_stop or not self._stop:
            return len(self.text)
        return max(0, len(self.text) - max(map(len, self._stop)) + 1)

    def _extend(self, piece: str) -> str | None:
        searched = len(self.text)
        self.text += piece
        if len(self._token_ids) <= self._min_tokens:
            return None
        # The earliest occurrence that the new piece completed; among equals the first in the user's order.
        best: tuple[int, str] | None = None
        for stop in self._stop:
            at = self.text.find(stop, max(0, searched - len(stop) + 1))
            if at >= 0 and (best is None or at < best[0]):
                best = at, stop
        if best is None:
            return None
        at, stop = best
        self.text = self.text[: at + len(stop)] if self._include_stop else self.text[:at]
        return stop

    def _decode(self, start: int, end: int) -> str:
        return decode(self._tokenizer, self._token_ids[start:end], self._skip_special_tokens)


def decode(tokenizer: Any, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
    """The text of token ids, exactly as they stand: no clean-up of spaces before punctuation."""
    return tokenizer.decode(
        list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
