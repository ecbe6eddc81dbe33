"""Log-probabilities in the two shapes of OpenAI's interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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
    """The best `num_top` tokens of a row, whose first entry may or may not be one of them."""
    return sorted(row, key=lambda token_id: row[token_id].rank)[:num_top]


class CompletionLogprobs:
    """The field `logprobs` of a completion: parallel lists. `text_offset` goes on from piece to piece of a stream.

    as_ids: tokens are called by their ids.
    """

    def __init__(self, num_top: int, as_ids: bool) -> None:
        self._num_top = num_top
        self._as_ids = as_ids
        self._offset = 0

    def of(self, rows: Sequence[Row | None], token_texts: Sequence[str], token_ids: Sequence[int]) -> dict[str, Any]:
        """The log-probabilities as OpenAI's `logprobs`.

        Args:
            rows: None for a prompt's first token, which has no log-probability.
            token_texts, token_ids: the same tokens.
        """
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for row, text, token_id in zip(rows, token_texts, token_ids):
            tokens.append(token_name(token_id) if self._as_ids else text)
            offsets.append(self._offset)
            self._offset += len(text)
            if row is None:
                logprobs.append(None)
                tops.append(None)
                continue
            own = next(iter(row))
            logprobs.append(max(row[own].logprob, _LEAST))
            top: dict[str, float] = {}
            for t in [own, *_most_likely(row, self._num_top)]:  # as vLLM: the token itself is first
                name = token_name(t) if self._as_ids else row[t].decoded_token or ""
                top.setdefault(name, max(row[t].logprob, _LEAST))
            tops.append(top)
        return {
            "tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops,
            "text_offset": offsets,
        }  # fmt: skip


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
