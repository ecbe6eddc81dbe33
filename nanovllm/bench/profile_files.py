"""From a job to the three files of a profile."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

from nanovllm.bench.job import Emit, Job
from nanovllm.bench.launcher import Launch
from nanovllm.bench.profile import Profile, summarize
from nanovllm.bench.profile_report import html_report, over_limit, text_report
from nanovllm.bench.profiler import merge, write_trace
from nanovllm.bench.results import Record
from nanovllm.bench.trace_reader import Trace

TRACE, TEXT, PAGE, NUMBERS = "profile_trace.json", "profile_report.txt", "profile_report.html", "profile.json"


def make_profile(
    launch: Launch, job: Job, record: Record, label: str, folder: Path, plots: bool, other: Emit
) -> list[str]:
    """Profile a job's first workload and write what was found to `folder`; returns lines on what was written.

    Args:
        record: the record of the timed runs; its rates, last measured just before, are the limits.
        other: is told what else the passes say.

    Raises:
        WorkerDied: a pass failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    other("started", f"profiling {job.workloads[0].name}")
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        as_run = _run_pass(launch, job, Path(scratch) / "as-run.json", other)
        passes = [as_run]
        if not as_run[0]["eager"]:
            # Without graphs the engine would by itself piggyback and pad no prompts: the kernels would be others.
            first = as_run[0]
            same = {"piggyback_prefill": first["piggybacks"], "capture_prefill": first["pads_prompts"]}
            eager = dataclasses.replace(job, options={**job.options, "enforce_eager": True, **same})
            passes.append(_run_pass(launch, eager, Path(scratch) / "eager.json", other))
        labels = ["as it runs", "without graphs"] if len(passes) == 2 else None
        write_trace(merge([trace for _, trace in passes], labels) if labels else as_run[1], folder / TRACE)
    traces = [Trace(trace["traceEvents"]) for _, trace in passes]
    assert record.rates is not None  # a caller without rates has no limits to show
    profile = summarize(traces[0], traces[-1], as_run[0], passes[-1][0]["costs"], record.rates, job.workloads[0], label)
    (folder / NUMBERS).write_text(json.dumps({"profile": profile.to_json(), "record": record.to_json()}))
    written = [f"written: {folder / name}" for name in (TRACE, NUMBERS)]
    return [*written, *write_reports(profile, record, folder, plots)]


def draw_again(numbers: Path, folder: Path, plots: bool) -> list[str]:
    """The reports of a profile that was made before, perhaps on a machine without matplotlib."""
    if not numbers.is_file():
        raise FileNotFoundError(f"--report {numbers}: there is no such file; pass the profile.json of an earlier run")
    data = json.loads(numbers.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    return write_reports(Profile.from_json(data["profile"]), Record.from_json(data["record"]), folder, plots)


def write_reports(profile: Profile, record: Record, folder: Path, plots: bool) -> list[str]:
    """The text and the page; without matplotlib only the text."""
    (folder / TEXT).write_text(text_report(profile, record.rows))
    lines = [f"written: {folder / TEXT}"]
    lines += [f"above the limit, so its account is wrong: {line}" for line in over_limit(profile)]
    try:
        from nanovllm.bench.profile_figures import figures, write_pngs

        made = figures(profile, record.rows)
    except ImportError as error:
        return [*lines, f"no {PAGE}: it needs matplotlib ({error}); pip install matplotlib"]
    (folder / PAGE).write_text(html_report(profile, made, record.rows))
    lines.append(f"written: {folder / PAGE}")
    if plots:
        lines += [f"written: {path}" for path in write_pngs(made, folder)]
    return lines


def _run_pass(launch: Launch, job: Job, path: Path, other: Emit) -> tuple[dict[str, Any], dict[str, Any]]:
    found: dict[str, Any] = {}

    def take(kind: str, content: Any) -> None:
        if kind == "profile":
            found.update(content)
        else:
            other(kind, content)

    launch(dataclasses.replace(job, task="profile", trace=str(path)), take)
    return found, json.loads(path.read_text())
