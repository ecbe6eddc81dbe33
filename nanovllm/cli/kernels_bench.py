"""`nanovllm kernels bench`: the time of each provider of an op, also as a share of the hardware limit."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm.cli import kernels_common as common
from nanovllm.cli.option_records import takes_records
from nanovllm.cli.text_table import print_table
from nanovllm.console import INTERRUPTED, Column, TablePrinter, say, working
from nanovllm.json_output import STDOUT, write_json
from nanovllm.wording import counted

if TYPE_CHECKING:
    import torch

    from nanovllm.kernels import Op, Provider
    from nanovllm.kernels.op.inputs import Shape
    from nanovllm.kernels.testing.compare import Measurement
    from nanovllm.kernels.testing.verify import Case


@dataclass(frozen=True)
class _Timed:
    """What is timed."""

    op: common.OpName = None
    shape: common.Shapes = None
    dtype: common.Dtype = "bfloat16"
    provider: common.Providers = None
    compile: Annotated[bool, typer.Option(help="Also time torch.compile of the reference.")] = False


@takes_records
def bench(
    timed: _Timed,
    device: common.Device = "auto",
    kernel_plugin: common.Plugins = None,
    save: Annotated[Path | None, typer.Option(help="Write the measurements to this JSON file.")] = None,
    save_table: Annotated[
        Path | None,
        typer.Option(help="Write which providers are fastest to this directory, for NANOVLLM_KERNEL_TABLES."),
    ] = None,
    wide: common.Wide = False,
    json_file: common.Json = None,
) -> None:
    """Time the providers of an op: medians with cold caches, and their share of the hardware limit.

    Ctrl-C keeps what was measured (exit status 130). Fails if a provider raises or nothing can be measured.
    """
    where, ops, origins = common.prepare(device, kernel_plugin)
    from nanovllm.kernels.testing.compare import TIMED_ON_A_GPU, compiled

    if save_table is not None and where.type != "cuda":
        raise ValueError(f"--save-table: a table of kernels is measured on a GPU, this is {where}")
    results: list[Measurement] = []
    skipped = []
    table = None if json_file == STDOUT or wide else _BenchTable(where)
    stopped = False
    named = common.with_provider(common.matching(ops, timed.op), timed.provider, origins)
    progress = _Progress(len(named))
    if len(named) > 1:
        text = f"timing {counted(len(named), 'op')}, which takes minutes; `nanovllm kernels bench OP` times one"
        say(f"{text}, and Ctrl-C keeps what was measured", sys.stderr)
    try:
        for declared in named:
            progress.begin(declared.name)
            if declared.inputs is None or declared.cost is None:
                skipped.append(f"{declared.name}: it declares no inputs or no cost")
                print(f"{skipped[-1]}: not timed", file=sys.stderr)
                continue
            shapes = None if timed.shape is None else [common.shape_of(declared, s) for s in timed.shape]
            candidates = [p for name, p in declared.providers.items() if not timed.provider or name in timed.provider]
            if timed.compile:
                with working("importing torch.compile ...", timed=True):  # seconds, for the first op
                    candidates.append(compiled(declared))
            _measure(declared, candidates, common.dtype_of(timed.dtype), shapes, where, results, table, progress)
    except KeyboardInterrupt:
        # The table would lack ops, or providers that were not reached.
        left_out = "; --save-table is not written" if save_table else ""
        save_table, stopped = None, True
        print(f"stopped early, with what was measured so far{left_out}", file=sys.stderr)
    else:
        if all(m.timing is None for m in results):
            reasons = [*skipped, *(f"{m.provider}: {m.reason}" for m in results)]
            raise common.nothing_done("timed", reasons, not any(m.reason == TIMED_ON_A_GPU for m in results))
    document = _bench_document(where, results)
    if not write_json(json_file, document):
        if table is None:
            heads, rows, notes = wide_table(results, *_unit(where))
            print_table(heads, rows, ("op", "case", "provider", "how"), _title(where), wide=True)
            notes += [_WITHOUT_PLAN_NOTE] if any(m.without_plan for m in results) else []
            say("\n".join(notes)) if notes else None
        else:
            table.end()
        _warn_of_slow_choices(ops, results, where, origins)
    write_json(None if save is None else str(save), document)
    if save_table is not None:
        print(f"wrote {write_table(where, results, save_table, document['date'])}")
    if stopped:
        raise typer.Exit(INTERRUPTED)
    if any(m.failed for m in results):
        raise typer.Exit(1)


def _measure(
    declared: Op, candidates: Sequence[Provider], dtype: torch.dtype, shapes: list[Shape] | None, where: torch.device,
    results: list[Measurement], table: _BenchTable | None, progress: _Progress,
) -> None:  # fmt: skip
    """Append the times of an op's providers, and show each.

    Args:
        shapes: None: the declared ones, on a CPU only the first of a decode step.
    """
    from nanovllm.kernels.testing.compare import bench_cases, measure

    assert declared.inputs is not None
    if where.type == "cpu" and shapes is None:
        shapes = list(declared.inputs.decode[:1])
    for case in bench_cases(declared, dtype, shapes):
        for candidate in candidates:
            with progress.timing(candidate, case):
                found = [measure(declared, candidate, case, where)]
                if found[0].timing is not None and candidate.planned is not None:
                    found.append(measure(declared, candidate, case, where, without_plan=True))
            results += found
            if table is not None:
                for m in found:
                    table.add(m)


class _Progress:
    """A status line that names what is being timed."""

    def __init__(self, num_ops: int) -> None:
        self._num_ops, self._begun, self._op = num_ops, 0, ""

    def begin(self, op: str) -> None:
        """The next op's providers are timed from now on."""
        self._op, self._begun = op, self._begun + 1

    def timing(self, provider: Provider, case: Case) -> AbstractContextManager[None]:
        """In the block the line says which provider and case are timed, and the seconds."""
        from nanovllm.kernels.testing.compare import COMPILED

        count = f" ({self._begun} of {self._num_ops} ops)" if self._num_ops > 1 else ""
        if provider.name == COMPILED:
            return working(f"{self._op}, {case}: compiling with torch.compile, and timing it{count} ...", timed=True)
        return working(f"{self._op}, {case}: timing {provider.name}{count} ...", timed=True)


