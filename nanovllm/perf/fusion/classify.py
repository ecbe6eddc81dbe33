"""What kind of work an ATen operator is, and how many flops it needs.

The kinds are those of TVM's operator fusion (Chen et al., "TVM", OSDI 2018, section 3), with matrix products apart: element by
element, broadcast, injective (each output element is one input element, moved), reduction, matrix product, opaque.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from torch.fx import Node as FxNode
from torch.utils.flop_counter import flop_registry

from nanovllm.kernels import all_ops

Known = Mapping[FxNode, torch.Tensor]


class Kind(str, Enum):
    """What an operator does with its elements."""

    ELEMENTWISE = "elementwise"
    BROADCAST = "broadcast"
    INJECTIVE = "injective"
    REDUCTION = "reduction"
    MATMUL = "matmul"
    OPAQUE = "opaque"

    def __str__(self) -> str:
        return self.value


POINTWISE = (Kind.ELEMENTWISE, Kind.BROADCAST, Kind.INJECTIVE)

MATMULS = ("linear", "mm", "addmm", "matmul", "bmm", "baddbmm")
# Reduce within rows and give a row back.
NORMALISATIONS = (
    "softmax", "_softmax", "log_softmax", "_log_softmax", "layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm",
)  # fmt: skip
_REDUCTIONS = (
    *NORMALISATIONS, "sum", "mean", "amax", "amin", "max", "min", "prod", "var", "std", "var_mean", "norm", "linalg_vector_norm",
    "logsumexp", "argmax", "argmin", "any", "all", "cumsum", "cumprod",
)  # fmt: skip
# Their rows are read through an index: what they read from must lie in memory.
GATHERS = ("index", "index_select", "embedding", "gather", "index_put", "index_put_", "take_along_dim")
_INJECTIVE = (
    *GATHERS, "cat", "stack", "clone", "contiguous", "reshape", "flatten", "repeat", "repeat_interleave", "roll",
    "flip", "constant_pad_nd", "pad", "arange", "full", "zeros", "ones", "empty", "full_like", "zeros_like", "ones_like",
    "scalar_tensor", "tril", "triu", "expand_as", "one_hot", "copy_", "fill_", "zero_",
)  # fmt: skip
# Marked as random for their dropout, which inference leaves out.
_SELDOM_RANDOM = ("scaled_dot_product_attention",)
# Take a number to the host, so that no kernel can hold them and what needs the number.
HOST_READS = ("item", "_local_scalar_dense")
_CASTS = ("to", "_to_copy", "type_as")
# Arithmetic with no effect on memory traffic: a few instructions where the rest take one. Counts are of the usual
# polynomial and special-function-unit sequences; they matter only where arithmetic binds.
_FLOPS = {
    "exp": 8, "log": 8, "tanh": 16, "erf": 20, "gelu": 24, "silu": 12, "sigmoid": 10, "mish": 24, "sin": 16, "cos": 16,
    "pow": 8, "rsqrt": 4, "sqrt": 4, "div": 4, "softmax": 12, "log_softmax": 14, "layer_norm": 8, "rms_norm": 5, "var": 4,
    "var_mean": 4, "std": 4, "logsumexp": 10,
}  # fmt: skip


def op_name(node: FxNode) -> str:
    """ "add" for aten.add.Tensor, "nanovllm.attention_decode" for an op of ours, else the target's own name."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        packet = target._schema.name
        return packet.removeprefix("aten::").replace("::", ".")
    if target is operator.getitem:
        return "getitem"
    return getattr(target, "__name__", str(target))


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of a node's traced value, which may be a tuple."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in tensors_of(v)]
    return []


def fake(node: FxNode) -> list[torch.Tensor]:
    return tensors_of(node.meta.get("val"))


def storages(node: FxNode) -> set[int]:
    """Which memory a node's tensors lie in. Tracing keeps track of it: a view has the storage of what it views."""
    return {t.untyped_storage()._cdata for t in fake(node)}


def mutated(node: FxNode) -> list[FxNode]:
    """The arguments that an operator writes to."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    written = []
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            written += [given] if isinstance(given, FxNode) else []
    return written


def is_ignored(node: FxNode) -> bool:
    """Assertions of the tracer and arithmetic on sizes: no kernel, no value."""
    return not fake(node) and not mutated(node) and not reads_to_host(node)


def reads_to_host(node: FxNode) -> bool:
    """Whether an operator takes a tensor's value to the host, as `tensor.item()` does: work waits for all kernels before it."""
    return isinstance(node.target, torch._ops.OpOverload) and op_name(node) in HOST_READS


