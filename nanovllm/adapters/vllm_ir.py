"""This package's kernels as implementations of vLLM's IR ops: its norms, and a gated activation that we declare as one.

vLLM hashes this file into the names of compiled code. When it compiles a range of sizes it lowers each IR op to the
first implementation of the op's priority; which one may differ from range to range (`vllm_passes.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.ir.op import IrOp, register_op

import nanovllm.kernels  # noqa: F401  registers torch.ops.nanovllm

PROVIDER = "nanovllm"
_SILU_AND_MUL = "nanovllm_silu_and_mul"

# The annotations of an implementation must be objects, as vLLM infers a schema from them.


def provide_rms_norm() -> None:
    op = IrOp.registry["rms_norm"]
    if PROVIDER in op.impls:
        return

    def takes(x: Any, weight: Any, epsilon: float, variance_size: int | None = None) -> bool:
        return _plain_norm(x, weight, variance_size)

    def rms_norm(x, weight, epsilon, variance_size=None):  # type: ignore[no-untyped-def]
        return torch.ops.nanovllm.rms_norm(x, weight, epsilon)

    optional = {"weight": Tensor | None, "epsilon": float, "variance_size": int | None}
    rms_norm.__annotations__ = {"x": Tensor, **optional, "return": Tensor}
    op.register_impl(PROVIDER, supports_args=takes)(rms_norm)


def provide_add_rms_norm() -> None:
    op = IrOp.registry["fused_add_rms_norm"]
    if PROVIDER in op.impls:
        return

    def takes(x: Any, x_residual: Any, weight: Any, epsilon: float, variance_size: int | None = None) -> bool:
        return _plain_norm(x, weight, variance_size) and x.dtype == x_residual.dtype

    def fused_add_rms_norm(x, x_residual, weight, epsilon, variance_size=None):  # type: ignore[no-untyped-def]
        return torch.ops.nanovllm.add_rms_norm(x, x_residual, weight, epsilon)

    optional = {"weight": Tensor | None, "epsilon": float, "variance_size": int | None}
    annotations = {"x": Tensor, "x_residual": Tensor, **optional, "return": tuple[Tensor, Tensor]}
    fused_add_rms_norm.__annotations__ = annotations
    op.register_impl(PROVIDER, supports_args=takes)(fused_add_rms_norm)


def _plain_norm(x: Any, weight: Any, variance_size: int | None) -> bool:
    return variance_size is None and weight is not None and _has_kernels(x) and weight.dtype == x.dtype


def _has_kernels(x: Any) -> bool:
    return x.dtype in (torch.float16, torch.bfloat16, torch.float32)


def silu_and_mul_op() -> Any:
    """An IR op that computes what vLLM's layer `SiluAndMul` does: with our kernel, or as `forward_native` there."""
    if _SILU_AND_MUL not in IrOp.registry:

        def native(x):  # type: ignore[no-untyped-def]
            half = x.shape[-1] // 2
            return F.silu(x[..., :half]) * x[..., half:]

        native.__annotations__ = {"x": Tensor, "return": Tensor}
        register_op(name=_SILU_AND_MUL)(native)
    op = IrOp.registry[_SILU_AND_MUL]
    if PROVIDER not in op.impls:

        def takes(x: Any) -> bool:
            return _has_kernels(x)

        def silu_and_mul(x):  # type: ignore[no-untyped-def]
            return torch.ops.nanovllm.silu_and_mul(x)

        silu_and_mul.__annotations__ = {"x": Tensor, "return": Tensor}
        op.register_impl(PROVIDER, supports_args=takes)(silu_and_mul)
        op.set_default([PROVIDER, "native"])  # vLLM's configuration has priorities of its own ops alone
    return op


@contextmanager
def vllms_own() -> Iterator[None]:
    """Within the block no IR op is lowered to an implementation of ours."""
    with ExitStack() as stack:
        for op in IrOp.registry.values():
            if PROVIDER in (order := op.get_priority()):
                stack.enter_context(op.set_priority([name for name in order if name != PROVIDER]))
        yield


def remove_providers() -> None:
    """Remove our implementations. The op of the activation stays, as PyTorch keeps it, and is its `native`."""
    for op in IrOp.registry.values():
        op.impls.pop(PROVIDER, None)
    if _SILU_AND_MUL in IrOp.registry:
        IrOp.registry[_SILU_AND_MUL].set_default(["native"])
