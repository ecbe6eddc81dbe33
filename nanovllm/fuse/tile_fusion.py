"""Fused nests cut into tiles: whether that is legal, which size moves the least, and the order in which tiles run.

Loops may be cut into rectangular tiles that run one after the other if no dependence has a negative part (Irigoin and
Triolet, "Supernode Partitioning", 1988; Wolf and Lam, "A Data Locality Optimizing Algorithm", 1991). A delay of the
later nests can make it so (`LoopFusionAnalyzer.shift`).

A tile's footprint is what it touches: for each array and dimension the span of its indices over the tile. If the
footprint fits into a cache or shared memory, every tile loads its footprint once.
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
from nanovllm.wording import counted


@dataclass(frozen=True)
class TileCost:
    """What tiles of one size cost, in elements.

    Attributes:
        tile: iterations of each loop, outermost first.
        footprint: elements that a tile touches.
        tiles: how many there are.
        traffic: elements that all tiles move, each its footprint once.
    """

    tile: Point
    footprint: int
    tiles: int

    @property
    def traffic(self) -> int:
        return self.tiles * self.footprint


class TileFusion:
    """Tiles over nests that are fused at all levels, or over one nest. The nests run with the delays of `shift`.

    Args:
        nests: in program order, with the same bounds.

    Raises:
        ValueError: no nest, or bounds that differ.
    """

    def __init__(self, *nests: LoopNest) -> None:
        if not nests:
            raise ValueError("nests: expected at least one")
        if len({n.bounds for n in nests}) > 1:
            raise ValueError(f"nests: expected the same bounds, not {', '.join(str(n.bounds) for n in nests)}")
        self.nests = nests
        delays = LoopFusionAnalyzer(*nests).shift if len(nests) > 1 else None
        self.shift: tuple[Point, ...] = delays or tuple((0,) * n.depth for n in nests)

    @property
    def extents(self) -> Point:
        """The extents of the loops that run all nests, with the delays."""
        return tuple(n + max(later) - min(later) for n, later in zip(self.nests[0].extents, zip(*self.shift)))

    @cached_property
    def dependences(self) -> list[Dependence]:
        """Within each nest and between nests, those that order accesses; distances with the delays."""
        return [d for d in dependences(self.nests, self.nests[0].depth, self.shift, within=True) if d.kind.orders]

    def why_not(self) -> str | None:
        """None if tiles over all loops are legal, else the dependence that forbids them."""
        for d in self.dependences:
            if d.prevents:
                return str(d)
            against = d.distances.against_tiles(one_nest=d.nests[0] == d.nests[1])
            if against is not None:
                return f"{d.earlier} and {d.later} meet at the distance {against}, which tiles would turn around"
        return None

    def footprint(self, tile: Sequence[int]) -> int:
        """Elements that a tile touches."""
        spans: dict[str, list[list[tuple[int, int]]]] = {}
        for nest, delay in zip(self.nests, self.shift):
            # A nest that runs later touches, within a tile, what lies that much before.
            box = [(-late, size - late) for size, late in zip(tile, delay)]
            for a in nest.accesses:
                spans.setdefault(a.array, []).append(a.span(box))
        return sum(
            math.prod(max(high for _, high in ends) - min(low for low, _ in ends) + 1 for ends in zip(*of_array))
            for of_array in spans.values()
        )

    def cost(self, tile: Sequence[int]) -> TileCost:
        """What tiles of a size cost.

        Raises:
            ValueError: a size below 1, or of another number of loops.
        """
        if len(tile) != len(self.extents) or min(tile, default=1) < 1:
            raise ValueError(f"tile: expected {counted(len(self.extents), 'size')} of at least 1, not {tuple(tile)}")
        tile = tuple(min(t, max(1, n)) for t, n in zip(tile, self.extents))
        return TileCost(tile, self.footprint(tile), math.prod(-(-n // t) for n, t in zip(self.extents, tile)))

    def best(self, capacity: int) -> TileCost:
        """The tile that moves the least and whose footprint fits; its sizes are powers of two or whole loops.

        Args:
            capacity: elements that the cache or shared memory holds.

        Raises:
            ValueError: tiles are not legal, or not even a tile of one iteration fits.
        """
        reason = self.why_not()
        if reason is not None:
            raise ValueError(f"tiles are not legal: {reason}")
        whole = [max(1, n) for n in self.extents]
        sizes = [sorted({n, *(1 << b for b in range(n.bit_length()) if 1 << b < n)}) for n in whole]
        fitting = [p for p in map(self.cost, itertools.product(*sizes)) if p.footprint <= capacity]
        if not fitting:
            least = self.footprint((1,) * len(sizes))
            raise ValueError(f"capacity: a tile of one iteration touches {least} elements, not {capacity}")
        # Of equals the one that is longest in the innermost loop, where elements are neighbours.
        return min(fitting, key=lambda p: (p.traffic, p.tiles, [-t for t in reversed(p.tile)]))

    def schedule(self, tile: Sequence[int]) -> list[tuple[LoopNest, Point]]:
        """The iterations tile by tile, legal or not, for `loop_nest.run`; within a tile as the fused loops run."""
        tile = self.cost(tile).tile
        timed = []
        for number, (nest, delay) in enumerate(zip(self.nests, self.shift)):
            for point in nest.points():
                time = tuple(x + late for x, late in zip(point, delay))
                block = tuple((x - low) // t for x, (low, _), t in zip(time, nest.bounds, tile))
                timed.append((block, time, number, point))
        return [(self.nests[number], point) for *_, number, point in sorted(timed)]
