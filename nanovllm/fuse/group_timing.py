"""Predicted beside measured: every group unfused, through torch.compile and through our ops.

On CUDA a call is timed within a CUDA graph, so launches by the host do not count. Each call of the graph has inputs of
its own; they come from memory if they are large enough to leave the L2 cache. On a CPU it is a wall clock, with warm
caches.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node as FxNode
from torch.utils._pytree import tree_map_only

from nanovllm.fuse import fx_nodes
from nanovllm.fuse.analyzer import FusionAnalyzer
from nanovllm.fuse.group_module import GroupModule, extract, values
from nanovllm.fuse.grouping import KernelGroup
from nanovllm.fuse.op_matching import Match
from nanovllm.hardware.timing import l2_bytes, time_in_graph, time_kernel
from nanovllm.kernels.op.inputs import copy_of

WAYS = ("unfused", "compile", "ours")
_MOST_SETS = 64
_MOST_BYTES = 8 << 30
# Several roundings of a reduction and a product in the dtype.
_TOLERANCE = {torch.bfloat16: 5e-2, torch.float16: 1e-2, torch.float32: 1e-4, torch.float64: 1e-8}


@dataclass(frozen=True)
class GroupTiming:
    """One way to run a group.

    Attributes:
        seconds: None if it was not timed.
        reason: why it was not timed, or, with seconds, why its results were not compared.
        error: the largest difference from the unfused result, relative to that result's largest value.
    """

    seconds: float | None
    reason: str = ""
    error: float | None = None


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
    unfused: GroupTiming
    compile: GroupTiming
    ours: GroupTiming

    @property
    def fused(self) -> float | None:
        """The faster of the fused ways."""
        return min((m.seconds for m in (self.compile, self.ours) if m.seconds is not None), default=None)

    @property
    def measured_gain(self) -> float | None:
        if self.fused is None or self.unfused.seconds is None:
            return None
        return self.unfused.seconds - self.fused


@dataclass(frozen=True)
class Agreement:
    """How well predictions and measurements agree.

    Attributes:
        rank: Spearman's correlation of the predicted with the measured gains of groups of several kernels; None if
            there are fewer than three such groups.
        unfused_error, fused_error: the median of |predicted - measured| / measured; for fused times, of groups of
            several kernels only.
    """

    rank: float | None
    unfused_error: float | None
    fused_error: float | None

    @staticmethod
    def of(rows: Sequence[Comparison]) -> Agreement:
        several = [r for r in rows if r.kernels > 1 and r.measured_gain is not None]
        gains = [(r.predicted_unfused - r.predicted_fused, r.measured_gain or 0.0) for r in several]
        unfused = [(r.predicted_unfused, r.unfused.seconds) for r in rows if r.predicted_unfused]
        fused = [(r.predicted_fused, r.fused) for r in several]
        return Agreement(spearman(*zip(*gains)) if len(gains) > 2 else None, _error(unfused), _error(fused))


def _error(pairs: Sequence[tuple[float, float | None]]) -> float | None:
    errors = [abs(predicted / measured - 1) for predicted, measured in pairs if measured]
    return statistics.median(errors) if errors else None


def spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's rank correlation; equal values share the mean of their ranks. None if one side is all equal."""

    def ranks(values: Sequence[float]) -> list[float]:
        ordered = sorted(values)
        return [ordered.index(v) + (ordered.count(v) - 1) / 2 for v in values]

    if len(set(a)) < 2 or len(set(b)) < 2:
        return None
    return statistics.correlation(ranks(a), ranks(b))


def measure(
    analyzer: FusionAnalyzer, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None, *,
    ways: Sequence[str] = WAYS, backend: str = "inductor", iters: int = 30,
    progress: Callable[[str], None] | None = None,
) -> Iterator[Comparison]:  # fmt: skip
    """Time one group after the other.

    Args:
        args, kwargs: arguments of the module with values, on the device to measure.
        ways: some of "unfused", "compile" and "ours".
        backend: the backend of torch.compile.
        iters: timed calls on a CPU, replays of the graph on CUDA.
        progress: is told the number and name of each group before it is timed.

    Raises:
        ValueError: a tensor is on the meta device, or an unknown way.
    """
    unknown = [w for w in ways if w not in WAYS]
    if unknown:
        raise ValueError(f"ways: expected some of {', '.join(WAYS)}, not {unknown[0]!r}")
    found = values(analyzer.graph, args, kwargs or {})
    for number, group in enumerate(analyzer.groups, 1):
        if progress is not None:
            progress(f"group {number} of {len(analyzer.groups)}: {group.name}")
        yield _compare(analyzer, number, group, found, ways, backend, iters)