def _bench_document(where: torch.device, results: list[Measurement]) -> dict[str, Any]:
    import datetime

    from nanovllm.hardware.versions import versions

    document: dict[str, Any] = {
        "device": common.short_device_name(where),
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "command": "nanovllm " + _command(sys.argv[1:]),
    }
    if where.type == "cuda":
        from nanovllm.hardware.roofline import copy_bandwidth, empty_kernel_time

        document["copy_bytes_per_second"] = copy_bandwidth(where)
        document["empty_kernel_us"] = 1e6 * empty_kernel_time(where)
    return {**document, "measurements": [m.as_dict() for m in results]}


def _command(arguments: Sequence[str]) -> str:
    """The arguments without where the results go: a path of the machine that measured them."""
    text, options = " ".join(arguments), r"--save(-table)?(=|\s+)\S+"
    return " ".join(re.sub(options, "", text).split())


_WITHOUT_PLAN_NOTE = (
    "without its plan: the plan was made once for a batch, before the clock started, and used many times. The engine "
    "and the measured order of providers go by the row above, of whole calls."
)


class _BenchTable:
    """Shows each measurement when it is made."""

    def __init__(self, where: torch.device) -> None:
        unit, self._unit = _unit(where)
        limit = [Column("limit", 5, number=True)] if where.type == "cuda" else []  # a CPU's is not measured
        columns = (
            Column("case", 29), Column("provider", 18), Column("us", 9, number=True),
            Column(f"{unit}B/s", 5, number=True), Column(f"{unit}FLOP/s", 7, number=True), *limit,
        )  # fmt: skip
        self._where = where
        self._rows, self._width = TablePrinter(*columns, title=_title(where)), len(columns)
        self._shown: tuple[str, str] | None = None

    def add(self, m: Measurement) -> None:
        """Print a row; the op above its first row, the case in its first row."""
        if self._shown is None or self._shown[0] != m.op:
            self._shown = m.op, ""
            self._add(m.op, style="bold")
        case = "" if self._shown[1] == str(m.case) else str(m.case)
        self._shown = m.op, str(m.case)
        provider = m.provider.split(",")[0]
        if m.without_plan:
            provider += " " + self._rows.note(_WITHOUT_PLAN_NOTE)
        if m.timing is None:
            self._add(case, f"{provider} {self._rows.note(m.reason or '')}")
            return
        if not m.cold and self._where.type == "cuda":
            provider += " " + self._rows.note("the inputs were in the L2 cache")
        seconds = m.timing.median
        share = "" if m.share is None else f"{m.share:.0%}"
        self._add(
            case, provider, f"{1e6 * seconds:.2f}", f"{m.bytes / seconds / self._unit:.2f}",
            f"{m.flops / seconds / self._unit:.1f}", share,
        )  # fmt: skip

    def _add(self, *cells: str, style: str = "") -> None:
        """A row; cells at its end that are left out are empty."""
        self._rows.add(*(*cells, *[""] * self._width)[: self._width], style=style)

    def end(self) -> None:
        """Print the footnotes."""
        self._rows.end()


