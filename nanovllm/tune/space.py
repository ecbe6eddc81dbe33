"""What may be tried: named values, and rules that leave plans out, each with its reason."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any


@dataclass(frozen=True)
class Space:
    """Every combination of some values that no rule leaves out.

    Attributes:
        make: the values as keyword arguments -> a plan, which is a frozen dataclass.
        values: name -> what to choose from.
        rules: reason -> whether a plan is left out for it. The first such rule counts.
        refuse: the kernel's own rule: None, or why it cannot launch a plan.
    """

    make: Callable[..., Any]
    values: Mapping[str, Sequence[Any]]
    rules: Mapping[str, Callable[[Any], Any]]
    refuse: Callable[[Any], str | None] = lambda plan: None

    def left_out(self, plan: Any) -> str | None:
        """Why a plan is not tried; None: it is."""
        if reason := self.refuse(plan):
            return f"the kernel: {reason}"
        return next((reason for reason, applies in self.rules.items() if applies(plan)), None)


@dataclass(frozen=True)
class Candidates:
    """The plans of some spaces.

    Attributes:
        plans: what may be tried, the plans near the built-in one first.
        left_out: reason -> how many other combinations are left out for it.
    """

    plans: list[Any]
    left_out: Counter[str]

    @property
    def total(self) -> int:
        """Combinations of all values."""
        return len(self.plans) + self.left_out.total()


def candidates_of(spaces: Iterable[Space], builtin: Any) -> Candidates:
    """All combinations of the values of some spaces, split by the rules."""
    plans, left_out = [], Counter[str]()
    for space in spaces:
        for values in itertools.product(*space.values.values()):
            plan = space.make(**dict(zip(space.values, values)))
            if reason := space.left_out(plan):
                left_out[reason] += 1
            else:
                plans.append(plan)
    return Candidates(nearest(plans, {}, builtin), left_out)


@cache
def _shared_fields(a: type, b: type) -> list[str]:
    return [f.name for f in fields(a) if f.name in {g.name for g in fields(b)}]


def distance(a: Any, b: Any) -> float:
    """How far two plans are apart: doublings and halvings of the numbers that both have."""
    pairs = ((getattr(a, name), getattr(b, name)) for name in _shared_fields(a.__class__, b.__class__))
    return sum(float(x != y) if isinstance(x, bool) or not (x and y) else abs(math.log2(x / y)) for x, y in pairs)


def nearest(plans: Iterable[Any], times: Mapping[Any, float], default: Any | None) -> list[Any]:
    """The plans in the order in which to try them: those near the fastest so far first.

    Each class of plans has a fastest of its own, and the classes alternate, beginning with the default's.

    Args:
        times: seconds of the plans that were tried.
        default: what stands for the fastest of a class of which none was tried.
    """
    classes: dict[type, list[Any]] = {type(default): []}
    for plan in plans:
        classes.setdefault(type(plan), []).append(plan)
    for kind, of_kind in classes.items():
        centre = min((plan for plan in times if type(plan) is kind), key=times.__getitem__, default=default)
        if centre is not None:
            of_kind.sort(key=lambda plan: distance(plan, centre))  # noqa: B023 - called within the same round
    return [plan for group in itertools.zip_longest(*classes.values()) for plan in group if plan is not None]


def powers(low: int, high: int) -> tuple[int, ...]:
    """The powers of two from low to high, both powers themselves."""
    return tuple(itertools.takewhile(lambda n: n <= high, (low << i for i in range(64))))
