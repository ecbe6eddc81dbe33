"""Plan, time and judge every problem, until the time is over.

A problem is timed when its kernels are compiled, which other processes do meanwhile. One problem that fails does not
cost the others; a broken CUDA context ends the run, and what was measured before it is kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.planner_proof.builtin_choice import with_builtin
from benchmarks.planner_proof.compile_queue import CompileQueue
from benchmarks.planner_proof.gpu_timer import first_line, sample
from benchmarks.planner_proof.judging import in_words, judge, summary
from benchmarks.planner_proof.problems import plan
from nanovllm.hardware.gpu_presets import DeviceModel
from nanovllm.plan.resources import Plan

Timer = Callable[[Any, Sequence[Plan], float, "int | None"], dict[str, Any]]


@dataclass(frozen=True)
class Planned:
    """A problem with its plans.

    Attributes:
        plans: what the planner keeps, the best by prediction first, then the engine's own choice if the planner lacks
            it.
        chosen: indices of the plans that are timed.
        num_kept: how many of the plans the planner keeps.
        builtin: index of the engine's own choice, if it has a kernel for the problem.
    """

    kind: str
    problem: Any
    plans: Sequence[Plan]
    chosen: Sequence[int]
    num_kept: int
    builtin: int | None

    @property
    def words(self) -> dict[str, Any]:
        return in_words(self.kind, self.problem)


@dataclass
class Proof:
    """What was found so far.

    Attributes:
        timer: (problem, plans, deadline, index of the engine's own plan) -> {"seconds": {index: seconds}, ...}; what
            else it returns goes into the document.
        turns: (kind, problem), in the order of the document.
        times: of each problem the microseconds of every configuration, to which the model can be fitted.
    """

    timer: Timer
    turns: Sequence[tuple[str, Any]]
    times: list[dict[str, Any]] = field(default_factory=list)
    shapes: list[dict[str, Any]] = field(default_factory=list)
    errors: list[dict[str, Any]] = field(default_factory=list)
    stopped: str | None = None

    def document(self) -> dict[str, Any]:
        """What was measured, and what was not, in the form of the JSON file."""
        order = [in_words(*turn) for turn in self.turns]
        shapes = sorted(self.shapes, key=lambda s: order.index(s["problem"]))
        have = [s["problem"] for s in shapes]
        return {
            "shapes": shapes, "not_measured": [w for w in order if w not in have], "summary": summary(shapes),
            "stopped": self.stopped, "errors": self.errors,
        }  # fmt: skip

    def fail(self, words: dict[str, Any], error: Exception) -> None:
        self.errors.append({"problem": words, "reason": first_line(error)})

    def measure(self, p: Planned, deadline: float) -> None:
        """Time one problem and judge its plans."""
        began = time.monotonic()
        own = None if p.builtin is None else p.chosen.index(p.builtin)
        try:
            result = self.timer(p.problem, [p.plans[i] for i in p.chosen], deadline, own)
        except RuntimeError as e:
            if type(e).__name__ == "OutOfMemoryError":
                self.fail(p.words, e)
            else:
                self.stopped = f"{p.words}: {first_line(e)}"
            return
        seconds = {p.chosen[i]: s for i, s in result.pop("seconds").items()}
        if result.pop("cut", False) or not any(i < p.num_kept for i in seconds):
            return
        us = {str(p.plans[i].config): round(1e6 * s, 2) for i, s in seconds.items()}
        self.times.append({"problem": p.words, "us": us})
        took = round(time.monotonic() - began, 3)
        counts = {"candidates": p.num_kept, "timed": len(seconds), "took_s": took}
        judged = judge(p.plans, seconds, p.builtin, p.num_kept)
        self.shapes.append({"kind": p.kind, "problem": p.words, **counts, **judged, **result})


def prove(
    model: DeviceModel,
    problems: Mapping[str, Sequence[Any]],
    timer: Timer,
    limit: float,
    most: int = 0,
    queue: CompileQueue | None = None,
    keep: Callable[[Proof], None] | None = None,
    keep_seconds: float = 5.0,
) -> Proof:
    """Plan and time every problem until `limit` seconds have passed; what was not reached is named.

    Args:
        most: time at most this many configurations of a problem; 0: all.
        queue: compiles the plans; a problem is timed once they are compiled.
        keep: called with what there is so far, at most every `keep_seconds`.
    """
    deadline = time.monotonic() + limit
    # Kinds alternate, so that a short run has some of each.
    turns = [(kind, p) for kind, ps in problems.items() for p in ps]
    turns.sort(key=lambda t: problems[t[0]].index(t[1]) / len(problems[t[0]]))
    proof = Proof(timer, turns)
    left = _planned(proof, model, most, queue, deadline)
    kept = time.monotonic()
    while left and not proof.stopped and time.monotonic() <= deadline:
        # The first problem whose kernels are compiled; else the first.
        p = next((p for p in left if queue is None or queue.ready(p.problem)), left[0])
        left.remove(p)
        if queue is not None and not queue.wait(p.problem, deadline):
            break
        proof.measure(p, deadline)
        if keep is not None and time.monotonic() > kept + keep_seconds:
            keep(proof)
            kept = time.monotonic()
    return proof


def _planned(proof: Proof, model: DeviceModel, most: int, queue: CompileQueue | None, deadline: float) -> list[Planned]:
    """The problems with their plans, all of which the queue is asked to compile."""
    found = []
    for kind, problem in proof.turns:
        if time.monotonic() > deadline:
            break
        try:
            kept = plan(problem, model)
            plans, own = with_builtin(kept, problem, model)
            chosen = sorted({*sample(kept, most), *([] if own is None else [own])})
            if queue is not None:
                queue.ask(problem, [plans[i] for i in chosen], model)
        except Exception as e:  # noqa: BLE001 - one problem must not cost the others
            proof.fail(in_words(kind, problem), e)
            continue
        found.append(Planned(kind, problem, plans, chosen, len(kept), own))
    return found
