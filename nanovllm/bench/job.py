"""What one measuring process is told, and what it says back."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy

from nanovllm.bench.workloads import Workload
from nanovllm.hardware.roofline import Work

Emit = Callable[[str, Any], object]
"""Sends (kind, content) to the process that started the job.

Kinds: "rates"; "loading" an engine; "started" a workload; "run", one of its runs begins; "row"; "failed", a row with
an error that the engine did not foresee (the output of the process may say more); "ops"; "profile".
"""


@dataclass(frozen=True)
class Job:
    """One engine in one configuration, and the workloads to run on it.

    Attributes:
        task: "measure" the workloads; measure the "rates" of the device, which loads no engine; find the "ops" that the
            model calls; or "profile" the first workload.
        engine: one of `nanovllm.bench.engines.ENGINES`.
        variant: what distinguishes this configuration in tables: "custom", "native", "no rms_norm", or "".
        model: a path, a hub id, or a preset's name.
        config: the preset's config.json, for random weights; None: `model` has weights.
        options: arguments for nanovllm's `LLM`; peers take from them what they have too.
        limit: seconds for each workload with its warm-up; None: as long as it takes.
        trace: the file that the trace of a profile goes to.
        shape: what a GGUF model's config.json would hold, for engines that do not tell.
        temperature, top_p: of every request.
    """

    engine: str
    variant: str
    model: str
    workloads: tuple[Workload, ...]
    config: dict[str, Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    repeat: int = 3
    warmup: int = 1
    seed: int = 0
    max_model_len: int = 4096
    task: str = "measure"
    limit: float | None = None
    trace: str = ""
    shape: dict[str, Any] | None = None
    temperature: float = 0.6
    top_p: float = 1.0

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Job:
        def workload(fields: dict[str, Any]) -> Workload:
            bounds = {k: tuple(v) for k, v in fields.items() if isinstance(v, list)}
            return Workload(**{**fields, **bounds})

        return cls(**{**data, "workloads": tuple(workload(w) for w in data["workloads"])})


@dataclass
class RequestTimes:
    """When a request's tokens came, in seconds after its arrival."""

    first_token: float | None
    total: float | None
    num_output: int
    gaps: list[float] | None = None
    """Between one token and the next; None if only their mean is known."""

    @property
    def mean_gap(self) -> float | None:
        if self.num_output < 2 or self.first_token is None or self.total is None:
            return None
        return (self.total - self.first_token) / (self.num_output - 1)


@dataclass
class Run:
    """One run of a workload: the wall time and each request's times."""

    seconds: float
    requests: list[RequestTimes]
    gaps: list[float] | None = None
    """Between the tokens of all requests, from an engine that does not say whose they are."""


@dataclass(frozen=True)
class Repeat:
    """The figures of one run. Times in seconds; None where the engine does not tell or there is nothing to tell.

    `itl_p50` and `itl_p99` are percentiles of the times between two tokens, of all requests. If the engine tells only
    the mean of each request, `itl_p50` is the median of the means and `itl_p99` is None: means have no slow tokens.
    """

    seconds: float
    output_tokens: int
    total_tokens: int
    ttft_p50: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None
    bytes: int
    flops: int
    foreign_load: float | None = None
    """Processors that other processes kept busy meanwhile."""
    fp8_flops: int = 0
    """Those of `flops` that are products with quantised activations; 0 in results of before they were counted."""
    round: int = 0
    """Which of a run's rounds it belongs to; 0 in results of before it was noted."""

    @property
    def output_rate(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_rate(self) -> float:
        return self.total_tokens / self.seconds

    @classmethod
    def of(cls, run: Run, num_prompt_tokens: int, work: Work, foreign: float | None = None) -> Repeat:
        output = sum(r.num_output for r in run.requests)
        first = [r.first_token for r in run.requests if r.first_token is not None]
        several = [r for r in run.requests if r.num_output > 1]
        only_means = run.gaps is None and any(r.gaps is None for r in several)
        if run.gaps is not None:
            each = run.gaps
        elif only_means:
            each = [r.mean_gap for r in several if r.mean_gap is not None]
        else:
            each = [gap for r in several for gap in r.gaps or ()]
        return cls(
            run.seconds, output, output + num_prompt_tokens, percentile(first, 50), percentile(first, 99),
            percentile(each, 50), None if only_means else percentile(each, 99), work.bytes, work.flops, foreign,
            work.fp8_flops,
        )  # fmt: skip


def stopped(limit: float) -> str:
    """The reason of a row that was given no more time."""
    return f"stopped after {limit:g} s (--limit)"


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear between the nearest ranks; None of no values."""
    return float(numpy.percentile(values, percent)) if values else None


@dataclass
class ResultRow:
    """What is known of one workload on one engine in one configuration."""

    engine: str
    variant: str
    model: str
    workload: str
    load: str
    """The workload in words, "8 x 128 -> 256"."""
    error: str | None = None
    repeats: list[Repeat] = field(default_factory=list)
    warmup_seconds: list[float] = field(default_factory=list)
    peak_memory: int | None = None
    """Bytes, the KV cache as it was allocated among them."""
    about: dict[str, Any] = field(default_factory=dict)
    """Of the engine: version, device, dtype, kernels, what it takes to be ready."""
    open_loop: bool = False
    mbu: float | None = None
    mfu: float | None = None

    def median(self, name: str) -> float | None:
        """The median over the rounds of `medians`."""
        values = self.medians(name).values()
        return statistics.median(values) if values else None

    def medians(self, name: str) -> dict[int, float]:
        """By round the median over its repeats of an attribute of `Repeat`. A round is one process."""
        found: dict[int, list[float]] = {}
        for repeat in self.repeats:
            if (value := getattr(repeat, name)) is not None:
                found.setdefault(repeat.round, []).append(value)
        return {number: statistics.median(values) for number, values in found.items()}

    @property
    def spread(self) -> float | None:
        """Largest less smallest output rate, as a share of the median; None of a single run."""
        rates = [r.output_rate for r in self.repeats]
        return (max(rates) - min(rates)) / statistics.median(rates) if len(rates) > 1 else None

    @property
    def limit(self) -> float | None:
        """The share of the limit, of 1: of bandwidth or matmul rate, whichever binds.

        With quantised weights on a CPU it is that of bandwidth: the rate of products of bytes is not known.
        """
        if self.about.get("quantised"):
            return self.mbu
        return None if self.mbu is None or self.mfu is None else max(self.mbu, self.mfu)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ResultRow:
        return cls(**{**data, "repeats": [Repeat(**r) for r in data.get("repeats", [])]})
