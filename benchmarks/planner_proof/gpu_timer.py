"""Timing plans on a CUDA device, in little time: most configurations are far from the best, and a glance tells.

A CUDA graph has one call for each set of inputs, which together are more than twice the L2 cache. The first replay
warms up, the second is timed, and only what comes near the best so far is replayed more often. In the end the first
choices and the best are replayed alternately, so that drifting clocks affect all of them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from nanovllm.hardware.gpu_presets import DeviceModel
from nanovllm.plan.resources import Plan

FIRST = 5
FAR = 1.5
"""Times the best so far: not timed again."""
_NEAR = 1.15
"""Times the best so far: the median of several replays."""
_FINALISTS = 8
_SLOW = 1e-4
"""Seconds of a call from which on a call by itself is looked at before a graph is recorded."""
_LAUNCH = 1.5e-4
"""Seconds that the host may add to a call by itself: launching it."""
_REPLAYS, _REPLAY_SECONDS = 7, 4e-3
_ROUNDS, _ROUND_SECONDS = 25, 12e-3
"""Most replays and most seconds of them, of a configuration near the best, and of a finalist."""
_LEAST_REPLAYS, _LEAST_ROUNDS = 2, 5
"""Replays even if they take longer."""
_TOLERANCE = {"float32": 1e-4, "tfloat32": 5e-3, "float16": 5e-3, "bfloat16": 2e-2}
"""Largest error over the largest value of the reference."""


def first_line(error: Exception) -> str:
    """An error in one line of a table."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.160}"


def sample(plans: Sequence[Plan], most: int) -> list[int]:
    """Which plans to time: all, or `most` of them: the first half by rank, the others evenly spaced over the rest."""
    if not most or len(plans) <= most:
        return list(range(len(plans)))
    head = max(FIRST, most // 2)
    rest = max(0, most - head)
    step = (len(plans) - head) / max(1, rest)
    return [*range(head), *(head + int(i * step) for i in range(rest))]


def repeats(seconds: float, most: int, limit: float, least: int) -> int:
    """How often to repeat what takes `seconds`: at most `most` times or `limit` seconds, but at least `least` times."""
    return max(least, min(most, int(limit / max(seconds, 1e-9))))


def finalists(seconds: dict[int, float], own: int | None = None) -> list[int]:
    """Which plans to time again: the first five by rank, the best eight, and the engine's own if it was timed."""
    named = [own] if own is not None and own in seconds else []
    return sorted({*sorted(seconds, key=lambda i: seconds[i])[:_FINALISTS], *sorted(seconds)[:FIRST], *named})


class CallTimer:
    """How a call is timed on the current CUDA device. Use it within `with torch.cuda.stream(timer.stream)`."""

    def __init__(self) -> None:
        import torch

        self.stream = torch.cuda.Stream()
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        # Graphs share their memory, and this one keeps it from being given back between them.
        self._memory = torch.cuda.graph_pool_handle()
        with torch.cuda.stream(self.stream):
            torch.zeros(1, device="cuda")
            self._keeper = self.record([lambda: torch.zeros(1, device="cuda")])

    def record(self, calls: Sequence[Callable[[], Any]]) -> Any:
        """A CUDA graph of the calls, one after the other. `torch.cuda.graph` takes longer: it empties caches first."""
        import torch

        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._memory)
        try:
            for call in calls:
                call()
        finally:
            graph.capture_end()
        return graph

    def once(self, call: Callable[[], Any]) -> float:
        """Seconds of one call by itself, the time to launch it included."""
        begin, end = self._events
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def replays(self, graph: Any, count: int) -> list[float]:
        """Seconds of each of `count` replays; one more, before them, keeps the device busy while the host launches."""
        return self.turns([graph], count)[0]

    def turns(self, graphs: Sequence[Any], rounds: int) -> list[list[float]]:
        """For each graph the seconds of its replays, one in each of `rounds` rounds."""
        import torch

        events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds * len(graphs) + 1)]
        graphs[-1].replay()
        events[0].record()
        for i, event in enumerate(events[1:]):
            graphs[i % len(graphs)].replay()
            event.record()
        events[-1].synchronize()
        spans = [a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:])]
        return [spans[i :: len(graphs)] for i in range(len(graphs))]


