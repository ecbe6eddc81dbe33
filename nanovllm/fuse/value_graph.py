"""A graph of kernels as a network of values by which two graphs are compared: what matters to a result, nothing else.

Left out are names, reshapes, numbers of rows and the order of what commutes. Kept are operators, which part of a value
a slice takes, along which dimensions an operand is broadcast or a reduction goes (counted from the last), and scalars.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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


@dataclass(frozen=True, eq=False)
class Value:
    """A value of the graph: an input, a kernel's result or a part of one of these.

    Attributes:
        fx: one of the fx nodes that stand for it.
        label: what it does; None for an input.
        sources: what it is computed from.
        uses: for each source, how it enters: (position or 0 where operands commute, broadcast dimensions, domain).
        scalars: the numbers among the arguments.
    """

    fx: FxNode
    label: tuple[Any, ...] | None
    sources: tuple[Value, ...] = ()
    actual: tuple[FxNode, ...] = ()
    """For each source, the fx node that is named there, which has the shape that is meant."""
    uses: tuple[tuple[Any, ...], ...] = ()
    scalars: tuple[Any, ...] = ()
    kernel: bool = False

    @property
    def commutes(self) -> bool:
        return self.kernel and self.name in _COMMUTES and len(self.sources) == 2

    @property
    def name(self) -> str:
        """The operator or the kind of part; "" of an input."""
        return self.label[0] if self.label else ""


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
        source = self.of[node.all_input_nodes[0]]
        tensors = fake(node)
        if len(tensors) != 1 or isinstance(node.meta["val"], (tuple, list)):
            return source  # of several parts; which is said when one is taken
        if source.kernel and len(fake(source.fx)) > 1:
            label: tuple[Any, ...] = ("item", node.args[1])
            return self._same(source, label, node)
        part, whole = tensors[0], fake(node.all_input_nodes[0])[0]
        if isinstance(node.all_input_nodes[0].meta["val"], (tuple, list)):  # an item of a split
            whole = fake(node.all_input_nodes[0].all_input_nodes[0])[0]
        permuted = _permuted(part) != _permuted(whole)
        if _numel(part) == _numel(whole) and not permuted:
            return source
        return self._same(source, ("part", permuted, *_place(part, whole)), node)

    def _same(self, source: Value, label: tuple[Any, ...], node: FxNode) -> Value:
        key = (id(source), *label)
        if key not in self._parts:
            operand = node.all_input_nodes[0]
            if isinstance(operand.meta["val"], (tuple, list)) and operand.all_input_nodes and is_view(operand):
                operand = operand.all_input_nodes[0]
            self._parts[key] = Value(node, label, (source,), (operand,), ((),))
        return self._parts[key]

    def _kernel(self, node: FxNode) -> Value:
        kernel = self.graph.of[node]
        name = op_name(node)
        name = _SPELLINGS.get(name, name.rstrip("_"))
        positions, scalars = _arguments(node)
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
        sources = tuple(self.of[n] for _, n in positions)
        commutes = name in _COMMUTES and len(positions) == 2
        # A reduction, a product and a gather have their own rules for shapes; what is pointwise broadcasts.
        free = kernel.kind in (Kind.MATMUL, Kind.REDUCTION, Kind.INJECTIVE, Kind.OPAQUE)
        uses = tuple(
            (0 if commutes else place, None if free else _broadcast(n, kernel.domain), kernel.domain)
            for place, n in positions
        )
        label = (name, len(positions), *details)
        return Value(node, label, sources, tuple(n for _, n in positions), uses, scalars, True)


def _arguments(node: FxNode) -> tuple[list[tuple[Any, FxNode]], tuple[Any, ...]]:
    """(position, operand) of the tensors among a node's arguments, and the numbers and words."""
    tensors: list[tuple[Any, FxNode]] = []
    scalars: list[Any] = []

    def look(value: Any, place: Any) -> None:
        if isinstance(value, FxNode):
            if fake(value):
                tensors.append((place, value))
        elif isinstance(value, (list, tuple)):
            for i, v in enumerate(value):
                look(v, (place, i))
        elif isinstance(value, Mapping):
            for k, v in value.items():
                look(v, k)
        elif isinstance(value, (int, float, bool, str)):
            scalars.append(value)

    # By the schema's names, so that f(x, a) and f(x, weight=a) are one.
    op = overload(node)
    names = [] if op is None else [a.name for a in op._schema.arguments]
    for i, value in enumerate(node.args):
        look(value, names[i] if i < len(names) else i)
    for name, value in node.kwargs.items():
        look(value, name)
    return tensors, tuple(scalars)


def _numel(t: torch.Tensor) -> int:
    """Elements in memory: expanded dimensions count once."""
    return math.prod(n for n, stride in zip(t.shape, t.stride()) if stride or n == 0)


def _permuted(t: torch.Tensor) -> bool:
    strides = [s for n, s in zip(t.shape, t.stride()) if n > 1 and s]
    return strides != sorted(strides, reverse=True)


def _place(part: torch.Tensor, whole: torch.Tensor) -> tuple[Any, ...]:
    """(share of the whole, where it starts as a share of a dimension, which dimension from the last)."""
    share = round(part.numel() / max(1, whole.numel()), 6)
    start = part.storage_offset() - whole.storage_offset()
    if part.dim() == whole.dim():
        for d in range(whole.dim()):
            if part.shape[d] != whole.shape[d]:
                return share, round(start / max(1, whole.stride(d) * whole.shape[d]), 6), d - whole.dim()
    return share, round(start / max(1, whole.numel()), 6), 0


def _broadcast(operand: FxNode, domain: tuple[int, ...]) -> tuple[int, ...]:
    """The dimensions of a domain, counted from the last, along which an operand has elements of its own."""
    t = fake(operand)[0]
    return tuple(d for d in range(-len(domain), 0) if d >= -t.dim() and t.shape[d] > 1 and t.stride()[d])


def uses_match(wanted: tuple[Any, ...], given: tuple[Any, ...]) -> bool:
    """Whether an operand enters in the same way: same position, own elements along the same dimensions.

    Dimensions of size 1 say nothing, and those before the pattern's first stand for rows: they must be there if its
    first is.
    """
    if not wanted or not given or wanted[0] != given[0]:
        return wanted == given == ()
    if wanted[1] is None or given[1] is None:
        return wanted[1] is given[1]
    rank = len(wanted[2])
    own = (d for d in range(-len(given[2]), 0) if given[2][d] != 1)
    return all((d in given[1]) == (max(d, -rank) in wanted[1]) for d in own)
