"""A packed weight rounded to 8-bit floats, which tensor cores multiply with activations of 8-bit floats."""

from __future__ import annotations

import torch

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Cost, Inputs, nbytes
from nanovllm.kernels.ops.embedding_packed import dequantise_packed
from nanovllm.kernels.ops.linear_fp8_dynamic import LARGEST, LEAST
from nanovllm.kernels.ops.linear_packed import SCALES, check_storage, needs_storage, weight_inputs


def row_factors(largest: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(factors, scales), float32 [rows], of rows whose largest magnitudes are float32 [rows].

    A row is multiplied by its factor, 448 / largest, before it is rounded. Its scale is largest / 448. These are the
    rules by which `linear_fp8_dynamic` rounds a row of activations.
    """
    largest = largest.clamp_min(LEAST)
    top = torch.full_like(largest, LARGEST)  # PyTorch multiplies by the inverse of a number, and so rounds twice
    return top / largest, largest / top


def _inputs(t, outputs, size, storage=2):
    """storage: as of `linear_packed_silu_and_mul`."""
    made = weight_inputs(t, 0, outputs, size, storage)
    del made["x"]
    values = dequantise_packed(made["storage"], made["weight"], made["scale"], made["zero"], size)
    return {**made, "size": size, "factor": row_factors(values.abs().amax(1))[0]}


def _needs(numbers):
    return "OUTPUTS of at least 1" if numbers["outputs"] < 1 else needs_storage(numbers)


def _cost(storage, weight, scale, zero, size, factor):
    return Cost(nbytes(weight, scale, zero, factor) + weight.shape[0] * size)


def _compare(got, arguments, dtype):
    """Every code is the reference's."""
    want = packed_to_fp8.native(**arguments)
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"gave {got.dtype}{list(got.shape)} instead of {want.dtype}{list(want.shape)}"
    wrong = got.view(torch.uint8) != want.view(torch.uint8)
    return f"{int(wrong.sum())} of {wrong.numel()} codes differ" if bool(wrong.any()) else None


@op(
    arguments={
        "weight": "uint8[outputs, bytes] | float8_e4m3fn[outputs, bytes]", "factor": "float32[outputs]", **SCALES,
    },
    inputs=Inputs(
        _inputs,
        needs=_needs,
        # Each form of storage; no power of two, several tiles.
        small=[
            (5, 32), (9, 96, 2), (72, 1024), (200, 320, 1), (33, 160, 3), (20, 512, 4), (37, 256, 5), (40, 64, 6),
            (24, 120),
        ],
        # Qwen3-8B: output projection, and gate and up projection. The weight is expanded for many tokens.
        decode=[(4096, 4096), (24576, 4096), (24576, 4096, 4)],
        large=[(24576, 4096, 3), (4096, 12288, 5)],
        scales=(1.0,),
    ),
    cost=_cost,
    compare=_compare,
    fake=lambda storage, weight, scale, zero, size, factor: weight.new_empty(
        (weight.shape[0], size), dtype=torch.float8_e4m3fn
    ),
)  # fmt: skip
def packed_to_fp8(
    storage: str, weight: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None, size: int,
    factor: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """A packed weight times a factor for each row, rounded to 8-bit floats.

    Args:
        storage, weight, scale, zero: as of `linear_packed_silu_and_mul`, [outputs, ...].
        size: columns of the weight.
        factor: float32 [outputs], such as 448 over the largest magnitude of a row (`row_factors`).

    Returns:
        float8_e4m3fn [outputs, size]: dequantised and multiplied in float32, rounded to nearest, ties to even. Beyond
        448 the largest number is taken. It has no gradient.

    Raises:
        ValueError: as `linear_packed_silu_and_mul`.
    """
    check_storage(storage, scale)
    values = dequantise_packed(storage, weight, scale, zero, size).detach() * factor.detach()[:, None]
    return values.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
