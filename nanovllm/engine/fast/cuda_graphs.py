"""Decode steps as CUDA graphs: one launch instead of one for each kernel.

A graph has fixed shapes, so there is one for each of a few batch sizes, and a batch is padded to the next larger one. The
reference's attention does work in proportion to the bound on the context length, so for it there are a few of these
bounds as well; a kernel that reads the lengths on the device needs only the largest. They are captured when the engine
starts, in one piece of memory, but for those of shared prefixes and those that prompts ride on: each of these when the first
batch of its size comes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from nanovllm.engine.fast import piggyback
from nanovllm.engine.fast.decode_state import SamplingMode
from nanovllm.engine.fast.prefix_groups import LEAST_ROWS
from nanovllm.hardware.cuda_graph_memory import GraphMemory, recover_generator

_LARGEST_SMALL_BATCH = 64
_LARGEST_WHOLE_STEP = 32


def batch_buckets(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, 8, then steps of about an eighth; the last is `max_num_seqs`, so none is missed."""
    sizes = {s for s in (1, 2, 4, 8) if s < max_num_seqs}
    size = 16
    while size < max_num_seqs:
        sizes.add(size)
        size += 16 if size < 256 else 32 if size < 512 else size // 8
    return sorted(sizes | {max_num_seqs})


def context_buckets(max_model_len: int) -> list[int]:
    """Bounds on the context length: powers of two from 512; the last is `max_model_len`."""
    sizes = []
    size = 512
    while size < max_model_len:
        sizes.append(size)
        size *= 2
    return [*sizes, max_model_len]


