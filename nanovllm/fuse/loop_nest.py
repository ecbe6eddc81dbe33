"""Affine loop nests, read from Python text, that can be analysed and run.

    nests = parse(\"\"\"
    for i in range(N):
        for j in range(M):
            B[i, j] = 2 * A[i, j]
    for i in range(N):
        for j in range(M):
            C[i, j] = B[i, j] + B[i, j - 1]
    \"\"\", N=8, M=8)

A nest is a loop in a loop in a loop, with numbers or sizes as bounds. The innermost body assigns to elements of arrays.
Their indices are affine: sums of loop variables with whole factors.
"""

from __future__ import annotations

import ast
import itertools
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType

import numpy as np

SUPPORTED = (
    "supported are perfectly nested `for i in range(low, high)` loops with numbers or sizes as bounds, and in the "
    "innermost one assignments to array elements with affine indices, such as A[i, 2 * j + 1] = f(B[i, j])"
)
_FUNCTIONS = {
    "abs": abs, "max": max, "min": min, "exp": math.exp, "log": math.log, "sqrt": math.sqrt, "tanh": math.tanh,
}  # fmt: skip
_EXPRESSION = (ast.Subscript, ast.Constant, ast.Name, ast.BinOp, ast.UnaryOp, ast.Call)
Point = tuple[int, ...]


class NestError(ValueError):
    """The text is not an affine loop nest. The message has the line, the reason and what is supported."""


