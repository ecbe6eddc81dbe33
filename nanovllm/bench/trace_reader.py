"""Reading a PyTorch profiler's Chrome trace: which op and which step launched each kernel.

Host ranges nest by time within a thread. A kernel belongs to the range that launched it, found through the
correlation id that launch and kernel share; the kernels of a CUDA graph all carry the id of the graph's launch.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanovllm.bench.instrument import OP_NAME, STEP_NAME

_HOST = {"user_annotation", "cpu_op", "cuda_runtime", "cuda_driver", "python_function"}
DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_LAUNCHES = {"cuda_runtime", "cuda_driver"}

Owner = tuple[str, str, str]
"""(op, module, provider)"""

WINDOW = "recorded window"
"""The range around steps that were recorded one after the other."""


@dataclass(eq=False)
class Range:
    """Something on a host thread, from `start` for `duration` microseconds."""

    name: str
    start: float
    duration: float
    parent: Range | None = None
    children: list[Range] = field(default_factory=list)

    @property
    def end(self) -> float:
        return self.start + self.duration

    def up(self) -> Iterator[Range]:
        """This range and those around it, the innermost first."""
        node: Range | None = self
        while node is not None:
            yield node
            node = node.parent

    def walk(self) -> Iterator[Range]:
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass
class Kernel:
    """Something that ran on the device, in microseconds.

    Attributes:
        launch: the host range that launched it, if the trace tells.
        turn: when everything that started before it had ended; until then it waited, or read what does not depend on
            that.
    """

    name: str
    start: float
    duration: float
    launch: Range | None = None
    turn: float = float("-inf")

    @property
    def end(self) -> float:
        return self.start + self.duration

    @property
    def own(self) -> float:
        """Its time from its turn on: those of all kernels add up to the time in which the device works."""
        return max(0.0, self.end - max(self.turn, self.start))


@dataclass
class Step:
    """A step of the engine: its host range, the ops in it, the kernels it launched, in order."""

    kind: str
    range: Range
    kernels: list[Kernel] = field(default_factory=list)

    def ops(self) -> Iterator[tuple[Owner, Range]]:
        """((op, module, provider), range) of every innermost op."""
        for node in self.range.walk():
            found = op_of(node.name)
            if found and not any(op_of(inner.name) for inner in node.walk() if inner is not node):
                yield found, node


class Trace:
    """A parsed trace.

    Attributes:
        roots: by thread, the outermost host ranges.
        kernels: by start.
        steps: by start.
    """

    def __init__(self, events: Iterable[dict[str, Any]]) -> None:
        threads: dict[tuple[Any, Any], list[Range]] = defaultdict(list)
        launches: dict[Any, Range] = {}
        device = []
        for event in events:
            if event.get("ph") != "X":
                continue
            category = event.get("cat", "").lower()
            name, start, duration = event["name"], float(event["ts"]), float(event.get("dur", 0))
            correlation = event.get("args", {}).get("correlation")
            if category in DEVICE:
                device.append((Kernel(name, start, duration), correlation))
            elif category in _HOST:
                node = Range(name, start, duration)
                threads[event["pid"], event["tid"]].append(node)
                if category in _LAUNCHES and correlation is not None:
                    launches[correlation] = node
        self.roots = {thread: nest(ranges) for thread, ranges in threads.items()}
        for kernel, correlation in device:
            kernel.launch = launches.get(correlation)
        self.kernels = sorted((k for k, _ in device), key=lambda k: k.start)
        end = float("-inf")
        for kernel in self.kernels:
            kernel.turn = max(kernel.start, end)
            end = max(end, kernel.end)
        self.steps = self._steps()

    def _steps(self) -> list[Step]:
        steps = {}
        for roots in self.roots.values():
            for root in roots:
                for node in root.walk():
                    if found := STEP_NAME.match(node.name):
                        steps[node] = Step(found["kind"], node)
        for kernel in self.kernels:
            if kernel.launch is not None:
                owner = next((n for n in kernel.launch.up() if n in steps), None)
                if owner is not None:
                    steps[owner].kernels.append(kernel)
        return sorted(steps.values(), key=lambda s: s.range.start)


def nest(ranges: Sequence[Range]) -> list[Range]:
    """Make a forest of one thread's ranges. A range that only overlaps another one is put beside it."""
    roots: list[Range] = []
    stack: list[Range] = []
    for node in sorted(ranges, key=lambda r: (r.start, -r.duration)):
        # The clock's resolution is coarser than its digits.
        while stack and node.end > stack[-1].end + 0.002:
            stack.pop()
        if stack:
            node.parent = stack[-1]
            stack[-1].children.append(node)
        else:
            roots.append(node)
        stack.append(node)
    return roots


def op_of(name: str) -> Owner | None:
    """(op, module, provider) if a range's name is that of an op."""
    found = OP_NAME.match(name)
    return (found["op"], found["module"] or "", found["provider"]) if found else None


