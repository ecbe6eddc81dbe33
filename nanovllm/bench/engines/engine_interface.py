"""What the engines share: their interface, errors, and serving requests as they arrive."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from nanovllm.bench.job import Job, RequestTimes, Run
from nanovllm.bench.workload_cost import ModelShape
from nanovllm.bench.workloads import Item
from nanovllm.hardware.product_rates import has_fp8_products
from nanovllm.model_config import ModelConfig


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

        An engine may have a `warm_up` too, which is called instead before what is measured, and
        `quantised_weights(num_tokens)`, weights of the layers that a step of `num_tokens` multiplies with activations
        of 8-bit floats.
        """

    def close(self) -> None: ...


def gguf_config(job: Job) -> ModelConfig:
    """The architecture of the job's GGUF file, for engines that read nothing else."""
    if job.shape is None:
        raise EngineError(f"{job.engine} is measured with GGUF files here; pass --model FILE.gguf")
    return ModelConfig.from_dict(job.shape)


def cpu_threads() -> int:
    """Threads of an engine on a CPU: $NANOVLLM_CPU_THREADS, else the processors that this process may use."""
    return int(os.environ.get("NANOVLLM_CPU_THREADS", 0)) or len(os.sched_getaffinity(0))


_INT = {"type": "int", "strategy": "group", "group_size": 128, "symmetric": True, "dynamic": False}
_QUANTIZATION: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    **{
        f"int{bits}": {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": bits, **_INT}}},
        }
        for bits in (4, 8)
    },
}  # fmt: skip
"""What a checkpoint's config.json says that is stored as `LLM(quantization=...)` stores weights; for fp8 one with the
blocks in which models are published, where ours have a scale for each row."""


def model_directory(job: Job, folder: Path) -> str:
    """What a peer loads: the model's path, or for a preset a folder with nothing but its config.json.

    Raises:
        EngineError: a model with weights is to be quantised while it is loaded, which engines do differently.
    """
    form = job.options.get("quantization")
    if job.config is None:
        if form:
            raise EngineError(
                f"{job.engine} quantises a model in another way; pass a quantised checkpoint as --model, or a --preset"
            )
        return job.model
    kinds = {
        "Qwen3ForCausalLM": "qwen3", "Qwen3MoeForCausalLM": "qwen3_moe", "Qwen2ForCausalLM": "qwen2",
        "LlamaForCausalLM": "llama", "MistralForCausalLM": "mistral", "SmolLM3ForCausalLM": "smollm3",
        "Phi3ForCausalLM": "phi3", "Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3_text",
    }  # fmt: skip
    config = {"model_type": kinds[job.config["architectures"][0]], "hidden_act": "silu", **job.config}
    config["dtype"] = job.options.get("dtype") or config.get("dtype", "bfloat16")
    if job.options.get("lm_head_quantization"):
        raise EngineError(f"{job.engine} has no --lm-head-quantization; leave one of them out")
    if form:
        if form not in _QUANTIZATION:
            raise EngineError(f"{job.engine} has no quantization={form!r}; choose one of {', '.join(_QUANTIZATION)}")
        config["quantization_config"] = _QUANTIZATION[form]
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def quantised_by_peer(job: Job, config: ModelConfig) -> int:
    """Weights of the layers that vLLM and SGLang multiply with activations of 8-bit floats, in steps of any size.

    These are all for `quantization="fp8"`, whose activation scheme is dynamic, on a GPU with products of 8-bit floats.
    """
    if job.options.get("quantization") != "fp8" or not has_fp8_products(torch.device("cuda")):
        return 0
    return ModelShape.of(config, 1).token_parameters


def run_open_loop(
    items: Sequence[Item],
    add: Callable[[Item], Hashable],
    step: Callable[[], Iterable[tuple[Hashable, int]]],
    is_busy: Callable[[], bool],
) -> Run:
    """Serve requests as they arrive.

    Args:
        add: gives a request to the engine, and returns a key for it.
        step: runs a step, and returns the key and the number of output tokens so far of each request that has new ones.
        is_busy: whether any request is unfinished.
    """
    stamps: dict[Hashable, list[float]] = {}
    arrivals: dict[Hashable, float] = {}
    todo = list(items)[::-1]
    started = time.perf_counter()
    while todo or is_busy():
        now = time.perf_counter() - started
        while todo and todo[-1].arrival <= now:
            item = todo.pop()
            key = add(item)
            # From when it was due: a step that was running then is part of the wait.
            arrivals[key], stamps[key] = item.arrival, []
        if not is_busy():
            time.sleep(max(0.0, todo[-1].arrival - (time.perf_counter() - started)))
            continue
        grown = step()
        now = time.perf_counter() - started
        for key, num_output in grown:
            stamps[key] += [now] * (num_output - len(stamps[key]))
    seconds = time.perf_counter() - started
    return Run(
        seconds, [RequestTimes(s[0] - arrivals[k], s[-1] - arrivals[k], len(s), gaps(s)) for k, s in stamps.items()]
    )


def gaps(times: Sequence[float]) -> list[float]:
    return [b - a for a, b in zip(times, times[1:])]