def _compare(
    analyzer: FusionAnalyzer, number: int, group: KernelGroup, found: dict[FxNode, Any], ways: Sequence[str],
    backend: str, iters: int,
) -> Comparison:  # fmt: skip
    plain = extract(group)
    inputs = [found[n] for n in plain.inputs]
    device = next((t.device for t in fx_nodes.tensors_of(inputs)), torch.device("cpu"))
    served = analyzer.served(group)
    sets, near = 1, True
    if device.type == "cuda":
        sets, near = input_sets(inputs, group.read_bytes, l2_bytes(device))
    done = {w: GroupTiming(None, "not asked for") for w in WAYS}
    if any(fx_nodes.reads_to_host(k.fx) for k in group.kernels):
        done, ways = {w: GroupTiming(None, "it takes a value to the host") for w in WAYS}, ()
    random = next((k.op for k in group.kernels if fx_nodes.draws_random(k.fx)), None)
    with torch.no_grad():
        wanted = plain.module(*_fresh(inputs)) if ways else ()
        for way in ways:
            try:
                fn, order = _way(way, plain, group, served.matches, device, backend)
                given = [found[n] for n in order]
                error = difference(fn(*_fresh(given)), wanted)
                if random:
                    reason = f"{random} draws random numbers, so results were not compared"
                    done[way] = GroupTiming(_time(fn, given, device, sets, iters), reason)
                elif error is None:
                    done[way] = GroupTiming(None, "its result differs from the unfused one")
                else:
                    done[way] = GroupTiming(_time(fn, given, device, sets, iters), error=error)
            except Exception as e:  # a compiler that is missing or fails is a row of the table, not the end of it
                done[way] = GroupTiming(None, str(e) if isinstance(e, _NoOp) else _in_one_line(e))
            finally:
                if way == "compile":
                    torch._dynamo.reset()
    cost = replace(analyzer.cost, inputs="cache" if near else "memory")
    return Comparison(
        number, group.name, len(group.kernels), str(served), "cache" if near else "memory", cost.unfused(group),
        cost.fused(group).seconds, done["unfused"], done["compile"], done["ours"],
    )  # fmt: skip


class _NoOp(Exception):
    pass


def _way(
    way: str, plain: GroupModule, group: KernelGroup, matches: Sequence[Match], device: torch.device, backend: str
) -> tuple[Callable[..., Any], Sequence[FxNode]]:
    """(what to call, the nodes whose values are its arguments)."""
    if way == "unfused":
        return plain.module, plain.inputs
    if way == "compile":
        return torch.compile(plain.module, backend=backend, dynamic=False), plain.inputs
    if not matches:
        raise _NoOp("no op of ours")
    ours = extract(group, matches, device)
    return ours.module, ours.inputs


def _fresh(inputs: Sequence[Any]) -> list[Any]:
    """Copies with the same strides: a group may write to its arguments, which may be tuples of tensors."""
    return tree_map_only(torch.Tensor, copy_of, list(inputs))


def input_sets(inputs: Sequence[Any], read_bytes: int, cache_bytes: int) -> tuple[int, bool]:
    """(how many sets of inputs to rotate through, whether all of them stay in the cache), clearly one or the other.

    Args:
        read_bytes: how much of the inputs a call reads: of a KV cache or a table perhaps little.
        cache_bytes: size of the L2 cache.
    """
    size = max(1, sum(t.numel() * t.element_size() for t in fx_nodes.tensors_of(inputs)))
    touched = max(1, min(size, read_bytes))
    most = max(2, min(_MOST_SETS, _MOST_BYTES // size))
    wanted = math.ceil(3 * cache_bytes / touched)
    if wanted > most:
        return max(1, min(8, most, cache_bytes // 4 // touched)), True
    return max(2, wanted), False


def _time(fn: Callable[..., Any], inputs: Sequence[Any], device: torch.device, sets: int, iters: int) -> float:
    if device.type != "cuda":
        return time_kernel(fn, *_fresh(inputs), warmup=5, iters=iters).median
    copies = [_fresh(inputs) for _ in range(sets)]
    # Many calls a graph, so that the launch of the graph does not count.
    calls = [lambda given=given: fn(*given) for given in copies] * math.ceil(_MOST_SETS / sets)
    with torch.cuda.device(device):
        return time_in_graph(calls, replays=iters).median


def difference(got: Any, wanted: Any) -> float | None:
    """The largest relative difference of two results, tensors in any nesting; None if rounding does not explain it."""
    got, wanted = fx_nodes.tensors_of(got), fx_nodes.tensors_of(wanted)
    if [(t.shape, t.dtype) for t in got] != [(t.shape, t.dtype) for t in wanted]:
        return None
    tolerance = max((_TOLERANCE.get(t.dtype, 0.0) for t in wanted), default=0.0) or 1e-4
    worst = 0.0
    for a, b in zip(got, wanted):
        if not b.dtype.is_floating_point or not b.numel():
            if not torch.equal(a, b):
                return None
            continue
        a, b = a.double(), b.double()
        scale = b.nan_to_num().abs().max().clamp_min(1e-30)
        error = float((a - b).nan_to_num().abs().max() / scale)
        if error > tolerance or not torch.equal(a.isnan(), b.isnan()):
            return None
        worst = max(worst, error)
    return worst


def _in_one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])
    return f"{type(error).__name__}: {said[:200]}" if said else type(error).__name__
