"""Weights of quantised checkpoints as the blocks that `formats.h` describes."""

from __future__ import annotations

import torch

from nanovllm.kernels.ops.linear_fp8 import BLOCK, block_shape
from nanovllm.kernels.ops.linear_int4 import group_size, unpack_int4


def int4_blocks(
    weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None
) -> tuple[str, torch.Tensor, int]:
    """Integers of 4 bits with a scale for each group of columns: (q - zero) * scale.

    Args:
        weight: q, uint8 [rows, columns / 2]; the low four bits of a byte are the even column.
        scale: [rows, groups], any float dtype.
        zero: uint8 [rows, groups], 0 to 15; None: 8.

    Returns:
        Format, uint8 [rows, bytes of a row], columns.

    Raises:
        ValueError: a group is not a multiple of 32 columns, or shapes contradict each other.
    """
    rows, columns = weight.shape[0], 2 * weight.shape[1]
    if scale.dim() != 2 or scale.shape[0] != rows or (zero is not None and zero.shape != scale.shape):
        shapes = [list(t.shape) for t in (weight, scale, zero) if t is not None]
        raise ValueError(f"int4: expected a scale and a zero [rows, groups] for each row of the weight, not {shapes}")
    group = group_size(columns, scale)
    if group % 32:
        raise ValueError(
            f"int4: groups of {group} columns; the C++ kernels take multiples of 32; dequantise this weight instead"
        )
    block = 128 if group % 128 == 0 else 32
    factor = scale.float()
    minimum = factor * (-8.0 if zero is None else -zero.float())
    # [rows, blocks, 1]: a block of columns lies in one group.
    floats = torch.stack((factor, minimum), -1).repeat_interleave(group // block, 1)
    halves = unpack_int4(weight).unflatten(1, (columns // block, block // 32, 2, 16))
    nibbles = (halves[..., 0, :] | halves[..., 1, :] << 4).flatten(2)
    blocks = torch.cat((floats.contiguous().view(torch.uint8), nibbles), -1)
    return f"INT4_{block}", blocks.flatten(1), columns


def fp8_blocks(weight: torch.Tensor, scale: torch.Tensor) -> tuple[str, torch.Tensor, int]:
    """8-bit floats times the scale of their block.

    Args:
        weight: float8_e4m3fn, or its bits as uint8, [rows, columns].
        scale: any float dtype: one number, [rows], or as `linear_fp8` has it: [1, rows or rows / 128, 1 or
            columns / 128].

    Returns:
        As `int4_blocks`.

    Raises:
        ValueError: the shape of scale fits no such blocks.
    """
    rows, columns = weight.shape
    scale = scale.float()
    if scale.dim() < 2:
        scale = scale.reshape(-1, 1)
    height, _ = block_shape(weight, scale)
    scale = scale[torch.arange(rows) // height]  # [rows, 1 or blocks]
    blocks = -(-columns // BLOCK)
    values = torch.zeros(rows, blocks * BLOCK, dtype=torch.uint8)
    values[:, :columns] = weight.view(torch.uint8)
    floats = scale.expand(rows, blocks).unsqueeze(-1).contiguous().view(torch.uint8)
    return "E4M3", torch.cat((floats, values.unflatten(1, (blocks, BLOCK))), -1).flatten(1), columns
