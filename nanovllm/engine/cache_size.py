"""How large a KV cache is, in words. Nothing here imports PyTorch: a server's API process says it, too."""

from __future__ import annotations

from typing import NamedTuple

_GIB = 2**30


class CacheSize(NamedTuple):
    """The size of a KV cache."""

    num_blocks: int
    block_size: int
    num_bytes: int
    """On one device."""
    max_model_len: int
    """The longest sequence that is served."""
    num_devices: int = 1
    """Each holds some of the KV heads of every token."""

    def __str__(self) -> str:
        tokens = self.num_blocks * self.block_size
        sequences = self.num_blocks / -(-self.max_model_len // self.block_size)
        each = "" if self.num_devices == 1 else f" on each of {self.num_devices} devices"
        return (
            f"KV cache: {tokens:,} tokens ({self.num_blocks:,} x {self.block_size}, {self.num_bytes / _GIB:.2f} GiB"
            f"{each}), {int(sequences * 10) / 10:,.1f} sequences of {self.max_model_len:,} tokens at a time"
        )
