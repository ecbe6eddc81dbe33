"""Multiply and add, element by element."""

import torch

from nanovllm.kernels.registry import op


@op
def element_wise_mul_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c.

    Args:
        a: [..., n], any float dtype; b, c: the shape of a, or [n], same dtype.

    Returns:
        The shape and dtype of a. The product is rounded to that dtype before the sum.
    """
    return a * b + c
