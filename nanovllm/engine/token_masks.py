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

import numpy as np
import torch

from nanovllm.engine.sequence import Sequence as TokenSequence
from nanovllm.engine.step_result import StepResult
from nanovllm.hardware.devices import on_device
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

    def __init__(self, job: _Job, filling: Filling, times: deque[MaskTimes]) -> None:
        self._job, self._filling, self._times = job, filling, times

    def __len__(self) -> int:
        return len(self._job.constraints)

    def finish(self) -> TokenMasks:
        """The masks on the device, valid until the next ones are finished; waits until they are filled."""
        job = self._job
        start = time.perf_counter()
        filled = self._filling.wait()
        there = time.perf_counter()
        for i, (constraint, tokens) in enumerate(zip(job.constraints, job.banned)):
            if tokens or not constraint.is_plain:  # most have nothing to restrict
                constraint.restrict(tokens, job.masks[i])
        masks = job.buffers.send(job.buffer, len(job.constraints))
        self._times.append(MaskTimes(job.wait, job.advance, filled, there - start, time.perf_counter() - there))
        return masks


class _Buffer(NamedTuple):
    """Host memory for the masks of one step."""

    words: torch.Tensor
    """int32: a row number (two words) for each row that there may be, then the masks."""
    numbers: np.ndarray
    """[max_rows] int64, in `words`."""
    masks: np.ndarray
    """[max_rows, num_words] int32, in `words`."""
    copied: torch.cuda.Event | None
    """When the masks written last are on the device; None: the device is the host."""


class _Buffers:
    """Masks and their rows: one tensor on the device, and two on the host in turns, one a step.

    So nothing is allocated in a step, and a captured graph can read the masks.
    """

    def __init__(self, max_rows: int, num_words: int, device: torch.device) -> None:
        self.num_words = num_words
        self.device = device
        self._max_rows = max_rows
        on_gpu = device.type == "cuda"
        size = max_rows * (2 + num_words)
        self._host: list[_Buffer] = []
        for _ in range(2):
            words = torch.zeros(size, dtype=torch.int32, pin_memory=on_gpu)
            numbers, masks = self._split(words)
            self._host.append(_Buffer(words, numbers.numpy(), masks.numpy(), torch.cuda.Event() if on_gpu else None))
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._views: dict[int, TokenMasks] = {}
        self._copies: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        """By buffer and number of masks: what is copied from the host, and where."""

    def _split(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(row numbers, masks)"""
        numbers, masks = words[: 2 * self._max_rows], words[2 * self._max_rows :]
        return numbers.view(torch.int64), masks.view(self._max_rows, self.num_words)

    def next(self) -> _Buffer:
        """The buffer to be written; waits until the device has read what it held."""
        buffer = self._host[0]
        self._host.reverse()
        if buffer.copied is not None:
            buffer.copied.synchronize()
        return buffer

    def send(self, buffer: _Buffer, count: int) -> TokenMasks:
        """Launch the copy of the first `count` masks. What it returns is the same for each step with so many."""
        key = id(buffer), count
        if key not in self._copies:
            size = 2 * self._max_rows + count * self.num_words
            self._copies[key] = buffer.words[:size], self._device[:size]
        on_host, on_device = self._copies[key]
        on_device.copy_(on_host, non_blocking=True)
        if buffer.copied is not None:
            buffer.copied.record()
        if count not in self._views:
            numbers, masks = self._split(self._device)
            self._views[count] = TokenMasks(masks[:count], numbers[:count])
        return self._views[count]


class _Job:
    """From the tokens of the step before to masks in a buffer."""

    def __init__(self, rows: Sequence[ConstrainedRow], latest: StepResult | None, buffers: _Buffers) -> None:
        self._rows, self._latest = rows, latest
        self.buffers, self.buffer = buffers, buffers.next()
        self.masks = self.buffer.masks[: len(rows)]
        self.buffer.numbers[: len(rows)] = [row.row for row in rows]
        self.constraints = [seq.constraint for _, seq, _ in rows if seq.constraint is not None]
        assert len(self.constraints) == len(rows)
        self.banned: list[list[int]] = []
        self._index: dict[TokenSequence, int] = {}
        if any(position > len(seq.token_ids) for _, seq, position in rows):
            assert latest is not None, "one step is in flight"
            self._index = {seq: i for i, seq in enumerate(latest.step.sampling)}
        self.wait = self.advance = 0.0
        """As in `MaskTimes`."""

    def move_on(self) -> None:
        """Move the grammars on. It waits for the tokens of the step before, if the host lacks them."""
        start = time.perf_counter()
        tokens: list[int] = []
        if self._index and self._latest is not None:
            with on_device(self.buffers.device):  # a thread of its own begins with the first GPU
                tokens = self._latest.token_ids()
        known = time.perf_counter()
        for (_, seq, position), constraint in zip(self._rows, self.constraints):
            assert position <= len(seq.token_ids) + 1
            pending = [tokens[self._index[seq]]] if position > len(seq.token_ids) else []
            first = seq.prompt_len + constraint.num_taken
            constraint.take(seq.token_ids[first:] + pending if first < position else [])
            may_ban = seq.logit_rules is not None or seq.params.min_tokens
            self.banned.append(list(_banned(seq, pending)) if may_ban else [])
        self.wait, self.advance = known - start, time.perf_counter() - known


class MaskBuilder:
    """Fills masks.

    Args:
        device: where the logits are.
        max_rows: rows that a step may have.

    Attributes:
        times: of the latest steps with masks.
    """

    def __init__(self, device: torch.device | str, max_rows: int) -> None:
        self._device = torch.device(device)
        self._max_rows = max_rows
        self._buffers: _Buffers | None = None
        self._latest: StepResult | None = None
        self._filling: Filling | None = None
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

        in_thread: a thread waits too, and fills them while the caller goes on. At most one step's masks are being
            filled.
        """
        if self._buffers is None:
            constraint = rows[0].seq.constraint
            assert constraint is not None
            self._buffers = _Buffers(self._max_rows, constraint.num_words, self._device)
        if self._filling is not None:
            self._filling.settle()  # a step that was given up may still be filling its masks
        job = _Job(rows, self._latest, self._buffers)
        self._filling = self._filler.start(job.constraints, job.masks, in_thread, job.move_on)
        return StartedMasks(job, self._filling, self.times)


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
