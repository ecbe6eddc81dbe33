"""Which kernels start before the kernel in front of them has ended: programmatic dependent launch, sm_90 and later.

A kernel that is launched so first loads what no kernel writes, such as weights. Then it waits for the kernel in front
(`gdc_wait`), and only then reads what that kernel has written. A kernel may also let its successor start before its own
end (`gdc_launch_dependents`). All thresholds for this are here. They were measured on an H200.
"""

from functools import cache

import torch

FEW_ROWS = 32
"""Sampling, and the gathering of logits over ranks, start early for up to this many rows.

With 256 rows an early start of norms between products was seen to lose.
"""
NORM_ROWS, NORM_MANY_ROWS, NORM_SIZE = 128, 1024, 4096
"""RMS norms start early for at most, or for more than, this many rows; or for rows of at least this many elements."""
ELEMENTWISE_BYTES = 8 << 20
"""Elementwise kernels start early for results of at most this many bytes."""
ATTENTION_TOKENS = 256
"""Decode attention lets its successor start early for up to this many tokens.

The successor is the output projection, whose kernel for so few tokens loads weights before it waits. Where the library
multiplies, it starts at the end of its predecessor all the same.
"""


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether kernels can be launched before their predecessor has ended (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def can_launch_early(x: torch.Tensor) -> bool:
    """Whether a kernel on x's device can be launched before its predecessor has ended, for which it then waits."""
    return has_dependent_launch(x.device)


def are_constant(*weights: torch.Tensor | None) -> bool:
    """Whether a kernel may read these before its predecessor has ended: parameters of a module, which no kernel writes.

    Any other tensor may be what the predecessor is about to write. Then the kernel is launched after its predecessor's
    end.
    """
    return all(w is None or type(w) is torch.nn.Parameter for w in weights)


def launched_early(x: torch.Tensor, rows: int) -> bool:
    """Whether a kernel that gathers `rows` rows, samples from them or advances them starts before its predecessor has
    ended.
    """
    return rows <= FEW_ROWS and can_launch_early(x)


def norm_launched_early(x: torch.Tensor, rows: int) -> bool:
    """Whether an RMS norm of `rows` rows is launched before its predecessor has ended.

    Alone that saves 0.2 to 0.7 us. Between products of the library, where models have it, a layer with two norms gains
    0.5 to 2 us up to 128 rows. From 192 to 1,024 rows it loses as much at 1,024 elements a row, and nothing at 4,096.
    """
    few_or_many = rows <= NORM_ROWS or rows > NORM_MANY_ROWS
    return (few_or_many or x.shape[-1] >= NORM_SIZE) and can_launch_early(x)


def small_elementwise(y: torch.Tensor) -> bool:
    """Whether an elementwise kernel with the result y is launched before its predecessor has ended, and lets its
    successor start.

    For few bytes the launch costs more than the memory traffic. Beyond, the wait in each of many programs costs more.
    """
    return y.nbytes <= ELEMENTWISE_BYTES and has_dependent_launch(y.device)
