"""nanovllm, through its public interface."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from nanovllm.bench.engines.engine_interface import EngineError, gaps, run_open_loop
from nanovllm.bench.job import Job, RequestTimes, Run
from nanovllm.bench.workloads import Item
from nanovllm.sampling_params import SamplingParams
from nanovllm.wording import counted

_PACKED = ("PackedWeight", "PackedDecoderForCausalLM")
"""Modules whose weights may take other bytes than those of the dtype."""


class NanovllmEngine:
    """Requests that arrive at once go through `LLM.generate`; later ones through the engine's steps."""

    def __init__(self, job: Job, llm_class: Any) -> None:
        options = {"skip_tokenizer_init": True, "max_model_len": job.max_model_len, **job.options}
        if job.config is not None:
            options["load_format"] = "dummy"
        self._job = job
        self.llm = llm_class(job.model, **options)
        self.config = self.llm.engine.model_config
        if plugins := job.options.get("kernel_plugins"):
            kernels = self.llm.kernels
            if not any(kernels.provider(op).origin for op in kernels.providers):
                self.close()
                listed = " ".join(f"--kernel-plugin {plugin}" for plugin in plugins)
                raise EngineError(f"no kernel of the plugin runs here; `nanovllm kernels list {listed}` says why")

    def about(self) -> dict[str, Any]:
        from importlib.metadata import PackageNotFoundError, version

        try:
            number = version("nanovllm")
        except PackageNotFoundError:
            number = "source"
        name, _, dtype = self.llm.device_name.rpartition(", ")
        providers = dict(self.llm.kernels.providers)
        about = {"version": number, "device": name, "dtype": dtype, "kernels": providers}
        if (arch := os.environ.get("NANOVLLM_CPU_ARCH", "native")) != "native" and "cpu" in providers.values():
            about["compiled_for"] = arch
        return about

    @property
    def bytes_of_a_weight(self) -> float | None:
        """The mean over the weights that each step reads; None: it is that of the dtype, or of the file."""
        model = self.llm.engine.runner.model
        packed = any(type(module).__name__ in _PACKED for module in model.modules())
        read = model.read_bytes_of_a_weight if packed else None
        # What is not quantised is counted as peers' weights are: without the rows that fill tiles up.
        return None if read is None or read >= getattr(torch, self.about()["dtype"]).itemsize else read

    def quantised_weights(self, num_tokens: int) -> int:
        """Weights of the layers, on all ranks, that a step of `num_tokens` tokens multiplies with quantised
        activations.
        """
        of_rank = self.llm.engine.runner.model.quantised_weights(num_tokens)
        return of_rank * (self._job.options.get("tensor_parallel_size") or 1)

    def run(self, items: Sequence[Item]) -> Run:
        if any(item.arrival for item in items):
            run = self._run_open_loop(items)
        else:
            run = self._run_closed_loop(items)
        wrong = [(i.num_output, r.num_output) for i, r in zip(items, run.requests) if i.num_output != r.num_output]
        if wrong:
            raise RuntimeError(f"expected {counted(wrong[0][0], 'output token')}, got {wrong[0][1]}")
        if len(items) != len(run.requests):
            raise RuntimeError("requests were lost")
        return run

    def _run_closed_loop(self, items: Sequence[Item]) -> Run:
        with _stamped_steps(self.llm.engine) as steps:
            params = [sampling_params(self._job, item) for item in items]
            started = time.perf_counter()
            outputs = self.llm.generate([item.prompt for item in items], params, use_tqdm=False)
            seconds = time.perf_counter() - started
        stamps: dict[str, list[float]] = {}
        for at, grown in steps:
            for request in grown:
                stamps.setdefault(str(request.request_id), []).append(at)
        return Run(seconds, [
            RequestTimes(
                o.metrics.time_to_first_token, o.metrics.total_time, len(o["token_ids"]), gaps(stamps[o.request_id])
            )
            for o in outputs
        ])  # fmt: skip

    def _run_open_loop(self, items: Sequence[Item]) -> Run:
        engine = self.llm.engine
        return run_open_loop(
            items,
            add=lambda item: engine.add_request(item.prompt, sampling_params(self._job, item)),
            step=lambda: [(request, request.num_output_tokens) for request in engine.step()],
            is_busy=lambda: engine.has_unfinished,
        )

    def close(self) -> None:
        del self.llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def sampling_params(job: Job, item: Item) -> SamplingParams:
    return SamplingParams(
        temperature=job.temperature, top_p=job.top_p, ignore_eos=True, max_tokens=item.num_output
    )  # fmt: skip


@contextmanager
def _stamped_steps(engine: Any) -> Iterator[list[tuple[float, list[Any]]]]:
    """The time of each step within, and the requests that got tokens in it.

    Costs one clock reading and one append a step.
    """
    steps: list[tuple[float, list[Any]]] = []
    step = engine.step

    def stamped() -> list[Any]:
        grown = step()
        steps.append((time.perf_counter(), grown))
        return grown

    engine.step = stamped
    try:
        yield steps
    finally:
        del engine.step  # the class's own again
