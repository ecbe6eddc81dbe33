"""Predicted beside measured: every group unfused, through torch.compile and through our ops.

On CUDA a call is timed within a CUDA graph, so that launches by the host do not show. Each call of the graph has inputs
of its own, so that they come from memory where they are large enough to leave the L2 cache. On a CPU it is a wall
clock, with warm caches.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node as FxNode
from torch.utils._pytree import tree_map_only

from nanovllm.fuse import fx_nodes
from nanovllm.fuse.analyzer import FusionAnalyzer
from nanovllm.fuse.group_module import Extract, extract, values
from nanovllm.fuse.grouping import Group
from nanovllm.hardware.timing import l2_bytes, time_in_graph, time_kernel
from nanovllm.kernels.op.declaration import copy_of

WAYS = ("unfused", "compile", "ours")
_MOST_COPIES = 64
_MOST_BYTES = 8 << 30
# Several roundings of a reduction and a product in the dtype.
_TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-4, torch.float64: 1e-8}


@dataclass(frozen=True)
class Measured:
    """One way to run a group: seconds, or a reason why there are none; with both, why results were not compared."""

    seconds: float | None
    reason: str = ""
    error: float | None = None
    """The largest difference from unfused, relative to its largest value."""


@dataclass(frozen=True)
class Comparison:
    """A group, predicted and measured. Seconds.

    Attributes:
        inputs: where its inputs lay while it was timed: "memory" or "cache".
    """

    number: int
    ops: str
    kernels: int
    served: str
    inputs: str
    predicted_unfused: float
    predicted_fused: float
    unfused: Measured
    compile: Measured
    ours: Measured

    @property
    def fused(self) -> float | None:
        """The best of the fused ways; a group of one kernel is fused already."""
        found = [m.seconds for m in (self.compile, self.ours) if m.seconds is not None]
        return min(found, default=None)

    @property
    def measured_gain(self) -> float | None:
        if self.fused is None or self.unfused.seconds is None:
            return None
        return self.unfused.seconds - self.fused


@dataclass(frozen=True)
class Agreement:
    """How well predictions and measurements agree.

    Attributes:
        rank: Spearman's correlation of the predicted with the measured gains of groups of several kernels; None for
            fewer than three of them.
        unfused_error, fused_error: the median of |predicted - measured| / measured.
    """

    rank: float | None
    unfused_error: float | None
    fused_error: float | None


def measure(
    analyzer: FusionAnalyzer,
    args: Sequence[Any] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    ways: Sequence[str] = WAYS,
    backend: str = "inductor",
    iters: int = 30,
    progress: Callable[[str], None] | None = None,
) -> list[Comparison]:
    """Time every group.

    Args:
        args, kwargs: real arguments of the module, on the device to measure.
        ways: which of "unfused", "compile" and "ours".
        backend: of torch.compile.
        iters: timed calls on a CPU, replays of the graph on CUDA.
        progress: is told the number and name of each group as its turn comes.

    Raises:
        ValueError: a tensor is on the meta device, or an unknown way.
    """
    unknown = [w for w in ways if w not in WAYS]
    if unknown:
        raise ValueError(f"ways: expected some of {', '.join(WAYS)}, not {unknown[0]!r}")
    found = values(analyzer.graph, args, kwargs or {})
    rows = []
    for number, group in enumerate(analyzer.groups, 1):
        if progress is not None:
            progress(f"group {number} of {len(analyzer.groups)}: {group.name}")
        rows.append(_compare(analyzer, number, group, found, ways, backend, iters))
    return rows


def agreement(rows: Sequence[Comparison]) -> Agreement:
    """Correlation and errors over groups; of fused times only where something was fused."""
    several = [r for r in rows if r.kernels > 1 and r.measured_gain is not None]
    gains = [(r.predicted_unfused - r.predicted_fused, r.measured_gain or 0.0) for r in several]
    unfused = [
        abs(r.predicted_unfused / r.unfused.seconds - 1) for r in rows if r.unfused.seconds and r.predicted_unfused
    ]
    fused = [abs(r.predicted_fused / r.fused - 1) for r in several if r.fused]
    return Agreement(
        spearman(*zip(*gains)) if len(gains) > 2 else None,
        statistics.median(unfused) if unfused else None,
        statistics.median(fused) if fused else None,
    )


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation; equal values share the mean of their ranks. None where one side is all equal."""
    ra, rb = _ranks(a), _ranks(b)
    if len(set(ra)) < 2 or len(set(rb)) < 2:
        return None
    return statistics.correlation(ra, rb)


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]


# ------------------------------------------------------------------------------------------------------------- one
# group


