"""The engines that can be measured, each behind the same few calls. A module is imported in the process that runs it."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from nanovllm.bench.job import Job, Run
from nanovllm.bench.workloads import Item
from nanovllm.model_config import ModelConfig

ENGINES = ("nanovllm", "transformers", "vllm")


class EngineError(RuntimeError):
    """The engine cannot be measured so; the message is the row's reason."""


class Engine(Protocol):
    """An engine with a model loaded.

    Attributes:
        config: the model's architecture.
    """

    config: ModelConfig

    def about(self) -> dict[str, Any]:
        """Facts for the record: "version", "device", "dtype", and what else there is to say."""

    def run(self, items: Sequence[Item]) -> Run:
        """Serve the requests, all at once if they arrive at 0, else as they arrive.

        An engine may have a `warm_up` too, which is called instead before what is measured.
        """

    def close(self) -> None: ...


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


def model_directory(job: Job, folder: Path) -> str:
    """What a peer loads: the model's path, or for a preset a folder with nothing but its config.json."""
    if job.config is None:
        return job.model
    kinds = {"Qwen3ForCausalLM": "qwen3", "LlamaForCausalLM": "llama"}
    config = {"model_type": kinds[job.config["architectures"][0]], "hidden_act": "silu", **job.config}
    config["dtype"] = job.options.get("dtype") or config.get("dtype", "bfloat16")
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)
