"""Can custom kernels run on this machine?"""

from __future__ import annotations

import importlib.util
import inspect
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def triton_support(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on a device, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install triton (Linux)"
    try:
        import triton.language as tl
        from triton.runtime.interpreter import InterpretedFunction
    except Exception as e:  # whatever a damaged installation raises
        remedy = "pip install --force-reinstall triton"
        return f"Triton is installed but cannot be imported ({type(e).__name__}: {e}); {remedy}"
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")  # the default is what the kernels expect
    if device.type != "cuda":
        # Triton's own functions are interpreted if the variable was set when Triton was imported.
        if device.type == "cpu" and isinstance(tl.sum, InterpretedFunction):
            # NumPy computes there, and warns of overflows that a GPU passes over in silence.
            warnings.filterwarnings("ignore", category=RuntimeWarning, module=r"(numpy|triton)\b")
            return None
        return (
            f"Triton kernels need a CUDA device, this is {device}; `export TRITON_INTERPRET=1` runs them there, slowly"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"Triton kernels need compute capability 8.0 or later, this GPU has {major}.{minor}; use native"
    return None


def is_triton_support(support: Callable[[torch.device], str | None]) -> bool:
    """Whether a provider's `support` is `triton_support`: on a CPU, Triton's interpreter runs its kernels if at all."""
    return inspect.unwrap(support) is inspect.unwrap(triton_support)


def refused_by_interpreter(*args: Any, **kwargs: Any) -> str | None:
    """For kernels with matrix products: why Triton's interpreter cannot run a call, or None."""
    first = args[0] if args else next(iter(kwargs.values()))
    if first.dtype == torch.bfloat16 and first.device.type == "cpu":
        return "Triton's interpreter computes bfloat16 matrix products wrongly; use float32 or float16 there"
    return None


def unavailable_reason() -> str | None:
    """Why this machine's first GPU cannot run the custom kernels, and what to do; None if it can."""
    if not torch.cuda.is_available():
        return "no CUDA device: kernels for GPUs do not run"
    return triton_support(torch.device("cuda", torch.cuda.current_device()))
