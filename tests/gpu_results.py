"""What the processes of `make test-gpu` reported: how each test ended, and a summary."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Result:
    """What is known of one test: when it began, seconds with its fixtures, and the outcome, None while it runs."""

    began: float = 0.0
    seconds: float = 0.0
    outcome: str | None = None
    said: str = ""
    compiled: list[tuple[str, str, float]] = field(default_factory=list)
    """Triton's kernels: name, key in Triton's cache, seconds."""
    gib: float = 0.0
    """The most memory of a GPU that PyTorch held in the test's process, from the end of the test before to its end."""


@dataclass
class Results:
    """All tests of a run, by name."""

    tests: dict[str, Result] = field(default_factory=dict)
    collected: set[str] | None = None  # None: no process has come so far

    @classmethod
    def read(cls, paths: Iterable[Path]) -> Results:
        """From the reports of the processes; what an end wrote in part is left out."""
        results = cls()
        for line in (line for path in paths if path.exists() for line in path.read_text().splitlines()):
            try:
                results.add(json.loads(line))
            except json.JSONDecodeError:
                continue
        return results

    def add(self, told: dict[str, Any]) -> None:
        if told["kind"] == "collected":
            self.collected = (self.collected or set()) | set(told["tests"])
            return
        test = self.tests.setdefault(told["test"], Result(told["at"]))
        test.seconds = told["at"] - test.began
        if told["kind"] == "start":
            return
        test.compiled += told.get("compiled", [])
        test.gib = told.get("gib", test.gib)
        if told["outcome"] != "passed":
            if test.outcome != "failed":
                test.outcome, test.said = told["outcome"], told["said"]
        elif told["when"] == "teardown" and test.outcome is None:
            test.outcome = "passed"

    @property
    def not_begun(self) -> int:
        """Collected tests that no process has come to."""
        return len((self.collected or set()) - set(self.tests))

    def named(self, outcome: str | None) -> dict[str, Result]:
        return {name: test for name, test in self.tests.items() if test.outcome == outcome}

    def files(self) -> dict[str, tuple[float, int]]:
        """(seconds of a file's tests, their number) by the file's name, most seconds first."""
        seconds: dict[str, list[float]] = defaultdict(list)
        for name, test in self.tests.items():
            seconds[name.split("::")[0]].append(test.seconds)
        totals = {name: (sum(each), len(each)) for name, each in seconds.items()}
        return dict(sorted(totals.items(), key=lambda item: -item[1][0]))

    def kernels(self, most: int = 8) -> list[str]:
        """Lines: what Triton compiled, and the kernels that took the longest, each with all that it is compiled for."""
        seconds: Counter[str] = Counter()
        numbers: Counter[str] = Counter()
        known, again = set(), 0.0
        for name, key, took in (each for test in self.tests.values() for each in test.compiled):
            seconds[name] += took
            numbers[name] += 1
            again += took if key in known else 0.0
            known.add(key)
        if not known:
            return []
        title = f"compiled by Triton: {len(known):,} kernels in {sum(seconds.values()):,.0f} s of all processes"
        lines = [f"{title}, {again:,.0f} s of them for what another compiled as well:"]
        return lines + [f"  {took:6.0f} s  {numbers[name]:4} x {name}" for name, took in seconds.most_common(most)]

    def summary(self, slowest: int = 20, files: int = 12, largest: int = 8) -> list[str]:
        """Lines: what was compiled, the slowest files and tests, the tests that held the most memory, then the first
        line of reasons of skips and of failures, what did not end, counts.
        """
        lines = [*self.kernels(), "slowest files:"]
        for name, (seconds, number) in list(self.files().items())[:files]:
            lines.append(f"  {seconds:6.0f} s  {number:4} tests  {name}")
        lines.append(f"slowest {slowest}:")
        for name, test in sorted(self.tests.items(), key=lambda item: -item[1].seconds)[:slowest]:
            lines.append(f"  {test.seconds:6.1f} s  {name}")
        held = sorted(((test.gib, name) for name, test in self.tests.items() if test.gib), reverse=True)[:largest]
        lines += [f"most memory, {largest}:", *(f"  {gib:6.1f} GiB  {name}" for gib, name in held)] if held else []
        skipped = Counter(_first_line(test.said).removeprefix("Skipped: ") for test in self.named("skipped").values())
        lines += ["skipped:", *(f"  {n:4}  {why}" for why, n in skipped.most_common())] if skipped else []
        for title, outcome in (("failed:", "failed"), ("did not end:", None)):
            found = self.named(outcome)
            lines += [title] if found else []
            for name, test in found.items():
                lines += [f"  {name}", *([f"      {_first_line(test.said)}"] if test.said else [])]
        words = {"passed": "passed", "skipped": "skipped", "failed": "failed", None: "did not end"}
        counts = [f"{len(self.named(outcome)):,} {word}" for outcome, word in words.items()]
        return [*lines, ", ".join([*counts, f"{self.not_begun:,} not begun"])]


def _first_line(said: str) -> str:
    return said.partition("\n")[0]
