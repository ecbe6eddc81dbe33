"""Packed weights in formats of the C++ kernels of a CPU that hold the same numbers."""

from __future__ import annotations

import torch

from nanovllm.kernels.cpu.library import GGUF_FORMATS, PackedMatrix
from nanovllm.layers.stored_matrices import Fp8Matrix, GGUFMatrix, IntMatrix
from nanovllm.layers.stored_matrix import StoredMatrix

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


def packed_matrix(matrix: StoredMatrix, activations: str) -> PackedMatrix | None:
    """The matrix with exactly its numbers, stored in about as many bits; None: no format has them.

    Args:
        activations: as in `PackedMatrix`.
    """
    blocks = as_gguf(matrix)
    if blocks is not None and blocks[0] in GGUF_FORMATS:
        return PackedMatrix(*blocks, matrix.shape[1], activations)
    if isinstance(matrix, Fp8Matrix):
        return PackedMatrix.of_fp8(matrix.weight, matrix.scale)
    if isinstance(matrix, IntMatrix) and matrix.bits == 4 and matrix.permutation is None:
        if matrix.group_size % _BLOCK == 0:
            return PackedMatrix.of_int4(matrix.weight, matrix.scale, matrix.zero, activations)
    return None
