"""The ops of a decoder layer and their swappable providers."""

from nanovllm.kernels.registry import Kernels, Op, all_ops, op, resolve_kernels

__all__ = ["Kernels", "Op", "all_ops", "op", "resolve_kernels"]
