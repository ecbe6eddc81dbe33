"""The work that benchmarks of the adapter of transformers time: `generate`, and prefill."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch


def timed(run: Callable[[], Any], device: str, times: int = 1) -> float:
    """Seconds of a call, the least of several."""
    sync = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    least = float("inf")
    for _ in range(times):
        sync()
        start = time.perf_counter()
        run()
        sync()
        least = min(least, time.perf_counter() - start)
    return least


def busy(run: Callable[[], Any]) -> float:
    """Seconds of a call in which the GPU computes or copies, by PyTorch's profiler: the host has no part in it."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    return sum(event.self_device_time_total for event in events) / 1e6


class Generating:
    """`generate` of one token after another: seconds a step.

    Args:
        compiled: let transformers compile the step.
        sampling: draw the tokens: options of `generate` such as "temperature=0.6,top_k=20"; empty: the largest logits.

    The time of a shorter run, of `start_len` tokens, is taken from that of the whole: of the prompt, and what else is
    done once, such as to capture a graph.
    """

    def __init__(
        self, model: Any, batch: int, args: argparse.Namespace, compiled: bool = False, sampling: str = ""
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(3, model.config.vocab_size, (batch, args.prompt_len), generator=generator)
        self.name = f"generate {batch} x {args.prompt_len} -> {args.output_len}, {args.cache} cache" + ", drawn" * bool(
            sampling
        )
        self._model, self._ids, self._args, self._compiled = model, ids.to(args.device), args, compiled
        self._start = args.start_len
        options = (entry.split("=") for entry in sampling.split(",") if entry)
        self._draws: dict[str, Any] = {name: json.loads(value) for name, value in options}

    def generate(self, tokens: int, **options: Any) -> Any:
        return self._model.generate(
            self._ids, attention_mask=torch.ones_like(self._ids), min_new_tokens=tokens, max_new_tokens=tokens,
            do_sample=bool(self._draws), cache_implementation=self._args.cache, disable_compile=not self._compiled,
            pad_token_id=0, **self._draws, **options,
        )  # fmt: skip

    def prepare(self) -> None:
        self.generate(self._args.output_len)
        self.generate(self._start)

    def seconds(self, times: int = 1) -> float:
        return self._a_step(lambda run: timed(run, self._args.device, times))

    def busy_seconds(self) -> float:
        return self._a_step(busy)

    def _a_step(self, measure: Callable[[Callable[[], Any]], float]) -> float:
        whole, first = (measure(lambda n=n: self.generate(n)) for n in (self._args.output_len, self._start))
        return (whole - first) / max(1, self._args.output_len - self._start)


class Prefilling:
    """A forward of prompts, without a cache: seconds."""

    def __init__(self, model: Any, batch: int, tokens: int, args: argparse.Namespace, compiled: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(3, model.config.vocab_size, (batch, tokens), generator=generator)
        self.name = f"prefill {batch} x {tokens}"
        self._ids, self._device = ids.to(args.device), args.device
        self._model, self._compiled = model, compiled

    def prepare(self) -> None:
        self._forward = torch.compile(self._model.forward, dynamic=False) if self._compiled else self._model
        for _ in range(2):
            self.logits()

    @torch.no_grad()
    def logits(self) -> torch.Tensor:
        return self._forward(self._ids, use_cache=False, logits_to_keep=1).logits

    def seconds(self, times: int = 1) -> float:
        return timed(self.logits, self._device, times)

    def busy_seconds(self) -> float:
        return busy(self.logits)


def works(
    args: argparse.Namespace, compiled: bool = False, sampling: str = ""
) -> list[Callable[[Any], Generating | Prefilling]]:
    """What makes the works that --batches and --prefill name, each from a model. sampling: as of `Generating`."""
    made: list[Callable[[Any], Generating | Prefilling]] = [
        lambda model, b=int(batch): Generating(model, b, args, compiled, sampling) for batch in args.batches.split(",")
    ]
    if args.prefill:
        shape = [int(n) for n in args.prefill.split("x")]
        made.append(lambda model: Prefilling(model, *shape, args, compiled))
    return made


def limit(model: Any, work: Any, device: str) -> float | None:
    """The least seconds that a GPU could take: the weights read once, or their products."""
    if not device.startswith("cuda"):
        return None
    from nanovllm.hardware.roofline import copy_bandwidth, matmul_rate

    used = [p for name, p in model.named_parameters() if "embed_tokens" not in name or model.config.tie_word_embeddings]
    if isinstance(work, Generating):
        return sum(p.nbytes for p in used) / copy_bandwidth(torch.device(device))
    inner = sum(
        p.numel() for name, p in model.named_parameters() if "embed_tokens" not in name and "lm_head" not in name
    )
    return 2 * inner * work._ids.numel() / matmul_rate(torch.device(device), model.dtype)
