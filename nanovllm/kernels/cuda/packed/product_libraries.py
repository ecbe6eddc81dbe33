"""The compiled libraries of products, and where they can run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nanovllm.kernels.cuda.build import cuda_support, load_library
from nanovllm.kernels.op.availability import triton_support

OLDEST_CAPABILITY = (9, 0)  # dependent launch
FOLDER = Path(__file__).parent
FP8_FOLDER = FOLDER.parent / "fp8"


def packed_support(device: torch.device, folder: Path = FOLDER) -> str | None:
    """Why the kernels of a folder cannot run on a device, and what to do about it; None if they can. Compiles nothing.

    Calls that the kernel does not take go to the provider `triton`, so that has to run, too.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < OLDEST_CAPABILITY:
        return "they need compute capability 9.0 or later; use triton"
    return cuda_support(device, folder) or triton_support(device)


def fp8_support(device: torch.device) -> str | None:
    """As `packed_support`, for 8-bit floats."""
    return packed_support(device, FP8_FOLDER)


@functools.cache
def product_kernel(device: torch.device, folder: Path = FOLDER) -> Callable[..., None]:
    """The operator `product` of the folder's bindings.cpp; compiles the library if that was not done before.

    Raises:
        ValueError: it cannot run on the device.
        RuntimeError: as `load_library`.
    """
    kernel: Callable[..., None] = _library(device, folder).product.default
    return kernel


@functools.cache
def stacked_kernel(device: torch.device) -> Callable[..., None]:
    """The operator `stacked_product` of bindings.cpp, as `product_kernel`."""
    kernel: Callable[..., None] = _library(device, FOLDER).stacked_product.default
    return kernel


@functools.cache
def rounding_kernel(device: torch.device) -> Callable[..., None]:
    """The operator `to_fp8` of bindings.cpp, as `product_kernel`."""
    kernel: Callable[..., None] = _library(device, FOLDER).to_fp8.default
    return kernel


def _library(device: torch.device, folder: Path) -> Any:
    reason = packed_support(device, folder)
    if reason is not None:
        raise ValueError(reason)
    return load_library(torch.cuda.get_device_capability(device), folder)
