"""Profiles of a window of steps: a trace of them, and from it where the time goes.

Two passes, each in a process of its own, apart from the timed runs. The engine as it runs, with CUDA graphs: its
times are the real ones. And the engine without graphs: there every kernel lies within the range of its op, so the
kernels of the first pass get their names from the second. On a CPU one pass is both.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, record_function

from nanovllm.bench.engines.nanovllm import NanovllmEngine
from nanovllm.bench.instrument import Instrument
from nanovllm.bench.job import Job
from nanovllm.bench.trace_reader import WINDOW
from nanovllm.bench.trace_writer import add_memory_track, merge, write_trace
from nanovllm.bench.workloads import Item
from nanovllm.kernels.op.selection import decorated_kernels
from nanovllm.sampling_params import SamplingParams

PREFILL_STEPS, DECODE_STEPS, SKIPPED_STEPS = 2, 6, 32


def profile(job: Job, llm_class: Any) -> dict[str, Any]:
    """One pass over the job's first workload; the trace goes to `job.trace`.

    Returns:
        "costs": per op, its calls, bytes and flops over the recorded steps; "unprofiled_us": the time of a decode step
        without a profiler; "memory": samples, one a step; "about": the engine; "eager": whether it ran without graphs;
        "piggybacks": whether prompts are piggybacked on decode steps; "pads_prompts": whether steps with prompts are
        padded.
    """
    instrument = Instrument()
    with decorated_kernels(instrument.decorate):
        engine = NanovllmEngine(job, llm_class)
    about = engine.about()
    instrument.attach(engine.llm.engine)
    on_gpu = about["device"] != "cpu"
    items = job.workloads[0].draw(job.seed, engine.config.vocab_size)
    eager = not on_gpu or bool(job.options.get("enforce_eager"))
    # The first time is a warm-up.
    _drive(engine, instrument, _shifted(items, 1, engine), instrument.costing if eager else nullcontext)
    costs = [
        {"op": c.op, "module": c.module, "provider": c.provider, "phase": c.phase, "calls": instrument.calls[c],
         "cold_bytes": instrument.cold[c], "bytes": work.bytes, "flops": work.flops, "fp8_flops": work.fp8_flops}
        for c, work in instrument.costs.items()
    ]  # fmt: skip
    windows: list[dict[str, Any]] = []
    memory: list[dict[str, Any]] = []

    @contextmanager
    def recorded() -> Iterator[None]:
        with profiled(on_gpu, windows), record_function(WINDOW), instrument.recording():
            yield

    if on_gpu:
        with profiled(on_gpu, []):  # the first use of the device's profiler is slow
            torch.zeros(1, device="cuda").add_(1)
    unprofiled = _drive(engine, instrument, _shifted(items, 2, engine), recorded, memory)
    trace = merge(windows)
    add_memory_track(trace, memory)
    write_trace(trace, Path(job.trace))
    piggybacks = engine.llm.engine.runner.fast.piggyback is not None
    pads_prompts = engine.llm.engine.runner.fast.prefill is not None
    engine.close()  # nothing here refers to a part of it any more: the next job in this process has its memory
    return {
        "costs": costs,
        "unprofiled_us": unprofiled,
        "memory": memory,
        "about": about,
        "eager": eager,
        "piggybacks": piggybacks,
        "pads_prompts": pads_prompts,
    }


def _shifted(items: Sequence[Item], by: int, engine: NanovllmEngine) -> list[Item]:
    """The same lengths with other tokens: nothing is in the prefix cache."""
    vocab = engine.config.vocab_size
    return [Item([(t + by) % vocab for t in item.prompt], item.num_output, item.arrival) for item in items]


def _drive(
    engine: NanovllmEngine,
    instrument: Instrument,
    items: Sequence[Item],
    recorded: Callable[[], Any],
    memory: list[dict[str, Any]] | None = None,
) -> float | None:
    """Serve the requests for a while, as the timed runs do, within `recorded()` during some steps of each kind.

    These are the first steps. If prompts are piggybacked, only the first step, and some steps after half of the
    requests have begun. At the end these are decode steps without prompts. Piggybacking takes most of a run, so
    requests that have not begun after its steps were recorded are aborted.

    Returns the microseconds of a decode step that was not recorded, or None if none was left.
    """
    core = engine.llm.engine
    requests = _queued(core, items)
    shortest = min(item.num_output for item in items)

    def steps(count: int, keep: bool = False) -> None:
        for _ in range(count):
            if not core.has_unfinished:
                return
            core.step()
            if keep and memory is not None:
                memory.append(_memory(core))

    def not_begun() -> list[Any]:
        return [r for r in requests if r.first_token_time is None]

    try:
        with recorded():
            # If prompts are piggybacked, the second step may have some, with few decodes.
            steps(1 if core.runner.fast.piggyback is not None else PREFILL_STEPS, keep=True)
            synchronize()
        while (late := not_begun()) and core.has_unfinished:
            if 2 * len(late) <= len(requests) and instrument.last_step.kind.value == "piggybacked":
                with recorded():
                    steps(DECODE_STEPS, keep=True)
                    synchronize()
                for request in not_begun():
                    core.abort(request)
                break
            steps(1)
        if not core.has_unfinished:
            return None
        steps(max(0, min(SKIPPED_STEPS, shortest - PREFILL_STEPS - 3 * DECODE_STEPS)))
        with recorded():
            steps(DECODE_STEPS, keep=True)
            synchronize()
        return _step_microseconds(core, requests)
    finally:
        for request in requests:
            core.abort(request)
        while core.has_unfinished:
            core.step()


def _queued(core: Any, items: Sequence[Item]) -> list[Any]:
    requests = [
        core.make_request(i.prompt, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=i.num_output))
        for i in items
    ]
    if any(item.arrival for item in items):
        for request in requests:
            core.queue(request)
    else:
        core.queue(*requests, offline=True)
    return requests


def _step_microseconds(core: Any, requests: Sequence[Any]) -> float | None:
    """The mean time of the next steps; None if there are none, or no token came."""
    if not core.has_unfinished:
        return None
    synchronize()
    started, before = time.perf_counter(), sum(r.num_output_tokens for r in requests)
    count = 0
    while core.has_unfinished and count < DECODE_STEPS:
        core.step()
        count += 1
    synchronize()
    grew = sum(r.num_output_tokens for r in requests) - before
    return (time.perf_counter() - started) / count * 1e6 if grew else None


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _memory(core: Any) -> dict[str, Any]:
    """Bytes in use after a step: PyTorch's on a GPU, this process's resident ones else; and the share of cache
    blocks.
    """
    sample: dict[str, Any] = {}
    if torch.cuda.is_available():
        sample = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    else:
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            sample = {"resident": pages * os.sysconf("SC_PAGE_SIZE")}
        except OSError:
            pass
    blocks = getattr(core.scheduler, "blocks", None)
    if blocks is not None:
        sample["kv_blocks_used"] = blocks.num_blocks - blocks.num_free_blocks
        sample["kv_blocks"] = blocks.num_blocks
    return sample


@contextmanager
def profiled(on_gpu: bool, windows: list[dict[str, Any]]) -> Iterator[None]:
    """Record what happens within, and add its trace to `windows`."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as recorder:
        yield
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "window.json"
        recorder.export_chrome_trace(str(path))
        windows.append(json.loads(path.read_text(errors="replace")))
