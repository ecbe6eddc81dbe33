"""May loop nests that run one after the other become one, down to which level, and if not, would a delay help?

Fused down to level k, iteration j of the second nest runs with iteration j of the first. Iteration i of the first still
comes first if j does not lie before i. So a dependence prevents fusion if its distance j - i, cut to k levels, is
negative (Kennedy and McKinley, "Maximizing Loop Parallelism and Improving Data Locality via Loop Fusion and
Distribution", 1993). If the distances are bounded, running the second nest that much later makes fusion legal
(Manjikian and Abdelrahman, "Fusion of Loops for Parallelism and Locality", 1997).
"""

from __future__ import annotations

import itertools
from functools import cached_property

from nanovllm.fuse.dependence import Dependence, dependences
from nanovllm.fuse.loop_nest import LoopNest, Point


class LoopFusionAnalyzer:
    """The fusion of two or more nests.

    Args:
        nests: in program order.

    Raises:
        ValueError: fewer than two nests.
    """

    def __init__(self, *nests: LoopNest) -> None:
        if len(nests) < 2:
            raise ValueError(f"nests: expected at least two, not {len(nests)}")
        self.nests = nests

    @cached_property
    def common(self) -> int:
        """How many outer loops have the same bounds in all nests."""
        levels = zip(*(n.bounds for n in self.nests))
        return sum(1 for _ in itertools.takewhile(lambda bounds: len(set(bounds)) == 1, levels))

    @cached_property
    def dependences(self) -> list[Dependence]:
        """The dependences of every pair of nests, RAW, WAR, WAW and RAR; distances over the loops of the deepest."""
        return dependences(self.nests, max(1, self.common))

    @cached_property
    def depth(self) -> int:
        """Down to which level the nests can be fused; 0: not at all."""
        ordering = [d.distances for d in self.dependences if d.kind.orders]
        levels = (k for k in range(self.common, 0, -1) if not any(d.before(k) for d in ordering))
        return next(levels, 0)

    @property
    def legal(self) -> bool:
        """Whether all levels of all nests can be fused."""
        return self.depth == max(n.depth for n in self.nests)

    @property
    def reason(self) -> str:
        """Why not all levels can be fused; empty if they can."""
        prevented = next((str(d) for d in self.dependences if d.prevents), "")
        if self.legal or prevented:
            return prevented
        levels = enumerate(itertools.zip_longest(*(n.bounds for n in self.nests)), 1)
        return next(f"loop {k} has different bounds: {', '.join(map(str, b))}" for k, b in levels if len(set(b)) > 1)

    @cached_property
    def shift(self) -> tuple[Point, ...] | None:
        """How many iterations later each nest must run, level by level, to be fused and tiled at all levels.

        All zeros if no delay is needed. None: bounds differ, or a nest would only begin with the last iteration of
        another.
        """
        depth = max(n.depth for n in self.nests)
        if self.common < depth:
            return None
        shifts = [(0,) * depth]
        for j in range(1, len(self.nests)):
            later = [0] * depth
            for d in self.dependences:
                if d.nests[1] == j and d.kind.orders:
                    for k, (low, _) in enumerate(d.distances.ranges):
                        later[k] = max(later[k], shifts[d.nests[0]][k] - low)
            shifts.append(tuple(later))
        extents = self.nests[0].extents
        return None if any(s >= n - 1 for shift in shifts for s, n in zip(shift, extents) if s) else tuple(shifts)

    def schedule(
        self, depth: int | None = None, shift: tuple[Point, ...] | None = None
    ) -> list[tuple[LoopNest, Point]]:
        """The iterations in the order of the fused loops, legal or not; for `loop_nest.run`.

        Args:
            depth: levels to fuse; by default those that can be. 0: one nest after the other.
            shift: for each nest, how much later its iterations run.
        """
        level = self.depth if depth is None else depth
        if not 0 <= level <= self.common:
            raise ValueError(f"depth: expected 0 to {self.common}, the loops with the same bounds, not {level}")
        timed = []
        for number, nest in enumerate(self.nests):
            delay = shift[number] if shift else (0,) * nest.depth
            for point in nest.points():
                time = tuple(x + y for x, y in zip(point, delay))
                timed.append((time[:level], number, time[level:], point))
        return [(self.nests[number], point) for _, number, _, point in sorted(timed)]

    def source(self) -> str:
        """The fused loops as text: the common loops, and in them what remains of each nest."""
        level, first = self.depth, self.nests[0]
        lines = [first.source(0, level)] if level else []
        for nest in self.nests:
            pairs = zip(first.variables[:level], nest.variables[:level])
            lines += [f"{'    ' * level}{new} = {old}" for old, new in pairs if old != new]
            lines.append(nest.source(level))
        return "\n".join(lines)
