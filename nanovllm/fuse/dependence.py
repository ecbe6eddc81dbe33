"""Dependences between accesses of affine loop nests, as distances between iterations.

Two accesses of one array, at iteration i and at iteration j, depend on each other where they meet in one element; j - i is the
distance. Sources: Banerjee, "Dependence Analysis for Supercomputing" (1988), for the GCD test and bounds; Allen and Kennedy,
"Optimizing Compilers for Modern Architectures" (2001), for distance vectors. Bounds are numbers here, so that what these
leave open is settled by listing the iterations.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from nanovllm.fuse.nest import Access, LoopNest

# Accesses whose indices mix variables are settled by listing pairs of iterations, up to as many as this; beyond, any
# distance is assumed.
_MOST_POINTS = 1 << 20
_MOST_PAIRS = 1 << 22

Vector = tuple[int, ...]


class DependenceKind(str, Enum):
    """What the earlier access does, and what the later one: a read after a write is a true dependence, and so on."""

    RAW = "RAW"
    WAR = "WAR"
    WAW = "WAW"
    RAR = "RAR"

    @staticmethod
    def of(earlier: Access, later: Access) -> DependenceKind:
        return DependenceKind(f"{'W' if later.write else 'R'}A{'W' if earlier.write else 'R'}")

    @property
    def orders(self) -> bool:
        """Whether the order of the two accesses matters: two reads may be exchanged."""
        return self is not DependenceKind.RAR


@dataclass(frozen=True)
class Distances:
    """The distances at which two accesses meet.

    Attributes:
        ranges: (least, largest) of each level, outermost first.
        vectors: all of them, where not every combination within the ranges occurs; None: every one does.
        exact: False: assumed, since there are too many iterations to list.
    """

    ranges: tuple[tuple[int, int], ...]
    vectors: frozenset[Vector] | None = None
    exact: bool = True

    def before(self, depth: int) -> bool:
        """Whether a distance, cut to its first `depth` levels, is negative: its first part that is not 0 is below 0."""
        if self.vectors is not None:
            return any(v[:depth] < (0,) * depth for v in self.vectors)
        for low, _ in self.ranges[:depth]:
            if low:  # below 0: it is negative here, after zeros; above: it is positive whatever follows
                return low < 0
        return False

    def mixed(self, first: int, last: int, both_ways: bool) -> Vector | None:
        """A distance that forbids tiles over the levels first .. last - 1, if there is one.

        That is one which those levels carry (it is 0 in the levels before) and which has a negative part among them.
        both_ways: the accesses are of one nest, where a negative distance is a positive one of the other way round.
        """
        for v in self.vectors if self.vectors is not None else _corners(self.ranges):
            if any(v[:first]):
                continue
            part = v[first:last]
            if both_ways and part < (0,) * len(part):
                part = tuple(-x for x in part)
            if min(part, default=0) < 0:
                return v
        return None

    def __str__(self) -> str:
        text = ", ".join(str(low) if low == high else f"{low}..{high}" for low, high in self.ranges)
        return f"({text})" + ("" if self.exact else " assumed")


def _corners(ranges: Sequence[tuple[int, int]]) -> Iterator[Vector]:
    """What stands for all vectors of a box where only signs count."""
    return itertools.product(*(sorted({low, high, max(low, min(high, 0))}) for low, high in ranges))


@dataclass(frozen=True)
class Dependence:
    """Two accesses that meet. `prevents`: they forbid to fuse all levels of the two nests."""

    kind: DependenceKind
    array: str
    earlier: str
    later: str
    nests: tuple[int, int]
    distances: Distances
    prevents: bool

    def __str__(self) -> str:
        effect = "prevents fusion" if self.prevents else "allows fusion"
        return f"{self.text}: {effect}"

    def forwards(self) -> Dependence:
        """The same of two accesses of one nest, named in the order in which they run, where that is one order."""
        ranges = self.distances.ranges
        if tuple(high for _, high in ranges) >= (0,) * len(ranges):
            return self
        vectors = self.distances.vectors
        back = Distances(
            tuple((-high, -low) for low, high in ranges),
            None if vectors is None else frozenset(tuple(-x for x in v) for v in vectors), self.distances.exact,
        )  # fmt: skip
        kind = DependenceKind(self.kind.value[::-1])
        return Dependence(kind, self.array, self.later, self.earlier, self.nests[::-1], back, self.prevents)

    @property
    def text(self) -> str:
        """What meets, and how far apart."""
        return f"{self.kind.value} on {self.array}: {self.earlier} then {self.later}, distance {self.distances}"


def distances(a: Access, b: Access, first: LoopNest, second: LoopNest) -> Distances | None:
    """Every j - i for which `a` at iteration i of `first` and `b` at iteration j of `second` are one element; None if none is.

    The nests have as many levels. Exact unless the indices mix variables and there are very many iterations.
    """
    if a.array != b.array or not first.volume or not second.volume:
        return None
    if len(a.offset) != len(b.offset):
        raise ValueError(f"{a.array}: {a.text} and {b.text} have different numbers of indices")
    if _gcd_excludes(a, b) or _bounds_exclude(a, b, first, second):
        return None
    box = [(lo2 - (hi1 - 1), (hi2 - 1) - lo1) for (lo1, hi1), (lo2, hi2) in zip(first.bounds, second.bounds)]
    if a.matrix == b.matrix and all(sum(map(bool, row)) <= 1 for row in a.matrix):
        return _separable(a, b, box)
    return _listed(a, b, first, second, box)


def _gcd_excludes(a: Access, b: Access) -> bool:
    """The GCD test: a sum of whole multiples is a multiple of their greatest common divisor."""
    for row_a, row_b, x, y in zip(a.matrix, b.matrix, a.offset, b.offset):
        divisor = math.gcd(*row_a, *row_b)
        if (y - x) % divisor if divisor else y != x:
            return True
    return False


def _bounds_exclude(a: Access, b: Access, first: LoopNest, second: LoopNest) -> bool:
    """Banerjee's bounds, for a box of iterations: the two ranges of indices do not overlap."""
    return any(
        high_a < low_b or high_b < low_a
        for (low_a, high_a), (low_b, high_b) in zip(a.span(first.bounds), b.span(second.bounds))
    )


