"""One run of `bench.py`: its jobs, their order, and where their results go."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from nanovllm.bench import command_line, results
from nanovllm.bench import result_tables as text
from nanovllm.bench.job import Job, ResultRow
from nanovllm.bench.launcher import Launch, WorkerDied, measure_rows
from nanovllm.bench.workloads import Workload
from nanovllm.console import INTERRUPTED, StatusLine, say
from nanovllm.hardware.measured_rates import Rates, best_of
from nanovllm.json_output import STDOUT, check_target, write_json

# Workloads that fit this are run by one engine; longer ones each by one of their own, so that a result does not
# depend on what else was asked for.
_USUAL_LENGTH = 4096
# Two measurements of a rate that differ by less, of 1, say the same.
_NOISE = 0.03


class Benchmark:
    """One run of the benchmark.

    Args:
        args: the args of `bench.py`; `preset_config` is set if a preset was named.
        root: the root of the checkout, for its commit.
    """

    def __init__(self, args: argparse.Namespace, launch: Launch, root: Path) -> None:
        self.args = args
        self.launch = launch
        self.engines = command_line.check(args)
        self.workloads = command_line.workloads(args)
        self.model = args.preset or args.model
        self.label = args.preset or Path(args.model).name
        if args.quantization:
            self.label += f", {args.quantization} weights"
        if args.lm_head_quantization:
            self.label += f", {args.lm_head_quantization} head"
        if args.kv_cache_dtype not in (None, "auto"):
            self.label += f", {args.kv_cache_dtype} cache"  # results of their own, with tables and history
        self.variant = "native" if args.use_custom_kernels is False else "custom"
        self.record = results.new_record(root, command_line.recorded(args))
        self.table, self.status = text.TextTable(args.wide), StatusLine()
        self.round = 0
        self.shown: dict[int, float] = {}
        """By the row's id, its share of the limit as the table shows it."""
        self._check_places()

    def run(self) -> int:
        """Measure everything, print it, and write what was asked for.

        Returns:
            The exit code: 0; 1 if --check found a regression or a row could not run; 130 after Ctrl-C.
        """
        code = 0
        print(f"{self.label}; {', '.join(f'{w.name}: {w.description}' for w in self.workloads)}", flush=True)
        try:
            self._measure_rates()
            for turn in range(self.args.rounds):
                self.round = turn
                for job in self._jobs():
                    # Other prompts each time: the seeds of one round lie beside each other.
                    job = dataclasses.replace(job, seed=job.seed + turn * job.repeat)
                    self.status.show(f"starting {job.engine} ...", timed=True)
                    measure_rows(self.launch, job, self._take_row, self._take)
            self._measure_rates()
        except KeyboardInterrupt:
            self.status.clear()
            print(
                f"\ninterrupted; {'what was measured stands above' if self.record.rows else 'nothing was measured'}",
                flush=True,
            )
            code = INTERRUPTED
        except Exception:
            self.status.clear()
            if not self.record.rows:
                raise
            traceback.print_exc()
            code = 1
        rows = self.record.rows
        others = [row for row in rows if (row.limit or 0) <= 1 or not _beside_others(row)]
        lines = [*text.comparison_lines(rows), *self._over_limit(), *text.load_lines(others), *text.error_lines(rows)]
        for line in lines:
            say(line)
        code = self._keep(code)
        # Last: whatever happens in it, all else is on the disk.
        if self.args.profile and code != INTERRUPTED:
            try:
                self._profile()
            except KeyboardInterrupt:
                print("\ninterrupted; what was measured is written, the profile is not", flush=True)
                code = INTERRUPTED
            except (WorkerDied, OSError, ValueError) as error:
                say(f"no profile: {error}")
        return code or int(not self.record.rows or any(row.error is not None for row in self.record.rows))

    def _keep(self, code: int) -> int:
        """Write what was asked for; what cannot be written costs nothing else. Returns the exit code."""
        problems: list[Exception] = []

        def tried(write: Callable[[], object]) -> None:
            try:
                write()
            except (OSError, ValueError) as error:
                problems.append(error)
                say(f"bench.py: {error}", sys.stderr)

        def save() -> None:
            for path in results.keep(self.record, self.args.results):
                print(f"kept: {path}")

        if self.args.json not in (None, STDOUT):
            tried(lambda: self._write_json(self.args.json))
        if self.args.check and not code:  # before this run is itself the last kept one
            checks: list[results.Check] = []
            tried(lambda: checks.extend(results.check(self.record, self.args.results)))
            code = self._judge(checks)
        if self.args.save:
            tried(save)
        if problems:
            handle, elsewhere = tempfile.mkstemp(prefix="bench-", suffix=".json")
            os.close(handle)
            self._write_json(elsewhere)
        return code or int(bool(problems))

    def _write_json(self, path: str) -> None:
        write_json(path, self.record.to_json())
        print(f"written: {path}")

    def _check_places(self) -> None:
        """Before anything is measured, a ValueError for a place that cannot be written, or kept results that cannot
        be read.
        """
        args = self.args
        check_target(args.json)
        if args.save:
            command_line.check_folder("--results", args.results, args.results)
        if args.profile and self._profiled() is not None:
            command_line.check_folder("--profile-dir", args.profile_dir, args.profile_dir)
            if (line := command_line.check_drawing(args.plots)) is not None:
                say(line)
        if args.save or args.check:
            names = {w.name for w in self.workloads}
            for path in results.kept_files(args.results):
                if path.stem in names:
                    results.load_runs(path)

    # ---------------------------------------------------------------------------------------------------------- jobs

    def _jobs(self) -> Iterator[Job]:
        """The jobs, one after the other; the later ones may depend on what the earlier ones found."""
        for engine in self.engines:
            if engine != "nanovllm":
                given = command_line.peer_options(self.args)
                yield from self._sized(self._job(engine, "", given))
                for ops in self.args.vllm_plugin or () if engine == "vllm" else ():
                    variant = "plugin" if ops == "1" else f"plugin {ops}"
                    yield from self._sized(self._job(engine, variant, {**given, "vllm_plugin": ops}))
                continue
            given = command_line.engine_options(self.args)
            yield from self._sized(self._job(engine, self.variant, given))
            if self.args.kernel_plugin:
                plugins = {"kernel_plugins": self.args.kernel_plugin}
                yield from self._sized(self._job(engine, "plugin", {**given, **plugins}))
            if self.args.compare:
                yield from self._sized(self._job(engine, "native", {**given, "use_custom_kernels": False}))
            for op in self._ops_to_ablate(given) if self.args.ablate else ():
                without = {**given, "kernel_priority": {**given.get("kernel_priority", {}), op: ["native"]}}
                yield from self._sized(self._job(engine, f"no {op}", without))

    def _job(self, engine: str, variant: str, given: dict[str, Any]) -> Job:
        args = self.args
        return Job(
            engine, variant, self.model, tuple(self.workloads), getattr(args, "preset_config", None), given,
            args.repeat, args.warmup, args.seed, limit=args.limit, shape=getattr(args, "model_shape", None),
            temperature=args.temperature, top_p=args.top_p,
        )  # fmt: skip

    def _sized(self, job: Job) -> Iterator[Job]:
        """A job for the workloads of usual length, and one for each longer one."""
        usual = tuple(w for w in job.workloads if w.max_len <= _USUAL_LENGTH)
        if usual:
            yield dataclasses.replace(job, workloads=usual, max_model_len=_USUAL_LENGTH)
        for workload in job.workloads:
            if workload.max_len > _USUAL_LENGTH:
                yield dataclasses.replace(job, workloads=(workload,), max_model_len=workload.max_len)

    def _ops_to_ablate(self, given: dict[str, Any]) -> list[str]:
        """The ops that the model calls and that a custom kernel serves."""
        found: dict[str, str] = {}
        job = dataclasses.replace(self._job("nanovllm", "custom", given), task="ops")
        try:
            self.launch(job, lambda kind, content: found.update(content) if kind == "ops" else None)
        except WorkerDied as error:
            print(f"--ablate: the model's ops could not be found: {error}")
            return []
        custom = [op for op, provider in sorted(found.items()) if provider != "native"]
        if not custom:
            print("--ablate: no op of this model has a custom kernel here, so there is none to turn off")
        return custom

    def _measure_rates(self) -> None:
        """In a process of its own, which leaves nothing in the device's memory: before the engines and after them."""
        job = dataclasses.replace(
            self._job("nanovllm", "", command_line.engine_options(self.args)), task="rates", limit=None
        )
        known = set(self.record.rates.matmul) if self.record.rates else set()
        used = {row.about["dtype"] for row in self.record.rows if row.about}
        if any(repeat.fp8_flops for row in self.record.rows for repeat in row.repeats):
            used.add("float8")
        missing = used - known
        if missing:  # the engine found out what the model is computed in
            job = dataclasses.replace(job, options={**job.options, "dtype": min(missing)})
        self.status.show("measuring the device's rates ...", timed=True)
        try:
            self.launch(job, self._take)
        except WorkerDied as error:
            self.status.clear()
            print(f"the device's rates could not be measured: {error}")
        finally:
            self.status.clear()

    def _take_row(self, row: ResultRow) -> None:
        row.model = self.label
        row.repeats = [dataclasses.replace(repeat, round=self.round) for repeat in row.repeats]
        self.status.clear()
        if not self.record.rows:
            print(self.table.head())
        row = self._joined(row)
        results.add_shares(row, self.record.rates)
        self.shown[id(row)] = row.limit or 0.0
        print(self.table.row(row), flush=True)

    def _joined(self, row: ResultRow) -> ResultRow:
        """The row of this configuration with the repeats of all rounds so far. One that failed stays as it is."""
        before = results.find(self.record.rows, row.engine, row.variant, row.workload, row.model)
        if before is None or row.error is not None:
            self.record.rows.append(row)
            return row
        before.repeats += row.repeats
        before.warmup_seconds += row.warmup_seconds
        before.peak_memory = max(before.peak_memory or 0, row.peak_memory or 0)
        return before

    def _over_limit(self) -> list[str]:
        """A line for each row that claims more than the device was measured to give."""
        lines = []
        for row in self.record.rows:
            if row.limit is None or row.limit <= 1:
                continue
            before, now = f"{self.shown[id(row)]:.1%}", f"{row.limit:.1%}"
            said = f"{now} is impossible"
            if before != now:
                again = f"{now} with the rates measured again"
                said = f"{before} is impossible ({again})" if self.shown[id(row)] > 1 else f"{again} is impossible"
            if _beside_others(row):
                load = text.foreign_load(row)
                why = f"other processes used up to {load:.1f} processors; run it again on an idle machine"
            else:
                why = (
                    "its work is counted wrongly (nanovllm/bench/workload_cost.py), or something slowed the device"
                    " while its rates were measured"
                )
            lines.append(f"{row.workload}, {text.name_of(row)}: of limit {said}: {why}")
        return lines

    def _take(self, kind: str, content: Any) -> None:
        if kind == "rates":
            self.status.clear()
            rates, before = Rates(**content), self.record.rates
            if before is not None:  # again, after the engines
                self.record.rates = best_of(before, rates)
                for row in self.record.rows:
                    results.add_shares(row, self.record.rates)
                changed = _changes(before, rates)
                if changed:
                    say(f"measured again: {changed}; the table above uses the first values, saved results the larger")
                if further := _products({k: v for k, v in rates.matmul.items() if k not in before.matmul}):
                    say(f"measured on {rates.device}: {further}")
                return
            self.record.rates = rates
            matmul = _products(rates.matmul)
            say(f"measured on {rates.device}: {rates.bandwidth / 1e9:,.0f} GB/s, {matmul}")
        elif kind in ("loading", "started", "run"):
            self.status.show(f"{'loading ' * (kind == 'loading')}{content} ...", timed=True)

    # --------------------------------------------------------------------------------------------- profile and check

    def _profiled(self) -> Workload | None:
        """The workload to profile, if there is one. A profile is of one GPU."""
        if (self.args.tensor_parallel_size or 1) > 1:
            return None
        closed = [w for w in self.workloads if w.rate is None]
        return closed[0] if "nanovllm" in self.engines and closed else None

    def _profile(self) -> None:
        from nanovllm.bench.profile_files import make_profile

        workload = self._profiled()
        if workload is None or self.record.rates is None:
            return
        # What could not be timed will not be profiled either.
        if any(r.error for r in self.record.rows if r.workload == workload.name and r.variant == self.variant):
            return
        job = self._job("nanovllm", self.variant, command_line.engine_options(self.args))
        job = next(self._sized(dataclasses.replace(job, workloads=(workload,), limit=None)))
        try:
            written = make_profile(
                self.launch, job, self.record, self.label, self.args.profile_dir, self.args.plots, self._take
            )
        finally:
            self.status.clear()
        print(*written, sep="\n")

    def _judge(self, checks: list[results.Check]) -> int:
        if not checks:
            print("--check: no kept result of this device, model and workload to compare with; keep one with --save")
            return 1
        for line in text.check_lines(checks):
            print(line)
        return int(not all(c.holds for c in checks))


def _beside_others(row: ResultRow) -> bool:
    """Whether other processes used processors that the row needed."""
    return row.about.get("device") == "cpu" and text.foreign_load(row) > 0


def _products(matmul: dict[str, float]) -> str:
    """The rates of products, in words."""
    return ", ".join(f"{v / 1e12:.3g} TFLOP/s {k}" for k, v in sorted(matmul.items()) if v)


def _changes(before: Rates, now: Rates) -> str:
    """Rates that came out differently by more than noise, before and now; "" if none did."""
    pairs = [("GB/s", before.bandwidth / 1e9, now.bandwidth / 1e9)]
    both = sorted(k for k, v in now.matmul.items() if v and before.matmul.get(k))
    pairs += [(f"TFLOP/s {k}", before.matmul[k] / 1e12, now.matmul[k] / 1e12) for k in both]
    return ", ".join(f"{n:,.4g} {unit} (before {b:,.4g})" for unit, b, n in pairs if abs(n / b - 1) > _NOISE)
