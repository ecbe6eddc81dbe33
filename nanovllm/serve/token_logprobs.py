"""Log-probabilities in the two shapes of OpenAI's interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nanovllm.engine.requests.detokenizer import TextDecoder
from nanovllm.outputs import Logprob

Row = dict[int, Logprob]
_LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def token_name(token_id: int) -> str:
    """What vLLM's `return_tokens_as_token_ids` puts in a token's place: different tokens may have the same text."""
    return f"token_id:{token_id}"


def chat_logprobs(
    rows: Sequence[Row], num_top: int, token_bytes: Callable[[int], bytes], as_ids: bool = False
) -> list[dict[str, Any]]:
    """The field `logprobs` of a chat completion: an object for each token.

    Args:
        rows: for each token itself first, then the most likely ones.
        as_ids: tokens are called by their ids.
    """
    found = []
    for row in rows:
        own = next(iter(row))
        top = [_chat_entry(t, row[t], token_bytes, as_ids) for t in _most_likely(row, num_top)]
        found.append({**_chat_entry(own, row[own], token_bytes, as_ids), "top_logprobs": top})
    return found


def _chat_entry(token_id: int, logprob: Logprob, token_bytes: Callable[[int], bytes], as_ids: bool) -> dict[str, Any]:
    name = token_name(token_id) if as_ids else logprob.decoded_token or ""
    return {"token": name, "logprob": max(logprob.logprob, _LEAST), "bytes": list(token_bytes(token_id))}


def _most_likely(row: Row, num_top: int) -> list[int]:
    """The best `num_top` tokens of a row, whose first entry may or may not be one of them. -1: all."""
    best_first = sorted(row, key=lambda token_id: row[token_id].rank)
    return best_first if num_top == -1 else best_first[:num_top]


class CompletionLogprobs:
    """The field `logprobs` of a completion: parallel lists, as OpenAI's. It goes on from piece to piece of a stream.

    A token that is no whole text has its bytes as its name, "bytes:\\xf0\\x9f". If tokens at one position have the same
    name, all but one are called by their ids, so that `top_logprobs` has them all.

    Args:
        num_top: the most likely tokens that are told.
        as_ids: tokens are called by their ids.
        decoder: None: there are no texts.
        skip_special_tokens: whether the output's text is without them.
    """

    def __init__(
        self, num_top: int, as_ids: bool, decoder: TextDecoder | None, skip_special_tokens: bool = True
    ) -> None:
        self._num_top = num_top
        self._as_ids = as_ids
        self._decoder = decoder
        self._output = _Offsets(decoder, skip_special_tokens)

    def of(self, rows: Sequence[Row], token_ids: Sequence[int]) -> dict[str, Any]:
        """The log-probabilities of the output's next tokens."""
        return self._told(rows, token_ids, [self._output.next(token_id) for token_id in token_ids])

    def of_prompt(self, rows: Sequence[Row | None], token_ids: Sequence[int], text: str) -> dict[str, Any]:
        """Those of the prompt, whose text stands before that of the output. To be called before `of`, if at all.

        Args:
            rows: None for a first token, which has no log-probability.
        """
        offsets = _Offsets(self._decoder, skip_special_tokens=False)
        found = []
        for token_id in token_ids:
            found.append(offsets.end if offsets.is_outside(token_id, text) else offsets.next(token_id))
        self._output.end = len(text)
        return self._told(rows, token_ids, [min(offset, len(text)) for offset in found])

    def _told(self, rows: Sequence[Row | None], token_ids: Sequence[int], offsets: list[int]) -> dict[str, Any]:
        found: list[tuple[float | None, dict[str, float] | None]] = []
        for row, own in zip(rows, token_ids):
            if row is None:
                found.append((None, None))
                continue
            top: dict[str, float] = {}
            own_first = dict.fromkeys([own, *_most_likely(row, self._num_top)])  # as vLLM has it
            for token_id in own_first:
                name = self._name(token_id)
                top[token_name(token_id) if name in top else name] = max(row[token_id].logprob, _LEAST)
            found.append((max(row[own].logprob, _LEAST), top))
        return {
            "tokens": [self._name(token_id) for token_id in token_ids], "token_logprobs": [own for own, _ in found],
            "top_logprobs": [top for _, top in found], "text_offset": offsets,
        }  # fmt: skip

    def _name(self, token_id: int) -> str:
        if self._as_ids or self._decoder is None:
            return token_name(token_id)
        raw = self._decoder.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + repr(raw)[2:-1]


class _Offsets:
    """For each token of a text the index of the character in which it begins.

    end: the characters that are complete.
    """

    def __init__(self, decoder: TextDecoder | None, skip_special_tokens: bool) -> None:
        self._decoder = decoder
        self._pieces = None if decoder is None else decoder.pieces(skip_special_tokens)
        self.end = 0

    def next(self, token_id: int) -> int:
        if self._pieces is None:
            return self.end
        found = self.end + self._pieces.begins_after(token_id)
        self.end += len(self._pieces.push(token_id))
        return found

    def is_outside(self, token_id: int, text: str) -> bool:
        """Whether it is a special token that the tokenizer has added to a text that does not have it."""
        decoder = self._decoder
        if decoder is None or not decoder.is_passed_over(token_id, skip_special_tokens=True):
            return False
        return not text.startswith(decoder.token_text(token_id), self.end)


def prompt_rows(rows: Sequence[Row | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's `prompt_logprobs`: for each token of the prompt a dict from token ids."""
    if rows is None:
        return None
    return [
        None
        if row is None
        else {
            str(t): {"logprob": max(p.logprob, _LEAST), "rank": p.rank, "decoded_token": p.decoded_token}
            for t, p in row.items()
        }
        for row in rows
    ]