def _separable(a: Access, b: Access, box: list[tuple[int, int]]) -> Distances | None:
    """Every index is of one variable at most, the same in both: c (j - i) = difference of what is added."""
    ranges = list(box)
    for row, x, y in zip(a.matrix, a.offset, b.offset):
        level = next((k for k, c in enumerate(row) if c), None)
        if level is None:
            if x != y:
                return None
            continue
        d, rest = divmod(x - y, row[level])
        low, high = ranges[level]
        if rest or not low <= d <= high:
            return None
        ranges[level] = (d, d)
    return Distances(tuple(ranges))


def _listed(a: Access, b: Access, first: LoopNest, second: LoopNest, box: list[tuple[int, int]]) -> Distances | None:
    assumed = Distances(tuple(box), exact=False)
    if max(first.volume, second.volume) > _MOST_POINTS:
        return assumed
    points = [np.stack(np.meshgrid(*(np.arange(lo, hi) for lo, hi in n.bounds), indexing="ij"), -1).reshape(-1, n.depth)
              for n in (first, second)]  # fmt: skip
    spans = [(min(s[0], t[0]), max(s[1], t[1])) for s, t in zip(a.span(first.bounds), b.span(second.bounds))]
    addresses = []
    for access, at in zip((a, b), points):
        flat = np.zeros(len(at), dtype=np.int64)
        for row, o, (low, high) in zip(access.matrix, access.offset, spans):
            flat = flat * (high - low + 1) + at @ np.asarray(row, dtype=np.int64) + o - low
        addresses.append(flat)
    order = np.argsort(addresses[1], kind="stable")
    sorted_b = addresses[1][order]
    start, end = (np.searchsorted(sorted_b, addresses[0], side) for side in ("left", "right"))
    counts = end - start
    total = int(counts.sum())
    if total == 0:
        return None
    if total > _MOST_PAIRS:
        return assumed
    left = np.repeat(np.arange(len(counts)), counts)
    right = order[np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(start, counts)]
    found = np.unique(points[1][right] - points[0][left], axis=0)
    ranges = tuple((int(lo), int(hi)) for lo, hi in zip(found.min(0), found.max(0)))
    return Distances(ranges, frozenset(tuple(map(int, v)) for v in found))