def _compare(
    analyzer: FusionAnalyzer, number: int, group: Group, found: dict[FxNode, Any], ways: Sequence[str], backend: str,
    iters: int,
) -> Comparison:  # fmt: skip
    plain = extract(group)
    inputs = [found[n] for n in plain.inputs]
    device = next((t.device for t in fx_nodes.tensors_of(inputs)), torch.device("cpu"))
    served = analyzer.served(group)
    copies, near = _copies(inputs, group.read_bytes, device)
    cost = replace(analyzer.cost, inputs="cache" if near else "memory")
    done = {w: Measured(None, "not asked for") for w in WAYS}
    if any(fx_nodes.reads_to_host(k.fx) for k in group.kernels):
        done, ways = {w: Measured(None, "it takes a value to the host") for w in WAYS}, ()
    random = next((k for k in group.kernels if fx_nodes.draws_random(k.fx)), None)
    uncompared = f"{random.op} draws random numbers, so results were not compared" if random else ""
    with torch.no_grad():
        wanted = plain.module(*_fresh(inputs)) if ways else ()
        for way in ways:
            try:
                fn, order = _way(way, group, plain, served.matches, device, backend)
                given = [found[n] for n in order]
                got = fn(*_fresh(given))
                error = None if random else _difference(got, wanted)
                if error is None and not random:
                    done[way] = Measured(None, "its result differs from the unfused one")
                    continue
                done[way] = Measured(_time(fn, given, device, copies, iters), uncompared, error)
            except _Missing as e:
                done[way] = Measured(None, str(e))
            except Exception as e:  # a compiler that is missing or fails is a row of the table, not the end of it
                done[way] = Measured(None, _first_line(e))
            finally:
                if way == "compile":
                    torch._dynamo.reset()
    return Comparison(
        number, group.name, len(group.kernels), served.text(len(group.kernels)), "cache" if near else "memory",
        cost.unfused(group), cost.fused(group).seconds, done["unfused"], done["compile"], done["ours"],
    )  # fmt: skip


class _Missing(Exception):
    pass


def _way(
    way: str, group: Group, plain: Extract, matches: Sequence[Any], device: torch.device, backend: str
) -> tuple[Callable[..., Any], Sequence[FxNode]]:
    if way == "unfused":
        return plain.module, plain.inputs
    if way == "compile":
        return torch.compile(plain.module, backend=backend, dynamic=False), plain.inputs
    if not matches:
        raise _Missing("no op of ours")
    ours = extract(group, matches, device)
    return ours.module, ours.inputs


def _fresh(inputs: Sequence[Any]) -> list[Any]:
    """Copies, with the same strides: a group may write to what it is given."""
    return tree_map_only(torch.Tensor, copy_of, list(inputs))  # what sort gives is a tuple


def _copies(inputs: Sequence[Any], read_bytes: int, device: torch.device) -> tuple[int, bool]:
    """(how many sets of inputs to rotate through, whether all of them stay in the cache): clearly the one or the other.

    Args:
        read_bytes: of the inputs, what a call reads: of a KV cache or a table perhaps little.
    """
    if device.type != "cuda":
        return 1, True
    size = max(1, sum(t.numel() * t.element_size() for t in fx_nodes.tensors_of(inputs)))
    touched = max(1, min(size, read_bytes))
    cache, most = l2_bytes(device), max(2, min(_MOST_COPIES, _MOST_BYTES // size))
    wanted = math.ceil(3 * cache / touched)
    if wanted > most:
        return max(1, min(8, most, cache // 4 // touched)), True
    return max(2, wanted), False


def _time(fn: Callable[..., Any], inputs: Sequence[Any], device: torch.device, copies: int, iters: int) -> float:
    if device.type != "cuda":
        return time_kernel(fn, *_fresh(inputs), warmup=5, iters=iters).median
    sets = [_fresh(inputs) for _ in range(copies)]
    # Many calls a graph, so that what launching the graph takes does not count.
    calls = [lambda s=s: fn(*s) for s in sets] * math.ceil(_MOST_COPIES / copies)
    with torch.cuda.device(device):
        return time_in_graph(calls, replays=iters).median


def _difference(got: Any, wanted: Any) -> float | None:
    """The largest relative difference of two results; None if it is more than roundings explain."""
    worst = 0.0
    got, wanted = fx_nodes.tensors_of(got), fx_nodes.tensors_of(wanted)
    if len(got) != len(wanted):
        return None
    tolerance = max((_TOLERANCE.get(t.dtype, 0.0) for t in wanted), default=0.0) or 1e-4
    for a, b in zip(got, wanted):
        if a.shape != b.shape or a.dtype != b.dtype:
            return None
        if not b.dtype.is_floating_point:
            if not torch.equal(a, b):
                return None
            continue
        a, b = a.double(), b.double()
        if not torch.equal(a.isnan(), b.isnan()):
            return None
        scale = b.nan_to_num().abs().max().clamp_min(1e-30) if b.numel() else b.new_ones(())
        error = float((a - b).nan_to_num().abs().max() / scale) if b.numel() else 0.0
        if error > tolerance:
            return None
        worst = max(worst, error)
    return worst


def _first_line(error: Exception) -> str:
    """What an error says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[:2]) if lines and lines[0].endswith(":") else "".join(lines[:1])
    return f"{type(error).__name__}: {said[:200]}" if said else type(error).__name__
