"""The ops of a decoder layer and their swappable providers."""

from nanovllm.kernels.registry import Op, Provider, all_ops, op
from nanovllm.kernels.selection import Kernels, resolve_kernels

__all__ = ["Kernels", "Op", "Provider", "all_ops", "op", "resolve_kernels"]
