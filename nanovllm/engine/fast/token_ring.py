"""Host memory in which decode steps leave their tokens: the device writes to it by itself.

A copy after each step would stand between that step and the next on the stream, which costs several times what copying
a few numbers does: another engine of the GPU copies, and the stream waits for it twice. Instead the kernel that ends a
step stores its tokens in the next cell of a ring, and counts on the device which cell that is, so that a captured graph
does both.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from nanovllm.engine.step_result import StepResult

DEPTH = 4
"""More than the steps in flight, so that no step waits for a cell."""


class TokenRing:
    """DEPTH cells, written in turn, one a step. Before a cell is written again, the result that it belongs to is read.

    Args:
        max_num_seqs: tokens in a cell.
        device: whose steps write. On CUDA the cells are pinned memory of the host.

    Attributes:
        tokens: [DEPTH, max_num_seqs] int64, on the host.
        count: [1] int64 on the device: a step writes to cell `count % DEPTH`, and adds one.
    """

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self.tokens = torch.zeros(DEPTH, max_num_seqs, dtype=torch.int64, pin_memory=device.type == "cuda")
        self.count = torch.zeros(1, dtype=torch.int64, device=device)
        self._count = 0  # as `count`, on the host
        self._counts_agree = False
        self._results: list[weakref.ref[StepResult] | None] = [None] * DEPTH

    def reset(self) -> None:
        """The device may have counted other steps than the host: before the next step both start from 0."""
        self._counts_agree = False

    def claim(self) -> None:
        """Before a step is launched: free the cell that it will write to, by reading the result that is there."""
        if not self._counts_agree:
            self._count = 0
            self.count.zero_()
            self._counts_agree = True
        reference = self._results[self._count % DEPTH]
        result = None if reference is None else reference()
        if result is not None:
            result.read()

    def latest(self) -> torch.Tensor:
        """[max_num_seqs] int64: the cell that the claimed step writes to, to be read when that has run."""
        return self.tokens[self._count % DEPTH]

    def hold(self, result: StepResult) -> None:
        """The claimed step was launched: its cell is that result's until the result has been read."""
        self._results[self._count % DEPTH] = weakref.ref(result)
        self._count += 1
