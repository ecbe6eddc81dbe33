"""What may be tried: named parameters with their values, and constraints, each of which says why it rules a combination out."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

Values = Mapping[str, Any]
C = TypeVar("C")


@dataclass(frozen=True)
class Parameter:
    """A named choice.

    Attributes:
        values: to choose from.
        when: whether there is a choice at all, given the parameters before this one; if not, `otherwise` is taken.
    """

    name: str
    values: tuple[Any, ...]
    when: Callable[[Values], bool] | None = None
    otherwise: Any = None

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError(f"{self.name}: expected values to choose from, got none")
        if len(set(self.values)) < len(self.values):
            raise ValueError(f"{self.name}: expected distinct values, not {self.values}")

    def choices(self, chosen: Values) -> tuple[Any, ...]:
        return self.values if self.when is None or self.when(chosen) else (self.otherwise,)


@dataclass(frozen=True)
class Constraint:
    """A reason to leave combinations out.

    Attributes:
        reason: what is wrong with them, for the report.
        refuses: the combination -> whether it is left out. A text also says why, in place of `reason`.
    """

    reason: str
    refuses: Callable[[Values], bool | str | None]

    def __call__(self, values: Values) -> str | None:
        refused = self.refuses(values)
        return refused if isinstance(refused, str) else self.reason if refused else None


@dataclass
class Pruned:
    """What was left out: how many for each reason, and one of them."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, Any] = field(default_factory=dict)

    def add(self, reason: str, example: Any) -> None:
        self.counts[reason] += 1
        self.examples.setdefault(reason, example)

    def merge(self, other: Pruned) -> None:
        self.counts.update(other.counts)
        self.examples = {**other.examples, **self.examples}

    @property
    def total(self) -> int:
        return sum(self.counts.values())


@dataclass(frozen=True)
class TuningSpace(Generic[C]):
    """All combinations of some parameters that no constraint refuses.

    Attributes:
        make: the parameters as keyword arguments -> a configuration.
        parameters: a later one may depend on earlier ones (`Parameter.when`).

    Raises:
        ValueError: two parameters of one name.
    """

    make: Callable[..., C]
    parameters: Sequence[Parameter]
    constraints: Sequence[Constraint] = ()

    def __post_init__(self) -> None:
        names = [p.name for p in self.parameters]
        twice = [n for n, times in Counter(names).items() if times > 1]
        if twice:
            raise ValueError(f"parameters: expected distinct names, not {twice[0]!r} twice")

    def combinations(self) -> Iterator[dict[str, Any]]:
        """Every combination, those that a constraint refuses included, each once, always in the same order."""

        def extend(chosen: dict[str, Any], left: Sequence[Parameter]) -> Iterator[dict[str, Any]]:
            if not left:
                yield chosen
                return
            for value in left[0].choices(chosen):
                yield from extend({**chosen, left[0].name: value}, left[1:])

        yield from extend({}, self.parameters)

    def refusal(self, values: Values) -> str | None:
        """Why a combination is left out, by the first constraint that refuses it; None: it is not."""
        return next((reason for c in self.constraints if (reason := c(values))), None)

    def split(self) -> tuple[list[C], Pruned]:
        """(the configurations, what was left out and why)."""
        kept, pruned = [], Pruned()
        for values in self.combinations():
            reason = self.refusal(values)
            if reason:
                pruned.add(reason, values)
            else:
                kept.append(self.make(**values))
        return kept, pruned


def powers(low: int, high: int) -> tuple[int, ...]:
    """The powers of two from low to high, both powers themselves."""
    return tuple(itertools.takewhile(lambda n: n <= high, (low << i for i in range(64))))


def prune(candidates: Iterable[C], refuse: Callable[[C], str | None]) -> tuple[list[C], Pruned]:
    """Split candidates by a further reason to leave them out."""
    kept, pruned = [], Pruned()
    for candidate in candidates:
        reason = refuse(candidate)
        if reason:
            pruned.add(reason, candidate)
        else:
            kept.append(candidate)
    return kept, pruned
