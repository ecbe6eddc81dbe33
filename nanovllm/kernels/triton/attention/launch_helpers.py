"""What the launches of attention kernels share on the host: facts of a device, the result, and arguments."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch

LOG2E = 1.4426950408889634


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 4  # the interpreter: few programs, but more than one
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def capability(device: torch.device) -> int:
    """The first number of a GPU's compute capability; 9 in the interpreter."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


@functools.cache
def has_hopper_kernels(device: torch.device) -> bool:
    """Whether the kernels that are written in Gluon for Hopper can run there: Gluon is not in every Triton."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    return importlib.util.find_spec("triton.experimental.gluon") is not None


@functools.cache
def gluon_kernel(name: str) -> tuple[Any, Any]:
    """(the kernel `name` of the module `name`, `gluon_compat.descriptor`), imported where they can run."""
    module = importlib.import_module(f"nanovllm.kernels.triton.attention.{name}")
    from nanovllm.kernels.triton.gluon_compat import descriptor

    return getattr(module, name), descriptor


def result_for(q: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """What a kernel writes for queries [num_tokens, num_heads, head_dim]: `out`, or a new tensor.

    Raises:
        ValueError: out is not contiguous, or not of the shape, dtype and device of q.
    """
    if out is None:
        return torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if out.shape != q.shape or out.dtype != q.dtype or out.device != q.device or not out.is_contiguous():
        given = f"{list(out.shape)} {out.dtype} on {out.device} with strides {list(out.stride())}"
        raise ValueError(f"out: expected contiguous {list(q.shape)} {q.dtype} on {q.device}, as q, not {given}")
    return out


def padded_count(count: int) -> int:
    """The next power of eight: few, since a kernel is compiled for each."""
    size = 1
    while size < count:
        size *= 8
    return size


def as_words(cache: torch.Tensor) -> torch.Tensor:
    """A float8 cache as int16, two elements a word; any other as it is."""
    return cache.view(torch.int16) if cache.element_size() == 1 else cache
