"""Catches kernels that leave outputs unwritten, and those that read or write outside of their tensors."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.kernels.op.inputs import Arguments
from nanovllm.kernels.testing.crash_report import out_of_bounds
from nanovllm.wording import counted

_ALIGNMENT = 64
"""Bytes: what PyTorch aligns tensors to on a CPU."""
_GUARD = 256 << 10
"""Bytes on each side of a tensor: more than a block of a kernel without a mask reaches. A multiple of a page."""
_POISON = 0xFF
"""The value of each byte around a tensor: NaN in every float dtype."""
_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
_FILLED = {
    torch.ops.aten.zeros.default,
    torch.ops.aten.zeros_like.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.full.default,
    torch.ops.aten.clone.default,
}


class MemoryGuard(TorchDispatchMode):
    """Within the block, new tensors have guarded surroundings, and uninitialised ones are poisoned: NaN, or the largest
    integer.

    On a CPU under Linux a tensor ends, but for at most 63 bytes, at a page that cannot be accessed. A kernel that reads
    or writes there ends the process with SIGSEGV. The rest of the surroundings, and on a GPU all of them, are poisoned
    bytes: what a kernel reads from them is NaN, and `check` finds what it wrote to them.

    Sees allocations by C++ code too, since they go through the dispatcher.
    """

    def __init__(self) -> None:
        super().__init__()
        self._guards: list[tuple[torch.Tensor, torch.dtype, bool]] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else PyTorch imports its compiler, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in _EMPTY and func not in _FILLED or out.layout != torch.strided or not out.numel():
            return out
        if (kwargs or {}).get("pin_memory"):
            return out
        extent = 1 + sum((n - 1) * stride for n, stride in zip(out.shape, out.stride()))
        memory = self._memory(extent * out.element_size(), out.dtype, out.device)
        if func in _EMPTY:
            memory.copy_(torch.full((extent,), _poison(out.dtype), device=out.device))
        guarded = memory.as_strided(out.shape, out.stride())
        return guarded if func in _EMPTY else guarded.copy_(out)

    def surrounded(self, arguments: Arguments) -> Arguments:
        """The arguments, with copies in place of tensors. The copies have guarded surroundings.

        Strides and offsets stay, and tensors that share memory share their copies' memory. A parameter stays one.
        """
        storages: dict[int, torch.Tensor] = {}
        copies = dict(arguments)
        for name, value in arguments.items():
            if not isinstance(value, torch.Tensor) or not value.numel():
                continue
            storage = value.untyped_storage()
            if storage.data_ptr() not in storages:
                whole = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
                storages[storage.data_ptr()] = self._memory(whole.numel(), value.dtype, value.device, torch.uint8)
                storages[storage.data_ptr()].copy_(whole)
            memory = storages[storage.data_ptr()]
            memory = memory[: memory.numel() // value.element_size() * value.element_size()].view(value.dtype)
            offset = memory.storage_offset() + value.storage_offset()
            copy = memory.as_strided(value.shape, value.stride(), offset)
            parameter = isinstance(value, torch.nn.Parameter)
            copies[name] = torch.nn.Parameter(copy, value.requires_grad) if parameter else copy
        return copies

    def check(self) -> str | None:
        """None, or what was written where nothing should be."""
        for guard, dtype, after in self._guards:
            damaged = guard != _POISON
            if not bool(damaged.any()):
                continue
            places = damaged.nonzero()
            byte = int(places[0]) if after else len(guard) - 1 - int(places[-1])
            distance = counted(byte // dtype.itemsize + 1, "element")
            where = "past the end" if after else "before the beginning"
            name = str(dtype).removeprefix("torch.")
            return f"wrote {distance} {where} of a {name} tensor: {out_of_bounds('store')}"
        return None

    def _memory(
        self, num_bytes: int, of: torch.dtype, device: torch.device, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Memory [num_bytes / size of an element] with guarded surroundings.

        Args:
            of: the dtype that `check` names.
            dtype: the dtype of the result; by default `of`.
        """
        dtype = dtype or of
        if device.type == "cpu" and sys.platform == "linux":
            before, memory, after = _between_pages(num_bytes, dtype)
        else:
            whole = torch.full((num_bytes + 2 * _GUARD,), _POISON, dtype=torch.uint8, device=device)
            before, memory, after = whole[:_GUARD], whole[_GUARD:-_GUARD].view(dtype), whole[-_GUARD:]
        self._guards += [(before, of, False), (after, of, True)]
        return memory


def _between_pages(num_bytes: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(the poisoned bytes before it, memory, the poisoned bytes after it), between pages that cannot be accessed."""
    size = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
    usable = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = mmap.mmap(-1, usable + 2 * _GUARD, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = _GUARD + usable - size
    memory = torch.frombuffer(pages, dtype=dtype, count=num_bytes // dtype.itemsize, offset=start)
    first = memory.data_ptr() - start
    before = torch.frombuffer(pages, dtype=torch.uint8, count=usable - size, offset=_GUARD) if usable > size else None
    end = start + num_bytes
    after = torch.frombuffer(pages, dtype=torch.uint8, count=size - num_bytes, offset=end) if size > num_bytes else None
    nothing = torch.empty(0, dtype=torch.uint8)
    before, after = (nothing if part is None else part.fill_(_POISON) for part in (before, after))
    _forbid(first, _GUARD)
    _forbid(first + _GUARD + usable, _GUARD)
    return before, memory, after


def _forbid(address: int, num_bytes: int) -> None:
    """Let no access to pages succeed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(0)) != 0:
        raise OSError(ctypes.get_errno(), "mprotect of a guard page failed")


def _poison(dtype: torch.dtype) -> float | int | bool:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).max
