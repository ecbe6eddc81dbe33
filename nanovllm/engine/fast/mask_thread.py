"""Masks that a thread makes while the device computes the logits that they are for.

A mask depends on the sequence's last token, which is still being sampled when the step is launched. So a thread makes
the masks, and the device's stream waits for them at a gate (`hardware/stream_gate.py`). Step N, from top to bottom:

    main thread                           mask thread                           device
    launches the model
    `start`: gives the thread a job       waits for the tokens of step N - 1    ends step N - 1
    `to_device`: waits for the grammars   advances the grammars                 computes logits
        launches a wait at the gate       fills the masks, without the          computes logits
        launches the copy of the masks        interpreter
    launches masking and sampling         applies other bans                    waits at the gate
    reads step N - 1, launches N + 1      opens the gate                        copies the masks, masks, samples

So between the tokens of one step and those of the next, the device waits only for masks, not for launches.

Each wait at the gate ends, or the GPU would hang: a wait is launched after its job was given to the thread, and the
thread opens the gate whatever the job raises. A job that the thread never began is ended by `drain`, which opens the
gate too. A failure is raised when the tokens are asked for (`StepResult`): they are not used. While a wait is on the
stream, the thread makes no call of CUDA: a launch of the main thread that loads a kernel could hold it up.

Without a gate the main thread waits in `to_device` until the masks are there: on a CPU, and where steps are not
captured. The launches of such steps could fill the device's queue. Then a launch waits for the device, maybe with the
interpreter, which the thread needs to open the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from nanovllm.engine.step_result import StepResult
from nanovllm.engine.token_masks import ConstrainedRow, MaskBuilder, MaskJob, TokenMasks
from nanovllm.hardware.stream_gate import Gate, stream_gate
from nanovllm.structured.mask_filler import Filling

MakeGate = Callable[[torch.Tensor, torch.device], Gate | None]
"""From a word of host memory and the device that waits to a gate; None: there can be none. See `stream_gate`."""


class StartedMasks:
    """Masks that are being filled. Made by `ThreadedMaskBuilder.start`.

    Attributes:
        filling: fills them. When the device has sampled, `Filling.raise_failure` raises what that raised.
    """

    def __init__(self, job: _BufferedMaskJob, filling: Filling, device_waits: bool) -> None:
        self._job, self.filling = job, filling
        self._gate = job.buffers.gate if device_waits else None

    def __len__(self) -> int:
        return len(self._job.constraints)

    def to_device(self, host_waits: bool = False) -> TokenMasks:
        """The masks on the device, for what is launched next; valid until the next call for other masks.

        The caller waits until the grammars have advanced: from then on the thread does not read the sequences. For the
        masks the device waits at the gate; if there is none, or with `host_waits`, which overrides `device_waits` of
        `start`, the caller waits for them too.

        Raises:
            Whatever reading the tokens of the step before raised; or filling the masks, if the caller waits for them.
        """
        job = self._job
        gate = None if host_waits else self._gate
        if gate is None:
            self.filling.wait_until_filled()
        else:
            self.filling.wait_until_filling()
            # The thread makes no further call of CUDA. What is launched from now on may load a kernel, for which the
            # driver waits until the gate opens, with a lock that all of its calls need.
            gate.launch_wait(job.gate_value)
        return job.buffers.launch_copy(job.buffer, len(job.constraints))


class _Buffer:
    """Host memory for the masks of one step.

    Attributes:
        words: int32: a row number (two words) for each row that there may be, then the masks.
        rows, masks: [max_rows] int64 and [max_rows, num_words] int32, in `words`.
        copied: when the masks written last are on the device; None: the device is the host.
        filling: what writes to it.
        copies: by number of masks: what is copied, where to, and the masks there.
    """

    def __init__(self, words: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor, on_gpu: bool) -> None:
        self.words, self.rows, self.masks = words, rows.numpy(), masks.numpy()
        self.copied = torch.cuda.Event() if on_gpu else None
        self.filling: Filling | None = None
        self.copies: dict[int, tuple[torch.Tensor, torch.Tensor, TokenMasks]] = {}


class _Buffers:
    """Masks and their rows: one tensor on the device, and two buffers on the host, which steps use in turns.

    So nothing is allocated in a step, and a captured graph can read the masks.

    Attributes:
        gate: what the device waits at; None: there is none.
    """

    def __init__(self, max_rows: int, num_words: int, device: torch.device, make_gate: MakeGate) -> None:
        self.num_words = num_words
        self.device = device
        self._max_rows = max_rows
        on_gpu = device.type == "cuda"
        size = max_rows * (2 + num_words)
        # The gate's word is in the memory that is copied: PyTorch gives no such memory to others while a stream that
        # has copied it has work left, and the waits at the gate are on that stream.
        each = size + size % 2  # a row number is a pair of words: the second buffer begins at a whole pair
        host = torch.zeros(2 * each + 2, dtype=torch.int32, pin_memory=on_gpu)
        halves = host[:size], host[each : each + size]
        self._on_host = [_Buffer(words, *self._split(words), on_gpu) for words in halves]
        """The buffer that was used last is the last one."""
        self._on_device = torch.zeros(size, dtype=torch.int32, device=device)
        self._on_device.copy_(self._on_host[0].words, non_blocking=True)
        self.gate = make_gate(host[2 * each : 2 * each + 1], device)
        self._value = 0

    def _split(self, words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(row numbers, masks)"""
        rows, masks = words[: 2 * self._max_rows], words[2 * self._max_rows :]
        return rows.view(torch.int64), masks.view(self._max_rows, self.num_words)

    def next_free(self) -> tuple[_Buffer, int]:
        """The buffer for the next masks, and the value that the gate opens for when they are there.

        The caller waits until the device has copied the masks that the buffer held.
        """
        buffer = self._on_host[0]
        if buffer.filling is not None:
            buffer.filling.cancel_or_wait()
        if buffer.copied is not None:
            buffer.copied.synchronize()
        self._on_host.reverse()
        self._value = (self._value + 1) % 2**32
        return buffer, self._value

    def drain(self) -> None:
        """Wait until nothing writes to a buffer any more. The older job first: the gate opens in order."""
        for buffer in self._on_host:
            if buffer.filling is not None:
                buffer.filling.cancel_or_wait()
                buffer.filling = None

    def launch_copy(self, buffer: _Buffer, count: int) -> TokenMasks:
        """Launch the copy of the first `count` masks. They are in the same memory in every step with this count."""
        if count not in buffer.copies:
            size = 2 * self._max_rows + count * self.num_words
            rows, masks = self._split(self._on_device)
            token_masks = TokenMasks(masks[:count], rows[:count])
            buffer.copies[count] = buffer.words[:size], self._on_device[:size], token_masks
        on_host, on_device, token_masks = buffer.copies[count]
        on_device.copy_(on_host, non_blocking=True)
        if buffer.copied is not None:
            buffer.copied.record()
        return token_masks


