"""Matrix products among ATen operators, some einsums and convolutions too: their operands and their sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.fx import Node as FxNode

from nanovllm.fuse.fx_nodes import arg, argument, op_name, shape_of

_MATMULS = ("linear", "mm", "addmm", "matmul", "bmm", "baddbmm")
# Products by implicit GEMM: the weight times every window of the input, which is no matrix in memory.
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution", "_convolution")
Sizes = tuple[int, int, int]
"""Rows, columns and inner size of a product."""


@dataclass(frozen=True)
class Einsum:
    """The letters of an einsum: of each operand and of the result, and their sizes."""

    terms: list[str]
    out: str
    sizes: dict[str, int]

    @staticmethod
    def of(node: FxNode) -> Einsum:
        inputs, arrow, out = arg(node, 0).replace(" ", "").partition("->")
        terms = inputs.split(",")
        if not arrow:
            out = "".join(sorted(c for c in set(inputs) - set(",.") if inputs.count(c) == 1))
        sizes: dict[str, int] = {}
        for term, operand in zip(terms, arg(node, 1)):
            before, _, behind = term.partition("...")
            shape = shape_of(operand)
            for letter, n in (*zip(before, shape), *zip(reversed(behind), reversed(shape))):
                sizes[letter] = max(n, sizes.get(letter, n))
        return Einsum(terms, out, sizes)


@dataclass(frozen=True)
class Contraction:
    """An einsum of two operands that is a product.

    Attributes:
        left: which operand has the rows.
        in_order: whether the rows are the first dimensions of that operand, as they are of the result.
    """

    sizes: Sizes
    left: int
    in_order: bool


def contraction(node: FxNode) -> Contraction | None:
    """The product that an einsum is; None if it is another thing, such as a diagonal or a product of three."""
    e = Einsum.of(node)
    if "." in arg(node, 0) or len(e.terms) != 2:
        return None
    if any(shape_of(operand) != tuple(e.sizes[c] for c in term) for term, operand in zip(e.terms, arg(node, 1))):
        return None  # one of them is broadcast
    a, b = map(set, e.terms)
    inner = (a & b) - set(e.out)
    if any(len(set(t)) < len(t) for t in (*e.terms, e.out)) or not inner or not e.out or (a ^ b) - set(e.out):
        return None
    for left, term in enumerate(e.terms):
        columns = set(e.terms[1 - left]) - set(term)
        head, tail = e.out[: len(e.out) - len(columns)], e.out[len(e.out) - len(columns) :]
        if set(tail) == columns:
            rows, width, depth = (math.prod(e.sizes[c] for c in letters) for letters in (head, tail, inner))
            return Contraction((rows, width, depth), left, term.startswith(head))
    return None


def is_matmul(node: FxNode) -> bool:
    """Whether an ATen operator is a product."""
    name = op_name(node)
    if name in CONVOLUTIONS:
        return not (name.endswith("convolution") and argument(node, "transposed"))
    return name in _MATMULS or (name == "einsum" and contraction(node) is not None)


def matmul_sizes(node: FxNode) -> Sizes | None:
    """Sizes of a product, rows counted over all batches where the right operand is one matrix; None: of vectors."""
    if op_name(node) == "einsum":
        product = contraction(node)
        return None if product is None else product.sizes
    out = shape_of(node)
    a, b = map(shape_of, matmul_operands(node))
    if op_name(node) in CONVOLUTIONS:  # for every image, the weight times the windows: channels by positions
        columns = math.prod(out[2 - len(a) :])
        return math.prod(out) // max(1, columns), columns, math.prod(a[1:])
    if not (a and b and out):
        return None
    columns = out[-1] if len(b) > 1 else 1
    return math.prod(out) // max(1, columns), columns, a[-1]


def rows_in_order(node: FxNode) -> bool:
    """Whether the rows of a product are the first dimensions of its left operand."""
    product = contraction(node) if op_name(node) == "einsum" else None
    return product is None or product.in_order


def matmul_operands(node: FxNode) -> tuple[FxNode, FxNode]:
    """(left, right): what has the rows, and what has the columns."""
    if op_name(node) in CONVOLUTIONS:
        return arg(node, 1), arg(node, 0)
    if op_name(node) == "einsum":
        product = contraction(node)
        left = 0 if product is None else product.left
        return arg(node, 1)[left], arg(node, 1)[1 - left]
    first = 1 if op_name(node) in ("addmm", "baddbmm") else 0
    return arg(node, first), arg(node, first + 1)


def matmul_bias(node: FxNode) -> FxNode | None:
    """What is added to a product, where it is an operand."""
    name = op_name(node)
    if name in ("addmm", "baddbmm"):
        return arg(node, 0)
    return argument(node, "bias") if name in ("linear", *CONVOLUTIONS) else None
