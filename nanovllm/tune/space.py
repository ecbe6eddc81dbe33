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
    """Every combination of some values that no rule refuses.

    Attributes:
        make: the values as keyword arguments -> a plan, a frozen dataclass.
        values: name -> what to choose from.
        rules: reason -> whether a plan is left out for it. A text that a rule returns is the reason in its place.
    """

    make: Callable[..., Any]
    values: Mapping[str, Sequence[Any]]
    rules: Mapping[str, Callable[[Any], Any]]

    def split(self) -> tuple[list[Any], Counter[str]]:
        """(the plans, reason -> how many others were left out); the first rule that refuses a plan is the reason."""
        plans, left_out = [], Counter[str]()
        for values in itertools.product(*self.values.values()):
            plan = self.make(**dict(zip(self.values, values)))
            found = ((reason, refuses(plan)) for reason, refuses in self.rules.items())
            refused = next(((reason, said) for reason, said in found if said), None)
            if refused is None:
                plans.append(plan)
            else:
                reason, said = refused
                left_out[said if isinstance(said, str) else reason] += 1
        return plans, left_out


@cache
def _shared_fields(a: type, b: type) -> list[str]:
    return [f.name for f in fields(a) if f.name in {g.name for g in fields(b)}]


def distance(a: Any, b: Any) -> float:
    """How far two plans are apart: doublings and halvings of the numbers that both have."""
    pairs = ((getattr(a, name), getattr(b, name)) for name in _shared_fields(a.__class__, b.__class__))
    return sum(float(x != y) if isinstance(x, bool) or not (x and y) else abs(math.log2(x / y)) for x, y in pairs)


def nearest(plans: Iterable[Any], times: Mapping[Any, float], default: Any | None) -> list[Any]:
    """The plans, the most promising first: those near the fastest so far.

    Each class of plans has a fastest of its own, and the classes alternate.

    Args:
        times: seconds of the plans that were tried. default: the centre of a class of which none was tried.
    """
    classes: dict[type, list[Any]] = {}
    for plan in plans:
        classes.setdefault(type(plan), []).append(plan)
    if default is not None and type(default) in classes:
        classes = {type(default): classes[type(default)], **classes}
    for kind, of_kind in classes.items():
        tried = [plan for plan in times if type(plan) is kind]
        centre = min(tried, key=times.__getitem__) if tried else default
        if centre is not None:
            of_kind.sort(key=lambda plan: distance(plan, centre))  # noqa: B023 - called within the same round
    return [plan for group in itertools.zip_longest(*classes.values()) for plan in group if plan is not None]


def powers(low: int, high: int) -> tuple[int, ...]:
    """The powers of two from low to high, both powers themselves."""
    return tuple(itertools.takewhile(lambda n: n <= high, (low << i for i in range(64))))