def owner_of(kernel: Kernel) -> Owner | None:
    """The op that launched a kernel."""
    if kernel.launch is None:
        return None
    return next(filter(None, (op_of(node.name) for node in kernel.launch.up())), None)


def name_graph_kernels(steps: Sequence[Step], named: Sequence[Step]) -> list[list[Owner | None]]:
    """The op of each kernel of each step, also of kernels in a CUDA graph, which no op's range contains.

    Args:
        steps: as they ran.
        named: steps of the same kinds that ran eagerly, whose kernels are inside the ranges of their ops. The i-th
            kernel of a name in a captured step is taken for the i-th of that name in an eager one. A kernel whose
            name no eager step has is named by its place: see `_name_by_place`.
    """
    result = []
    for step in steps:
        models = [s for s in named if s.kind == step.kind]
        # The one of the same size first: sizes decide which kernels a library takes.
        models.sort(key=lambda s: s.range.name != step.range.name)
        by_name: list[dict[str, list[int]]] = []
        for model in models:
            places: dict[str, list[int]] = defaultdict(list)
            for i, kernel in enumerate(model.kernels):
                places[kernel.name].append(i)
            by_name.append(places)
        seen: dict[str, int] = defaultdict(int)
        owners: list[Owner | None] = []
        found: list[int | None] = []  # the place in the first model, -1 in another one
        for kernel in step.kernels:
            owner, place = owner_of(kernel), None
            which = next((m for m, places in enumerate(by_name) if kernel.name in places), None)
            if which is not None:
                like = by_name[which][kernel.name]
                at = like[min(seen[kernel.name], len(like) - 1)]
                owner, place = owner or owner_of(models[which].kernels[at]), -1 if which else at
            seen[kernel.name] += 1
            owners.append(owner)
            found.append(place)
        if models:
            _name_by_place(step.kernels, owners, found, [owner_of(k) for k in models[0].kernels])
        result.append(owners)
    return result


def _name_by_place(
    kernels: Sequence[Kernel], owners: list[Owner | None], found: Sequence[int | None], model: Sequence[Owner | None]
) -> None:
    """Name kernels that only a graph has, as a library's for a product of padded shape, by what an eager step runs
    there.

    Between two kernels that were found in the eager step, its ops between those two are missing from the graph. Each
    gets one of the unknown kernels there, the longest of them, in order; what else is there only prepares.

    Args:
        found: each kernel's place in the eager step; None: no eager step has its name.
        model: the ops of the eager step's kernels.
    """
    anchors = [(i, at) for i, at in enumerate(found) if at is not None and at >= 0 and model[at] is not None]
    ends = [(-1, -1), *anchors, (len(kernels), len(model))]
    for (i, first), (j, last) in zip(ends, ends[1:]):
        missing = list(dict.fromkeys(o for o in model[first + 1 : last] if o is not None))
        unknown = [k for k in range(i + 1, j) if found[k] is None and owners[k] is None]
        longest = sorted(sorted(unknown, key=lambda k: -kernels[k].duration)[: len(missing)])
        for k, owner in zip(longest, missing):
            owners[k] = owner


def gaps(kernels: Sequence[Kernel]) -> list[float]:
    """Microseconds between the end of everything that ran and the start of the next kernel, where that is above 0."""
    ordered = sorted(kernels, key=lambda k: k.start)
    ends = itertools.accumulate((k.end for k in ordered), max)
    return [kernel.start - end for kernel, end in zip(ordered[1:], ends) if kernel.start > end]


def busy(kernels: Sequence[Kernel]) -> float:
    """Microseconds in which at least one of the kernels ran."""
    if not kernels:
        return 0.0
    return max(k.end for k in kernels) - min(k.start for k in kernels) - sum(gaps(kernels))


def flame(steps: Sequence[Step]) -> dict[str, Any]:
    """Host time of the steps' threads as a tree {"name", "us", "children"}, with equal names at one place added up."""
    tops: list[Range] = []
    for step in steps:
        top = list(step.range.up())[-1]
        if top not in tops:
            tops.append(top)
    tree: dict[str, Any] = {"name": "host", "us": sum(t.duration for t in tops), "children": []}
    _merge(tree, tops)
    return tree


def _merge(into: dict[str, Any], ranges: Sequence[Range]) -> None:
    groups: dict[str, list[Range]] = defaultdict(list)
    for node in ranges:
        groups[plain_name(node.name)].append(node)
    for name, members in groups.items():
        child: dict[str, Any] = {"name": name, "us": sum(m.duration for m in members), "children": []}
        _merge(child, [c for m in members for c in m.children])
        into["children"].append(child)
    into["children"].sort(key=lambda c: -c["us"])


def plain_name(name: str) -> str:
    """A range's name without its numbers: "layer 3" -> "layer"; a step's is its kind."""
    step = STEP_NAME.match(name)
    return f"{step['kind']} step" if step else re.sub(r" \d+$", "", name)