def _title(where: torch.device) -> str:
    title = common.short_device_name(where)
    if where.type == "cuda":
        from nanovllm.hardware.roofline import copy_bandwidth, empty_kernel_time

        title += f": copy {copy_bandwidth(where) / 1e12:.2f} TB/s, empty kernel {1e6 * empty_kernel_time(where):.2f} us"
    return title


def _unit(where: torch.device) -> tuple[str, float]:
    """(the prefix, the number) of bytes and flops a second."""
    return ("T", 1e12) if where.type == "cuda" else ("G", 1e9)


def wide_table(
    results: list[Measurement], prefix: str = "T", unit: float = 1e12
) -> tuple[Sequence[str], list[Sequence[str]], list[str]]:
    """(headings, a row of every figure for each measurement, footnotes why there are none). No column is empty."""
    speeds = f"{prefix}B/s", f"{prefix}FLOP/s"
    heads = "op", "case", "provider", "us", "p20-p80", *speeds, "of limit", "of copy", "peak MiB", "how"
    rows: list[Sequence[str]] = []
    reasons = list(dict.fromkeys(m.reason or "" for m in results if m.timing is None))
    for m in results:
        if m.timing is None:
            rows.append((m.op, str(m.case), m.provider, *[""] * 7, f"[{reasons.index(m.reason or '') + 1}]"))
            continue
        t = m.timing
        rows.append((
            m.op, str(m.case), m.provider, f"{1e6 * t.median:.2f}", f"{1e6 * t.p20:.2f}-{1e6 * t.p80:.2f}",
            f"{m.bytes / t.median / unit:.2f}", f"{m.flops / t.median / unit:.1f}",
            "" if m.share is None else f"{m.share:.0%}", "" if m.copy is None else f"{m.copy / t.median:.0%}",
            "" if m.peak_bytes is None else f"{m.peak_bytes / 2**20:.1f}", m.method + (", cold" if m.cold else ""),
        ))  # fmt: skip
    filled = [i for i in range(len(heads)) if any(row[i] for row in rows)]
    notes = [f"[{i}] {reason}" for i, reason in enumerate(reasons, 1)]
    return [heads[i] for i in filled], [[row[i] for i in filled] for row in rows], notes


def _warn_of_slow_choices(
    ops: dict[str, Op], results: list[Measurement], where: torch.device, origins: list[str]
) -> None:
    from nanovllm.kernels.op.selection import ranked_providers
    from nanovllm.kernels.testing.compare import slower_somewhere

    for name in dict.fromkeys(m.op for m in results):
        mine = [m for m in results if m.op == name]
        chosen = ranked_providers(ops[name], where, origins)[0].name
        for m in slower_somewhere(mine, chosen):
            say(f"{name} {m.case}: {m.provider} is faster than {chosen}, which is chosen")


def write_table(where: torch.device, results: list[Measurement], directory: Path, date: str) -> Path:
    import torch

    from nanovllm.hardware.gpu_name import canonical_gpu_name
    from nanovllm.kernels.op.measured_order import save_table
    from nanovllm.kernels.testing.compare import providers_by_speed

    by_op = {}
    for name in dict.fromkeys(m.op for m in results):
        relative = providers_by_speed([m for m in results if m.op == name])
        if relative:
            by_op[name] = {"order": list(relative), "relative": {p: round(t, 3) for p, t in relative.items()}}
    return save_table(canonical_gpu_name(torch.cuda.get_device_name(where)), by_op, date, directory)
