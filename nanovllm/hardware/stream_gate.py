"""A gate that a CUDA stream waits at until the host opens it: `cuStreamWaitValue32` on a word of pinned memory.

The host launches everything behind the gate before it can know when the gate will open. Opening it is one store, so
no launch comes between what the host computes and the work that needs it.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
from typing import Protocol

import torch

logger = logging.getLogger(__name__)

_GEQ = 0
"""CU_STREAM_WAIT_VALUE_GEQ: until (int32_t)(word - value) >= 0, so that values may wrap around."""


class Gate(Protocol):
    """Values are consecutive numbers modulo 2**32. Opening a gate for a value opens it for all values before."""

    def open(self, value: int) -> None:
        """Let work pass that waits for this value. Any thread may call it; values may not go back."""

    def launch_wait(self, value: int) -> None:
        """What is launched on the device's current stream from now on waits until the gate is open for this value."""


class StreamGate:
    """A `Gate` of one GPU.

    Args:
        word: [1] int32 in pinned memory, 0. The caller keeps that memory until the device has passed every wait.

    Raises:
        RuntimeError, OSError: the driver has no such waits.
    """

    def __init__(self, word: torch.Tensor, device: torch.device) -> None:
        self._device = device
        self._word = word.numpy()
        self._driver = ctypes.CDLL("libcuda.so.1")
        try:
            self._wait = self._driver.cuStreamWaitValue32_v2
        except AttributeError:
            raise RuntimeError("the driver has no cuStreamWaitValue32_v2") from None
        self._wait.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
        address = ctypes.c_uint64()
        self._check(
            "cuMemHostGetDevicePointer_v2",
            self._driver.cuMemHostGetDevicePointer_v2(
                ctypes.byref(address), ctypes.c_void_p(word.data_ptr()), ctypes.c_uint(0)
            ),
        )
        self._address = address.value
        self.launch_wait(0)  # an error says that this device has no such waits

    def open(self, value: int) -> None:
        """As in `Gate`. x86 processors let no store overtake an earlier one: who sees the value sees what was written
        before. `stream_gate` makes no gate on others.
        """
        self._word[0] = ctypes.c_int32(value).value

    def launch_wait(self, value: int) -> None:
        """As in `Gate`."""
        stream = torch.cuda.current_stream(self._device).cuda_stream
        self._check("cuStreamWaitValue32", self._wait(stream, self._address, value, _GEQ))

    def _check(self, name: str, error: int) -> None:
        if error:
            raise RuntimeError(f"{name} failed with CUDA error {error}")


def stream_gate(word: torch.Tensor, device: torch.device) -> Gate | None:
    """A gate of a device, for `StreamGate`; None: there is none, and the host has to wait."""
    if device.type != "cuda":
        return None
    if platform.machine() not in ("x86_64", "AMD64"):
        logger.info("the host waits for masks: a store may overtake another one on %s", platform.machine())
        return None
    if os.environ.get("CUDA_LAUNCH_BLOCKING") == "1":
        logger.info("the host waits for masks, since CUDA_LAUNCH_BLOCKING=1 makes each launch wait for the device")
        return None
    try:
        return StreamGate(word, device)
    except (RuntimeError, OSError) as e:
        logger.info("the host waits for masks: %s", e)
        return None
