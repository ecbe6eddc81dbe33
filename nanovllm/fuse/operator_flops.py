"""Floating-point operations of an operator: as an op of ours declares, as PyTorch counts, or by an estimate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import Node as FxNode
from torch.utils.flop_counter import flop_registry

from nanovllm.fuse.classify import Kind
from nanovllm.fuse.fx_nodes import arg, fake, op_name, overload, shape_of
from nanovllm.fuse.matrix_products import Einsum, matmul_sizes
from nanovllm.kernels import all_ops

Known = Mapping[FxNode, torch.Tensor]

# Arithmetic with no effect on memory traffic: a few instructions where the rest take one. Counts are of the usual
# polynomial and special-function-unit sequences; they matter only where arithmetic binds.
_FLOPS = {
    "exp": 8, "log": 8, "tanh": 16, "erf": 20, "gelu": 24, "silu": 12, "sigmoid": 10, "mish": 24, "sin": 16, "cos": 16,
    "pow": 8, "rsqrt": 4, "sqrt": 4, "div": 4, "softmax": 12, "log_softmax": 14, "layer_norm": 8, "rms_norm": 5,
    "var": 4, "var_mean": 4, "std": 4, "logsumexp": 10, "batch_norm": 4, "group_norm": 8, "cross_entropy_loss": 14,
    "mse_loss": 3, "l1_loss": 3, "hardswish": 6, "log_sigmoid": 18,
}  # fmt: skip


def flops_of(node: FxNode, kind: Kind, known: Known) -> int:
    """Floating-point operations of one call. `known`: values of tensors that decide how much work an op has."""
    if kind is Kind.MATMUL:
        sizes = matmul_sizes(node)
        return 2 * math.prod(sizes) if sizes else 0
    name = op_name(node)
    if kind is Kind.OPAQUE:
        cost = declared_cost(node, known)
        if cost is not None:
            return cost[1]
        op = overload(node)
        counter = flop_registry.get(None if op is None else op.overloadpacket)
        if counter is not None and (outs := fake(node)):
            return int(counter(*_values(node.args, known), **_values(node.kwargs, known), out_val=outs[0]))
        if name == "scaled_dot_product_attention":
            return 4 * math.prod(shape_of(arg(node, 0))) * shape_of(arg(node, 1))[-2]
        if name == "einsum":
            e = Einsum.of(node)  # as one loop nest: a multiplication and an addition for every value of the letters
            return 2 * math.prod(shape_of(node)) * math.prod(n for c, n in e.sizes.items() if c not in e.out)
        if name.startswith("conv_transpose"):  # every input element times the weights of its channel
            return 2 * math.prod(shape_of(arg(node, 0))) * math.prod(shape_of(arg(node, 1))[1:])
    if kind is Kind.INJECTIVE:
        return 0
    if name in ("nll_loss_nd", "nll_loss"):  # takes one element of each row
        return math.prod(shape_of(arg(node, 1)))
    base = name.rstrip("_").removeprefix("_").removeprefix("native_")
    elements = math.prod(shape_of(arg(node, 0) if kind is Kind.REDUCTION else node)) if fake(node) else 0
    return _FLOPS.get(base, 1) * elements


def declared_cost(node: FxNode, known: Known) -> tuple[int, int] | None:
    """(bytes, flops) that an op of ours declares for such a call; None for other operators, or if it needs values."""
    namespace, _, name = op_name(node).rpartition(".")
    declared = all_ops().get(name) if namespace == "nanovllm" else None
    if declared is None or declared.cost is None:
        return None
    try:
        cost = declared.cost(*_values(node.args, known), **_values(node.kwargs, known))
        return int(cost.bytes), int(cost.flops)
    except Exception:  # it looks at values, which a traced tensor does not have
        return None


def _values(arguments: Any, known: Known) -> Any:
    return torch.fx.node.map_arg(arguments, lambda n: known.get(n, n.meta.get("val")))