class GpuTimer:
    """Times plans on the current CUDA device.

    Args:
        failure: (problem, index of a plan) -> why it did not compile, or None; such plans are not tried.
        bench: how calls are timed; by default on the GPU.
    """

    def __init__(
        self, model: DeviceModel, failure: Callable[[Any, int], str | None] | None = None, bench: Any = None
    ) -> None:
        self.model = model
        self._failure = failure or (lambda problem, index: None)
        self._bench = bench or CallTimer()

    def __call__(self, problem: Any, plans: Sequence[Plan], deadline: float, own: int | None = None) -> dict[str, Any]:
        """{"seconds": {index: seconds}, ...}. own: the index of a plan that is timed again in any case."""
        import torch

        from benchmarks.planner_proof.input_sets import prepare

        where = torch.device("cuda", torch.cuda.current_device())
        with torch.cuda.stream(self._bench.stream):
            inputs = prepare(problem, where, self.model)
            found: dict[int, float] = {}
            failed: list[dict[str, str]] = []
            wrong: list[dict[str, Any]] = []
            error_of, checked = _checker(inputs), set()

            def right(i: int) -> bool:
                """Whether plan i computes what it should: what does not is no candidate, however fast."""
                checked.add(i)
                error = error_of(plans[i])
                if error <= _TOLERANCE[problem.dtype]:  # not if it is NaN
                    return True
                wrong.append({"config": str(plans[i].config), "error": error})
                return False

            for i, p in enumerate(plans):
                if time.monotonic() > deadline:
                    return {"seconds": found, "cut": True}
                reason = self._failure(problem, i)
                if reason is None:
                    try:
                        best = min(found.values(), default=None)
                        seconds = self.glance([partial(inputs.run, p, s) for s in inputs.sets], p.seconds, best)
                        # Before a plan sets the pace for the others its results are compared.
                        if (best is not None and seconds >= best) or right(i):
                            found[i] = seconds
                    except Exception as e:  # noqa: BLE001 - whatever a compiler or launcher raises
                        reason = first_line(e)
                        torch.cuda.synchronize()  # a broken context ends the run here
                if reason is not None:
                    failed.append({"config": str(p.config), "reason": reason})
            while wrong_ones := [i for i in finalists(found, own) if i not in checked and not right(i)]:
                for i in wrong_ones:  # others stand in their place
                    del found[i]
            if not found:
                return {"seconds": found, "failed": failed, "wrong": wrong}
            again = finalists(found, own)
            calls = [[partial(inputs.run, plans[i], s) for s in inputs.sets] for i in again]
            found |= zip(again, self.compare(calls))
            # One replay is too inexact: a plan that was not timed again counts as at most as fast as those that were.
            least = min(found[i] for i in again)
            found = {i: max(t, least) for i, t in found.items()}
            library = None
            if inputs.library is not None:
                inputs.library(inputs.sets[0])  # chooses a kernel, allocates
                library = 1e6 * self.compare([[partial(inputs.library, s) for s in inputs.sets]])[0]
            return {"seconds": found, "failed": failed, "wrong": wrong, "library_us": library}

    def glance(self, calls: Sequence[Callable[[], Any]], expected: float, best: float | None) -> float:
        """Seconds of a call, the more exact the nearer it comes to `best`, the best of the problem so far.

        Args:
            calls: one for each set of inputs. expected: seconds of one, roughly.
        """
        # The first call loads the kernel, which its time includes; if it is slow, the second tells.
        alone = self._bench.once(calls[0])
        if best is not None and max(best, expected) > _SLOW:
            far = FAR * best + _LAUNCH
            if alone > far and (alone := self._bench.once(calls[1])) > far:
                return alone
        graph = self._bench.record(calls)
        times = self._bench.replays(graph, 1)
        if best is None or times[0] < _NEAR * best * len(calls):
            times += self._bench.replays(graph, repeats(times[0], _REPLAYS, _REPLAY_SECONDS, _LEAST_REPLAYS))
        return statistics.median(times) / len(calls)

    def compare(self, candidates: Sequence[Sequence[Callable[[], Any]]]) -> list[float]:
        """Seconds of a call of each candidate: medians of many replays, in turns."""
        graphs = [self._bench.record(calls) for calls in candidates]
        mean = statistics.mean(t[0] for t in self._bench.turns(graphs, 1))
        rounds = repeats(mean, _ROUNDS, _ROUND_SECONDS, _LEAST_ROUNDS)
        times = self._bench.turns(graphs, rounds)
        return [statistics.median(t) / len(calls) for t, calls in zip(times, candidates)]


def _checker(inputs: Any) -> Callable[[Plan], float]:
    """Plan -> by how much its results differ from the float32 reference, relative to its largest value."""
    arguments = inputs.sets[-1]
    expected = inputs.reference(arguments)
    scale = expected.abs().max().item()
    return lambda plan: (inputs.run(plan, arguments).float() - expected).abs().max().item() / scale
