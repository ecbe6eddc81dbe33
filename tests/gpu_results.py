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

    def summary(self, slowest: int = 20, files: int = 12) -> list[str]:
        """Lines: the slowest files and tests, then the first line of reasons of skips and of failures, what did not
        end, counts.
        """
        lines = ["slowest files:"]
        for name, (seconds, number) in list(self.files().items())[:files]:
            lines.append(f"  {seconds:6.0f} s  {number:4} tests  {name}")
        lines.append(f"slowest {slowest}:")
        for name, test in sorted(self.tests.items(), key=lambda item: -item[1].seconds)[:slowest]:
            lines.append(f"  {test.seconds:6.1f} s  {name}")
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
