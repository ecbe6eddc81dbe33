"""The search: in which order plans are tried, when one is given up, when the search ends, and which plan wins.

It neither knows kernels nor reads a clock: both are arguments.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanovllm.tune.space import nearest

QUICK, FULL, FINAL = 3, 15, 40
"""Rounds of a measurement: to see whether a plan is worth more, to rank it, and to decide among the first ones."""


class Skipped(Exception):
    """A plan that cannot win whatever its speed; the message is the reason."""


@dataclass(frozen=True)
class Budget:
    """When to stop.

    Attributes:
        seconds: for all; None: no limit. A batch under way is finished: what is compiled is quickly measured.
        patience: plans in a row that are not better than the best, or of which none is right yet; None: no limit.
        most: plans of one search.
        slower: a plan whose quick measurement takes this many times the best's is measured no further.
        margin: a plan wins over the built-in choice only if it is faster by this factor.
        finalists: how many are measured again in the end, alternately, so that clocks affect all alike.
        batch: plans that are prepared (compiled) together.
    """

    seconds: float | None = None
    patience: int | None = None
    most: int = 150
    slower: float = 1.2
    margin: float = 1.02
    finalists: int = 3
    batch: int = 16

    def __post_init__(self) -> None:
        if self.seconds is not None and not self.seconds > 0:
            raise ValueError(f"--limit {self.seconds:g}: expected a positive number of seconds")
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"patience: expected at least 1 candidate, not {self.patience}")
        if self.slower < 1 or self.margin < 1:
            raise ValueError(f"slower, margin: expected factors of at least 1, not {self.slower} and {self.margin}")


@dataclass
class Outcome:
    """What a search found.

    Attributes:
        best: the winner; None: no plan is right.
        default_seconds: of the built-in choice, measured alternately with the best; None: it could not be measured.
        runner_up: the second of the final measurement.
        tried: plans that were timed, `slower` of which only a little.
        skipped: reason -> how many could not be timed or were wrong.
        untried: plans that the end of the search left out; `stopped` is why it ended before them.
    """

    best: Any = None
    seconds: float | None = None
    default_seconds: float | None = None
    runner_up: Any = None
    runner_up_seconds: float | None = None
    tried: int = 0
    slower: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    untried: int = 0
    stopped: str | None = None
    elapsed: float = 0.0


def search(
    plans: Sequence[Any],
    measure: Callable[[Any, int], float],
    verify: Callable[[Any], None],
    *,
    default: Any = None,
    budget: Budget | None = None,
    prepare: Callable[[Sequence[Any]], None] = lambda batch: None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """The fastest plan whose results are right. Each batch has the untried plans nearest to the fastest so far.

    Args:
        measure: (plan, rounds) -> seconds of a call. Raises `Skipped` with a reason such as
            "out of shared memory: ...", of which the part before the colon is counted.
        verify: raises `Skipped` if the plan's results are wrong. It is called before a plan becomes the best, so that a
            wrong plan never sets the pace for the others.
        default: the built-in choice; tried first, and the winner unless another is faster by `budget.margin`.
        prepare: called with each batch of plans before they are measured.
    """
    return _Search(measure, verify, default, budget or Budget(), prepare, clock).run(plans)


class _Search:
    def __init__(self, measure: Any, verify: Any, default: Any, budget: Budget, prepare: Any, clock: Any) -> None:
        self.measure, self.verify, self.default = measure, verify, default
        self.budget, self.prepare, self.clock = budget, prepare, clock
        self.found = Outcome()
        self.quick: dict[Any, float] = {}  # seconds of every right plan that was timed, by the quick measurement
        self.times: dict[Any, float] = {}  # of those that were measured in full
        self.right: set[Any] = set()
        self.pace = self.best = float("inf")
        self.since_best = 0

    def run(self, plans: Sequence[Any]) -> Outcome:
        start, count = self.clock(), 0
        left = [plan for plan in dict.fromkeys(plans) if plan != self.default]
        first = [] if self.default is None else [self.default]
        while (left or first) and not self.found.stopped:
            self.found.stopped = self._over(self.clock() - start, count)
            size = min(self.budget.batch, self.budget.most - count) - len(first)
            batch = [*first, *nearest(left, self.quick, self.default)[: max(0, size)]]
            if self.found.stopped or not batch:
                break
            self.prepare(batch)
            for i, plan in enumerate(batch):
                self.found.stopped = self._over(0.0, count)
                if self.found.stopped:
                    batch = batch[:i]
                    break
                count += 1
                self._try(plan)
            left, first = [plan for plan in left if plan not in set(batch)], []
        self.found.untried = len(left) + len(first)
        self._decide()
        self.found.elapsed = self.clock() - start
        return self.found

    def _over(self, elapsed: float, count: int) -> str | None:
        budget = self.budget
        if budget.seconds is not None and elapsed >= budget.seconds:
            return f"time limit of {budget.seconds:g} s"
        if budget.patience is not None and self.since_best >= budget.patience:
            return f"no improvement in {budget.patience} candidates"
        return f"limit of {budget.most} candidates" if count >= budget.most else None

    def _try(self, plan: Any) -> None:
        self.since_best += 1
        try:
            quick = self.measure(plan, QUICK)
            self.found.tried += 1
            if quick > self.pace * self.budget.slower:
                self.found.slower += 1
                self.quick[plan] = quick
                return
            seconds = self.measure(plan, FULL)
            if seconds < self.best:
                self._check(plan)
                self.best, self.since_best = seconds, 0
                self.pace = min(self.pace, quick)
            self.times[plan], self.quick[plan] = seconds, quick
        except Skipped as e:
            self._skip(e)

    def _check(self, plan: Any) -> None:
        if plan not in self.right:
            self.verify(plan)
            self.right.add(plan)

    def _skip(self, error: Skipped) -> None:
        self.found.skipped[str(error).partition(":")[0]] += 1

    def _decide(self) -> None:
        """Measure the finalists again, alternately, and fill in the winner, the runner-up and the built-in choice."""
        finalists: list[Any] = []
        for plan in sorted(self.times, key=self.times.__getitem__):
            if len(finalists) == self.budget.finalists:
                break
            try:
                self._check(plan)
                finalists.append(plan)
            except Skipped as e:
                self._skip(e)
        if self.default in self.right and self.default not in finalists:
            finalists.append(self.default)
        final: dict[Any, float] = {}
        failed = set()
        for plan in (*finalists, *reversed(finalists)):  # forwards and backwards: a drifting clock favours no plan
            if plan in failed:
                continue
            try:
                final[plan] = min(final.get(plan, float("inf")), self.measure(plan, FINAL))
            except Skipped as e:  # out of memory, say, which other processes have taken since
                self._skip(e)
                failed.add(plan)
                final.pop(plan, None)
        ranking = sorted(final, key=final.__getitem__)
        if self.default in final:
            self.found.default_seconds = final[self.default]
            if final[self.default] <= final[ranking[0]] * self.budget.margin:
                ranking.remove(self.default)
                ranking.insert(0, self.default)
        if ranking:
            self.found.best, self.found.seconds = ranking[0], final[ranking[0]]
        if len(ranking) > 1:
            self.found.runner_up, self.found.runner_up_seconds = ranking[1], final[ranking[1]]
