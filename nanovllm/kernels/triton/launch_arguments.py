"""Host-side arithmetic of launches. All of it is cheap: these lines run before every kernel of an eager step."""

from functools import cache
from typing import overload

import torch

_DEFAULT_SMS = 132  # where there is no GPU: the interpreter, and tests that only compile


@cache
def _sms(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def num_sms(x: torch.Tensor) -> int:
    """Multiprocessors of the GPU that holds x."""
    return _sms(x.device.index) if x.is_cuda else _DEFAULT_SMS


def largest_block(size: int, most: int, least: int) -> int | None:
    """The largest power of two that divides `size`, at most `most`; None if it is below `least`."""
    block = min(size & -size, most)
    return block if block >= least else None


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else 1


def warps_for(elements: int, per_thread: int = 8, most: int = 16) -> int:
    """Warps (a power of two) so that each thread holds about `per_thread` of a tile's elements."""
    return max(1, min(most, next_power_of_2(elements // (32 * per_thread))))


@overload
def adjacent(x: torch.Tensor) -> torch.Tensor: ...
@overload
def adjacent(x: None) -> None: ...
@overload
def adjacent(x: torch.Tensor | None) -> torch.Tensor | None: ...
def adjacent(x: torch.Tensor | None) -> torch.Tensor | None:
    """x with the elements of its last dimension side by side, as kernels read vectors and tables; copied if strided
    or expanded.

    A copy was written by the kernel in front: it is no parameter, for which `are_constant` would let a kernel read it
    early.
    """
    return x if x is None or x.stride(-1) == 1 else x.contiguous()


def rows_of(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int, int]:
    """x [..., n] as rows that a kernel can address: (x, rows, inner, outer stride, inner stride).

    Row r starts at (r // inner) * outer stride + (r % inner) * inner stride. That covers contiguous tensors,
    row-strided matrices, and the [num_tokens, heads, head_dim] views of a fused projection. Anything else is copied.
    """
    n = x.shape[-1]
    if x.is_contiguous():
        return x, x.numel() // n if n else 0, 1, n, n
    if x.stride(-1) == 1 and x.dim() <= 3:
        if x.dim() == 2:
            return x, x.shape[0], 1, x.stride(0), n
        if x.dim() == 3:
            return x, x.shape[0] * x.shape[1], x.shape[1], x.stride(0), x.stride(1)
    return rows_of(x.contiguous())


def matrix_of(x: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """x [..., n] as (x, rows, row stride); copied unless it is contiguous or a row-strided matrix."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x, x.shape[0], x.stride(0)
    n = x.shape[-1]
    return (x if x.is_contiguous() else x.contiguous()), x.numel() // n if n else 0, n