class DecodeBuckets:
    """The sizes that decode batches are padded to, with or without graphs, so that both compute the same thing.

    Args:
        by_context: whether attention costs what the bound on the context length says, not what the lengths are.
        sharing: whether there are steps that attend to shared prefixes once (`PrefixGroups`).
        riding: whether prompts ride on decodes (`pacing`).
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        by_context: bool = True,
        sharing: bool = False,
        riding: bool = False,
    ) -> None:
        self.by_context = by_context
        self.batch_sizes = batch_buckets(max_num_seqs)
        self.shared_sizes = [size for size in self.batch_sizes if sharing and size >= LEAST_ROWS]
        self.context_lens = context_buckets(max_model_len) if by_context else [max_model_len]
        rows = sorted({piggyback.padded_rows(size, max_num_seqs) for size in self.batch_sizes})
        self.riding_sizes = [(n, tokens) for n in rows for tokens in piggyback.riding_sizes(n)] if riding else []
        """(rows, tokens that ride beside them)"""
        # By context there would be many more graphs, of a slow kernel.
        self.whole_sizes = [size for size in self.batch_sizes if size <= _LARGEST_WHOLE_STEP and not by_context]

    def fit(self, num_seqs: int, max_context_len: int) -> tuple[int, int]:
        """The smallest (batch size, context length) that holds a batch."""
        return (
            self.batch_sizes[bisect_left(self.batch_sizes, num_seqs)],
            self.context_lens[bisect_left(self.context_lens, max_context_len)],
        )


def capture(
    fn: Callable[[], object], stream: torch.cuda.Stream, memory: GraphMemory | None = None
) -> torch.cuda.CUDAGraph:
    """What `fn` launches on `stream`, as a graph. memory: of other graphs; None: its own.

    `torch.cuda.graph` would empty the caching allocator, wait for the GPU, and ask several times whether there is one, 0.75 ms each time.
    What `fn` launches for the first time must have run on this stream before.

    Raises:
        Whatever fn raised; RuntimeError, if it did what a graph cannot hold.
    """
    graph = torch.cuda.CUDAGraph()
    memory = memory or GraphMemory()
    before = torch.cuda.current_stream(stream.device)
    torch.cuda.set_stream(stream)
    try:
        graph.capture_begin(memory.handle, "thread_local")  # other threads may allocate meanwhile
        try:
            fn()
            graph.capture_end()
        except BaseException:
            try:
                graph.capture_end()
            except RuntimeError:  # it was spoiled, or has ended
                memory.give_up(stream.device)
            recover_generator(stream.device)
            raise
    finally:
        torch.cuda.set_stream(before)
    return graph


class DecodeGraphs:
    """Captured decode steps over static device state: the model up to the logits, then sampling and the state's advance.

    The two halves are graphs of their own: what sampling a batch needs changes from step to step, and capturing the model
    again for each kind of sampling takes time. It gains the 4 us between two graphs and a copy of the logits, 2 us, which
    is worth it where a step is short: small batches have graphs of whole steps as well.

    Args:
        model: (rows, context length, whether prefixes are shared, tokens that ride) -> None: from the state's first rows to
            static logits.
        draw: (rows, mode) -> None: from these logits to the state of the next step.
        whole: (rows, context length, mode) -> None: both in one, with no shared prefixes nor riders.
        ride: (rows, tokens that ride) -> None: a first call of `model` with riders, all of them padding.
        modes: the kinds of sampling to capture.
        brief: entered for the first calls, which create and measure what must not be in a capture.
        All must depend on no host value that changes, and leave nothing but static buffers behind.
    """

    def __init__(
        self,
        model: Callable[[int, int, bool, int], object],
        draw: Callable[[int, SamplingMode], object],
        whole: Callable[[int, int, SamplingMode], object],
        ride: Callable[[int, int], object],
        buckets: DecodeBuckets,
        modes: Sequence[SamplingMode],
        device: torch.device,
        brief: AbstractContextManager[None] | None = None,
    ) -> None:
        largest, longest = buckets.batch_sizes[-1], buckets.context_lens[-1]
        # What is created, compiled or measured in a first call. Small batches may have other kernels.
        first: list[tuple[Any, ...]] = [(model, largest, longest, False, 0)]
        first += [
            (model, rows, buckets.context_lens[0], False, 0)
            for rows in buckets.batch_sizes
            if rows <= _LARGEST_SMALL_BATCH
        ]
        first += [(model, rows, longest, True, 0) for rows in buckets.shared_sizes]
        first += [(ride, rows, tokens) for rows, tokens in buckets.riding_sizes]
        first += [(draw, largest, mode) for mode in modes]
        with brief or nullcontext():
            self._prepare(first, device)
        # Largest first, so that the smaller ones fit into what it already has.
        self._model = {
            (rows, context, False, 0): self._capture(model, rows, context, False, 0)
            for rows in reversed(buckets.batch_sizes)
            for context in reversed(buckets.context_lens)
        }
        # The rest of them when they are first wanted: most engines see few of these sizes.
        self._model |= {
            (rows, longest, True, 0): self._capture(model, rows, longest, True, 0) for rows in buckets.shared_sizes[-1:]
        }
        self._capture_model = partial(self._capture, model)
        self._draw = {
            (rows, mode): self._capture(draw, rows, mode) for rows in reversed(buckets.batch_sizes) for mode in modes
        }
        self._whole = {
            (rows, mode): self._capture(whole, rows, longest, mode)
            for rows in reversed(buckets.whole_sizes)
            for mode in modes
        }

    def _prepare(self, calls: Sequence[tuple[Any, ...]], device: torch.device) -> None:
        """Run these (function, *arguments) once, on the stream that captures."""
        self._memory = GraphMemory()
        self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(self._stream):
            for fn, *args in calls:
                fn(*args)
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()  # graphs have memory of their own

    def _capture(self, fn: Callable[..., object], *args: Any) -> torch.cuda.CUDAGraph:
        return capture(lambda: fn(*args), self._stream, self._memory)

    @property
    def stream(self) -> torch.cuda.Stream:
        """The stream that captures, for which kernels have their counters and workspaces already."""
        return self._stream

    @property
    def memory(self) -> GraphMemory:
        """Of the graphs; others may share it that never run at the same time."""
        return self._memory

    def __len__(self) -> int:
        return len(self._model) + len(self._draw) + len(self._whole)

    def run(self, rows: int, max_context_len: int, shared: bool, riding: int, mode: SamplingMode) -> bool:
        """Replay a step. False: this kind of sampling was not captured; the step ends with the static logits."""
        whole = None if shared or riding else self._whole.get((rows, mode))
        if whole is not None:
            whole.replay()
            return True
        key = rows, max_context_len, shared, riding
        if key not in self._model:
            self._model[key] = self._capture_model(*key)
        self._model[key].replay()
        draw = self._draw.get((rows, mode))
        if draw is not None:
            draw.replay()
        return draw is not None
