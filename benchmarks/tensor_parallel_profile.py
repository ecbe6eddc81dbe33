"""The kernels of a decode step of rank 0, in their order: which they are, their grids, and what each takes.

`python -m benchmarks.tensor_parallel --profile LAYERS` runs this. A model of a few layers starts in seconds, and its
layers are those of the whole model.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function

from nanovllm import LLM, SamplingParams
from nanovllm.bench.profiler import profiled, synchronize
from nanovllm.bench.trace_reader import Step, Trace

PROMPT, SKIPPED, RECORDED, UNRECORDED = 128, 64, 8, 64
"""Tokens of a prompt; then steps, of which those before the recorded ones make contexts as long as in the middle of a
run of 128 -> 256 tokens."""


class KernelRow(NamedTuple):
    """A kernel of a step."""

    name: str
    grid: str
    own_us: float
    """From when all kernels before it had ended."""
    us: float
    """From its start, which may be an early one."""


def kernel_rows(events: Sequence[dict[str, Any]]) -> tuple[list[KernelRow], int]:
    """The kernels of a step in order, with medians over the steps that have these kernels, and how many these are.

    Args:
        events: of a Chrome trace, with a range "decode: ..." around each step.
    """
    steps = [step for step in Trace(events).steps if step.kernels]
    if not steps:
        return [], 0
    (names, count), *_ = Counter(map(_names, steps)).most_common(1)
    alike = [step for step in steps if _names(step) == names]
    grids = {
        (event["name"], float(event["ts"])): "x".join(map(str, event.get("args", {}).get("grid", ())))
        for event in events
        if event.get("ph") == "X"
    }
    rows = []
    for name, kernels in zip(names, zip(*(step.kernels for step in alike))):
        times = (statistics.median(k.own for k in kernels), statistics.median(k.duration for k in kernels))
        rows.append(KernelRow(name, grids[name, kernels[0].start], *times))
    return rows, count


def _names(step: Step) -> tuple[str, ...]:
    return tuple(kernel.name for kernel in step.kernels)


def profile(config: dict[str, Any], ranks: int, layers: int, counts: Iterable[int], **options: Any) -> None:
    """Print the kernels of decode steps of each number of sequences. config: of a preset; options: of `LLM`."""
    counts = list(counts)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
        since = time.perf_counter()
        llm = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, tensor_parallel_size=ranks, max_model_len=1024,
            max_num_seqs=max(counts), num_kvcache_blocks=4 * max(counts), seed=0, enable_prefix_caching=False, **options
        )  # fmt: skip
    print(f"{layers} layers on {ranks} rank(s), {llm.device_name}: started in {time.perf_counter() - since:.1f} s")
    for count in counts:
        events, step_us = _recorded(llm.engine, count)
        rows, steps = kernel_rows(events)
        print(f"\n{count} sequences: {step_us:,.0f} us a decode step without the profiler; medians of {steps} steps")
        print("| kernel | grid | us of its own | us from its start |\n|---|---|---|---|")
        for row in rows:
            print(f"| {row.name[:60]} | {row.grid} | {row.own_us:.1f} | {row.us:.1f} |")
        print(f"| all {len(rows)} kernels | | {sum(row.own_us for row in rows):.1f} | |", flush=True)


def _recorded(engine: Any, count: int) -> tuple[list[dict[str, Any]], float]:
    """The events of some decode steps, and the microseconds of a step that is not recorded."""
    generator = torch.Generator().manual_seed(count)
    prompts = torch.randint(0, engine.model_config.vocab_size, (count, PROMPT), generator=generator).tolist()
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=256)
    requests = [engine.make_request(prompt, params) for prompt in prompts]
    engine.queue(*requests, offline=True)
    while any(request.first_token_time is None for request in requests):
        engine.step()
    for _ in range(SKIPPED):
        engine.step()
    traces: list[dict[str, Any]] = []
    with profiled(torch.cuda.is_available(), traces):
        for _ in range(RECORDED):
            with record_function(f"decode: {count} sequences"):
                engine.step()
        synchronize()
    since = time.perf_counter()
    for _ in range(UNRECORDED):
        engine.step()
    synchronize()
    step_us = (time.perf_counter() - since) / UNRECORDED * 1e6
    for request in requests:
        engine.abort(request)
    while engine.has_unfinished:
        engine.step()
    return traces[0]["traceEvents"], step_us
