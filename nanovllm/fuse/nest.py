"""Affine loop nests, read from Python text, that can be analysed and run.

    nests = parse(\"\"\"
    for i in range(N):
        for j in range(M):
            B[i, j] = 2 * A[i, j]
    for i in range(N):
        for j in range(M):
            C[i, j] = B[i, j] + B[i, j - 1]
    \"\"\", N=8, M=8)

A nest is a loop in a loop in a loop, perfectly nested, with numbers or sizes as bounds. Its innermost body is
assignments to elements of arrays, whose indices are affine: sums of loop variables with whole factors.
"""

from __future__ import annotations

import ast
import itertools
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

SUPPORTED = (
    "supported are perfectly nested `for i in range(low, high)` loops with numbers or sizes as bounds, and in the "
    "innermost one assignments to array elements with affine indices, such as A[i, 2 * j + 1] = f(B[i, j])"
)
FUNCTIONS: Mapping[str, Callable[..., float]] = {
    "abs": abs, "max": max, "min": min, "exp": math.exp, "log": math.log, "sqrt": math.sqrt, "tanh": math.tanh,
}  # fmt: skip
Point = tuple[int, ...]
Arrays = dict[str, np.ndarray]


class NestError(ValueError):
    """Text that is no affine loop nest; the message has the line, the reason and what is supported."""


