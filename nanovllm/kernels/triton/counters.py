"""Counters of programs that have arrived, for kernels whose last program finishes what the others began."""

from concurrent.futures import ThreadPoolExecutor

import torch
import triton

_COUNTERS = 1 << 16

buffers: dict[tuple[torch.device, int], torch.Tensor] = {}
"""The arrival counters of a device's stream. They outlive a launch: each launch leaves them zero for the next."""


def arrival_counters(device: torch.device, count: int) -> torch.Tensor:
    """int32 zeros that every kernel leaves zero: [at least count].

    One buffer a stream, since launches on one stream do not overlap. During a graph capture a buffer cannot be
    created (its zeros would be recorded, not written), so a first call inside a capture records a memset with every
    launch instead.
    """
    stream = triton.runtime.driver.active.get_current_stream(device.index) if device.type == "cuda" else 0
    buffer = buffers.get((device, stream))
    if buffer is None or buffer.shape[0] < count:
        count = max(count, _COUNTERS)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return torch.zeros(count, dtype=torch.int32, device=device)
        buffer = _lasting_zeros(count, device)
        _kept.append(buffer)
        buffers[device, stream] = buffer
    return buffer


def _lasting_zeros(count: int, device: torch.device) -> torch.Tensor:
    """int32 zeros [count] that outlive the call. They are made in a thread and on a stream of their own, since what the
    caller allocates may go into a pool of memory: torch.compile refuses CUDA graphs in whose pool a tensor stays.
    """

    def make() -> torch.Tensor:
        if device.type != "cuda":
            return torch.zeros(count, dtype=torch.int32, device=device)
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            zeros = torch.zeros(count, dtype=torch.int32, device=device)
            torch.cuda.current_stream().synchronize()
        return zeros

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(make).result()


# Graphs hold addresses, not references: no buffer that one may have recorded is ever freed.
_kept: list[torch.Tensor] = []
