"""The device that an argument names."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from nanovllm.wording import counted


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Makes a GPU the current one: kernels, graphs, events and pinned memory go there, wherever their arguments are."""
    return torch.cuda.device(device.index) if device.type == "cuda" else nullcontext()


def cuda_devices(count: int) -> str:
    """How many GPUs PyTorch finds, to follow the name of one that it does not find."""
    if torch.version.cuda is None:
        return f"the installed PyTorch, {torch.__version__}, is built without CUDA and finds no CUDA device"
    return f"this machine has {counted(count, 'CUDA device')}"


def check_device(name: str) -> None:
    """A ValueError if this machine does not have the device that a `device` argument names. No GPU is used."""
    if name != "auto":
        _device(name)


def select_device(name: str, rank: int = 0, num_ranks: int = 1) -> torch.device:
    """The device that a `device` argument names, for one of several ranks; a ValueError if this machine does not have
    it.
    """
    if num_ranks > 1 and name in ("auto", "cuda") and torch.cuda.is_available():
        count = torch.cuda.device_count()
        if num_ranks > count:
            raise ValueError(f"tensor_parallel_size={num_ranks}: this machine has {counted(count, 'CUDA device')}")
        torch.cuda.set_device(rank)
        return torch.device("cuda", rank)
    if num_ranks > 1 and ":" in name:
        raise ValueError(
            f"device={name!r} with tensor_parallel_size={num_ranks}: each rank has a device of its own; pass"
            " device='cuda', and choose the GPUs by the environment variable CUDA_VISIBLE_DEVICES"
        )
    if name == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    device = _device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _device(name: str) -> torch.device:
    """The device with that name; a ValueError if this machine does not have it."""
    try:
        device = torch.device(name)
    except RuntimeError as e:
        raise ValueError(f"device={name!r}: not a device; use 'auto', 'cpu', 'cuda' or 'cuda:N'") from e
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r} is not supported; use 'auto', 'cpu', 'cuda' or 'cuda:N'")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ValueError(f"device={name!r}: {cuda_devices(count)}; use 'auto' or 'cpu'")
        device = torch.device("cuda", device.index or 0)
    return device
