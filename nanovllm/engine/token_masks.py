"""The bit masks of a step's constrained rows, filled on the host while the device computes the step's logits.

A mask depends on the sequence's last token. With asynchronous scheduling that token is still being sampled when the
step is launched. So the model is launched first; then the host waits for the tokens of the step before and begins to
fill the masks. It launches the sampling when they are there. The device computes logits meanwhile: the other rows lose
nothing. Threads can fill the masks while the host reads the step before (`MaskBuilder.begin`, `StepResult.complete`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from nanovllm.engine.sequence import Sequence as TokenSequence
from nanovllm.engine.step_result import StepResult
from nanovllm.structured.constraint import TokenConstraint
from nanovllm.structured.mask_filler import Filling, MaskFiller

_STEPS_TIMED = 4096


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


class MaskTimes(NamedTuple):
    """Seconds that the host spent on a step's masks."""

    wait: float
    """For the tokens of the step before: the device is behind, and nothing is lost."""
    advance: float
    """Moving the grammars on by these tokens."""
    fill: float
    """Filling the masks: beside other work, or before it."""
    late: float
    """Waiting for masks that are filled beside other work."""
    finish: float
    """The other bans, and launching the copy."""


class StartedMasks:
    """Masks that are being filled. Made by `MaskBuilder.begin`."""

    def __init__(
        self, numbers: list[int], constraints: list[TokenConstraint], banned: list[list[int]], filling: Filling,
        buffer: torch.Tensor, device: torch.device, times: deque[MaskTimes], before: tuple[float, float],
    ) -> None:  # fmt: skip
        self._numbers, self._constraints, self._banned = numbers, constraints, banned
        self._filling, self._buffer, self._device = filling, buffer, device
        self._times, self._before = times, before

    def finish(self) -> TokenMasks:
        """The masks on the device; waits until they are filled."""
        start = time.perf_counter()
        filled = self._filling.wait()
        there = time.perf_counter()
        numbers, bitmask = _split(self._buffer, len(self._constraints))
        numbers.numpy()[:] = self._numbers
        for constraint, mask, tokens in zip(self._constraints, bitmask.numpy(), self._banned):
            constraint.restrict(tokens, mask)
        on_device = self._buffer.to(self._device, non_blocking=self._device.type == "cuda")
        numbers, bitmask = _split(on_device, len(self._constraints))
        self._times.append(MaskTimes(*self._before, filled, there - start, time.perf_counter() - there))
        return TokenMasks(bitmask, numbers)


class MaskBuilder:
    """Fills masks.

    device: where the logits are.

    Attributes:
        times: of the latest steps with masks.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = torch.device(device)
        self._latest: StepResult | None = None
        self._filler = MaskFiller()
        self.times: deque[MaskTimes] = deque(maxlen=_STEPS_TIMED)

    def step_launched(self, result: StepResult) -> None:
        """A step was launched; the next step's masks may need its tokens."""
        self._latest = result

    def complete(self) -> None:
        """Launch what the step launched last has put off."""
        if self._latest is not None:
            self._latest.complete()

    def begin(self, rows: Sequence[ConstrainedRow], in_thread: bool = False) -> StartedMasks:
        """Begin with the masks of some rows. It waits for the tokens of the step before, if the host lacks them.

        in_thread: fill them while the caller goes on. At most one step's masks are being filled.
        """
        start = time.perf_counter()
        latest: dict[TokenSequence, int] = {}
        if any(position > len(seq.token_ids) for _, seq, position in rows):
            assert self._latest is not None, "one step is in flight"
            latest = dict(zip(self._latest.step.sampling, self._latest.token_ids()))
        known = time.perf_counter()
        constraints: list[TokenConstraint] = []
        banned: list[list[int]] = []
        for _, seq, position in rows:
            constraint = seq.constraint
            assert constraint is not None and position <= len(seq.token_ids) + 1
            pending = [latest[seq]] if position > len(seq.token_ids) else []
            first = seq.prompt_len + constraint.num_taken
            constraint.take(seq.token_ids[first:] + pending if first < position else [])
            constraints.append(constraint)
            banned.append(list(_banned(seq, pending)))
        before = known - start, time.perf_counter() - known
        # One buffer and one copy: a row number (two words) and a mask for each row.
        size = len(rows) * (2 + constraints[0].num_words)
        buffer = torch.empty(size, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        masks = _split(buffer, len(rows))[1].numpy()
        filling = self._filler.start(constraints, masks) if in_thread else self._filler.filled(constraints, masks)
        numbers = [row.row for row in rows]
        return StartedMasks(numbers, constraints, banned, filling, buffer, self._device, self.times, before)


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