@dataclass(frozen=True)
class ArrayAccess:
    """An array element that a statement reads or writes. Index d is matrix[d] . variables + offset[d]."""

    array: str
    matrix: tuple[tuple[int, ...], ...]
    offset: tuple[int, ...]
    write: bool
    text: str

    def span(self, bounds: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The least and largest index of each dimension over a box of iterations."""
        spans = []
        for row, o in zip(self.matrix, self.offset):
            ends = [sorted((c * low, c * (high - 1))) for c, (low, high) in zip(row, bounds)]
            spans.append((sum(e[0] for e in ends) + o, sum(e[1] for e in ends) + o))
        return spans


@dataclass(frozen=True)
class LoopNest:
    """A perfect loop nest.

    Attributes:
        variables: from the outermost.
        bounds: (low, high) of each, high excluded.
        accesses: the accesses of the body, in the order in which they happen.
        lines: the statements of the body, with the sizes as numbers.
    """

    variables: tuple[str, ...]
    bounds: tuple[tuple[int, int], ...]
    accesses: tuple[ArrayAccess, ...]
    lines: tuple[str, ...]
    code: CodeType

    @property
    def depth(self) -> int:
        return len(self.variables)

    @property
    def extents(self) -> Point:
        return tuple(max(0, high - low) for low, high in self.bounds)

    @property
    def arrays(self) -> set[str]:
        return {a.array for a in self.accesses}

    def points(self) -> Iterator[Point]:
        """The iterations, in the order in which the loops run them."""
        return itertools.product(*(range(low, high) for low, high in self.bounds))

    def source(self, first: int = 0, last: int | None = None) -> str:
        """The loops first .. last - 1 as Python text, indented as in the nest; without `last` also the body."""
        loops = zip(self.variables, self.bounds)
        lines = [f"{'    ' * k}for {v} in range({low}, {high}):" for k, (v, (low, high)) in enumerate(loops)]
        body = ["    " * self.depth + line for line in self.lines] if last is None else []
        return "\n".join([*lines[first:last], *body])


def parse(text: str, **sizes: int) -> tuple[LoopNest, ...]:
    """The loop nests of a text, in order.

    Args:
        sizes: values of the names that are neither loop variables nor arrays.

    Raises:
        NestError: the text is something else.
    """
    try:
        tree = ast.parse(textwrap.dedent(text))
    except SyntaxError as e:
        raise NestError(f"line {e.lineno}: {e.msg}; {SUPPORTED}") from e
    if not tree.body:
        raise NestError(f"no loop; {SUPPORTED}")
    return tuple(_NestReader(sizes).nest(node) for node in tree.body)


def run(schedule: Sequence[tuple[LoopNest, Point]], arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Execute iterations in the given order. Returns new arrays.

    Raises:
        ValueError: an array is missing, has another number of dimensions, or is too small.
    """
    for nest in dict.fromkeys(nest for nest, _ in schedule):
        for a in nest.accesses:
            if a.array not in arrays:
                raise ValueError(f"arrays: {a.array} is missing; the nest uses {', '.join(sorted(nest.arrays))}")
            shape, span = arrays[a.array].shape, a.span(nest.bounds)
            if len(shape) != len(span):
                raise ValueError(f"arrays: {a.array} has {len(shape)} dimensions, but the nest uses {a.text}")
            # NumPy would take a negative index from the end.
            if any(low < 0 or high >= n for (low, high), n in zip(span, shape)):
                raise ValueError(f"arrays: {a.text} leaves {a.array} of shape {shape}")
    made = {name: np.array(value) for name, value in arrays.items()}
    names = {"__builtins__": {}, **_FUNCTIONS}
    for nest, point in schedule:
        exec(nest.code, names, {**made, **dict(zip(nest.variables, point))})
    return made


class _NestReader:
    """Turns syntax trees into nests. `variables`: the loop variables of the nest that is read."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self.variables: list[str] = []

    def nest(self, node: ast.stmt) -> LoopNest:
        self.variables, bounds, body = [], [], [node]
        while len(body) == 1 and isinstance(body[0], ast.For):
            loop = body[0]
            if not isinstance(loop.target, ast.Name) or loop.orelse:
                raise self.error(loop, "a loop over several variables, or with else")
            if loop.target.id in self.variables:
                raise self.error(loop, f"{loop.target.id} is the variable of two loops")
            bounds.append(self.range(loop.iter))
            self.variables.append(loop.target.id)
            body = loop.body
        if not self.variables:
            raise self.error(node, f"`{ast.unparse(node)[:40]}` is outside of a loop")
        accesses = tuple(access for statement in body for access in self.statement(statement))
        body = [_WithNumbers(self.sizes).visit(statement) for statement in body]
        lines = tuple(map(ast.unparse, body))
        return LoopNest(tuple(self.variables), tuple(bounds), accesses, lines, compile("\n".join(lines), "", "exec"))

    def range(self, node: ast.expr) -> tuple[int, int]:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"):
            raise self.error(node, f"a loop over `{ast.unparse(node)}`")
        if node.keywords or not 1 <= len(node.args) <= 2:
            raise self.error(node, f"`{ast.unparse(node)}`, a range with a step")
        ends = [0]
        for argument in node.args:
            row, constant = self.affine(argument)
            if any(row):
                raise self.error(node, f"the bound `{ast.unparse(argument)}` depends on another loop's variable")
            ends.append(constant)
        return ends[-2], ends[-1]

    def statement(self, node: ast.stmt) -> list[ArrayAccess]:
        if isinstance(node, ast.For):
            raise self.error(node, "a loop beside a statement, so the nest is not perfect")
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
        elif isinstance(node, ast.AugAssign):
            target = node.target
        else:
            raise self.error(node, f"`{ast.unparse(node)[:60]}` is no assignment")
        if not isinstance(target, ast.Subscript):
            raise self.error(node, f"`{ast.unparse(target)}` is no element of an array")
        again = [self.access(target, write=False)] if isinstance(node, ast.AugAssign) else []
        return [*self.reads(node.value), *again, self.access(target, write=True)]

    def reads(self, node: ast.expr) -> list[ArrayAccess]:
        if isinstance(node, ast.Subscript):
            return [self.access(node, write=False)]
        names = (*self.variables, *self.sizes)
        if isinstance(node, ast.Call):
            known = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
        else:
            known = not isinstance(node, ast.Name) or node.id in names
        if not known or not isinstance(node, _EXPRESSION):
            allowed = f"functions are {', '.join(_FUNCTIONS)}, names are loop variables and sizes"
            raise self.error(node, f"`{ast.unparse(node)}` in an expression ({allowed})")
        children = node.args if isinstance(node, ast.Call) else ast.iter_child_nodes(node)
        return [a for child in children if isinstance(child, ast.expr) for a in self.reads(child)]

    def access(self, node: ast.Subscript, write: bool) -> ArrayAccess:
        if not isinstance(node.value, ast.Name):
            raise self.error(node, f"`{ast.unparse(node)}`, an index of an index")
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        matrix, offset = zip(*map(self.affine, indices))
        return ArrayAccess(node.value.id, matrix, offset, write, ast.unparse(node))

    def affine(self, node: ast.expr) -> tuple[tuple[int, ...], int]:
        """(a factor for each variable, what is added)."""
        none = (0,) * len(self.variables)
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return none, node.value
        if isinstance(node, ast.Name) and node.id in self.variables:
            return tuple(int(v == node.id) for v in self.variables), 0
        if isinstance(node, ast.Name) and node.id in self.sizes:
            return none, self.sizes[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            row, constant = self.affine(node.operand)
            return tuple(-c for c in row), -constant
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult)):
            (a, x), (b, y) = self.affine(node.left), self.affine(node.right)
            if isinstance(node.op, ast.Mult):
                if any(a) and any(b):
                    raise self.error(node, f"`{ast.unparse(node)}` is not affine")
                return tuple(y * c + x * d for c, d in zip(a, b)), x * y
            sign = 1 if isinstance(node.op, ast.Add) else -1
            return tuple(c + sign * d for c, d in zip(a, b)), x + sign * y
        if isinstance(node, ast.Name):
            raise self.error(node, f"{node.id} has no value; if it is a size, give its value (--size {node.id}=1024)")
        raise self.error(node, f"`{ast.unparse(node)}` is not affine in {', '.join(self.variables) or 'sizes'}")

    def error(self, node: ast.AST, what: str) -> NestError:
        return NestError(f"line {getattr(node, 'lineno', '?')}: {what}; {SUPPORTED}")


class _WithNumbers(ast.NodeTransformer):
    """Puts numbers in the place of sizes."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self.sizes[node.id]) if node.id in self.sizes else node
