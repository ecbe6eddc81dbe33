"""`nanovllm kernels verify`: every provider's results against the reference."""

from __future__ import annotations

import math
import os
import re
import secrets
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm.cli import kernels_common as common
from nanovllm.console import WIDTH, Column, StatusLine, TablePrinter, import_torch
from nanovllm.json_output import STDOUT, write_json
from nanovllm.wording import counted

if TYPE_CHECKING:
    from nanovllm.kernels import Op
    from nanovllm.kernels.testing.verify import Case, Verdict
    from nanovllm.kernels.testing.verify_jobs import Pair, Setting

_MOST_SHOWN = 5
"""Failures of a provider."""


def verify(
    op: common.OpName = None,
    provider: common.Providers = None,
    kernel_plugin: common.Plugins = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the random inputs; by default a random one, which is printed.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only small shapes, once in each dtype: for compute-sanitizer.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the cases.")] = 1,
    timeout: Annotated[
        float,
        typer.Option(min=0, help="Seconds that a case may take. 0: no limit, and in this process, for debuggers."),
    ] = 120,
    device: common.Device = "auto",
    json_file: common.Json = None,
    shape: Annotated[list[str] | None, typer.Option("--shape", hidden=True)] = None,
) -> None:
    """Compare every provider with the reference in float64, on every kind of input.

    Cases run in a process of their own: a kernel that crashes or hangs is a row of the table. Fails if a provider is
    wrong, or if none can run.

    Without a GPU, Triton kernels run in Triton's interpreter, on small shapes.
    """
    if shape:
        raise ValueError(f"--shape {shape[0]}: verify runs all shapes of the op; --quick takes fewer")
    with _interpreter(device) as interpreted:
        _verify(op, provider, kernel_plugin, seed, quick, jobs, timeout, device, json_file, interpreted)


def _verify(
    op: str | None, provider: list[str] | None, plugins: list[str] | None, seed: int | None, quick: bool, jobs: int,
    timeout: float, device: str, json_file: str | None, interpreted: bool,
) -> None:  # fmt: skip
    """interpreted: say that Triton kernels run in the interpreter, if any do."""
    where, ops, origins = common.prepare(device, plugins)
    from nanovllm.kernels.testing.compile_check import may_launch_triton
    from nanovllm.kernels.testing.verify_jobs import Setting

    rows: list[dict[str, Any]] = []
    for declared in common.with_provider(common.matching(ops, op), provider, origins):
        if declared.inputs is None:
            rows.append({"op": declared.name, "provider": "", "reason": "declares no inputs"})
            continue
        for name, candidate in declared.providers.items():
            if not provider or name in provider:
                rows.append({"op": declared.name, "provider": name, "reason": candidate.support(where)})
    pairs = [(r["op"], r["provider"]) for r in rows if r["reason"] is None]
    if not pairs:
        raise common.nothing_done("verified", (f"{r['provider'] or r['op']}: {r['reason']}" for r in rows))
    if interpreted and any(may_launch_triton(ops[name].providers[chosen]) for name, chosen in pairs):
        print("No CUDA device: Triton kernels run in Triton's interpreter, on small shapes.", file=sys.stderr)
    if seed is None:
        seed = secrets.randbelow(1 << 31)
        print(f"--seed {seed} repeats these inputs", file=sys.stderr)
    setting = Setting(str(where), tuple(plugins or ()), seed, quick, jobs, timeout)
    title = f"{common.short_device_name(where)}: error = largest error / tolerance"
    table = None if json_file == STDOUT else _VerifyTable(title)
    stopped = _fill(rows, pairs, setting, ops, table)
    write_json(json_file, rows)
    if stopped:
        raise typer.Exit(130)
    if any(row.get("failures") for row in rows):
        raise typer.Exit(1)


def _fill(
    rows: list[dict[str, Any]], pairs: list[Pair], setting: Setting, ops: dict[str, Op], table: _VerifyTable | None
) -> bool:
    """Verify, and add what was found to the rows and to the table. Whether Ctrl-C came first."""
    by_pair = {(row["op"], row["provider"]): row for row in rows}
    status, done = StatusLine(), 0

    def began(pair: Pair, case: Case) -> None:
        text = f"{pair[0]}, {pair[1]}: {case} (done: {done} of {counted(len(pairs), 'provider')}) ..."
        status.show(text, timed=True)

    stopped = False
    if setting.limit:
        status.show("starting a process for the cases ...", timed=True)
    try:
        for pair, verdicts in _verdicts(pairs, setting, ops, began):
            by_pair[pair] |= _summary(verdicts, setting.seed)
            done += 1
            status.clear()
            if table is not None:
                table.add(by_pair[pair])
    except KeyboardInterrupt:
        stopped = True
    status.clear()
    if table is not None:
        for row in rows:
            if row["reason"] is not None:
                table.add(row)
        table.end()
    if stopped:
        print(f"stopped early: verified {done} of {counted(len(pairs), 'provider')}", file=sys.stderr)
    return stopped


