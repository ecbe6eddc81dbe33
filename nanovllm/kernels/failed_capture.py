"""What a CUDA graph whose capture failed leaves behind."""

from contextlib import suppress
from typing import Any

import torch


def end_pool(device: torch.device, pool: Any) -> None:
    """Let other graphs be captured with this memory, after a capture with it whose end failed.

    The allocator is told of the end of a capture only if it ends well, and refuses a second one with the same memory ("already recording
    to mempool_id"). Where it was told, it says that there is none, and nothing changes.
    """
    with suppress(RuntimeError, AttributeError):  # it is no public function
        torch._C._cuda_endAllocateToPool(device.index, pool)


def recover_generator(device: torch.device) -> None:
    """Let PyTorch's generator of this GPU draw again, after a capture that ended in an error.

    It counts itself as part of that capture until one ends well ("Offset increment outside graph capture", PyTorch 2.11), so an
    empty one does. Where that fails too, it is the GPU that is in error, as the caller's own exception says.
    """
    with suppress(RuntimeError), torch.cuda.stream(torch.cuda.Stream(device)):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        graph.capture_end()
