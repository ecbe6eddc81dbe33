"""Capturing CUDA graphs: their memory, and what a capture that failed leaves behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch


class GraphMemory:
    """Memory that several CUDA graphs share. No two of these graphs may run at the same time.

    Attributes:
        handle: PyTorch's handle of the memory pool.
    """

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()

    def give_up(self, device: torch.device) -> None:
        """After a capture with it whose end failed: graphs that have this memory keep it, and others are captured
        with new memory.

        PyTorch's allocators are told of the end of a capture only if it ends well, and refuse a second one with the
        same memory ("already recording to mempool_id"). That of the GPU can be told, and reclaims memory again; that
        of pinned memory (PyTorch 2.11) cannot.
        """
        spoiled, self.handle = self.handle, torch.cuda.graph_pool_handle()
        # It has been told; or there is no such function, which is not public.
        with suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(device.index, spoiled)


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


def recover_generator(device: torch.device) -> None:
    """Let PyTorch's generator of this GPU draw again, after a capture that ended in an error.

    It counts itself as part of that capture until one ends well ("Offset increment outside graph capture", PyTorch
    2.11), so an empty one does. Where that fails too, it is the GPU that is in error, as the caller's own exception
    says.
    """
    with suppress(RuntimeError), torch.cuda.stream(torch.cuda.Stream(device)):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        graph.capture_end()
