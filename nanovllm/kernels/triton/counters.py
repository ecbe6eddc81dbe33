"""Counters of programs that have arrived, for kernels whose last program finishes what the others began."""

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
        buffer = torch.zeros(max(count, _COUNTERS), dtype=torch.int32, device=device)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return buffer
        _kept.append(buffer)
        buffers[device, stream] = buffer
    return buffer


# Graphs hold addresses, not references: no buffer that one may have recorded is ever freed.
_kept: list[torch.Tensor] = []
