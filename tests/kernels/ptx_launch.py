"""Global memory for a kernel that is emulated, and what its parameters point to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton

from tests.kernels.ptx_emulator import BASE


def unknown(error):
    """Of a Triton that the emulator was written for nothing is."""
    if triton.__version__.startswith(("3.6.", "3.9.")):
        raise error
    pytest.skip(f"the PTX of Triton {triton.__version__} has what the emulator does not know: {error}")


class Memory:
    """Global memory with 0xFF, which is NaN and -1, between what is placed there."""

    def __init__(self):
        self._bytes, self._at, self._sizes = bytearray(b"\xff" * 4096), {}, {}

    def place(self, name, data):
        """-> its address."""
        if isinstance(data, torch.Tensor):
            data = data.contiguous().view(torch.uint8).numpy().tobytes()
        self._at[name], self._sizes[name] = len(self._bytes), len(data)
        self._bytes += data + b"\xff" * (-(len(self._bytes) + len(data)) % 256 + 256)
        return BASE + self._at[name]

    def finish(self):
        self.array = np.frombuffer(self._bytes, np.uint8).copy()
        return self.array

    def arrays(self):
        """name -> (address, bytes)"""
        return {name: (BASE + at, self._sizes[name]) for name, at in self._at.items()}

    def words(self, name, count):
        """The first 16-bit words of what is there, as a view."""
        return self.array[self._at[name] :][: 2 * count].view(np.uint16)

    def read(self, name, dtype, shape):
        size = int(np.prod(shape)) * dtype.itemsize
        return torch.frombuffer(bytearray(self.array[self._at[name] :][:size].tobytes()), dtype=dtype).view(shape)
