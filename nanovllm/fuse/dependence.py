"""Dependences between accesses of affine loop nests, as sets of distances between iterations.

Two accesses of one array, at iteration i and at iteration j, depend on each other if they meet in one element; j - i is
the distance. The sets are exact for any number of iterations: they are integer sets of isl (Verdoolaege, "isl: An
Integer Set Library for the Polyhedral Model", 2010), through its Python binding islpy. Distance vectors: Allen and
Kennedy, "Optimizing Compilers for Modern Architectures" (2001).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from nanovllm.fuse.loop_nest import ArrayAccess, LoopNest, Point

try:
    import islpy as isl
except ImportError:
    raise ValueError("the analysis of loop nests needs islpy; pip install 'nanovllm[fuse]'") from None


class DependenceKind(str, Enum):
    """What the later access does, and what the earlier one: RAW is a read after a write."""

    RAW = "RAW"
    WAR = "WAR"
    WAW = "WAW"
    RAR = "RAR"

    @property
    def orders(self) -> bool:
        """Whether the order of the two accesses matters: two reads may be exchanged."""
        return self is not DependenceKind.RAR


class Distances:
    """The distances at which two accesses meet: integer vectors with a part for each loop, outermost first."""

    def __init__(self, vectors: isl.Set) -> None:
        self.vectors = vectors
        self.depth: int = vectors.dim(isl.dim_type.set)

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(least, largest) of each level."""
        v = self.vectors
        return tuple((v.dim_min_val(k).to_python(), v.dim_max_val(k).to_python()) for k in range(self.depth))

    def before(self, depth: int) -> bool:
        """Whether a distance, cut to its first `depth` levels, is negative: its first part that is not 0 is below 0."""
        return bool(_least(self.vectors.project_out(isl.dim_type.set, depth, self.depth - depth)) < (0,) * depth)

    def against_tiles(self, one_nest: bool) -> Point | None:
        """A distance with a negative part, which forbids tiles; None without one.

        one_nest: both accesses are of one nest. A negative distance is then a positive one of the other way round, so
        that only a distance with parts of both signs counts.
        """
        signs = [" or ".join(f"v{k} {sign} 0" for k in range(self.depth)) for sign in "<>"]
        found = self.vectors & _set(self.depth, [f"({s})" for s in signs[: 1 + one_nest]])
        return None if found.is_empty() else _least(found)

    def moved(self, delay: Sequence[int]) -> Distances:
        """The distances if the second access runs later by `delay`."""
        return Distances(self.vectors.sum(_set(self.depth, [f"v{k} = {n}" for k, n in enumerate(delay)])))

    def __str__(self) -> str:
        return f"({', '.join(str(low) if low == high else f'{low}..{high}' for low, high in self.ranges)})"


@dataclass(frozen=True)
class Dependence:
    """Two accesses that meet. `nests`: their places; `prevents`: the nests cannot be fused at all levels."""

    kind: DependenceKind
    array: str
    earlier: str
    later: str
    nests: tuple[int, int]
    distances: Distances
    prevents: bool

    def __str__(self) -> str:
        return f"{self.text}: {'prevents fusion' if self.prevents else 'allows fusion'}"

    @property
    def text(self) -> str:
        """What meets, and how far apart."""
        return f"{self.kind.value} on {self.array}: {self.earlier} then {self.later}, distance {self.distances}"

    def forwards(self) -> Dependence:
        """The same of two accesses of one nest, named in the order in which they run, if that is one order."""
        back = Distances(self.distances.vectors.neg())
        if back.before(back.depth) or _least(back.vectors) == (0,) * back.depth:
            return self
        kind = DependenceKind(self.kind.value[::-1])
        return Dependence(kind, self.array, self.later, self.earlier, self.nests[::-1], back, self.prevents)


def distances(a: ArrayAccess, b: ArrayAccess, first: LoopNest, second: LoopNest) -> Distances | None:
    """Every j - i for which `a` at iteration i of `first` and `b` at iteration j of `second` are one element, if any.

    If one nest is deeper, the other has loops of one iteration inside.
    """
    if a.array != b.array:
        return None
    if len(a.offset) != len(b.offset):
        raise ValueError(f"{a.array}: {a.text} and {b.text} have different numbers of indices")
    depth = max(first.depth, second.depth)
    found = _elements(a, first, depth).apply_range(_elements(b, second, depth).reverse()).deltas()
    return None if found.is_empty() else Distances(found)


def dependences(
    nests: Sequence[LoopNest], level: int, shift: Sequence[Point] | None = None, within: bool = False
) -> list[Dependence]:
    """The dependences of every pair of nests.

    Args:
        level: a dependence prevents fusion if its distance, cut to this many levels, is negative.
        shift: how much later each nest runs.
        within: also those between the accesses of one nest.
    """
    found: dict[str, Dependence] = {}
    for (i, first), (j, second) in itertools.combinations_with_replacement(enumerate(nests), 2):
        pairs: Any = itertools.product(first.accesses, second.accesses)
        if i == j:
            pairs = itertools.combinations_with_replacement(first.accesses, 2) if within else ()
        for a, b in pairs:
            d = distances(a, b, first, second)
            if d is None:
                continue
            if shift is not None:
                d = d.moved([y - x for x, y in zip(shift[i], shift[j])])
            kind = DependenceKind(f"{'RW'[b.write]}A{'RW'[a.write]}")
            prevents = i != j and kind.orders and d.before(level)
            dependence = Dependence(kind, a.array, a.text, b.text, (i, j), d, prevents)
            found.setdefault(f"{i} {j} {dependence}", dependence)
    return list(found.values())


def _elements(access: ArrayAccess, nest: LoopNest, depth: int) -> isl.Map:
    """Iteration -> the element that it accesses."""
    variables = [f"v{k}" for k in range(depth)]
    bounds = [*nest.bounds, *((0, 1) for _ in range(depth - nest.depth))]
    box = " and ".join(f"{low} <= {v} < {high}" for v, (low, high) in zip(variables, bounds))
    indices = (
        " + ".join([str(o), *(f"{c} * {v}" for c, v in zip(row, variables))])
        for row, o in zip(access.matrix, access.offset)
    )
    return isl.Map(f"{{ [{', '.join(variables)}] -> [{', '.join(indices)}] : {box} }}")


def _set(depth: int, conditions: Sequence[str]) -> isl.Set:
    return isl.Set(f"{{ [{', '.join(f'v{k}' for k in range(depth))}] : {' and '.join(conditions) or 'true'} }}")


def _least(vectors: isl.Set) -> Point:
    """The lexicographically least of them."""
    point, depth = vectors.lexmin().sample_point(), vectors.dim(isl.dim_type.set)
    return tuple(point.get_coordinate_val(isl.dim_type.set, k).to_python() for k in range(depth))
