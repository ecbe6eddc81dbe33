"""Token ids to text, token by token, never in the middle of a character."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

_UNFINISHED = "\ufffd"  # what a tokenizer decodes an incomplete UTF-8 sequence to
_LONGEST = 4  # bytes of a character
_FIRST, _LAST = 8, 19  # tokens of a long run that are looked at, at its two ends


class _Ends(NamedTuple):
    """What is to be looked at of a long run."""

    first: list[int]
    num_first: int
    """Characters that they are by themselves."""
    cuts: int
    """Numbers of last tokens to try, 1 if it is wrong bytes that the run begins with; 0: the run has to be decoded whole."""
    silent: frozenset[int]
    """Tokens without a text."""


class Detokenizer:
    """Decodes one completion as it grows, and finds its stop strings.

    A token's text can depend on its neighbours (a leading space, bytes of one character spread over tokens), so each
    new piece is the difference between decoding a short run of tokens with and without the new ones. A piece that
    ends in an incomplete character is kept back until the character is whole. `text` is therefore what decoding all
    tokens at once gives. What a token costs does not depend on how much is kept back (`_goes_on`).

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
        self._known = ""  # the text between the two
        self._ends: _Ends | None = None  # see `_goes_on`
        self.text = ""

    def append(self, token_id: int) -> str | None:
        """Take one more token; returns the stop string that it completed, with `text` cut there, or None."""
        self._token_ids.append(token_id)
        if self._goes_on():
            return None
        piece = self._decode(self._token_ids[self._prefix :])
        if len(piece) <= len(self._known) or piece.endswith(_UNFINISHED):
            return None
        piece = piece[len(self._known) :]
        self._prefix, self._read = self._read, len(self._token_ids)
        self._known, self._ends = self._decode(self._token_ids[self._prefix :]), None
        return self._extend(piece)

    def finish(self) -> str | None:
        """No more tokens will come: take over what was kept back. Returns a stop string as `append` does."""
        piece = self._decode(self._token_ids[self._prefix :])[len(self._known) :]
        self._prefix = self._read = len(self._token_ids)
        self._known = ""
        return self._extend(piece)

    @property
    def settled_length(self) -> int:
        """Characters of `text` that no stop string can still take back."""
        if self._include_stop or not self._stop:
            return len(self.text)
        return max(0, len(self.text) - max(map(len, self._stop)) + 1)

    def _goes_on(self) -> bool:
        """Whether a long run that is kept back surely still ends in an incomplete character, by its two ends alone.

        The last tokens say it if they have four bytes, the longest character; they do if they add four characters to the text.
        They are so many because up to three bytes become one U+FFFD. The first tokens are there because some tokenizers decode
        all byte tokens that follow each other to U+FFFD as soon as one of them is wrong. So that no cut makes them wrong: of
        four cuts in a row one is between two characters.
        """
        token_ids = self._token_ids
        if len(token_ids) - self._read < _FIRST + _LONGEST + _LAST:
            return False
        if self._ends is None:
            self._ends = self._look_at_first(token_ids[self._read : self._read + _FIRST + _LONGEST - 1])
        first, num_first, cuts, silent = self._ends
        if not cuts or not silent.isdisjoint(token_ids[-_LAST:]):
            return False
        for number in range(_LAST - cuts + 1, _LAST + 1):
            text = self._decode(first + token_ids[-number:])
            if not text.endswith(_UNFINISHED) or len(text) < num_first + _LONGEST:
                return False
        return True

    def _look_at_first(self, token_ids: list[int]) -> _Ends:
        silent = frozenset(self._tokenizer.all_special_ids) if self._skip_special_tokens else frozenset()
        if not silent.isdisjoint(token_ids):  # a character's tokens may be anywhere between them
            return _Ends([], 0, 0, silent)
        starts = [token_ids[:n] for n in range(_FIRST, _FIRST + _LONGEST)]
        lengths = [len(self._decode(start)) for start in starts]
        # Wrong bytes are characters of their own, right ones are fewer characters than bytes.
        length, first = min(zip(lengths, starts), key=lambda found: found[0] / len(found[1]))
        return _Ends(first, length, 1 if length >= len(first) else _LONGEST, silent)

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

    def _decode(self, token_ids: list[int]) -> str:
        return decode(self._tokenizer, token_ids, self._skip_special_tokens)


def decode(tokenizer: Any, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
    """The text of token ids, exactly as they stand: no clean-up of spaces before punctuation."""
    return tokenizer.decode(
        list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )
