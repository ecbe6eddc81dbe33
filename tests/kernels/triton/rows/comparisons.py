"""How near results of the row kernels must be, and the policy for many rows.

Shapes of few rows, strided ones among them, are those of `nanovllm kernels verify` (`test_verified.py`).
"""

import torch

from nanovllm.kernels.triton.rows.plans import RowPolicy

RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 1e-3}
MANY = RowPolicy(few_rows=0, few_elements=0, few_tokens=0)
"""Any number of rows, elements or tokens is cut as many are."""


def close(got, expected, dtype, slack=1.0):
    assert got.dtype == dtype and got.shape == expected.shape
    tolerance = RELATIVE[dtype] * slack
    torch.testing.assert_close(got.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True)


def like(got, native):
    """Equal but for the last bit of a few results: reductions may add in another order."""
    assert got.dtype == native.dtype and got.shape == native.shape
    if got.numel():
        tolerance = 4 * RELATIVE[got.dtype]
        torch.testing.assert_close(got.double(), native.double(), rtol=tolerance, atol=tolerance)
        different = (got != native).double().mean().item()
        assert got.dtype == torch.float32 or different < 0.01 or got.numel() < 2000, f"{different:.1%} differ"
