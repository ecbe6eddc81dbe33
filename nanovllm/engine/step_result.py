"""What a step computed, on its way to the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from nanovllm.engine.logprobs import LogprobsTensors
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import ScheduledStep
from nanovllm.hardware.devices import on_device


@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of a run of prompt tokens: row i belongs to token `start + i` of `seq`."""

    seq: Sequence
    start: int
    tensors: LogprobsTensors


class StepResult:
    """A step's tokens and log-probabilities. Made when the step is launched; the copies to the host run behind it.

    Args:
        token_ids: [n] int64, one for each part of the step that samples: on the device, or in host memory that the
            device writes to (`TokenRing`).
        logprobs: the log-probabilities of the same rows.
        order: [n] int64, the row of each of these parts; None: they are in order.
        device: the device that computes the step; None: where `token_ids` is.
        check: called when the step has run. It raises if the tokens are invalid, since host work that the step needed
            has failed.
    """

    def __init__(
        self,
        step: ScheduledStep,
        token_ids: torch.Tensor,
        logprobs: LogprobsTensors | None = None,
        prompt_logprobs: Iterable[PromptLogprobs] = (),
        order: np.ndarray | None = None,
        device: torch.device | None = None,
        check: Callable[[], object] | None = None,
    ) -> None:
        self.step = step
        self._ready: torch.cuda.Event | None = None
        self._read: list[int] | None = None
        self._order = order
        self._check = check
        device = device or token_ids.device
        if device.type == "cuda":
            token_ids = token_ids.to("cpu", non_blocking=True)  # no copy if it is in host memory
            logprobs = None if logprobs is None else logprobs.cpu(non_blocking=True)
            prompt_logprobs = [
                PromptLogprobs(p.seq, p.start, p.tensors.cpu(non_blocking=True)) for p in prompt_logprobs
            ]
            with on_device(device):
                self._ready = torch.cuda.Event()
                self._ready.record()
        self.prompt_logprobs = prompt_logprobs
        self._token_ids = token_ids
        self._logprobs = logprobs

    def token_ids(self) -> list[int]:
        """The sampled tokens, one for each part that samples; waits for the device.

        Raises:
            Whatever `check` raises.
        """
        token_ids = self.read()
        if self._check is not None:
            self._check()
        return token_ids

    def read(self) -> list[int]:
        """`token_ids` without `check`. After this call the device may overwrite the memory that holds them."""
        if self._read is None:
            if self._ready is not None:
                self._ready.synchronize()
            token_ids = self._token_ids.numpy()
            self._read = (token_ids if self._order is None else token_ids[self._order]).tolist()
        return self._read

    @cached_property
    def logprobs(self) -> LogprobsTensors | None:
        """The log-probabilities of the parts that sample, in order; to be read after `token_ids()`."""
        if self._logprobs is None or self._order is None:
            return self._logprobs
        order = torch.from_numpy(self._order)
        return LogprobsTensors(*(t[order] for t in self._logprobs))
