"""The providers that come with the package, beside each op's reference. Importing this module registers them.

Triton is imported when a kernel is first wanted, so that a machine without it, or without a GPU, loads none of it.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch


@cache
def triton_support(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on a device, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install triton (Linux)"
    if device.type != "cuda":
        return f"Triton kernels need a CUDA device, this is {device}; use native"
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 0):
        return f"Triton kernels need compute capability 8.0 or later, this GPU has {capability[0]}.{capability[1]}; use native"
    return None
