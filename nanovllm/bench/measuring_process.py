"""What runs in a measuring process: load one engine, run the job's workloads, send a row for each."""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from nanovllm.arguments import full_dtype
from nanovllm.bench.engines import start
from nanovllm.bench.engines.engine_interface import Engine, EngineError
from nanovllm.bench.foreign_load import ForeignLoad
from nanovllm.bench.job import Emit, Job, Repeat, ResultRow, stopped
from nanovllm.bench.workload_cost import ModelShape, workload_work
from nanovllm.bench.workloads import Workload
from nanovllm.hardware.measured_rates import Rates, rates
from nanovllm.hardware.product_rates import has_fp8_products
from nanovllm.sampling_params import SamplingParams

_WARMUP_SEED = 1_000_000
_DTYPES = ("bfloat16", "float16", "float32")


def work(job: Job, llm_class: Any, emit: Emit, rates_of: Callable[[Job], Rates] | None = None) -> None:
    """Do a job. An error of an engine or a workload becomes a row with the reason. rates_of: `measure_rates`."""
    if job.task == "rates":
        emit("rates", dataclasses.asdict((rates_of or measure_rates)(job)))
    elif job.task == "ops":
        emit("ops", find_ops(job, llm_class))
    elif job.task == "profile":
        from nanovllm.bench.profiler import profile

        emit("profile", profile(job, llm_class))
    else:
        measure(job, functools.partial(start, llm_class=llm_class), emit)


def measure_rates(job: Job) -> Rates:
    """The rates of the job's device, or of the GPUs that share its model.

    A job of its own, so that its device memory is free again when an engine starts.
    """
    device = torch_device(job)
    of_one = rates(device, dtypes_of(job), refresh=True)
    return of_several(of_one, job.options.get("tensor_parallel_size") or 1) if device.type == "cuda" else of_one


def of_several(one: Rates, count: int) -> Rates:
    """The rates of `count` devices that each do an equal share of the work."""
    if count == 1:
        return one
    return dataclasses.replace(
        one, device=f"{count} x {one.device}", bandwidth=count * one.bandwidth, read=count * one.read,
        copy=count * one.copy, matmul={dtype: count * rate for dtype, rate in one.matmul.items()},
        cache_bytes=count * one.cache_bytes, cache_bandwidth=count * one.cache_bandwidth,
    )  # fmt: skip


def dtypes_of(job: Job) -> tuple[str, ...]:
    """The dtypes whose products are measured: on a CPU float32, and what the model may be computed in.

    On a GPU these are all dtypes of models, and float8 for weights that activations may be quantised for.
    """
    config, path = job.config or {}, Path(job.model) / "config.json"
    if job.config is None and path.is_file():
        config = json.loads(path.read_text())
    device = torch_device(job)
    if device.type == "cuda":
        fp8 = "fp8" in (job.options.get("quantization"), job.options.get("prompt_activations")) or _stores_fp8(
            config.get("quantization_config") or {}
        )
        switches = ("activation_quantization", "use_custom_kernels")
        fp8 = fp8 and not any(job.options.get(name) is False for name in switches)
        fp8 = fp8 or job.options.get("dtype") == "float8"
        return tuple(sorted((*_DTYPES, "float8") if fp8 and has_fp8_products(device) else _DTYPES))
    named = job.options.get("dtype") or config.get("dtype") or config.get("torch_dtype")
    return tuple(sorted(dtype for dtype in _DTYPES if dtype in ("float32", named)))


def _stores_fp8(quantization: dict[str, Any]) -> bool:
    """Whether a checkpoint's `quantization_config` may be that of 8-bit floats."""
    groups = quantization.get("config_groups", {}).values()
    return quantization.get("quant_method") in ("fp8", "fbgemm_fp8", "modelopt") or any(
        (group.get("weights") or {}).get("type") == "float" for group in groups
    )


