"""Small integers in the bits of int32 words."""

from __future__ import annotations

import torch


def unpacked(words: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """int32 words -> uint8, with 32 / bits values for each word along `dim` (0 or 1); the lowest bits come first."""
    per_word = 32 // bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    if dim == 0:
        return ((words[:, None] >> shifts[None, :, None]) & (1 << bits) - 1).to(torch.uint8).flatten(0, 1)
    assert per_word * bits == 32
    return ((words[..., None] >> shifts) & (1 << bits) - 1).to(torch.uint8).flatten(1)


def in_storage(values: torch.Tensor, bits: int) -> torch.Tensor:
    """uint8 [rows, columns] as the ops `linear_int4` (two in a byte, the even column in the low half) and `linear_int8`
    take them."""
    if bits == 8:
        return values.contiguous()
    return values[:, ::2] | values[:, 1::2] << 4
