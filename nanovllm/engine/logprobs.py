"""Log-probabilities of sampled tokens and of prompts, and how a request sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from nanovllm.kernels.ops.sample import rows_per_chunk
from nanovllm.outputs import Logprob

PROMPT_LOGPROBS_ROWS = 256
"""Positions of a prompt with logits in memory at the same time: the logits of 16,384 would take gigabytes."""


class LogprobsTensors(NamedTuple):
    """Log-probabilities of R positions under the raw logits. Column 0 is the position's own token, then the k best."""

    token_ids: torch.Tensor
    """[R, 1 + k] int64"""
    logprobs: torch.Tensor
    """[R, 1 + k] float32, natural logarithm"""
    ranks: torch.Tensor
    """[R] int64: 1 + the number of tokens more likely than the position's own"""

    def cpu(self, non_blocking: bool = False) -> LogprobsTensors:
        """A copy on the host. With `non_blocking` it may be read only after the stream has been waited for."""
        return LogprobsTensors(*(t.to("cpu", non_blocking=non_blocking) for t in self))

    def row(self, index: int, num_logprobs: int, decode: Callable[[int], str] | None = None) -> dict[int, Logprob]:
        """Position `index` as a request sees it: its own token first, then up to `num_logprobs` of the most likely.

        Call it on a copy on the host. Equally likely tokens have equal ranks. `decode` gives a token's text.
        """
        token_ids = self.token_ids[index, : 1 + num_logprobs].tolist()
        logprobs = self.logprobs[index, : 1 + num_logprobs].tolist()
        text: Callable[[int], str | None] = decode or (lambda token_id: None)
        row = {token_ids[0]: Logprob(logprobs[0], int(self.ranks[index]), text(token_ids[0]))}
        rank, previous = 0, None
        for place, (token_id, logprob) in enumerate(zip(token_ids[1:], logprobs[1:]), 1):
            if logprob != previous:
                rank, previous = place, logprob
            if token_id not in row:
                row[token_id] = Logprob(logprob, rank, text(token_id))
        return row


def compute_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, k: int) -> LogprobsTensors:
    """The log-probability and rank of each row's token, and its k most likely tokens (all of them if k > V).

    For a prompt's log-probabilities pass the logits at T positions and the T tokens that follow these.

    Args:
        logits: [R, V], any float dtype; the softmax is float32.
        token_ids: [R] int64.
        k: how many of the most likely tokens to add, at least 0.
    """
    k = min(k, logits.shape[-1])
    n = rows_per_chunk(logits.shape[-1])  # a long prompt's [T, V] float32 would be gigabytes
    parts: list[Any] = []
    for start in range(0, max(len(logits), 1), n):
        logprobs = logits[start : start + n].log_softmax(-1, dtype=torch.float32)
        own_ids = token_ids[start : start + n, None]
        own = logprobs.gather(-1, own_ids)
        best, best_ids = logprobs.topk(k, dim=-1)
        ranks = (logprobs > own).sum(-1) + 1
        parts.append((torch.cat((own_ids, best_ids), -1), torch.cat((own, best), -1), ranks))
    return LogprobsTensors(*(torch.cat(columns) for columns in zip(*parts)))