class _BufferedMaskJob(MaskJob):
    """A `MaskJob` whose masks go to a buffer, and whose end opens the gate."""

    def __init__(self, rows: Sequence[ConstrainedRow], latest: StepResult | None, buffers: _Buffers) -> None:
        self.buffers = buffers
        self.buffer, self.gate_value = buffers.next_free()
        super().__init__(rows, latest, self.buffer.masks[: len(rows)], buffers.device)
        self.buffer.rows[: len(rows)] = [row.row for row in rows]

    def open_gate(self, failed: bool) -> None:
        """The job has ended. failed: the masks are not all there, and what is sampled with them is not used."""
        try:
            if failed:
                self.masks[:] = -1
        finally:
            if self.buffers.gate is not None:
                self.buffers.gate.open(self.gate_value)


class ThreadedMaskBuilder(MaskBuilder):
    """Makes masks in buffers that stay where they are, in a thread if the caller wants that.

    Args:
        max_rows: rows that a step may have.
        make_gate: makes what the device waits at, when the first masks come.
    """

    def __init__(self, device: torch.device, max_rows: int, make_gate: MakeGate = stream_gate) -> None:
        super().__init__(device)
        self._max_rows = max_rows
        self._make_gate = make_gate
        self._buffers: _Buffers | None = None

    def drain(self) -> None:
        """Wait until no thread fills masks, and the gate is open for all that was launched.

        It is called before steps of many launches, before a graph is captured, and after a failure.
        """
        if self._buffers is not None:
            self._buffers.drain()

    def make(self, rows: Sequence[ConstrainedRow]) -> TokenMasks:
        """As of `MaskBuilder`; valid until the next call for other masks."""
        return self.start(rows).to_device()

    def start(
        self, rows: Sequence[ConstrainedRow], in_thread: bool = False, device_waits: bool = False
    ) -> StartedMasks:
        """Start to make the masks of some rows; `StartedMasks.to_device` follows.

        Args:
            in_thread: the thread makes them. If not, the caller does, and waits for the tokens of the step before if
                the host lacks them.
            device_waits: the device waits for the thread, if there is a gate. Few launches may follow until `drain`.
        """
        if self._buffers is None:
            constraint = rows[0].seq.constraint
            assert constraint is not None
            self._buffers = _Buffers(self._max_rows, constraint.num_words, self._device, self._make_gate)
        job = _BufferedMaskJob(rows, self._latest, self._buffers)
        filling = self.filler.prepare(
            job.constraints, job.masks, in_thread, job.wait_and_advance, job.apply_bans, job.open_gate
        )
        if in_thread:
            job.buffer.filling = filling  # before a thread has it: an interrupt may come at any line
            if not self.filler.submit(filling):
                job.buffer.filling, in_thread = None, False
        if not in_thread:
            self.drain()  # the masks before may be of the same constraints
            filling.run()
            filling.raise_failure()
        return StartedMasks(job, filling, device_waits)