def torch_device(job: Job) -> torch.device:
    name = job.options.get("device", "auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def measure(
    job: Job, start_engine: Callable[[Job], Engine], emit: Emit, clock: Callable[[], float] = time.perf_counter
) -> None:
    """Run each workload; one row each, whether it could be measured or not.

    An error that the engine did not foresee ends the process, since the engine may be damaged: the workloads that
    follow need another one.
    """
    emit("loading", job.engine)
    started = clock()
    try:
        engine = start_engine(job)
    except Exception as error:
        for workload in job.workloads:
            emit("row" if isinstance(error, EngineError) else "failed", _row(job, workload, describe(error)).to_json())
        return
    about = {**engine.about(), "seconds_to_ready": clock() - started}
    for workload in job.workloads:
        emit("started", workload.name)
        row = _row(job, workload, about=about)
        try:
            measure_workload(job, workload, engine, row, clock, emit)
        except EngineError as error:
            row.error = describe(error)
        except Exception as error:
            row.error = describe(error)
            emit("failed", row.to_json())
            break
        emit("row", row.to_json())
    with suppress(Exception):  # of an engine that is dead
        engine.close()
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure_workload(
    job: Job, workload: Workload, engine: Engine, row: ResultRow, clock: Callable[[], float] = time.perf_counter,
    emit: Emit = lambda kind, content: None,
) -> None:  # fmt: skip
    """Warm up, then the repeats.

    Each draws its own prompts, so that nothing comes from an earlier one's prefix cache.
    """
    model, started, limit = model_shape(job, engine.config, row.about["dtype"]), clock(), job.limit
    read = getattr(engine, "bytes_of_a_weight", None)
    if read is not None:
        model = dataclasses.replace(model, weight_bytes=read)
    if torch_device(job).type == "cpu" and model.weight_bytes < 0.9 * getattr(torch, row.about["dtype"]).itemsize:
        row.about["quantised"] = True
    warm_up = getattr(engine, "warm_up", engine.run)
    name = ", ".join(filter(None, (workload.name, job.variant)))
    for i in range(job.warmup):
        emit("run", f"{name}: warm-up {i + 1} of {job.warmup}")
        row.warmup_seconds.append(warm_up(workload.draw(_WARMUP_SEED + job.seed + i, model.vocab)).seconds)
    for i in range(job.repeat):
        # A repeat may be slower than the last. One that takes too long is ended by the process that started this one.
        next_one = 1.25 * row.repeats[-1].seconds if row.repeats else 0.0
        if limit is not None and clock() - started + next_one > limit:
            break
        emit("run", f"{name}: run {i + 1} of {job.repeat}")
        items = workload.draw(job.seed + i, model.vocab)
        others = ForeignLoad()
        run = engine.run(items)
        foreign = others.cores()
        total = workload_work(model, items, workload.shared_prefix, getattr(engine, "quantised_weights", None))
        num_prompt = sum(len(item.prompt) for item in items)
        row.repeats.append(Repeat.of(run, num_prompt, total, foreign))
        row.peak_memory = max(row.peak_memory or 0, memory_in_use(row.about["device"]))
    if limit is not None and not row.repeats:
        raise EngineError(stopped(limit))


_BYTES = {"fp8": 1 + 4 / 128**2, "int8": 1 + 2 / 128, "int4": 0.5 + 2 / 128, "q6_k": 210 / 256, "q4_k_m": 0.6}
"""Bytes of a weight that is quantised while it is loaded; q4_k_m about, as its mixture depends on the shape."""


def model_shape(job: Job, config: Any, dtype: str) -> ModelShape:
    name = full_dtype(str(job.options.get("kv_cache_dtype") or "auto"))
    kv_bytes = 1 if name.startswith("fp8") else None
    if name in _DTYPES:
        kv_bytes = getattr(torch, name).itemsize
    shape, path = ModelShape.of(config, getattr(torch, dtype).itemsize, kv_bytes), Path(job.model)
    if path.suffix == ".gguf" and torch_device(job).type == "cpu":  # engines read its blocks as they are
        shape = dataclasses.replace(shape, weight_bytes=path.stat().st_size / shape.parameters)
    if form := job.options.get("quantization"):  # all but the head
        body, head = shape.layers * shape.layer_parameters, shape.vocab * shape.hidden
        of_head = _BYTES.get(job.options.get("lm_head_quantization") or ("q6_k" if form == "q4_k_m" else ""), 0.0)
        read = _BYTES[form] * body + (of_head or shape.weight_bytes) * head
        shape = dataclasses.replace(shape, weight_bytes=read / (body + head))
    return shape


def memory_in_use(device: str) -> int:
    """Bytes in use on the GPU, by any process, since an engine may have several; on a CPU, the peak of this process."""
    if device != "cpu" and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return total - free
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def describe(error: BaseException) -> str:
    """An error in one line, for a row."""
    text = " ".join(str(error).split())
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return f"out of memory: {text}"
    return text if isinstance(error, EngineError) else f"{type(error).__name__}: {text}"


def find_ops(job: Job, llm_class: Any) -> dict[str, str]:
    """Which ops the model really calls, and the provider of each: op -> provider."""
    from nanovllm.bench.engines.nanovllm import NanovllmEngine
    from nanovllm.bench.instrument import Instrument
    from nanovllm.kernels.op.selection import decorated_kernels

    instrument = Instrument()
    with decorated_kernels(instrument.decorate):
        eager = dataclasses.replace(job, options={**job.options, "enforce_eager": True})
        engine = NanovllmEngine(eager, llm_class)
    with instrument.costing():
        prompts = [[1] * 8, [1] * 5]
        engine.llm.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    engine.close()
    return {call.op: call.provider for call in instrument.costs if call.registered}


def _row(job: Job, workload: Workload, error: str | None = None, about: dict[str, Any] | None = None) -> ResultRow:
    return ResultRow(
        job.engine, job.variant, job.model, workload.name, workload.description, error, about=about or {},
        open_loop=workload.rate is not None,
    )  # fmt: skip
