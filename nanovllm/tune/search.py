"""The search itself: in which order candidates are tried, when one is given up, when all is, and who wins.

It neither knows kernels nor reads a clock: both are handed in. So it is tested with a timer that says what it is told to.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

C = TypeVar("C")

STRATEGIES = ("exhaustive", "random")
QUICK, FULL, FINAL = 3, 15, 40
"""Rounds of a measurement: to see whether a candidate is worth more, to rank it, and to decide among the first ones."""


class Skipped(Exception):
    """A candidate that cannot win whatever its speed; the message is the reason."""


@dataclass(frozen=True)
class Budget:
    """When to stop.

    Attributes:
        seconds: for the whole search; None: no limit. A batch under way is finished: what is compiled is quickly measured.
        patience: candidates in a row that are not better than the best, or of which none is right yet; None: no limit.
        slower: a candidate whose quick measurement takes this many times the best's is measured no further.
        margin: a winner that is not faster than the built-in choice by this factor makes room for it.
        finalists: how many are measured again in the end, in turn, so that all see the same clocks.
        batch: candidates that are prepared (compiled) together.
    """

    seconds: float | None = None
    patience: int | None = None
    slower: float = 1.2
    margin: float = 1.02
    finalists: int = 3
    batch: int = 16

    def __post_init__(self) -> None:
        if self.seconds is not None and self.seconds <= 0:
            raise ValueError(f"limit: expected a positive number of seconds, not {self.seconds}")
        if self.patience is not None and self.patience < 1:
            raise ValueError(f"patience: expected at least 1 candidate, not {self.patience}")
        if self.slower < 1 or self.margin < 1:
            raise ValueError(f"slower, margin: expected factors of at least 1, not {self.slower} and {self.margin}")


@dataclass
class Outcome(Generic[C]):
    """What a search found.

    Attributes:
        best: the winner; None: no candidate is right.
        default: the built-in choice, measured beside the others; its seconds are None if it could not be measured.
        runner_up: the second of the final measurement.
        tried: candidates that were timed, `slower` of which only a little.
        skipped: reason -> how many could not be timed or were wrong.
        examples: reason -> one of them and its full message.
        untried: candidates that the end of the search left out; `stopped` is why it ended before them.
    """

    best: C | None = None
    seconds: float | None = None
    default: C | None = None
    default_seconds: float | None = None
    runner_up: C | None = None
    runner_up_seconds: float | None = None
    tried: int = 0
    slower: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, Any] = field(default_factory=dict)
    untried: int = 0
    stopped: str | None = None
    elapsed: float = 0.0


def ordered(candidates: Sequence[C], strategy: str, seed: int) -> list[C]:
    """The order of trials: as given (the most promising first), or shuffled, the same for the same seed.

    Raises:
        ValueError: an unknown strategy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"search: expected one of {', '.join(STRATEGIES)}, not {strategy!r}")
    order = list(candidates)
    if strategy == "random":
        random.Random(seed).shuffle(order)
    return order


def trials(candidates: Sequence[C], default: C | None, strategy: str, seed: int) -> list[C]:
    """All that a search tries, in its order: the built-in choice first, so that no limit leaves it out."""
    rest = ordered([c for c in dict.fromkeys(candidates) if c != default], strategy, seed)
    return ([default] if default is not None else []) + rest


def search(
    candidates: Sequence[C],
    measure: Callable[[C, int], float],
    verify: Callable[[C], None],
    *,
    default: C | None = None,
    strategy: str = "exhaustive",
    seed: int = 0,
    budget: Budget | None = None,
    prepare: Callable[[Sequence[C]], None] = lambda batch: None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome[C]:
    """The fastest candidate whose results are right.

    Args:
        candidates: hashable, the most promising first.
        measure: (candidate, rounds) -> seconds of a call. Raises `Skipped` with a reason such as "out of shared memory: ...",
            of which the part before the colon is counted.
        verify: raises `Skipped` if the candidate's results are wrong. Called once for each that would become the best, before
            it does, so that nothing wrong sets the pace for the others.
        default: the built-in choice; tried first, and the winner unless another is faster by `budget.margin`.
        prepare: called with the next few candidates before they are measured.
    """
    budget = budget or Budget()
    order = trials(candidates, default, strategy, seed)
    outcome: Outcome[C] = Outcome(default=default)
    start, times, right, quickest, since_best = clock(), {}, set(), float("inf"), 0
    best = float("inf")

    def skip(candidate: C, reason: str) -> None:
        kind = reason.partition(":")[0]
        outcome.skipped[kind] += 1
        outcome.examples.setdefault(kind, {"config": candidate, "message": reason})

    for i, candidate in enumerate(order):
        elapsed = clock() - start if i % budget.batch == 0 else 0.0
        outcome.stopped = _stop(budget, elapsed, since_best)
        if outcome.stopped:
            outcome.untried = len(order) - i
            break
        if i % budget.batch == 0:
            prepare(order[i : i + budget.batch])
        since_best += 1
        try:
            quick = measure(candidate, QUICK)
            outcome.tried += 1
            if quick > quickest * budget.slower:
                outcome.slower += 1
                continue
            seconds = measure(candidate, FULL)
            if seconds < best:
                verify(candidate)
                right.add(candidate)
                best, since_best = seconds, 0
                quickest = min(quickest, quick)
            times[candidate] = seconds
        except Skipped as e:
            skip(candidate, str(e))

    # Candidates that never led were not verified yet.
    finalists: list[C] = []
    for candidate in sorted(times, key=times.__getitem__):
        if len(finalists) >= budget.finalists:
            break
        try:
            if candidate not in right:
                verify(candidate)
            finalists.append(candidate)
        except Skipped as e:
            skip(candidate, str(e))
    if default in right and default not in finalists:
        finalists.append(default)
    _decide(outcome, finalists, measure, budget, skip)
    outcome.elapsed = clock() - start
    return outcome


def _stop(budget: Budget, elapsed: float, since_best: int) -> str | None:
    if budget.seconds is not None and elapsed >= budget.seconds:
        return f"time limit of {budget.seconds:g} s"
    if budget.patience is not None and since_best >= budget.patience:
        return f"no improvement in {budget.patience} candidates"
    return None


def _decide(
    outcome: Outcome[C], finalists: Sequence[C], measure: Callable[[C, int], float], budget: Budget, skip: Callable[[C, str], None]
) -> None:  # fmt: skip
    """Measure the finalists again, in turn, and fill in the winner, the runner-up and the default."""
    final: dict[C, float] = {}
    failed: set[C] = set()
    # Twice, forwards and backwards: a clock that drifts favours nobody.
    for candidate in (*finalists, *reversed(finalists)):
        if candidate in failed:
            continue
        try:
            final[candidate] = min(final.get(candidate, float("inf")), measure(candidate, FINAL))
        except Skipped as e:  # out of memory, say, which others have taken since
            skip(candidate, str(e))
            failed.add(candidate)
            final.pop(candidate, None)
    ranking = sorted(final, key=final.__getitem__)
    default = outcome.default
    if default in final:
        outcome.default_seconds = final[default]
        if final[default] <= final[ranking[0]] * budget.margin:
            ranking.remove(default)
            ranking.insert(0, default)
    if ranking:
        outcome.best, outcome.seconds = ranking[0], final[ranking[0]]
    if len(ranking) > 1:
        outcome.runner_up, outcome.runner_up_seconds = ranking[1], final[ranking[1]]
