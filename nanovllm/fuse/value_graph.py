"""A graph of kernels as a graph of values, by which two graphs are compared: only what matters to a result.

Left out are names, reshapes, numbers of rows and the order of what commutes. Kept are operators, which part of a value
a slice takes, along which dimensions an operand is broadcast or a reduction goes (counted from the last), and scalars.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node as FxNode

from nanovllm.fuse.classify import CLASS_LOSSES, Kind, reduced_dims
from nanovllm.fuse.fx_nodes import arg, argument, fake, is_ignored, is_view, op_name, overload, shape_of
from nanovllm.fuse.matrix_products import CONVOLUTIONS
from nanovllm.fuse.op_graph import OpGraph

_COMMUTES = {"add", "mul", "maximum", "minimum"}
_SPELLINGS = {
    "_to_copy": "to", "type_as": "to", "_softmax": "softmax", "_log_softmax": "log_softmax", "clone": "contiguous",
    "native_layer_norm": "layer_norm", "_fused_rms_norm": "rms_norm", "mm": "matmul", "true_divide": "div",
    "multiply": "mul", "subtract": "sub",
}  # fmt: skip
# All of their arguments matter, not only the tensors and floating-point numbers.
_DETAILED = {"einsum", "group_norm", "batch_norm", *CONVOLUTIONS, *CLASS_LOSSES}
# They have their own rules for shapes; what is pointwise broadcasts.
_SHAPED = (Kind.MATMUL, Kind.REDUCTION, Kind.INJECTIVE, Kind.OPAQUE)


@dataclass(frozen=True, eq=False)
class Operand:
    """How a value enters the computation of another one.

    Attributes:
        node: the fx node that is named there, whose shape is meant.
        position: which argument; 0 if operands commute.
        own: the dimensions of `domain`, counted from the last, along which it has elements of its own; None if the
            operator has its own rules for shapes.
    """

    source: Value
    node: FxNode
    position: Any = None
    own: tuple[int, ...] | None = None
    domain: tuple[int, ...] = ()

    def enters_like(self, wanted: Operand) -> bool:
        """Whether it enters as an operand of a pattern does.

        Dimensions of size 1 say nothing. Those before the pattern's first stand for rows: they must be there if its
        first is.
        """
        if self.position != wanted.position or self.own is None or wanted.own is None:
            return self.position == wanted.position and self.own is wanted.own
        rank = len(wanted.domain)
        used = (d for d in range(-len(self.domain), 0) if self.domain[d] != 1)
        return all((d in self.own) == (max(d, -rank) in wanted.own) for d in used)


@dataclass(frozen=True, eq=False)
class Value:
    """A value of the graph: an input, a kernel's result or a part of one of these.

    Attributes:
        fx: one of the fx nodes that stand for it.
        label: the operator or the kind of part, with what else distinguishes it; None for an input.
        scalars: the numbers among the arguments.
    """

    fx: FxNode
    label: tuple[Any, ...] | None
    operands: tuple[Operand, ...] = ()
    scalars: tuple[Any, ...] = ()
    kernel: bool = False

    @property
    def name(self) -> str:
        """The operator or the kind of part; "" of an input."""
        return self.label[0] if self.label else ""

    @property
    def commutes(self) -> bool:
        return self.kernel and self.name in _COMMUTES and len(self.operands) == 2


class ValueGraph:
    """The values of a graph. `of[fx]` is the value behind an fx node."""

    def __init__(self, graph: OpGraph) -> None:
        self.graph = graph
        self.of: dict[FxNode, Value] = {}
        self._parts: dict[tuple[Any, ...], Value] = {}
        for node in graph.program.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.of[node] = Value(node, None)
            elif node.op == "call_function" and not is_ignored(node):
                self.of[node] = self._part(node) if is_view(node) else self._kernel(node)

    @property
    def kernels(self) -> list[Value]:
        return [self.of[k.fx] for k in self.graph]

    def _part(self, node: FxNode) -> Value:
        """What a view takes; the source itself if it takes all elements in their order."""
        operand = node.all_input_nodes[0]
        source = self.of[operand]
        if isinstance(node.meta["val"], (tuple, list)):
            return source  # several parts; an item of them says which one
        if isinstance(operand.meta["val"], (tuple, list)) and operand.all_input_nodes and is_view(operand):
            operand = operand.all_input_nodes[0]  # an item of a split is a part of what was split
        if source.kernel and len(fake(source.fx)) > 1:
            label: tuple[Any, ...] = ("item", node.args[1])
        else:
            part, whole = fake(node)[0], fake(operand)[0]
            permuted = _permuted(part) != _permuted(whole)
            if _elements(part) == _elements(whole) and not permuted:
                return source
            label = ("part", permuted, *_place(part, whole))
        key = (id(source), *label)
        if key not in self._parts:
            self._parts[key] = Value(node, label, (Operand(source, operand),))
        return self._parts[key]

    def _kernel(self, node: FxNode) -> Value:
        kernel, name = self.graph.of[node], op_name(node)
        name = _SPELLINGS.get(name, name.rstrip("_"))
        given = list(_arguments(node))
        tensors = [(place, n) for place, n in given if isinstance(n, FxNode)]
        scalars = tuple(value for _, value in given if not isinstance(value, FxNode))
        if name == "pow" and scalars == (2,):
            name, scalars = "square", ()
        details: tuple[Any, ...] = ()
        if name in _DETAILED:
            details, scalars = scalars, ()
        elif kernel.kind is Kind.REDUCTION:
            rank = len(shape_of(arg(node, 0)))
            details = tuple(d - rank for d in (reduced_dims(node) or ()))
            scalars = tuple(s for s in scalars if isinstance(s, float))
        elif name in ("cat", "stack"):
            rank = len(kernel.domain)
            details, scalars = (argument(node, "dim") % rank - rank,), ()
        elif name == "to":
            details, scalars = (str(kernel.dtype),), ()
        elif kernel.kind in (Kind.MATMUL, Kind.INJECTIVE):
            scalars = ()
        commutes = name in _COMMUTES and len(tensors) == 2
        operands = tuple(
            Operand(
                self.of[n], n, 0 if commutes else place,
                None if kernel.kind in _SHAPED else _own_dimensions(n, kernel.domain), kernel.domain,
            )
            for place, n in tensors
        )  # fmt: skip
        return Value(node, (name, len(tensors), *details), operands, scalars, True)


def _arguments(node: FxNode) -> Iterator[tuple[Any, Any]]:
    """(position, value) of the tensors, numbers and words among a node's arguments."""

    def look(value: Any, place: Any) -> Iterator[tuple[Any, Any]]:
        if isinstance(value, (list, tuple)):
            for i, v in enumerate(value):
                yield from look(v, (place, i))
        elif isinstance(value, Mapping):
            for k, v in value.items():
                yield from look(v, k)
        elif isinstance(value, (int, float, str)) or isinstance(value, FxNode) and fake(value):
            yield place, value

    # By the schema's names, so that f(x, a) and f(x, weight=a) are one.
    op = overload(node)
    names = [] if op is None else [a.name for a in op._schema.arguments]
    for i, value in enumerate(node.args):
        yield from look(value, names[i] if i < len(names) else i)
    yield from look(node.kwargs, None)


