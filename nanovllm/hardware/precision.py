"""What PyTorch multiplies float32 with, for one call: its own units, or tensor cores in tf32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def float32_products(dtype: str) -> Iterator[None]:
    """Within the block cuBLAS multiplies float32 in tf32 if `dtype` is "tfloat32", exactly if it is "float32"; others
    change nothing.

    A CUDA graph recorded within keeps what it recorded.
    """
    wanted = {"tfloat32": "tf32", "float32": "ieee"}.get(dtype)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        if wanted is not None:
            torch.backends.cuda.matmul.fp32_precision = wanted
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
