"""The engines that can be measured. A module is imported in the process that runs its engine."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from nanovllm.bench.engines.engine_interface import Engine, EngineError
from nanovllm.bench.job import Job

ENGINES = ("nanovllm", "transformers", "vllm", "sglang", "llama.cpp", "openvino")
_PACKAGES = {"llama.cpp": ("llama_cpp", "llama-cpp-python"), "openvino": ("openvino_genai", "openvino-genai")}
"""engine -> (the module that it needs, what pip calls that)"""


def needed_package(engine: str) -> tuple[str, str]:
    """(the module that an engine needs, what pip calls it)."""
    return _PACKAGES.get(engine, (engine, engine))


def start(job: Job, llm_class: Any) -> Engine:
    """Load the job's model into the job's engine.

    Args:
        llm_class: `nanovllm.LLM`, which this package may not import.
    """
    if job.engine == "nanovllm":
        from nanovllm.bench.engines.nanovllm import NanovllmEngine

        return NanovllmEngine(job, llm_class)
    module, package = needed_package(job.engine)
    if importlib.util.find_spec(module) is None:
        raise EngineError(f"{job.engine} is not installed; pip install {package}")
    return importlib.import_module(f"nanovllm.bench.engines.{job.engine.replace('.', '_')}").start(job)
