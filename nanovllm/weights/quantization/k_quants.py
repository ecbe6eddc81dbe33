"""Float weights in GGUF's blocks of 256: Q4_K, and Q6_K where more bits are worth it.

Formats: ggml-common.h of llama.cpp, as in `nanovllm.kernels.ops.gguf_blocks`. Scales are searched among a few for the
least squared error, which is simpler than what llama.cpp does, and about as exact.
"""

from __future__ import annotations

import torch

from nanovllm.layers.stored_matrices import GGUFMatrix

BLOCK = 256
_SHRINKS = (1.0, 0.95, 0.9, 0.85)


def more_bits(layer: int, num_layers: int) -> bool:
    """Whether Q4_K_M stores a layer's values and down projections in Q6_K: the first and last eighth of the layers, and
    every third between them, as in llama.cpp."""
    eighth = num_layers // 8
    return layer < eighth or layer >= 7 * num_layers // 8 or (layer - eighth) % 3 == 2


def to_k_quants(weight: torch.Tensor, kind: str) -> GGUFMatrix:
    """weight [rows, columns], any float dtype, in blocks of `kind`, "Q4_K" or "Q6_K".

    Raises:
        ValueError: 256 does not divide the columns.
    """
    rows, columns = weight.shape
    if columns % BLOCK:
        raise ValueError(f"{columns} columns cannot be in blocks of {BLOCK}")
    pack = {"Q4_K": _q4_k, "Q6_K": _q6_k}[kind]
    # A part of the rows at a time: the search takes some thirty times a part's memory.
    parts = [pack(part.float().unflatten(1, (-1, BLOCK))) for part in weight.split(max(1, 2**22 // columns))]
    return GGUFMatrix(torch.cat(parts).flatten(1), kind, columns)


def _quotients(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / torch.where(scale == 0, 1.0, scale)).round()


def _bytes_of_half(x: torch.Tensor) -> torch.Tensor:
    return x.half().contiguous().view(torch.uint8)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """float32 [rows, blocks, 256] -> uint8 [rows, blocks, 144]"""
    x = blocks.unflatten(-1, (8, 32))
    low = x.amin(-1, keepdim=True).clamp(max=0)
    full = (x.amax(-1, keepdim=True).clamp(min=0) - low) / 15
    best = torch.full_like(full, torch.inf)
    scale, minimum = torch.zeros_like(full), torch.zeros_like(full)
    for shrink in _SHRINKS:
        for lift in (1.0, shrink):
            s, m = full * shrink, -low * lift
            error = (_quotients(x + m, s).clamp(0, 15) * s - m - x).square().sum(-1, keepdim=True)
            better = error < best
            best, scale, minimum = (torch.where(better, *pair) for pair in ((error, best), (s, scale), (m, minimum)))
    d = (scale.amax(-2, keepdim=True) / 63).half().float()
    dmin = (minimum.amax(-2, keepdim=True) / 63).half().float()
    sc, mn = _quotients(scale, d).clamp(0, 63), _quotients(minimum, dmin).clamp(0, 63)
    q = _quotients(x + dmin * mn, d * sc).clamp(0, 15).to(torch.uint8)
    pairs = q.unflatten(-2, (4, 2))  # the low halves of 32 bytes, then the high ones
    qs = (pairs[..., 0, :] | pairs[..., 1, :] << 4).flatten(-2)
    s, m = (t.squeeze(-1).to(torch.uint8) for t in (sc, mn))
    first, last = (s[..., :4], m[..., :4]), (s[..., 4:], m[..., 4:])
    packed = (first[0] | (last[0] >> 4) << 6, first[1] | (last[1] >> 4) << 6, (last[0] & 15) | (last[1] & 15) << 4)
    return torch.cat((_bytes_of_half(d[..., 0]), _bytes_of_half(dmin[..., 0]), *packed, qs), -1)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """float32 [rows, blocks, 256] -> uint8 [rows, blocks, 210]"""
    x = blocks.unflatten(-1, (16, 16))
    largest = x.abs().amax(-1, keepdim=True)
    # Negative for groups whose value of largest magnitude is positive: -32 is the integer of largest magnitude.
    full = torch.where(x.amax(-1, keepdim=True) >= largest, -largest, largest) / 32
    best, scale = torch.full_like(full, torch.inf), torch.zeros_like(full)
    for shrink in _SHRINKS[:2]:
        error = (_quotients(x, full * shrink).clamp(-32, 31) * full * shrink - x).square().sum(-1, keepdim=True)
        better = error < best
        best, scale = torch.where(better, error, best), torch.where(better, full * shrink, scale)
    d = (scale.abs().amax(-2, keepdim=True) / 127).half().float()
    sc = _quotients(scale, d).clamp(-127, 127)
    q = (_quotients(x, d * sc).clamp(-32, 31) + 32).to(torch.uint8).flatten(-2)
    quarters = q.unflatten(-1, (2, 4, 32)).unbind(-2)  # each [rows, blocks, 2, 32]
    low = torch.cat([(quarters[i] & 15) | (quarters[i + 2] & 15) << 4 for i in (0, 1)], -1)  # [rows, blocks, 2, 64]
    high = sum((quarter >> 4) << 2 * i for i, quarter in enumerate(quarters))
    assert isinstance(high, torch.Tensor)
    scales = sc.squeeze(-1).to(torch.int8).view(torch.uint8)
    return torch.cat((low.flatten(-2), high.flatten(-2), scales, _bytes_of_half(d[..., 0])), -1)
