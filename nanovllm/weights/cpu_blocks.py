"""Packed weights in the blocks of GGUF, for the C++ kernels of a CPU, where these hold the same numbers."""

from __future__ import annotations

import torch

from nanovllm.layers.packed_weight import StoredMatrix
from nanovllm.layers.stored_matrices import GGUFMatrix, IntMatrix

_BLOCK = 32


def as_gguf(matrix: StoredMatrix) -> tuple[str, torch.Tensor] | None:
    """(kind, uint8 [rows, bytes of a row]) with exactly the matrix's numbers; None: no kind has them.

    Symmetric integers in groups of a multiple of 32 columns become Q4_0 or Q8_0, if their scales are float16 numbers.
    """
    if isinstance(matrix, GGUFMatrix):
        return matrix.kind, matrix.weight
    if not isinstance(matrix, IntMatrix) or matrix.zero is not None or matrix.permutation is not None:
        return None
    rows, columns = matrix.shape
    d = matrix.scale.to(torch.float16)
    if columns % _BLOCK or matrix.group_size % _BLOCK or not torch.equal(d.float(), matrix.scale.float()):
        return None
    blocks = columns // _BLOCK
    d = d.repeat_interleave(blocks // d.shape[1], 1).unsqueeze(-1).contiguous().view(torch.uint8)  # [rows, blocks, 2]
    q = matrix.values().unflatten(1, (blocks, _BLOCK))
    if matrix.bits == 4:
        # Half a block behind the other, not column by column.
        return "Q4_0", torch.cat((d, q[..., :16] | q[..., 16:] << 4), -1).flatten(1)
    return "Q8_0", torch.cat((d, q ^ 128), -1).flatten(1)
