"""The ops of a decoder layer and their swappable providers.

Every op is a function here: `from nanovllm.kernels import rms_norm`. It runs the provider that is selected for the
device of its arguments. On a machine without CUDA or Triton that is its PyTorch reference.
"""

from typing import TYPE_CHECKING

from nanovllm.early_exit import importing_engine

with importing_engine():
    import nanovllm.kernels.op.builtin_providers  # noqa: F401  registers them
    from nanovllm.hardware.timing import benchmark_kernel
    from nanovllm.kernels.extra import *  # noqa: F403
    from nanovllm.kernels.extra import __all__ as _extra_names
    from nanovllm.kernels.op import torch_library as library
    from nanovllm.kernels.op.availability import triton_support, unavailable_reason
    from nanovllm.kernels.op.dispatch import Op, op
    from nanovllm.kernels.op.inputs import Cost, Inputs, Tensors, nbytes
    from nanovllm.kernels.op.plugins import load_plugins
    from nanovllm.kernels.op.provider import KernelError, Provider
    from nanovllm.kernels.op.registry import all_ops
    from nanovllm.kernels.op.selected_kernels import Kernels
    from nanovllm.kernels.op.selection import resolve_kernels
    from nanovllm.kernels.ops import *  # noqa: F403
    from nanovllm.kernels.ops import __all__ as _op_names

if TYPE_CHECKING:
    KERNELS_AVAILABLE: bool
    """Whether custom kernels run on this machine's GPU; `unavailable_reason()` says why not."""

__all__ = [
    "KERNELS_AVAILABLE", "Cost", "Inputs", "KernelError", "Kernels", "Op", "Provider", "Tensors", "all_ops",
    "benchmark_kernel", "library", "load_plugins", "nbytes", "op", "resolve_kernels", "triton_support",
    "unavailable_reason", *_extra_names, *_op_names,
]  # fmt: skip


def __getattr__(name: str) -> bool:
    # Computed when it is read, not at import: that would start CUDA in every process.
    if name == "KERNELS_AVAILABLE":
        return unavailable_reason() is None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
