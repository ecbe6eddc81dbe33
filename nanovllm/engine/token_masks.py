"""The bit masks of a step's constrained rows: which tokens their grammars and other constraints allow.

A mask depends on the sequence's last token, which may still be being sampled when the step is launched. Here the caller
waits for that token and then fills the masks. `engine/fast/mask_thread.py` does the same while the device computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.engine.batch import to_device
from nanovllm.engine.sequence import Sequence as TokenSequence
from nanovllm.engine.step_result import StepResult
from nanovllm.hardware.devices import on_device
from nanovllm.structured.mask_filler import MaskFiller


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


class MaskJob:
    """From the tokens of the step before to masks in host memory. One thread calls, in this order: `wait_and_advance`,
    what fills the masks of `constraints`, and `apply_bans`.

    Args:
        latest: the step that was launched last.
        masks: [num_rows, num_words] int32.
        device: the device that computes the steps.
    """

    def __init__(
        self, rows: Sequence[ConstrainedRow], latest: StepResult | None, masks: np.ndarray, device: torch.device
    ) -> None:
        self._rows, self._latest, self._device = rows, latest, device
        self.masks = masks
        self.constraints = [seq.constraint for _, seq, _ in rows if seq.constraint is not None]
        assert len(self.constraints) == len(rows)
        self._tokens: list[int] = []
        self._banned: list[list[int]] = []
        self._index: dict[TokenSequence, int] = {}
        if any(position > len(seq.token_ids) for _, seq, position in rows):
            assert latest is not None, "one step is in flight"
            self._index = {seq: i for i, seq in enumerate(latest.step.sampling)}

    def wait_and_advance(self) -> None:
        """Wait for the tokens of the step before, and advance the grammars."""
        self.wait_for_tokens()
        self.advance_grammars()

    def wait_for_tokens(self) -> None:
        """Wait for the tokens of the step before, if the host lacks them."""
        if self._index and self._latest is not None:
            for constraint in self.constraints:
                constraint.prepare()
            with on_device(self._device):  # in a new thread the first GPU is current
                self._tokens = self._latest.token_ids()
        self._latest = None  # a result holds its masks: else each would keep all results before it

    def advance_grammars(self) -> None:
        """Advance each grammar by the tokens that it has not taken yet."""
        for (_, seq, position), constraint in zip(self._rows, self.constraints):
            assert position <= len(seq.token_ids) + 1
            pending = [self._tokens[self._index[seq]]] if position > len(seq.token_ids) else []
            next_position = seq.prompt_len + constraint.num_taken
            constraint.take(seq.token_ids[next_position:] + pending if next_position < position else [])
            may_ban = seq.logit_rules is not None or seq.params.min_tokens
            self._banned.append(list(_banned(seq, pending)) if may_ban else [])

    def apply_bans(self) -> None:
        """Apply other bans to the masks."""
        for i, (constraint, tokens) in enumerate(zip(self.constraints, self._banned)):
            if tokens or not constraint.is_plain:  # most have nothing to restrict
                constraint.restrict(tokens, self.masks[i])


class MaskBuilder:
    """Makes the masks of constrained rows.

    Args:
        device: where the logits are.

    Attributes:
        filler: fills them.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._latest: StepResult | None = None
        self.filler = MaskFiller()

    def step_launched(self, result: StepResult) -> None:
        """A step was launched; the next step's masks may need its tokens."""
        self._latest = result

    def drain(self) -> None:
        """Wait until nothing fills masks any more. Called after a failure, and before what may have to wait for the
        device, such as many launches: the device may wait for masks, and their thread for the interpreter."""

    def make(self, rows: Sequence[ConstrainedRow]) -> TokenMasks:
        """The masks of some rows, on the device. It waits for the tokens of the step before, if the host lacks them."""
        constraint = rows[0].seq.constraint
        assert constraint is not None
        masks = np.empty((len(rows), constraint.num_words), np.int32)
        job = MaskJob(rows, self._latest, masks, self._device)
        job.wait_and_advance()
        self.filler.fill(job.constraints, masks)
        job.apply_bans()
        numbers = np.array([row.row for row in rows], np.int64)
        return TokenMasks(to_device(masks, self._device), to_device(numbers, self._device))


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
