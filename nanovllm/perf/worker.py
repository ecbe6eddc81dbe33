"""What runs in a measuring process: load one engine, run the job's workloads, send what came of each."""

from __future__ import annotations

import gc
import resource
import sys
import time
from dataclasses import asdict
from typing import Any

import torch

from nanovllm.perf import device as device_rates
from nanovllm.perf.engines import Engine, EngineError, start
from nanovllm.perf.job import Emit, Job, Repeat, Row
from nanovllm.perf.roofline import ModelShape, workload_work
from nanovllm.perf.workloads import Workload
from nanovllm.sampling_params import SamplingParams

_WARMUP_SEED = 1_000_000


def work(job: Job, llm_class: Any, emit: Emit) -> None:
    """Do a job. Whatever goes wrong with an engine or a workload becomes a row with the reason."""
    if job.measure_rates:
        emit("rates", asdict(measure_rates(job)))
    if job.task == "ops":
        emit("ops", find_ops(job, llm_class))
    elif job.task == "profile":
        from nanovllm.perf.profiler import profile

        emit("profile", profile(job, llm_class))
    else:
        measure(job, llm_class, emit)


def measure_rates(job: Job) -> device_rates.Rates:
    device = torch_device(job)
    dtypes = {"bfloat16", "float16", "float32"} if device.type == "cuda" else {"float32"}
    if job.options.get("dtype") in ("bfloat16", "float16", "float32"):
        dtypes.add(job.options["dtype"])
    return device_rates.rates(device, tuple(sorted(dtypes)), refresh=True)


def torch_device(job: Job) -> torch.device:
    name = job.options.get("device", "auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def measure(job: Job, llm_class: Any, emit: Emit) -> None:
    """Run each workload; one row each, whether it could be measured or not."""
    emit("started", job.workloads[0].name)
    started = time.perf_counter()
    try:
        engine = start(job, llm_class)
    except Exception as error:
        for workload in job.workloads:
            emit("row", _row(job, workload, error=describe(error)).to_json())
        return
    about = {**engine.about(), "seconds_to_ready": time.perf_counter() - started}
    for workload in job.workloads:
        emit("started", workload.name)
        row = _row(job, workload, about=about)
        try:
            measure_workload(job, workload, engine, row)
        except Exception as error:
            row.error = describe(error)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        emit("row", row.to_json())
    engine.close()


def measure_workload(job: Job, workload: Workload, engine: Engine, row: Row) -> None:
    """Warm up, then the repeats. Each draws its own prompts, so that nothing comes from an earlier one's prefix cache."""
    model = model_shape(job, engine.config, row.about["dtype"])
    for i in range(job.warmup):
        items = workload.draw(_WARMUP_SEED + job.seed + i, model.vocab)
        row.warmup_seconds.append(engine.run(items).seconds)
    for i in range(job.repeat):
        items = workload.draw(job.seed + i, model.vocab)
        run = engine.run(items)
        total = workload_work(model, items, workload.shared_prefix)
        num_prompt = sum(len(item.prompt) for item in items)
        row.repeats.append(Repeat.of(run, num_prompt, total.bytes, total.flops))
        row.peak_memory = max(row.peak_memory or 0, memory_in_use(row.about["device"]))


def model_shape(job: Job, config: Any, dtype: str) -> ModelShape:
    kv_dtype = str(job.options.get("kv_cache_dtype") or "auto")
    return ModelShape.of(config, getattr(torch, dtype).itemsize, 1 if kv_dtype.startswith("fp8") else None)


def memory_in_use(device: str) -> int:
    """Bytes: of the GPU, whoever holds them, since an engine may have processes of its own; else this process's peak."""
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
    from nanovllm.kernels.selection import decorated_kernels
    from nanovllm.perf.engines.nanovllm import NanovllmEngine
    from nanovllm.perf.instrument import Instrument

    instrument = Instrument()
    with decorated_kernels(instrument.decorate):
        options = {**job.options, "enforce_eager": True}
        engine = NanovllmEngine(Job(**{**job.__dict__, "options": options}), llm_class)
    with instrument.costing():
        prompts = [[1] * 8, [1] * 5]
        engine.llm.generate(prompts, SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)
    engine.close()
    return {call.op: call.provider for call in instrument.costs if call.op in engine_ops(instrument)}


def engine_ops(instrument: Any) -> set[str]:
    return {call.op for call in instrument.costs if call.registered}


def _row(job: Job, workload: Workload, error: str | None = None, about: dict[str, Any] | None = None) -> Row:
    return Row(
        job.engine, job.variant, job.model, workload.name, workload.description, error, about=about or {},
        open_loop=workload.rate is not None,
    )  # fmt: skip
