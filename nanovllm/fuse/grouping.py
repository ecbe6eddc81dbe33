"""Which kernels become one: groups grown by dependence, shape and single-consumer rules, the best merge first.

Every kernel starts as a group of its own. A merge joins a producer with a consumer, or two kernels that read the same
value. It must be legal (`legality.py`) and leave the groups without a cycle. Of all merges the one with the largest
gain is made, until none gains, as XLA's priority fusion does.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import networkx
import torch
from torch.fx import Node as FxNode

from nanovllm.fuse import legality, memory_rules
from nanovllm.fuse.classify import Kind
from nanovllm.fuse.op_graph import GraphKernel, OpGraph, Read


@dataclass(frozen=True, eq=False)
class KernelGroup:
    """Kernels that become one, in program order."""

    graph: OpGraph
    kernels: tuple[GraphKernel, ...]

    @cached_property
    def members(self) -> frozenset[FxNode]:
        return frozenset(k.fx for k in self.kernels)

    @cached_property
    def product(self) -> GraphKernel | None:
        return next((k for k in self.kernels if k.kind is Kind.MATMUL), None)

    @cached_property
    def reads(self) -> list[Read]:
        """The reads of values that no kernel of the group computes."""
        return [r for k in self.kernels for r in k.reads if r.base not in self.members]

    @cached_property
    def outputs(self) -> list[GraphKernel]:
        """Members whose result is needed outside, or that write memory which exists outside."""
        g = self.graph

        def needed(k: GraphKernel) -> bool:
            later = (*g.consumers.get(k.fx, ()), *g.writers.get(k.fx, ()))
            if k.fx in g.returned or not later or any(c.fx not in self.members for c in later):
                return True
            return k.mutates and not memory_rules.private(g, k, self.members) and not memory_rules.overwritten(k, later)

        return [k for k in self.kernels if needed(k)]

    @cached_property
    def boundary_reads(self) -> dict[FxNode, int]:
        """Bytes that a fused kernel reads, by where they come from: every part of a value once."""
        found: dict[FxNode, dict[FxNode, int]] = {}
        for r in self.reads:
            parts = found.setdefault(r.base, {})
            parts[r.value] = max(parts.get(r.value, 0), r.num_bytes)
        return {base: min(sum(parts.values()), _whole(base) or sum(parts.values())) for base, parts in found.items()}

    @property
    def read_bytes(self) -> int:
        return sum(self.boundary_reads.values())

    @property
    def written_bytes(self) -> int:
        """What leaves; memory that several members write counts once."""
        found: dict[object, int] = {}
        for k in self.outputs:
            place = memory_rules.place(k)
            found[place] = max(found.get(place, 0), k.written_bytes)
        return sum(found.values())

    @property
    def unfused_bytes(self) -> int:
        return sum(k.bytes for k in self.kernels if not k.empty)

    @property
    def flops(self) -> int:
        return sum(k.flops for k in self.kernels)

    @property
    def name(self) -> str:
        """Its operators, for people: "add, mean, rsqrt, mul x2"."""
        runs = itertools.groupby(k.op.removeprefix("nanovllm.") for k in self.kernels)
        counted = ((name, len(list(same))) for name, same in runs)
        return ", ".join(name if n == 1 else f"{name} x{n}" for name, n in counted)


def _whole(base: FxNode) -> int:
    """Bytes of a value; 0 if it is several."""
    value = base.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


@dataclass(frozen=True)
class Decision:
    """A merge that was made, or one that was not, and why.

    Attributes:
        producer, consumer: a kernel of each of the two groups; the consumer reads the producer's result, or both read
            the same value.
        gain: seconds.
        both: the merged group, if it would be legal.
    """

    producer: str
    consumer: str
    gain: float
    made: bool
    reason: str = ""
    both: KernelGroup | None = field(default=None, repr=False, compare=False)


Gain = Callable[[KernelGroup, KernelGroup, KernelGroup], float]
"""(producer, consumer, both as one) -> seconds saved, or any number that is larger for a better merge."""


def saved_bytes(a: KernelGroup, b: KernelGroup, both: KernelGroup) -> float:
    """The gain if no device is given: bytes that need not be moved, and a little for the launch."""
    return a.read_bytes + a.written_bytes + b.read_bytes + b.written_bytes - both.read_bytes - both.written_bytes + 1


class Grower:
    """Groups the kernels of a graph.

    Args:
        gain: what a merge brings; by default the bytes that it saves, so that every legal merge is made. A
            `FusionCostModel` has one in seconds.
    """

    def __init__(self, graph: OpGraph, gain: Gain = saved_bytes) -> None:
        self.graph = graph
        self._gain = gain
        self._of: dict[FxNode, KernelGroup] = {}
        self._after = networkx.DiGraph()  # group -> groups that must wait for it
        self._heap: list[
            tuple[float, int, KernelGroup, KernelGroup, KernelGroup]
        ] = []  # (-gain, order of the offer, two groups, both)
        self._left: dict[tuple[KernelGroup, KernelGroup], Decision] = {}
        self._offers = itertools.count()
        self.decisions: list[Decision] = []
        """Merges in the order in which they were made, then those that were not made."""

    def groups(self) -> list[KernelGroup]:
        """The groups, in an order in which they can run. Call it once."""
        singles = [KernelGroup(self.graph, (k,)) for k in self.graph]
        self._of = {g.kernels[0].fx: g for g in singles}
        self._after.add_nodes_from(singles)
        for group in singles:
            self._connect(group)
        offered: set[KernelGroup] = set()
        for group in singles:
            self._offer(group, without=offered)
            offered.add(group)
        while self._heap:
            loss, _, a, b, both = heapq.heappop(self._heap)
            if a not in self._after or b not in self._after:
                continue  # one of them is part of a larger group by now
            names = _meet(a, b)
            if self._through_a_third(a, b) or self._through_a_third(b, a):
                reason = "it would make a cycle: one needs the other through a third"
                self._left[a, b] = Decision(*names, -loss, False, reason, both)
                continue
            self.decisions.append(Decision(*names, -loss, True, "", both))
            self._after.remove_nodes_from((a, b))
            self._of.update(dict.fromkeys(both.members, both))
            self._connect(both)
            self._offer(both)
        self.decisions += [d for (a, b), d in self._left.items() if a in self._after and b in self._after]
        return list(networkx.lexicographical_topological_sort(self._after, key=lambda g: g.kernels[0].index))

    def _connect(self, group: KernelGroup) -> None:
        """Add the group with its edges."""
        self._after.add_node(group)
        for k in group.kernels:
            for later in self.graph.followers.get(k.fx, ()):
                if later.fx not in group.members:
                    self._after.add_edge(group, self._of[later.fx])
            for fx in (*(r.base for r in k.reads), *k.after):
                if fx in self._of and fx not in group.members:
                    self._after.add_edge(self._of[fx], group)

    def _through_a_third(self, start: KernelGroup, goal: KernelGroup) -> bool:
        return any(networkx.has_path(self._after, n, goal) for n in self._after.successors(start) if n is not goal)

    def _offer(self, group: KernelGroup, without: set[KernelGroup] | frozenset[KernelGroup] = frozenset()) -> None:
        """Offer every merge of a group with a neighbour."""
        for other in dict.fromkeys(self._neighbours(group)):
            if other is group or other in without:
                continue
            a, b = sorted((group, other), key=lambda g: g.kernels[0].index)
            kernels = tuple(sorted(a.kernels + b.kernels, key=lambda k: k.index))
            reason = legality.why_not(self.graph, kernels)
            if reason is not None:
                self._left[a, b] = Decision(*_meet(a, b), 0.0, False, reason)
                continue
            both = KernelGroup(self.graph, kernels)
            gain = self._gain(a, b, both)
            if gain > 0:
                heapq.heappush(self._heap, (-gain, next(self._offers), a, b, both))
            else:
                reason = "it would take longer than the two"
                self._left[a, b] = Decision(*_meet(a, b), gain, False, reason, both)

    def _neighbours(self, group: KernelGroup) -> Iterator[KernelGroup]:
        """Producers, consumers, and groups without a product that read the same value."""
        yield from (self._of[r.base] for r in group.reads if r.base in self._of)
        yield from (self._of[c.fx] for k in group.kernels for c in self.graph.consumers.get(k.fx, ()))
        if group.product is None:
            readers = (self._of[c.fx] for r in group.reads for c in self.graph.consumers[r.base])
            yield from (g for g in readers if g.product is None)


def _meet(first: KernelGroup, second: KernelGroup) -> tuple[str, str]:
    """Names of two kernels at which two groups meet."""
    for x, y in ((first, second), (second, first)):
        for k in y.kernels:
            for r in k.reads:
                if r.base in x.members:
                    return r.base.name, k.name
    readers = {r.base: k.name for k in first.kernels for r in k.reads}
    shared = ((readers[r.base], k.name) for k in second.kernels for r in k.reads if r.base in readers)
    return next(shared, (first.kernels[-1].name, second.kernels[0].name))
