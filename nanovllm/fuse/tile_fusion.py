"""Fused nests cut into tiles: whether that is legal, which size moves the least, and the order in which tiles run.

Loops may be cut into rectangular tiles, which then run one after the other, if no dependence that these loops carry has
a negative part in one of them: the band is fully permutable (Irigoin and Triolet, "Supernode Partitioning", 1988; Wolf
and Lam, "A Data Locality Optimizing Algorithm", 1991). A delay of the later nests can make it so
(`LoopFusionAnalyzer.shift`).

A tile's footprint is what it touches: for each array and dimension the span of its indices over the tile. Cut so that
the footprint fits into a cache or shared memory, every tile loads its footprint once, and what is computed and used
within it never leaves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from nanovllm.fuse.dependence import Dependence, dependences
from nanovllm.fuse.loop_fusion import LoopFusionAnalyzer
from nanovllm.fuse.loop_nest import LoopNest, Point


@dataclass(frozen=True)
class TileCost:
    """What tiles of one size cost, in elements.

    Attributes:
        tile: iterations of each loop, outermost first.
        footprint: elements that a tile touches.
        tiles: how many there are.
        traffic: elements that all tiles load and store, each its footprint once; arrays that live only within tiles
            left out.
    """

    tile: Point
    footprint: int
    tiles: int
    traffic: int


class TileFusion:
    """Tiles over nests that are fused at all levels, or over one nest.

    Args:
        nests: in program order, with the same bounds.
        temporary: arrays that nobody reads afterwards.
        shift: for each nest, how much later it runs; by default `LoopFusionAnalyzer.shift`, which is 0 where it can be.

    Raises:
        ValueError: bounds differ, an unknown array, or a shift of another shape.
    """

    def __init__(self, *nests: LoopNest, temporary: Sequence[str] = (), shift: tuple[Point, ...] | None = None) -> None:
        if not nests:
            raise ValueError("nests: expected at least one")
        if len({n.bounds for n in nests}) > 1:
            raise ValueError(f"nests: expected the same bounds, not {', '.join(str(n.bounds) for n in nests)}")
        known = set().union(*(n.arrays for n in nests))
        for name in temporary:
            if name not in known:
                raise ValueError(f"temporary: no array {name!r}; arrays are {', '.join(sorted(known))}")
        self.nests, self.temporary = nests, tuple(temporary)
        zeros = tuple((0,) * n.depth for n in nests)
        if shift is None:
            shift = (LoopFusionAnalyzer(*nests).shift if len(nests) > 1 else None) or zeros
        if [len(s) for s in shift] != [n.depth for n in nests]:
            raise ValueError(f"shift: expected {len(nests)} times {nests[0].depth} numbers, not {shift}")
        self.shift = shift

    @property
    def extents(self) -> Point:
        """Of the loops that run all nests, the delays included."""
        return tuple(
            n + max(s[k] for s in self.shift) - min(s[k] for s in self.shift)
            for k, n in enumerate(self.nests[0].extents)
        )

    @cached_property
    def dependences(self) -> list[Dependence]:
        """Within each nest and between nests, those that order accesses; distances with the delays."""
        return [d for d in dependences(self.nests, self.nests[0].depth, self.shift, within=True) if d.kind.orders]

    def why_not(self, first: int = 0, last: int | None = None) -> str | None:
        """None if tiles over the loops first .. last - 1 are legal, else the dependence that forbids them."""
        last = self.nests[0].depth if last is None else last
        for d in self.dependences:
            if d.prevents:
                return str(d)
            v = d.distances.mixed(first, last, both_ways=d.nests[0] == d.nests[1])
            if v is not None:
                return f"{d.earlier} and {d.later} meet at the distance {v}, which tiles would turn around"
        return None

    @property
    def legal(self) -> bool:
        """Whether tiles over all loops are legal."""
        return self.why_not() is None

    def footprint(self, tile: Sequence[int], temporary: bool = True) -> int:
        """Elements that a tile touches; temporary=False: without arrays that live only within it."""
        return sum(math.prod(s) for name, s in self._spans(tile).items() if temporary or not self._inside(name))

    def _spans(self, tile: Sequence[int]) -> dict[str, list[int]]:
        ends: dict[str, list[list[tuple[int, int]]]] = {}
        for nest, s in zip(self.nests, self.shift):
            # A nest that runs later touches, within a tile, what lies that much before.
            box = [(-x, t - x) for t, x in zip(tile, s)]
            for a in nest.accesses:
                ends.setdefault(a.array, []).append(a.span(box))
        return {
            name: [max(high for _, high in one) - min(low for low, _ in one) + 1 for one in zip(*spans)]
            for name, spans in ends.items()
        }

    def _inside(self, name: str) -> bool:
        """Whether a temporary array's elements are used in the iteration that computes them, so never leave a tile."""
        if name not in self.temporary:
            return False
        written_first = next(a.write for n in self.nests for a in n.accesses if a.array == name)
        own = (d.distances.ranges for d in self.dependences if d.array == name)
        return written_first and not any(low or high for ranges in own for low, high in ranges)

    def plan(self, tile: Sequence[int]) -> TileCost:
        """What tiles of a size cost.

        Raises:
            ValueError: a size below 1, or of another number of loops.
        """
        tile = tuple(tile)
        if len(tile) != len(self.extents) or min(tile, default=1) < 1:
            raise ValueError(f"tile: expected {len(self.extents)} sizes of at least 1, not {tile}")
        tile = tuple(min(t, max(1, n)) for t, n in zip(tile, self.extents))
        tiles = math.prod(math.ceil(n / t) for n, t in zip(self.extents, tile))
        return TileCost(tile, self.footprint(tile), tiles, tiles * self.footprint(tile, temporary=False))

    def best(self, capacity: int) -> TileCost:
        """Of the sizes that are powers of two or a whole loop, the one that moves the least and whose footprint fits.

        Args:
            capacity: elements that the cache or shared memory holds.

        Raises:
            ValueError: tiles are not legal, or not even a tile of one iteration fits.
        """
        reason = self.why_not()
        if reason is not None:
            raise ValueError(f"tiles are not legal: {reason}")
        sizes = [
            sorted({n, *(1 << b for b in range(n.bit_length()) if 1 << b < n)})
            for n in map(lambda n: max(1, n), self.extents)
        ]
        fitting = [p for p in map(self.plan, itertools.product(*sizes)) if p.footprint <= capacity]
        if not fitting:
            least = self.footprint((1,) * len(sizes))
            raise ValueError(f"capacity: a tile of one iteration touches {least} elements, not {capacity}")
        # Of equals the one that is longest in the innermost loop, where elements are neighbours.
        return min(fitting, key=lambda p: (p.traffic, p.tiles, [-t for t in reversed(p.tile)]))

    def schedule(self, tile: Sequence[int]) -> list[tuple[LoopNest, Point]]:
        """The iterations tile by tile, legal or not, for `loop_nest.run`; within a tile as the fused loops run."""
        tile = self.plan(tile).tile
        low = [b[0] for b in self.nests[0].bounds]
        timed = []
        for number, (nest, s) in enumerate(zip(self.nests, self.shift)):
            for point in nest.points():
                time = tuple(x + d for x, d in zip(point, s))
                block = tuple((x - first) // t for x, first, t in zip(time, low, tile))
                timed.append((block, time, number, point))
        return [(self.nests[number], point) for *_, number, point in sorted(timed)]
