"""Multiply and add, element by element."""

import torch

from nanovllm.kernels.op.declaration import Cost, Inputs, nbytes
from nanovllm.kernels.op.dispatch import op


def _inputs(t, rows, size, broadcast=0):
    shape = (size,) if broadcast else (rows, size)
    return {"a": t.normal(rows, size), "b": t.normal(*shape), "c": t.normal(*shape)}


@op(
    arguments={"a": "[..., n]", "b": "[n] | [..., n]", "c": "[n] | [..., n]"},
    inputs=Inputs(
        _inputs,
        small=[(1, 1), (3, 96), (0, 64), (7, 33), (2, 1025, 1), (2, 33000)],
        decode=[(1, 1024), (64, 1024), (256, 5120), (256, 5120, 1)],
        large=[(2048, 4096), (2048, 4096, 1), (16384, 4096)],
    ),
    cost=lambda a, b, c: Cost(nbytes(a, b, c, a), 2 * a.numel()),
    cancels=True,
)
def element_wise_mul_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c.

    Args:
        a: [..., n], any float dtype; b, c: the shape of a, or [n], same dtype.

    Returns:
        The shape and dtype of a. The product is rounded to that dtype before the sum.
    """
    return a * b + c