def draws_random(node: FxNode) -> bool:
    """Whether an operator draws random numbers, so that no two calls agree."""
    if not isinstance(node.target, torch._ops.OpOverload) or is_view(node):
        return False
    return torch.Tag.nondeterministic_seeded in node.target.tags and op_name(node) not in _SELDOM_RANDOM


def is_view(node: FxNode) -> bool:
    """Whether an operator only describes memory anew: no kernel runs."""
    if node.target is operator.getitem:
        return True
    if op_name(node) in ("dropout", "native_dropout", "alpha_dropout", "feature_dropout"):
        return node.args[2:3] == (False,) or node.kwargs.get("train") is False
    if mutated(node) or not isinstance(node.target, torch._ops.OpOverload) or not fake(node):
        return False
    inputs = set().union(*(storages(n) for n in node.all_input_nodes)) if node.all_input_nodes else set()
    return storages(node) <= inputs


def kind_of(node: FxNode) -> Kind:
    """The kind of an operator that is no view."""
    name, target = op_name(node), node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return Kind.OPAQUE
    if name in MATMULS:
        return Kind.MATMUL
    if (
        name == "index_put"
    ):  # copies a tensor and then writes some of its rows: two kernels, the second after all of the first
        return Kind.OPAQUE
    if name in _REDUCTIONS or torch.Tag.reduction in target.tags:
        return Kind.REDUCTION if reduced_dims(node) is not None else Kind.OPAQUE
    if name in _CASTS:
        return Kind.ELEMENTWISE
    if name in _INJECTIVE:
        return Kind.INJECTIVE
    if torch.Tag.pointwise in target.tags:
        shape = fake(node)[0].shape
        same = all(t.shape == shape for n in node.all_input_nodes for t in fake(n) if t.dim() > 0)
        return Kind.ELEMENTWISE if same else Kind.BROADCAST
    return Kind.OPAQUE


def reduced_dims(node: FxNode) -> tuple[int, ...] | None:
    """The dimensions of its input, counted from the front, that a reduction combines; None where that is not known."""
    rank = fake(node.args[0])[0].dim()
    name = op_name(node)
    if name in ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"):
        return tuple(range(rank - len(node.args[1]), rank))
    arguments = node.target._schema.arguments
    place = next((i for i, a in enumerate(arguments) if a.name == "dim"), None)
    if place is None:
        return tuple(range(rank))
    dim = node.args[place] if place < len(node.args) else node.kwargs.get("dim")
    if isinstance(dim, FxNode):
        return None
    if dim is None or dim == []:
        return tuple(range(rank))
    return tuple(sorted(d % max(rank, 1) for d in ([dim] if isinstance(dim, int) else dim)))


def matmul_sizes(node: FxNode) -> tuple[int, int, int] | None:
    """(rows, columns, inner) of a product, rows counted over all batches where the right operand is one matrix."""
    left, right = matmul_operands(node)
    a, b = fake(left)[0], fake(right)[0]
    out = fake(node)[0]
    if not (a.dim() and b.dim() and out.dim()):
        return None
    inner = a.shape[-1]
    columns = out.shape[-1] if b.dim() > 1 else 1
    return math.prod(out.shape) // max(1, columns), columns, inner


def matmul_operands(node: FxNode) -> tuple[FxNode, FxNode]:
    first = 1 if op_name(node) in ("addmm", "baddbmm") else 0
    return node.args[first], node.args[first + 1]


def matmul_bias(node: FxNode) -> FxNode | None:
    """What is added to a product, where it is an operand."""
    name = op_name(node)
    if name in ("addmm", "baddbmm"):
        return node.args[0]
    return (node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")) if name == "linear" else None


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
        counter = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if counter is not None and (outs := fake(node)):
            return int(counter(*_values(node.args, known), **_values(node.kwargs, known), out_val=outs[0]))
        if name == "scaled_dot_product_attention":
            q, k = (fake(node.args[i])[0].shape for i in (0, 1))
            return 4 * math.prod(q) * k[-2]
    if kind is Kind.INJECTIVE:
        return 0
    base = name.rstrip("_").removeprefix("_").removeprefix("native_")
    elements = fake(node.args[0])[0].numel() if kind is Kind.REDUCTION else sum(t.numel() for t in fake(node)[:1])
    return _FLOPS.get(base, 1) * elements


def declared_cost(node: FxNode, known: Known) -> tuple[int, int] | None:
    """(bytes, flops) that one of our ops declares for such a call; None if it is no op of ours, or needs values to say."""
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
