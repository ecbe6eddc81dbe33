"""What kind of work an ATen operator is, and how many flops it needs.

The kinds are those of TVM's operator fusion (Chen et al., "TVM", OSDI 2018, section 3), with matrix products apart: element by
element, broadcast, injective (each output element is one input element, moved), reduction, matrix product, opaque.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
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
# Products by implicit GEMM: the weight times every window of the input, which is no matrix in memory.
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution", "_convolution")
# Reduce within rows and give a row back.
NORMALISATIONS = (
    "softmax", "_softmax", "log_softmax", "_log_softmax", "layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm",
    "group_norm",
)  # fmt: skip
_REDUCTIONS = (
    *NORMALISATIONS, "sum", "mean", "amax", "amin", "max", "min", "prod", "var", "std", "var_mean", "norm", "linalg_vector_norm",
    "logsumexp", "argmax", "argmin", "any", "all", "cumsum", "cumprod",
)  # fmt: skip
# (input, target, ..., reduction): of classes, and element by element.
CLASS_LOSSES = ("cross_entropy_loss", "nll_loss_nd", "nll_loss")
_LOSSES = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy", "binary_cross_entropy_with_logits",
)  # fmt: skip
# Pointwise operators that PyTorch does not tag as such: operators of Python, other names of tagged ones, and composites.
_POINTWISE = {
    "__and__", "__or__", "__xor__", "__lshift__", "__rshift__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__",
    "absolute", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh", "divide", "fix", "floor_divide", "greater",
    "greater_equal", "hardswish", "isreal", "less", "less_equal", "log_sigmoid", "masked_fill_", "multiply", "negative", "not_equal",
    "rsub", "special_expit", "special_ndtr", "subtract", "where",
}  # fmt: skip
# Their rows are read through an index: what they read from must lie in memory.
GATHERS = ("index", "index_select", "embedding", "gather", "index_put", "index_put_", "take_along_dim")
_INJECTIVE = (
    *GATHERS, "cat", "stack", "clone", "contiguous", "reshape", "flatten", "repeat", "repeat_interleave", "roll",
    "flip", "constant_pad_nd", "pad", "arange", "full", "zeros", "ones", "empty", "full_like", "zeros_like", "ones_like",
    "scalar_tensor", "tril", "triu", "expand_as", "one_hot", "copy_", "fill_", "zero_",
    "empty_like", "new_empty", "new_full", "new_ones", "new_zeros", "eye", "linspace", "lift_fresh_copy", "tile", "hstack", "fliplr",
    "rot90",
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
    "var_mean": 4, "std": 4, "logsumexp": 10, "batch_norm": 4, "group_norm": 8, "cross_entropy_loss": 14, "mse_loss": 3, "l1_loss": 3,
    "hardswish": 6, "log_sigmoid": 18,
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
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.inplace_view in node.target.tags:
        return []  # detach_, t_ and such write a description of memory, no memory
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
    if name in MATMULS or _is_convolution(node) or (name == "einsum" and contraction(node) is not None):
        return Kind.MATMUL
    if name in ("batch_norm", "_native_batch_norm_legit_no_training"):  # in training it reduces and writes its statistics
        return Kind.OPAQUE if name == "batch_norm" and argument(node, "training") else Kind.BROADCAST
    if name in _LOSSES and not argument(node, "reduction"):
        return _pointwise(node)
    if name in CLASS_LOSSES or name in _LOSSES or name == "group_norm":
        return Kind.REDUCTION
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
    if torch.Tag.pointwise in target.tags or name in _POINTWISE or name.rstrip("_") in _POINTWISE:
        return _pointwise(node)
    return Kind.OPAQUE


def _pointwise(node: FxNode) -> Kind:
    shape = fake(node)[0].shape
    same = all(t.shape == shape for n in node.all_input_nodes for t in fake(n) if t.dim() > 0)
    return Kind.ELEMENTWISE if same else Kind.BROADCAST


def _is_convolution(node: FxNode) -> bool:
    name = op_name(node)
    return name in CONVOLUTIONS and not (name.endswith("convolution") and argument(node, "transposed"))


def argument(node: FxNode, name: str) -> Any:
    """An argument of an operator, given by place, by name or not at all."""
    arguments = node.target._schema.arguments
    place = next(i for i, a in enumerate(arguments) if a.name == name)
    return node.args[place] if place < len(node.args) else node.kwargs.get(name, arguments[place].default_value)


def reduced_dims(node: FxNode) -> tuple[int, ...] | None:
    """The dimensions of its input, counted from the front, that a reduction combines; None where that is not known."""
    rank = fake(node.args[0])[0].dim()
    name = op_name(node)
    if name == "group_norm":  # within an image; the groups of one are rows of their own, see `independent_parts`
        return tuple(range(1, rank))
    if name in CLASS_LOSSES and not argument(node, "reduction"):
        return (min(1, rank - 1),)
    if name in CLASS_LOSSES or name in _LOSSES:
        return tuple(range(rank))
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
    out = fake(node)[0]
    if op_name(node) == "einsum":
        return contraction(node).sizes
    left, right = matmul_operands(node)
    a, b = fake(left)[0], fake(right)[0]
    if op_name(node) in CONVOLUTIONS:  # for every image, the weight times the windows: rows are channels, columns positions
        columns = math.prod(out.shape[2 - a.dim() :])
        return math.prod(out.shape) // max(1, columns), columns, math.prod(a.shape[1:])
    if not (a.dim() and b.dim() and out.dim()):
        return None
    inner = a.shape[-1]
    columns = out.shape[-1] if b.dim() > 1 else 1
    return math.prod(out.shape) // max(1, columns), columns, inner


@dataclass(frozen=True)
class Contraction:
    """An einsum of two operands that is a product: sizes as of `matmul_sizes`.

    Attributes:
        left: which operand has the rows.
        in_order: whether the rows are the first dimensions of that operand, as they are of the result.
    """

    sizes: tuple[int, int, int]
    left: int
    in_order: bool


def contraction(node: FxNode) -> Contraction | None:
    """The product that an einsum is; None if it is another thing, such as a diagonal or a product of three."""
    equation, operands = node.args[0].replace(" ", ""), node.args[1]
    inputs, arrow, out = equation.partition("->")
    terms = inputs.split(",")
    if "." in equation or len(terms) != 2:
        return None
    if not arrow:
        out = "".join(sorted(c for c in set(inputs) if inputs.count(c) == 1 and c != ","))
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands):
        for letter, n in zip(term, fake(operand)[0].shape):
            if sizes.setdefault(letter, n) != n:  # one of them is broadcast
                return None
    a, b = map(set, terms)
    inner = (a & b) - set(out)
    if any(len(set(t)) < len(t) for t in (*terms, out)) or not inner or not out or (a ^ b) - set(out):
        return None
    for left, term in enumerate(terms):
        columns = set(terms[1 - left]) - set(term)
        head, tail = out[: len(out) - len(columns)], out[len(out) - len(columns) :]
        if set(tail) == columns:
            found = tuple(math.prod(sizes[c] for c in letters) for letters in (head, tail, inner))
            return Contraction(found, left, term.startswith(head))
    return None


def _einsum_flops(node: FxNode) -> int:
    """As one loop nest: a multiplication and an addition for every value of the letters."""
    equation, operands = node.args[0].replace(" ", ""), node.args[1]
    inputs, arrow, out = equation.partition("->")
    if not arrow:
        out = "".join(c for c in set(inputs) if inputs.count(c) == 1)
    sizes: dict[str, int] = {}
    for term, operand in zip(inputs.split(","), operands):
        before, _, behind = term.partition("...")
        shape = fake(operand)[0].shape
        for letter, n in (*zip(before, shape), *zip(reversed(behind), reversed(shape))):
            sizes[letter] = max(n, sizes.get(letter, n))
    return 2 * fake(node)[0].numel() * math.prod(n for letter, n in sizes.items() if letter not in out)


def independent_parts(node: FxNode) -> int:
    """How many parts of a row a reduction treats by themselves: the groups of a group norm."""
    return node.args[1] if op_name(node) == "group_norm" else 1


def rows_in_order(node: FxNode) -> bool:
    """Whether the rows of a product are the first dimensions of its left operand."""
    return op_name(node) != "einsum" or contraction(node).in_order


def matmul_operands(node: FxNode) -> tuple[FxNode, FxNode]:
    if op_name(node) in CONVOLUTIONS:
        return node.args[1], node.args[0]
    if op_name(node) == "einsum":
        left = contraction(node).left
        return node.args[1][left], node.args[1][1 - left]
    first = 1 if op_name(node) in ("addmm", "baddbmm") else 0
    return node.args[first], node.args[first + 1]


def matmul_bias(node: FxNode) -> FxNode | None:
    """What is added to a product, where it is an operand."""
    name = op_name(node)
    if name in ("addmm", "baddbmm"):
        return node.args[0]
    return (node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")) if name in ("linear", *CONVOLUTIONS) else None


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
        if name == "einsum":
            return _einsum_flops(node)
        if name.startswith("conv_transpose"):  # every input element times the weights of its channel
            return 2 * fake(node.args[0])[0].numel() * math.prod(fake(node.args[1])[0].shape[1:])
    if kind is Kind.INJECTIVE:
        return 0
    if name in ("nll_loss_nd", "nll_loss"):  # takes one element of each row
        return fake(node.args[1])[0].numel()
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
