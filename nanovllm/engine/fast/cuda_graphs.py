"""Decode steps as CUDA graphs: one launch instead of one for each kernel.

A graph has fixed shapes, so there is one for each of a few batch sizes, and a batch is padded to the next larger one.
The reference's attention does work in proportion to the bound on the context length, so for it there are a few of these
bounds as well; a kernel that reads the lengths on the device needs only the largest. Graphs are captured when the
engine starts, all in one piece of memory. Those of shared prefixes and of piggybacked prompts are captured when the
first batch of their size comes, since most engines see few of these sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch

from nanovllm.distributed.group import current_group
from nanovllm.engine.fast.step_shape import DecodeBuckets, SamplingMode, StepShape
from nanovllm.hardware.cuda_graph_memory import GraphMemory, recover_generator

logger = logging.getLogger(__name__)

_LARGEST_SMALL_BATCH = 64
_LOGGED_GRAPHS = 32


class Graph(Protocol):
    """Launches that were captured."""

    def replay(self) -> Any: ...


class GraphBackend(Protocol):
    """Captures launches. What a function launches for the first time must have run within `first_calls` before."""

    def first_calls(self, fn: Callable[[], object]) -> None:
        """Run a function that makes first calls: these create, compile or measure what must not be in a capture."""

    def capture(self, fn: Callable[[], object]) -> Graph:
        """What `fn` launches. The graph depends on no host value, and `fn` leaves nothing but static buffers behind."""


class CudaGraphs:
    """Captures CUDA graphs of one device, on one stream and in one piece of memory: no two of them run at the same
    time. The group of ranks that it is made for resets them when it ends.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group = current_group()
        self._memory = GraphMemory()
        self._stream = torch.cuda.Stream(device)  # kernels have counters and workspaces for each stream

    def first_calls(self, fn: Callable[[], object]) -> None:
        """As in `GraphBackend`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            fn()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # graphs have memory of their own

    def capture(self, fn: Callable[[], object]) -> torch.cuda.CUDAGraph:
        """As in `GraphBackend`."""
        graph = capture(fn, self._stream, self._memory)
        if self._group.size > 1:
            self._group.captured_graphs.add(graph)
        return graph


def capture(
    fn: Callable[[], object], stream: torch.cuda.Stream, memory: GraphMemory | None = None
) -> torch.cuda.CUDAGraph:
    """What `fn` launches on `stream`, as a graph. memory: of other graphs; None: its own.

    `torch.cuda.graph` would empty the caching allocator, wait for the GPU, and ask several times whether there is one,
    which takes 0.75 ms each time. What `fn` launches for the first time must have run on this stream before.

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
    """Captured decode steps over static device state, found by their `StepShape`.

    A step is two graphs, the model up to the logits, then sampling and the state's advance: what sampling a batch needs
    changes from step to step, and capturing the model again for each kind of sampling takes time. One graph saves the 4
    us between two and a copy of the logits, 2 us, which is worth it where a step is short: small batches have graphs of
    whole steps as well.

    Args:
        modes: the kinds of sampling to capture.
    """

    def __init__(self, backend: GraphBackend, buckets: DecodeBuckets, modes: Sequence[SamplingMode]) -> None:
        self._backend = backend
        self._buckets = buckets
        self._modes = modes
        self._graphs: dict[StepShape, Graph] = {}
        self._mask_graphs: dict[int, Graph] = {}

    def capture(self, launch: Callable[[StepShape], object]) -> None:
        """Capture the steps that most engines need. Every shape of `first_shapes` has run before.

        Args:
            launch: runs a step of a shape on static buffers. It is an argument of `run_model` too and is not kept: it
                refers to the owner of these graphs, and with such a cycle `del llm` would not free the GPU's memory.
        """
        shapes = self._shapes_at_start()
        for count, shape in enumerate(shapes, 1):
            self._graphs[shape] = self._backend.capture(partial(launch, shape))
            if count % _LOGGED_GRAPHS == 0:
                logger.info("decode graphs: %d of %d", count, len(shapes))

    def first_shapes(self) -> list[StepShape]:
        """The shapes whose first call creates, compiles or measures something. Small batches may have other kernels,
        and so may batches that are multiplied with another form of the weights.
        """
        buckets, longest = self._buckets, self._buckets.longest
        largest = buckets.batch_sizes[-1]
        of_form = buckets.largest_of_forms
        small = [rows for rows in buckets.batch_sizes if rows <= _LARGEST_SMALL_BATCH or rows in of_form]
        return [
            StepShape(largest, longest),
            *(StepShape(rows, buckets.context_lens[0]) for rows in small),
            *(StepShape(rows, longest, shared=True) for rows in buckets.shared_sizes),
            *(StepShape(rows, longest, piggybacked=tokens) for rows, tokens in buckets.piggybacked_sizes),
            *(StepShape(largest, mode=mode) for mode in self._modes),
        ]

    def _shapes_at_start(self) -> list[StepShape]:
        """What is captured at the start: the largest first, so that smaller ones fit into the memory that these
        have.
        """
        buckets, longest, modes = self._buckets, self._buckets.longest, self._modes
        sizes, contexts = buckets.batch_sizes[::-1], buckets.context_lens[::-1]
        return [
            *(StepShape(rows, context) for rows in sizes for context in contexts),
            *(StepShape(rows, longest, shared=True) for rows in buckets.shared_sizes[-1:]),
            *(StepShape(rows, mode=mode) for rows in sizes for mode in modes),
            *(StepShape(rows, longest, mode=mode) for rows in buckets.one_graph_sizes[::-1] for mode in modes),
        ]

    @property
    def shapes(self) -> set[StepShape]:
        """The shapes that are captured so far."""
        return set(self._graphs)

    def has_model(self, shape: StepShape) -> bool:
        """Whether the model of this step is captured."""
        return _model_of(shape) in self._graphs

    def has_masks(self, num_masks: int) -> bool:
        """Whether there is a graph that applies this many masks."""
        return num_masks in self._mask_graphs

    def run_whole(self, shape: StepShape) -> bool:
        """Replay the model and sampling. False, with nothing done: there is no such graph."""
        graph = self._graphs.get(shape)
        if graph is not None:
            graph.replay()
        return graph is not None

    def run_model(self, shape: StepShape, launch: Callable[[StepShape], object]) -> None:
        """Replay the model, up to the static logits, which the caller may change before `sample`.

        launch: as for `capture`, for a shape that comes for the first time.
        """
        graphs = self._graphs
        model = _model_of(shape)
        if model not in graphs:
            graphs[model] = self._backend.capture(partial(launch, model))
        graphs[model].replay()

    def sample(self, shape: StepShape) -> bool:
        """Sample the static logits. False, with nothing done: this kind of sampling was not captured."""
        graph = self._graphs.get(StepShape(shape.rows, mode=shape.mode))
        if graph is not None:
            graph.replay()
        return graph is not None

    def apply_masks(self, num_masks: int, launch: Callable[[], object]) -> None:
        """Apply `num_masks` masks to the static logits. launch: does this, on the same memory in every call."""
        graph = self._mask_graphs.get(num_masks)
        if graph is None:
            launch()  # it may compile a kernel, and what is done twice changes nothing
            self._mask_graphs[num_masks] = self._backend.capture(launch)
        else:
            graph.replay()


def _model_of(shape: StepShape) -> StepShape:
    return StepShape(shape.rows, shape.context, shape.shared, shape.piggybacked)
