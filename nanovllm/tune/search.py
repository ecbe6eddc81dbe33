"""The search: in which order plans are tried, when one is given up, when the search ends, and which plan wins.

Kernels and the clock are arguments.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanovllm.tune.space import nearest
from nanovllm.wording import counted

QUICK, FULL, FINAL = 3, 15, 40
"""Rounds of a measurement: whether a plan is worth more, how it ranks, and which of the first plans wins."""


class Skipped(Exception):
    """A plan that cannot win at any speed; the message is the reason."""


@dataclass(frozen=True)
class Budget:
    """When to stop.

    Attributes:
        seconds: for all; None: no limit. A batch that has begun is finished: compiled plans are quickly measured.
        patience: plans in a row that were not the fastest right plan; None: no limit.
        most: plans of one search.
        slower: a plan whose quick measurement takes this many times the best's is measured no further.
        margin: a plan wins over the built-in choice only if it is faster by this factor.
        finalists: how many plans are measured again at the end, alternately, so that clocks affect all alike.
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
            raise ValueError(f"--patience {self.patience}: expected at least 1 candidate")
        if self.slower < 1 or self.margin < 1:
            raise ValueError(f"slower, margin: expected factors of at least 1, not {self.slower} and {self.margin}")


@dataclass
class Outcome:
    """What a search found.

    Attributes:
        ranking: the seconds of the final measurement, the winner first; empty: no plan is right.
        tried: plans that were timed, `slower` of which only a little.
        skipped: reason -> how many plans could not be timed or were wrong.
        untried: plans that the end of the search left out; `stopped` is why it ended before them.
    """

    ranking: dict[Any, float] = field(default_factory=dict)
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
        verify: raises `Skipped` if the plan's results are wrong. It is called before a plan may lead, so that no other
            plan is given up because of a wrong one.
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
        self.best_quick = self.best = math.inf
        self.since_best = 0

    def run(self, plans: Sequence[Any]) -> Outcome:
        start, found, budget, count = self.clock(), self.found, self.budget, 0
        left = list(dict.fromkeys([*([] if self.default is None else [self.default]), *plans]))
        while left and not found.stopped:
            batch = nearest(left, self.quick, self.default)[: min(budget.batch, budget.most - count)]
            if budget.seconds is not None and self.clock() - start >= budget.seconds:
                found.stopped = f"time limit of {budget.seconds:g} s"
            elif not batch:
                found.stopped = f"limit of {counted(budget.most, 'candidate')}"
            else:
                self.prepare(batch)
            for plan in batch if not found.stopped else ():
                if budget.patience is not None and self.since_best >= budget.patience:
                    found.stopped = f"no improvement in {counted(budget.patience, 'candidate')}"
                    break
                count += 1
                left.remove(plan)
                self._try(plan)
        found.untried = len(left)
        self._decide()
        found.elapsed = self.clock() - start
        return found

    def _try(self, plan: Any) -> None:
        self.since_best += 1
        try:
            quick = self.measure(plan, QUICK)
            self.found.tried += 1
            if quick > self.best_quick * self.budget.slower:
                self.found.slower += 1
                self.quick[plan] = quick
                return
            seconds = self.measure(plan, FULL)
        except Skipped as e:
            return self._skip(e)
        if seconds < self.best:
            if not self._is_right(plan):
                return
            self.best, self.since_best = seconds, 0
            self.best_quick = min(self.best_quick, quick)
        self.times[plan], self.quick[plan] = seconds, quick

    def _is_right(self, plan: Any) -> bool:
        if plan not in self.right:
            try:
                self.verify(plan)
            except Skipped as e:
                self._skip(e)
                return False
            self.right.add(plan)
        return True

    def _skip(self, error: Skipped) -> None:
        self.found.skipped[str(error).partition(":")[0]] += 1

    def _decide(self) -> None:
        """Measure the fastest right plans and the built-in one again, alternately, and rank them."""
        finalists: list[Any] = []
        for plan in sorted(self.times, key=self.times.__getitem__):
            if len(finalists) < self.budget.finalists and self._is_right(plan):
                finalists.append(plan)
        if self.default in self.right and self.default not in finalists:
            finalists.append(self.default)
        final = dict.fromkeys(finalists, math.inf)
        for plan in (*finalists, *reversed(finalists)):  # forwards and backwards: a drifting clock favours no plan
            if plan in final:
                try:
                    final[plan] = min(final[plan], self.measure(plan, FINAL))
                except Skipped as e:  # such as out of memory, which another process has taken since
                    self._skip(e)
                    del final[plan]
        fastest = min(final.values(), default=0.0)

        def rank(plan: Any) -> float:
            kept = plan == self.default and final[plan] <= fastest * self.budget.margin
            return 0.0 if kept else final[plan]

        self.found.ranking = {plan: final[plan] for plan in sorted(final, key=rank)}
