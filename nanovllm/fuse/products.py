"""Matrix products among ATen operators, some einsums and convolutions being such: which are, what they multiply, and their sizes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.fx import Node as FxNode

from nanovllm.fuse.fx_nodes import argument, fake, op_name

MATMULS = ("linear", "mm", "addmm", "matmul", "bmm", "baddbmm")
# Products by implicit GEMM: the weight times every window of the input, which is no matrix in memory.
CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "convolution", "_convolution")


def is_matmul(node: FxNode) -> bool:
    """Whether an ATen operator is a product."""
    name = op_name(node)
    return name in MATMULS or _is_convolution(node) or (name == "einsum" and contraction(node) is not None)


def _is_convolution(node: FxNode) -> bool:
    name = op_name(node)
    return name in CONVOLUTIONS and not (name.endswith("convolution") and argument(node, "transposed"))


def matmul_sizes(node: FxNode) -> tuple[int, int, int] | None:
    """(rows, columns, inner) of a product, rows counted over all batches where the right operand is one matrix."""
    out = fake(node)[0]
    if op_name(node) == "einsum":
        return contraction(node).sizes
    left, right = matmul_operands(node)
    a, b = fake(left)[0], fake(right)[0]
    if (
        op_name(node) in CONVOLUTIONS
    ):  # for every image, the weight times the windows: rows are channels, columns positions
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
    return (
        (node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")) if name in ("linear", *CONVOLUTIONS) else None
    )