def _verdicts(
    pairs: list[Pair], setting: Setting, ops: dict[str, Op], began: Any
) -> Iterator[tuple[Pair, list[Verdict]]]:
    """The verdicts of each op and provider, in the order of the op's cases."""
    import torch

    from nanovllm.kernels.testing.verify import verify_case
    from nanovllm.kernels.testing.verify_jobs import verify_in_processes

    if setting.limit:
        named = {op: ops[op] for op, _ in pairs}
        yield from verify_in_processes(list(named.values()), pairs, setting, began)
        return
    for pair in pairs:
        declared, verdicts = ops[pair[0]], []
        for case in setting.cases(declared):
            began(pair, case)
            verdicts.append(verify_case(declared, declared.providers[pair[1]], torch.device(setting.device), case))
        yield pair, verdicts


def _summary(verdicts: list[Verdict], seed: int) -> dict[str, Any]:
    """A row of the table. Failures: first those without numbers, then the largest errors."""
    failed = sorted(
        (v for v in verdicts if v.failure), key=lambda v: -math.inf if v.raised or not v.error else -v.error
    )
    return {
        "seed": seed,
        "cases": sum(v.skipped is None for v in verdicts),
        "skipped": sum(v.skipped is not None for v in verdicts),
        "skipped_because": dict(Counter(v.skipped for v in verdicts if v.skipped is not None)),
        "worst_error_over_tolerance": max((v.error for v in verdicts), default=0.0),
        "failures": [f"{v.case}: {v.failure}" for v in failed],
        "raised": sum(v.raised for v in verdicts),
    }


class _VerifyTable:
    """Shows each provider when its cases are done, and the failures below it."""

    def __init__(self, title: str) -> None:
        self._rows = TablePrinter(
            Column("op", 31), Column("provider", 12), Column("cases", 5, number=True),
            Column("skipped", 7, number=True), Column("error", 5, number=True), Column("verdict", 15), title=title,
        )  # fmt: skip

    def add(self, row: dict[str, Any]) -> None:
        if row["reason"] is not None:
            self._rows.add(row["op"], row["provider"], "", "", "", f"not run {self._rows.note(row['reason'])}")
            return
        failures = row["failures"]
        verdict = "right" if row["cases"] else "took no case"
        if failures:
            ends = [end for end in ("crashed", "hung") if any(f": {end}" in f for f in failures)]
            kinds = (len(failures) - row["raised"], "wrong"), (row["raised"], "failed")
            verdict = " and ".join(ends) or ", ".join(f"{number} {kind}" for number, kind in kinds if number)
        worst = row["worst_error_over_tolerance"]
        error = (
            f"{worst:.2f}" if worst < 100 or math.isinf(worst) else f"{worst:.0e}".replace("+0", "").replace("+", "")
        )
        if failures and worst <= 1:  # no case failed by its numbers
            error = "-"
        counts = str(row["cases"]), str(row["skipped"]) + self._why_skipped(row["skipped_because"])
        self._rows.add(row["op"], row["provider"], *counts, error, verdict, style="red" if failures else "")
        cases_of: dict[str, list[tuple[str, str]]] = {}
        for failure in failures:
            case, _, what = failure.partition(": ")
            cases_of.setdefault(_without_shapes(what), []).append((case, what))
        for cases in list(cases_of.values())[:_MOST_SHOWN]:
            (case, what), more, others = cases[0], len(cases) - 1, len({what for _, what in cases}) - 1
            text = case + (f" and {counted(more, 'more case')}" if more else "") + f": {what}"
            text += f"; likewise with {counted(others, 'other shape')}" if others else ""
            print(textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False))
        if any(" is nan instead of " in what for what in cases_of):
            print("  nan: not written, read around a tensor, or computed (inf / inf, inf - inf)")
        if len(cases_of) > _MOST_SHOWN:
            print(f"  and {len(cases_of) - _MOST_SHOWN} more; `--json -` shows all")

    def _why_skipped(self, because: dict[str, int]) -> str:
        """The mark of a footnote on cases that the provider does not accept, after a space; or nothing."""
        from nanovllm.kernels.testing.verify_jobs import NOT_RUN

        refused = {reason: number for reason, number in because.items() if not reason.startswith(NOT_RUN)}
        if not refused:
            return ""
        number, most = sum(refused.values()), max(refused, key=refused.__getitem__)
        others = f"; and {counted(len(refused) - 1, 'other reason')}" if len(refused) > 1 else ""
        return " " + self._rows.note(f"{number} skipped: {most}{others}")

    def end(self) -> None:
        self._rows.end()


def _without_shapes(failure: str) -> str:
    """The same text for a result of a wrong shape, whichever shapes the case has."""
    return re.sub(r"\[[\d, ]*\]", "[]", failure) if " has shape [" in failure else failure


@contextmanager
def _interpreter(device: str) -> Iterator[bool]:
    """Without a GPU, Triton kernels run in Triton's interpreter within the block, and in processes that start in it.

    Yields whether this has changed that.
    """
    import importlib.util

    import_torch()
    import torch

    from nanovllm.kernels import triton_support

    wanted = device in ("auto", "cpu") and not torch.cuda.is_available() and importlib.util.find_spec("triton")
    if not wanted or os.environ.get("TRITON_INTERPRET") == "1":
        yield False
        return
    os.environ["TRITON_INTERPRET"] = "1"
    triton_support.cache_clear()
    try:
        yield True
    finally:
        del os.environ["TRITON_INTERPRET"]
        triton_support.cache_clear()