@dataclass(frozen=True)
class Access:
    """An array element that a statement reads or writes: index d is matrix[d] . variables + offset[d]."""

    array: str
    matrix: tuple[tuple[int, ...], ...]
    offset: tuple[int, ...]
    write: bool
    text: str

    def at(self, point: Sequence[int]) -> Point:
        return tuple(sum(c * x for c, x in zip(row, point)) + o for row, o in zip(self.matrix, self.offset))

    def span(self, bounds: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
        """The least and largest index of each dimension over a box of points."""
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
        accesses: of the body, in the order in which they happen.
        lines: the statements of the body.
    """

    variables: tuple[str, ...]
    bounds: tuple[tuple[int, int], ...]
    accesses: tuple[Access, ...]
    lines: tuple[str, ...]
    _body: Callable[..., None] = field(repr=False, compare=False)

    @property
    def depth(self) -> int:
        return len(self.variables)

    @property
    def extents(self) -> tuple[int, ...]:
        return tuple(max(0, high - low) for low, high in self.bounds)

    @property
    def volume(self) -> int:
        return math.prod(self.extents)

    def points(self) -> Iterator[Point]:
        """The iterations, in the order in which the loops run them."""
        return itertools.product(*(range(low, high) for low, high in self.bounds))

    def execute(self, point: Point, arrays: Arrays) -> None:
        """One iteration."""
        self._body(point, arrays)

    def check(self, arrays: Mapping[str, np.ndarray]) -> None:
        """ValueError if an array is missing or too small: NumPy would take a negative index from the end."""
        for access in self.accesses:
            if access.array not in arrays:
                raise ValueError(f"arrays: {access.array} is missing; the nest uses {', '.join(sorted(self.arrays))}")
            shape = arrays[access.array].shape
            if len(shape) != len(access.offset):
                raise ValueError(f"arrays: {access.array} has {len(shape)} dimensions, but the nest uses {access.text}")
            if self.volume and any(low < 0 or high >= n for (low, high), n in zip(access.span(self.bounds), shape)):
                raise ValueError(f"arrays: {access.text} leaves {access.array} of shape {shape}")

    @property
    def arrays(self) -> set[str]:
        return {a.array for a in self.accesses}

    def loops(self, first: int, last: int) -> list[str]:
        """The headers of the loops first .. last - 1 as Python text, indented as in the nest."""
        bounds = zip(self.variables, self.bounds)
        return [f"{'    ' * k}for {v} in range({low}, {high}):" for k, (v, (low, high)) in enumerate(bounds)][
            first:last
        ]

    def source(self, first: int = 0) -> str:
        """The nest as Python text, without its first loops."""
        return "\n".join([*self.loops(first, self.depth), *("    " * self.depth + line for line in self.lines)])


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
    return tuple(_Reader(sizes).nest(node) for node in tree.body)


def run(schedule: Sequence[tuple[LoopNest, Point]], arrays: Mapping[str, np.ndarray]) -> Arrays:
    """Execute iterations in an order of one's own; returns new arrays."""
    for nest in dict.fromkeys(nest for nest, _ in schedule):
        nest.check(arrays)
    made = {name: np.array(value) for name, value in arrays.items()}
    for nest, point in schedule:
        nest.execute(point, made)
    return made


def in_sequence(nests: Sequence[LoopNest]) -> list[tuple[LoopNest, Point]]:
    """One nest after the other: the schedule that is written."""
    return [(nest, point) for nest in nests for point in nest.points()]


class _Reader:
    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes

    def nest(self, node: ast.stmt) -> LoopNest:
        variables: list[str] = []
        bounds: list[tuple[int, int]] = []
        body: list[ast.stmt] = [node]
        while len(body) == 1 and isinstance(body[0], ast.For):
            loop = body[0]
            if not isinstance(loop.target, ast.Name) or loop.orelse:
                raise self.error(loop, "a loop over several variables, or with else")
            if loop.target.id in variables:
                raise self.error(loop, f"{loop.target.id} is the variable of two loops")
            bounds.append(self.range(loop.iter, variables))
            variables.append(loop.target.id)
            body = loop.body
        if not variables:
            raise self.error(node, f"`{ast.unparse(node)[:40]}` is outside of a loop")
        accesses: list[Access] = []
        for statement in body:
            accesses += self.statement(statement, variables)
        lines = tuple(ast.unparse(s) for s in body)
        return LoopNest(tuple(variables), tuple(bounds), tuple(accesses), lines, self.compiled(body, variables))

    def range(self, node: ast.expr, variables: list[str]) -> tuple[int, int]:
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"):
            raise self.error(node, f"a loop over `{ast.unparse(node)}`")
        if node.keywords or not 1 <= len(node.args) <= 2:
            raise self.error(node, f"`{ast.unparse(node)}`, a range with a step")
        ends = []
        for argument in node.args:
            coefficients, constant = self.affine(argument, variables)
            if any(coefficients):
                raise self.error(node, f"the bound `{ast.unparse(argument)}` depends on another loop's variable")
            ends.append(constant)
        return (0, ends[0]) if len(ends) == 1 else (ends[0], ends[1])

    def statement(self, node: ast.stmt, variables: list[str]) -> list[Access]:
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
        found = self.reads(node.value, variables)
        if isinstance(node, ast.AugAssign):
            found.append(self.access(target, variables, write=False))
        return [*found, self.access(target, variables, write=True)]

    def reads(self, node: ast.expr, variables: list[str]) -> list[Access]:
        if isinstance(node, ast.Subscript):
            return [self.access(node, variables, write=False)]
        if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
            return []
        if isinstance(node, ast.Name) and (node.id in variables or node.id in self.sizes):
            return []
        if isinstance(node, ast.BinOp):
            return self.reads(node.left, variables) + self.reads(node.right, variables)
        if isinstance(node, ast.UnaryOp):
            return self.reads(node.operand, variables)
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in FUNCTIONS
            and not node.keywords
        ):
            return [a for argument in node.args for a in self.reads(argument, variables)]
        known = f"functions are {', '.join(FUNCTIONS)}, names are loop variables and sizes"
        raise self.error(node, f"`{ast.unparse(node)}` in an expression ({known})")

    def access(self, node: ast.Subscript, variables: list[str], write: bool) -> Access:
        if not isinstance(node.value, ast.Name):
            raise self.error(node, f"`{ast.unparse(node)}`, an index of an index")
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        rows = [self.affine(index, variables) for index in indices]
        return Access(node.value.id, tuple(r for r, _ in rows), tuple(o for _, o in rows), write, ast.unparse(node))

    def affine(self, node: ast.expr, variables: list[str]) -> tuple[tuple[int, ...], int]:
        """(a factor for each variable, what is added)."""
        none = (0,) * len(variables)
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return none, node.value
        if isinstance(node, ast.Name) and node.id in variables:
            return tuple(int(v == node.id) for v in variables), 0
        if isinstance(node, ast.Name) and node.id in self.sizes:
            return none, self.sizes[node.id]
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            row, constant = self.affine(node.operand, variables)
            return tuple(-c for c in row), -constant
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult)):
            (a, x), (b, y) = self.affine(node.left, variables), self.affine(node.right, variables)
            if isinstance(node.op, ast.Mult):
                if any(a) and any(b):
                    raise self.error(node, f"`{ast.unparse(node)}` is not affine")
                return tuple(y * c + x * d for c, d in zip(a, b)), x * y
            sign = 1 if isinstance(node.op, ast.Add) else -1
            return tuple(c + sign * d for c, d in zip(a, b)), x + sign * y
        unknown = f", and {node.id} has no value" if isinstance(node, ast.Name) else ""
        raise self.error(node, f"`{ast.unparse(node)}` is not affine in {', '.join(variables) or 'sizes'}{unknown}")

    def compiled(self, body: list[ast.stmt], variables: list[str]) -> Callable[..., None]:
        code = compile(ast.fix_missing_locations(ast.Module(body=body, type_ignores=[])), "<nest>", "exec")
        names: dict[str, Any] = {"__builtins__": {}, **FUNCTIONS, **self.sizes}

        def execute(point: Point, arrays: Arrays) -> None:
            exec(code, names, {**arrays, **dict(zip(variables, point))})

        return execute

    def error(self, node: ast.AST, what: str) -> NestError:
        return NestError(f"line {getattr(node, 'lineno', '?')}: {what}; {SUPPORTED}")
