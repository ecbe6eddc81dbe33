"""The memory of CUDA graphs, and what else a capture that failed leaves behind."""

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
