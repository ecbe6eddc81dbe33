"""Log-probabilities in the two shapes of OpenAI's interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nanovllm.outputs import Logprob

Row = dict[int, Logprob]
_LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def chat_logprobs(rows: Sequence[Row], num_top: int, token_bytes: Callable[[int], bytes]) -> list[dict[str, Any]]:
    """The field `logprobs` of a chat completion: an object for each token.

    Args:
        rows: for each token itself first, then the most likely ones.
    """
    found = []
    for row in rows:
        own = next(iter(row))
        top = [_chat_entry(t, row[t], token_bytes) for t in _most_likely(row, num_top)]
        found.append({**_chat_entry(own, row[own], token_bytes), "top_logprobs": top})
    return found


def _chat_entry(token_id: int, logprob: Logprob, token_bytes: Callable[[int], bytes]) -> dict[str, Any]:
    return {
        "token": logprob.decoded_token or "", "logprob": max(logprob.logprob, _LEAST),
        "bytes": list(token_bytes(token_id)),
    }  # fmt: skip


def _most_likely(row: Row, num_top: int) -> list[int]:
    """The best `num_top` tokens of a row, whose first entry may or may not be one of them."""
    return sorted(row, key=lambda token_id: row[token_id].rank)[:num_top]


class CompletionLogprobs:
    """The field `logprobs` of a completion: parallel lists. `offset` goes on from piece to piece of a stream."""

    def __init__(self, num_top: int, offset: int = 0) -> None:
        self._num_top = num_top
        self._offset = offset

    def of(self, rows: Sequence[Row | None], token_texts: Sequence[str]) -> dict[str, Any]:
        """The log-probabilities as OpenAI's `logprobs`.

        Args:
            rows: None for a prompt's first token, which has no log-probability.
            token_texts: the texts of the same tokens.
        """
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for row, text in zip(rows, token_texts):
            tokens.append(text)
            offsets.append(self._offset)
            self._offset += len(text)
            if row is None:
                logprobs.append(None)
                tops.append(None)
                continue
            own = next(iter(row))
            logprobs.append(max(row[own].logprob, _LEAST))
            best = dict.fromkeys([*_most_likely(row, self._num_top), own])
            tops.append({row[t].decoded_token or "": max(row[t].logprob, _LEAST) for t in best})
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
