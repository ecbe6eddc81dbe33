"""CUDA graphs: one launch instead of one for each kernel of a step."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch

from nanovllm.distributed.group import current_group
from nanovllm.hardware.graph_capture import GraphMemory, capture


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


class GraphTable:
    """Captured graphs by a key, which says all that the launches of a graph depend on."""

    def __init__(self, backend: GraphBackend) -> None:
        self._backend = backend
        self._graphs: dict[Hashable, Graph] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._graphs

    @property
    def keys(self) -> set[Hashable]:
        """The keys of what is captured so far."""
        return set(self._graphs)

    def capture(self, key: Hashable, fn: Callable[[], object]) -> None:
        """Capture what `fn` launches. `fn` is not kept: it may refer to the owner of this table, and with such a cycle
        `del llm` would not free the GPU's memory.
        """
        self._graphs[key] = self._backend.capture(fn)

    def replay(self, key: Hashable) -> bool:
        """Launch a graph. False, with nothing done: it is not captured."""
        graph = self._graphs.get(key)
        if graph is not None:
            graph.replay()
        return graph is not None

    def replay_or_call(self, key: Hashable, fn: Callable[[], object]) -> None:
        """Launch what `fn` does. The first time it is called, so that kernels are compiled, and then captured."""
        if not self.replay(key):
            fn()
            self.capture(key, fn)
