"""The engines that can be measured. A module is imported in the process that runs its engine."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from nanovllm.bench.engines.common import Engine, EngineError
from nanovllm.bench.job import Job

ENGINES = ("nanovllm", "transformers", "vllm")


def start(job: Job, llm_class: Any) -> Engine:
    """Load the job's model into the job's engine.

    Args:
        llm_class: `nanovllm.LLM`, which this package may not import.
    """
    if job.engine == "nanovllm":
        from nanovllm.bench.engines.nanovllm import NanovllmEngine

        return NanovllmEngine(job, llm_class)
    if importlib.util.find_spec(job.engine) is None:
        raise EngineError(f"{job.engine} is not installed; pip install {job.engine}")
    return importlib.import_module(f"nanovllm.bench.engines.{job.engine}").start(job)
