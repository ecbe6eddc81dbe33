"""The bit masks of a step's constrained rows, filled on the host while the device computes the step's logits.

A mask depends on the sequence's last token. With asynchronous scheduling that token is still being sampled when the
step is launched. So the model is launched first; then the host waits for the tokens of the step before, fills the masks
and launches the sampling. The device computes logits meanwhile: the other rows lose nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from nanovllm.engine.sequence import Sequence as TokenSequence
from nanovllm.engine.step_result import StepResult
from nanovllm.structured.constraint import MaskFiller, TokenConstraint


class ConstrainedRow(NamedTuple):
    """A row of logits whose token is constrained."""

    row: int
    seq: TokenSequence
    position: int
    """Position of the token that will be sampled: the number of tokens that the sequence has."""


class TokenMasks(NamedTuple):
    """What the op `apply_token_bitmask` takes after the logits."""

    bitmask: torch.Tensor
    """[num_masks, num_words] int32"""
    rows: torch.Tensor
    """[num_masks] int64"""


class MaskBuilder:
    """Fills masks.

    device: where the logits are.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._latest: StepResult | None = None
        self._filler = MaskFiller()

    def launched(self, result: StepResult) -> None:
        """A step was launched; the next step's masks may need its tokens."""
        self._latest = result

    def build(self, rows: Sequence[ConstrainedRow]) -> TokenMasks:
        """The masks of some rows, on the device. It waits for the tokens of the step before, if the host lacks them."""
        constraints: list[TokenConstraint] = []
        banned: list[Iterable[int]] = []
        latest = None
        for _, seq, position in rows:
            constraint = seq.constraint
            assert constraint is not None
            pending: list[int] = []
            if position > len(seq.token_ids):
                assert position == len(seq.token_ids) + 1 and self._latest is not None, "one step is in flight"
                if latest is None:
                    latest = dict(zip(self._latest.step.sampling, self._latest.token_ids()))
                pending.append(latest[seq])
            first = seq.prompt_len + constraint.num_taken
            constraint.take(seq.token_ids[first:] + pending if first < position else [])
            constraints.append(constraint)
            banned.append(_banned(seq, pending))
        # One buffer and one copy: a row number (two words) and a mask for each row.
        pin = self._device.type == "cuda"
        num_words = constraints[0].num_words
        buffer = torch.empty(len(rows) * (2 + num_words), dtype=torch.int32, pin_memory=pin)
        numbers, bitmask = _split(buffer, len(rows))
        numbers.numpy()[:] = [row.row for row in rows]
        masks = bitmask.numpy()
        self._filler.fill(constraints, masks)
        for constraint, mask, tokens in zip(constraints, masks, banned):
            constraint.restrict(tokens, mask)
        numbers, bitmask = _split(buffer.to(self._device, non_blocking=pin), len(rows))
        return TokenMasks(bitmask, numbers)


def _split(buffer: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(row numbers, masks)"""
    numbers, bitmask = buffer[: 2 * num_rows], buffer[2 * num_rows :]
    return numbers.view(torch.int64), bitmask.view(num_rows, -1)


def _banned(seq: TokenSequence, pending: list[int]) -> Iterable[int]:
    """Tokens that the sequence's parameters ban next: bad words, and end tokens before `min_tokens`.

    pending: the token that follows `seq.token_ids`, or none.
    """
    if seq.num_output_tokens + len(pending) < seq.params.min_tokens:
        yield from seq.stop_ids
    if seq.logit_rules is not None:
        token_ids = seq.token_ids + pending
        for change in seq.logit_rules.changes(token_ids, seq.prompt_len, last_is_unknown=False):
            if change.value == -math.inf:
                yield change.token_id
