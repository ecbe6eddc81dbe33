"""One run of the benchmark: which jobs, in which order, and what becomes of their results."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from nanovllm.kernels.selection import parse_priority
from nanovllm.perf import results
from nanovllm.perf import tables as text
from nanovllm.perf.device import Rates, best_of
from nanovllm.perf.engines import ENGINES
from nanovllm.perf.job import Job, Row
from nanovllm.perf.launcher import Launch, WorkerDied, measure_rows
from nanovllm.perf.workloads import ON_CPU, ON_GPU, Workload, parse_length, select

# Workloads that fit this are run by one engine; longer ones each by one of their own, so that a result does not depend on
# what else was asked for.
_USUAL_LENGTH = 4096
_INTERRUPTED = 130
_DECISIVE = frozenset(
    "preset dtype kv_cache_dtype device workload num_requests input_len output_len rate repeat warmup seed engine"
    " use_custom_kernels kernels enforce_eager capture_prefill gpu_memory_utilization max_num_seqs max_num_batched_tokens".split()
)


class Session:
    """What the command line asked for, in progress.

    Args:
        args: of `bench.py`; `preset_config` is set if a preset was named.
        root: of the checkout, for its commit.
    """

    def __init__(self, args: argparse.Namespace, launch: Launch, root: Path) -> None:
        self.args = args
        self.launch = launch
        self.engines = _names(args.engine)
        for engine in self.engines:
            if engine not in ENGINES:
                raise ValueError(f"--engine {engine!r}: expected any of {', '.join(ENGINES)}")
        if args.repeat < 1 or args.warmup < 0:
            raise ValueError("--repeat is at least 1, --warmup at least 0")
        if args.compare and args.use_custom_kernels is not None:
            raise ValueError("--compare runs both with and without custom kernels; leave out --use-custom-kernels")
        if args.ablate and args.use_custom_kernels is False:
            raise ValueError("--ablate needs custom kernels to turn off; leave out --no-use-custom-kernels")
        _check_device(args.device)
        self.workloads = self._workloads()
        self.model = args.preset or args.model
        self.label = args.preset or Path(args.model).name
        if args.kv_cache_dtype not in (None, "auto"):
            self.label += f", {args.kv_cache_dtype} cache"  # results of their own, with tables and history
        # What decides the figures; not where this machine has its files.
        given = {k: v for k, v in vars(args).items() if k in _DECISIVE and v is not None}
        shown = {k: v for k, v in given.items() if v is not False or k == "capture_prefill"}
        self.record = results.new_record(root, shown)
        variants = ["custom", "native", *(["no layernorm_residual_dropout_gelu"] if args.ablate else [])]
        self.table = text.TextTable(
            [w.name for w in self.workloads], [f"{e} {v}" for e in self.engines for v in variants]
        )

    def run(self) -> int:
        """Do it all. Returns the exit code: 0, 1 if --check found a regression or nothing could be measured, 130 after Ctrl-C."""
        code = 0
        print(f"{self.label}; {', '.join(f'{w.name}: {w.description}' for w in self.workloads)}", flush=True)
        try:
            for job in self._jobs():
                measure_rows(self.launch, job, self._take_row, self._take)
            if self.args.profile:
                self._profile()
        except KeyboardInterrupt:
            print("\ninterrupted; what was measured so far follows", flush=True)
            code = _INTERRUPTED
        for line in text.comparison_lines(self.record.rows):
            print(line)
        if self.args.json:
            self.args.json.parent.mkdir(parents=True, exist_ok=True)
            self.args.json.write_text(json.dumps(self.record.to_json(), indent=1) + "\n")
            print(f"written: {self.args.json}")
        # Compared before this run is itself the last kept one.
        if self.args.check and not code:
            code = self._check()
        if self.args.save:
            for path in results.keep(self.record, self.args.results):
                print(f"kept: {path}")
        return code or int(all(row.error is not None for row in self.record.rows))

    def _workloads(self) -> list[Workload]:
        args = self.args
        own = {"--num-requests": args.num_requests, "--input-len": args.input_len, "--output-len": args.output_len}
        if any(v is not None for v in own.values()):
            missing = [name for name, v in own.items() if v is None]
            if missing or args.workload:
                raise ValueError(f"a load of your own needs {', '.join(own)}, and no --workload")
            lengths = parse_length(args.input_len), parse_length(args.output_len)
            return [Workload("custom", args.num_requests, *lengths, rate=args.rate)]
        if args.workload:
            chosen = select(_names(args.workload))
        else:
            chosen = select(ON_GPU if _has_gpu(args.device) else ON_CPU)
        if args.rate is not None:
            if not any(w.rate for w in chosen):
                raise ValueError("--rate: none of the workloads has arrivals; choose poisson")
            chosen = [dataclasses.replace(w, rate=args.rate) if w.rate else w for w in chosen]
        return chosen

    # ---------------------------------------------------------------------------------------------------------- jobs

    def _jobs(self) -> Any:
        """The jobs, one after the other; the later ones may depend on what the earlier ones found."""
        first = True
        for engine in self.engines:
            if engine != "nanovllm":
                for job in self._sized(self._job(engine, "", self._common())):
                    yield dataclasses.replace(job, measure_rates=first)
                    first = False
                continue
            options = self._options()
            variant = "native" if self.args.use_custom_kernels is False else "custom"
            configurations = [(variant, options)]
            if self.args.compare:
                configurations.append(("native", {**options, "use_custom_kernels": False}))
            for name, chosen in configurations:
                for job in self._sized(self._job(engine, name, chosen)):
                    yield dataclasses.replace(job, measure_rates=first)
                    first = False
            if self.args.ablate:
                for op in self._ops_to_ablate(options):
                    without = {**options, "kernel_priority": {**options.get("kernel_priority", {}), op: ["native"]}}
                    yield from self._sized(self._job(engine, f"no {op}", without))

    def _job(self, engine: str, variant: str, options: dict[str, Any]) -> Job:
        args = self.args
        config = getattr(args, "preset_config", None) if args.preset else None
        return Job(
            engine, variant, self.model, tuple(self.workloads), config, options, args.repeat, args.warmup, args.seed
        )

    def _sized(self, job: Job) -> Any:
        """A job for the workloads of usual length, and one for each longer one."""
        usual = tuple(w for w in job.workloads if w.max_len <= _USUAL_LENGTH)
        if usual:
            yield dataclasses.replace(job, workloads=usual, max_model_len=_USUAL_LENGTH)
        for workload in job.workloads:
            if workload.max_len > _USUAL_LENGTH:
                yield dataclasses.replace(job, workloads=(workload,), max_model_len=workload.max_len)

    def _common(self) -> dict[str, Any]:
        """Arguments that peers have too."""
        args = self.args
        named = (
            "dtype",
            "kv_cache_dtype",
            "device",
            "gpu_memory_utilization",
            "max_num_seqs",
            "max_num_batched_tokens",
        )
        options = {name: getattr(args, name) for name in named if getattr(args, name) is not None}
        if args.enforce_eager:
            options["enforce_eager"] = True
        return options

    def _options(self) -> dict[str, Any]:
        options = self._common()
        if self.args.capture_prefill is not None:
            options["capture_prefill"] = self.args.capture_prefill
        if self.args.use_custom_kernels is not None:
            options["use_custom_kernels"] = self.args.use_custom_kernels
        if self.args.kernels:
            options["kernel_priority"] = parse_priority(self.args.kernels)
        return options

    def _ops_to_ablate(self, options: dict[str, Any]) -> list[str]:
        """The ops that the model calls and that a custom kernel serves."""
        found: dict[str, str] = {}
        job = dataclasses.replace(self._job("nanovllm", "custom", options), task="ops")
        try:
            self.launch(job, lambda kind, content: found.update(content) if kind == "ops" else None)
        except WorkerDied as error:
            print(f"--ablate: the model's ops could not be found: {error}")
            return []
        custom = [op for op, provider in sorted(found.items()) if provider != "native"]
        if not custom:
            print("--ablate: no op of this model has a custom kernel here, so there is none to turn off")
        return custom

    def _take_row(self, row: Row) -> None:
        row.model = self.label
        results.add_shares(row, self.record.rates)
        if not self.record.rows:
            print(self.table.head())
        self.record.rows.append(row)
        print(self.table.line(text.row_cells(row)), flush=True)

    def _take(self, kind: str, content: Any) -> None:
        if kind == "rates":
            rates = Rates(**content)
            if self.record.rates is not None:  # again, later in the run
                self.record.rates = best_of(self.record.rates, rates)
                for row in self.record.rows:
                    results.add_shares(row, self.record.rates)
                return
            self.record.rates = rates
            matmul = ", ".join(f"{v / 1e12:.3g} TFLOP/s {k}" for k, v in sorted(rates.matmul.items()))
            print(f"measured on {rates.device}: {rates.bandwidth / 1e9:,.0f} GB/s, {matmul}", flush=True)
        elif kind == "started" and sys.stderr.isatty():
            print(f"{content} ...", end="\r", file=sys.stderr, flush=True)

    # --------------------------------------------------------------------------------------------- profile and check

    def _profile(self) -> None:
        from nanovllm.perf.profiling import profile_and_report

        closed = [w for w in self.workloads if w.rate is None]
        if "nanovllm" not in self.engines or not closed or self.record.rates is None:
            return
        variant = "native" if self.args.use_custom_kernels is False else "custom"
        job = next(
            iter(
                self._sized(
                    dataclasses.replace(self._job("nanovllm", variant, self._options()), workloads=(closed[0],))
                )
            )
        )
        # What could not be timed will not be profiled either.
        if any(r.error for r in self.record.rows if r.workload == closed[0].name and r.variant == variant):
            return
        try:
            written = profile_and_report(
                self.launch, job, self.record, self.label, self.args.profile_dir, self.args.plots, self._take
            )
        except WorkerDied as error:
            print(f"no profile: {error}")
            return
        for line in written:
            print(line)

    def _check(self) -> int:
        checks = results.check(self.record, self.args.results)
        if not checks:
            print("--check: no kept result of this device, model and workload to compare with; keep one with --save")
            return 1
        for line in text.check_lines(checks):
            print(line)
        return int(not all(c.holds for c in checks))


def report(args: argparse.Namespace) -> int:
    """Draw the reports of an earlier profile again."""
    from nanovllm.perf.profiling import draw_again

    for line in draw_again(args.report, args.profile_dir, args.plots):
        print(line)
    return 0


def history(args: argparse.Namespace) -> int:
    """Print how the kept workloads moved."""
    files = results.kept_files(args.results)
    if args.workload:
        wanted = set(_names(args.workload))
        files = [f for f in files if f.stem in wanted]
    if not files:
        print(f"nothing is kept in {args.results} yet; keep a run with --save")
        return 1
    for path in files:
        print("\n".join(text.history_lines(path)))
    return 0


def tables(args: argparse.Namespace) -> int:
    """Write the kept results as tables: to the standard output, or between a file's markers."""
    made = text.markdown(results.kept_files(args.results))
    if str(args.tables) == "-":
        print(made)
    else:
        text.write_between_markers(args.tables, made)
        print(f"written: {args.tables}")
    return 0


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _check_device(name: str) -> None:
    """A ValueError for a GPU that is not there. Nothing is done with the device: that is for the processes that measure."""
    import torch

    kind, _, index = name.partition(":")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind not in ("auto", "cpu", "cuda") or (index and (kind != "cuda" or not index.isdecimal())):
        raise ValueError(f"--device {name}: expected auto, cpu, cuda or cuda:N")
    if kind == "cuda" and int(index or 0) >= count:
        raise ValueError(f"--device {name}: this machine has {count} CUDA device(s); use auto or cpu")


def _has_gpu(device: str) -> bool:
    import torch

    return device != "cpu" and torch.cuda.is_available()