def _elements(t: torch.Tensor) -> int:
    """Elements in memory: expanded dimensions count once."""
    return math.prod(n for n, stride in zip(t.shape, t.stride()) if stride or n == 0)


def _permuted(t: torch.Tensor) -> bool:
    strides = [s for n, s in zip(t.shape, t.stride()) if n > 1 and s]
    return strides != sorted(strides, reverse=True)


def _place(part: torch.Tensor, whole: torch.Tensor) -> tuple[float, float, int]:
    """(share of the whole, where it starts as a share of a dimension, which dimension from the last)."""
    share = round(part.numel() / max(1, whole.numel()), 6)
    start = part.storage_offset() - whole.storage_offset()
    cut = (d for d in range(whole.dim()) if part.dim() == whole.dim() and part.shape[d] != whole.shape[d])
    d = next(cut, None)
    if d is None:
        return share, round(start / max(1, whole.numel()), 6), 0
    return share, round(start / max(1, whole.stride(d) * whole.shape[d]), 6), d - whole.dim()


def _own_dimensions(operand: FxNode, domain: tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions of a domain, counted from the last, along which an operand has elements of its own."""
    t = fake(operand)[0]
    return tuple(d for d in range(-len(domain), 0) if d >= -t.dim() and t.shape[d] > 1 and t.stride()[d])
