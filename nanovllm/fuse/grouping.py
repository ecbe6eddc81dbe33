"""Which kernels become one: groups grown by dependence, shape and single-consumer rules, the best merge first.

Every kernel starts as a group of its own. A merge joins a producer with a consumer, or two kernels that read the same
value. It must be legal (`legality.py`) and leave the groups without a cycle. Of all merges the one with the largest
gain is made, until none gains, as XLA's priority fusion does.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch.fx import Node as FxNode

from nanovllm.fuse import legality, memory_rules
from nanovllm.fuse.classify import Kind
from nanovllm.fuse.op_graph import Kernel, OpGraph, Read


@dataclass(frozen=True)
class Group:
    """Kernels that become one, in program order."""

    graph: OpGraph
    kernels: tuple[Kernel, ...]

    @cached_property
    def members(self) -> frozenset[FxNode]:
        return frozenset(k.fx for k in self.kernels)

    @cached_property
    def product(self) -> Kernel | None:
        return next((k for k in self.kernels if k.kind is Kind.MATMUL), None)

    @cached_property
    def reads(self) -> list[Read]:
        """What comes from outside."""
        return [r for k in self.kernels for r in k.reads if r.base not in self.members]

    @cached_property
    def outputs(self) -> list[Kernel]:
        """Members whose result is needed outside, or that write memory which exists outside."""
        g = self.graph

        def needed(k: Kernel) -> bool:
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
        """What leaves, memory that several members write once."""
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
        """Its operators, for people: "add, mean, rsqrt, mul"; runs of one are shortened."""
        ops = (k.op.removeprefix("nanovllm.") for k in self.kernels)
        runs = ((name, len(list(same))) for name, same in itertools.groupby(ops))
        return ", ".join(name if n == 1 else f"{name} x{n}" for name, n in runs)


def _whole(base: FxNode) -> int:
    """Bytes of a value; 0 if it is several."""
    value = base.meta.get("val")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


@dataclass(frozen=True)
class Decision:
    """A merge that was made, or one that was left: its gain in seconds, and why it was not made.

    Attributes:
        producer, consumer: kernels, one of each of the two groups, of which the second reads the first's result; or, of
            siblings, two that read the same value.
        both: the merged group, where it would be legal.
    """

    producer: str
    consumer: str
    gain: float
    made: bool
    reason: str = ""
    both: Group | None = field(default=None, repr=False, compare=False)


Gain = Callable[[Group, Group, Group], float]
"""(producer, consumer, both as one) -> seconds saved, or any number that is larger for a better merge."""

Heap = list[tuple[float, int, int, int, Group]]
"""(-gain, for a tie which was offered first, the two groups, both as one)."""
Left = dict[tuple[int, int], Decision]
"""Merges that were not made, of groups that may be gone by now."""


def saved_bytes(a: Group, b: Group, both: Group) -> float:
    """The gain where no device is given: bytes that need not be moved, and a little for the launch."""
    return a.read_bytes + a.written_bytes + b.read_bytes + b.written_bytes - both.read_bytes - both.written_bytes + 1


class Grower:
    """Groups the kernels of a graph.

    Args:
        gain: what a merge brings; by default the bytes that it saves, so that every legal merge is made. A
            `FusionCostModel` has one in seconds.
        siblings: whether kernels that only read the same value may be joined too.
    """

    def __init__(self, graph: OpGraph, gain: Gain = saved_bytes, siblings: bool = True) -> None:
        self.graph = graph
        self._gain = gain
        self._siblings = siblings
        self._groups: dict[int, Group] = {}
        self._of: dict[FxNode, int] = {}
        self._numbers = itertools.count()
        self.decisions: list[Decision] = []
        """Merges in the order in which they were made, then those that were left."""

    def groups(self) -> list[Group]:
        """The groups, in an order in which they can run."""
        self._groups, self._of, self.decisions = {}, {}, []
        for k in self.graph:
            self._add(Group(self.graph, (k,)))
        heap: Heap = []
        left: Left = {}
        for number in list(self._groups):
            self._push(heap, number, left, only_later=True)
        while heap:
            loss, _, a, b, both = heapq.heappop(heap)
            if a not in self._groups or b not in self._groups:
                continue  # one of them is part of a larger group by now
            names = self._meet(a, b)
            if self._reaches(a, b) or self._reaches(b, a):
                reason = "it would make a cycle: one needs the other through a third"
                left[a, b] = Decision(*names, -loss, False, reason, both)
                continue
            del self._groups[a], self._groups[b]
            self.decisions.append(Decision(*names, -loss, True, "", both))
            self._push(heap, self._add(both), left)
        self.decisions += [d for (a, b), d in left.items() if a in self._groups and b in self._groups]
        return self._in_order()

    def _add(self, group: Group) -> int:
        number = next(self._numbers)
        self._groups[number] = group
        self._of.update(dict.fromkeys(group.members, number))
        return number

    def _push(self, heap: Heap, number: int, left: Left, only_later: bool = False) -> None:
        """Offer every merge of a group with a neighbour."""
        for other in self._neighbours(number):
            if only_later and other < number:
                continue
            a, b = sorted((number, other), key=lambda n: self._groups[n].kernels[0].index)
            first, second = self._groups[a], self._groups[b]
            names = self._meet(a, b)
            kernels = tuple(sorted(first.kernels + second.kernels, key=lambda k: k.index))
            reason = legality.why_not(self.graph, kernels)
            if reason is not None:
                left[a, b] = Decision(*names, 0.0, False, reason)
                continue
            both = Group(self.graph, kernels)
            gain = self._gain(first, second, both)
            if gain > 0:
                heapq.heappush(heap, (-gain, next(self._numbers), a, b, both))
            else:
                left[a, b] = Decision(*names, gain, False, "it would take longer than the two", both)

    def _meet(self, a: int, b: int) -> tuple[str, str]:
        """Names of two kernels at which two groups meet."""
        first, second = self._groups[a], self._groups[b]
        for x, y in ((first, second), (second, first)):
            for k in y.kernels:
                for r in k.reads:
                    if r.base in x.members:
                        return r.base.name, k.name
        readers = {r.base: k.name for k in first.kernels for r in k.reads}
        shared = ((readers[r.base], k.name) for k in second.kernels for r in k.reads if r.base in readers)
        return next(shared, (first.kernels[-1].name, second.kernels[0].name))

    def _neighbours(self, number: int) -> list[int]:
        group = self._groups[number]
        found = [self._of[r.base] for r in group.reads if r.base in self._of]
        found += [self._of[c.fx] for k in group.kernels for c in self.graph.consumers.get(k.fx, ())]
        if self._siblings and group.product is None:
            for r in group.reads:
                readers = (self._of[c.fx] for c in self.graph.consumers[r.base])
                found += [n for n in readers if self._groups[n].product is None]
        return [n for n in dict.fromkeys(found) if n != number]

    def _after(self, number: int) -> set[int]:
        """Groups that must wait for this one."""
        group = self._groups[number]
        return {self._of[later.fx] for k in group.kernels for later in self.graph.followers.get(k.fx, ())} - {number}

    def _reaches(self, start: int, goal: int) -> bool:
        """Whether a group reaches another one through a third."""
        todo = [n for n in self._after(start) if n != goal]
        seen = set(todo)
        while todo:
            for n in self._after(todo.pop()):
                if n == goal:
                    return True
                if n not in seen:
                    seen.add(n)
                    todo.append(n)
        return False

    def _in_order(self) -> list[Group]:
        """The groups so that each comes after those that it waits for, else in program order."""
        after = {n: self._after(n) for n in self._groups}
        waits = {n: sum(n in later for later in after.values()) for n in self._groups}
        ordered = []
        while waits:
            ready = [n for n, count in waits.items() if not count]
            assert ready, "the groups have a cycle"
            n = min(ready, key=lambda n: self._groups[n].kernels[0].index)
            del waits[n]
            ordered.append(self._groups[n])
            for later in after[n]:
                waits[later] -= 1
        return ordered
