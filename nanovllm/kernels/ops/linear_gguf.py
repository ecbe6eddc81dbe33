"""A linear layer whose weight is stored in blocks as GGUF files have them."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Inputs, product_cost
from nanovllm.kernels.ops.gguf_blocks import GGUF_TYPES, dequantise_gguf, gguf_planes

_NAMES = {t.type_id: t.name for t in GGUF_TYPES.values()}
_SPREAD = {
    "Q4_0": 4.6, "Q4_1": 4.6, "Q5_0": 9.2, "Q5_1": 9.2, "Q8_0": 74.0, "Q4_K": 170.0, "Q5_K": 340.0, "Q6_K": 1370.0,
}  # fmt: skip
"""The standard deviation of a random weight of each type over its scale d."""


def gguf_inputs(t, tokens, outputs, size, type_id=12, stored=0, below=0):
    """type_id: a number of GGUF's, 2 (Q4_0), 3, 6, 7, 8 (Q8_0), 12 (Q4_K), 13 or 14 (Q6_K); stored: not as planes;
    below: as many rows in Q6_K behind them.
    """
    if below:
        others = gguf_inputs(t, 0, below, size, 14, stored)
        made = gguf_inputs(t, tokens, outputs, size, type_id, stored)
        return {**made, "below": others["weight"], "below_kind": others["kind"]}
    of = GGUF_TYPES[_NAMES[type_id]]
    blocks = t.integers(0, 256, outputs, size // of.block_size, of.block_bytes, dtype=torch.uint8)
    at = 0
    for name, n in of.fields:
        if name in ("d", "m"):
            number = t.uniform(outputs, size // of.block_size, 1, low=0.5, high=1.5, dtype=torch.float32)
            number = number * (size**-0.5 / _SPREAD[of.name])
            if name == "m":  # so that about as many weights are negative as positive
                number = number * (7.5 if of.bits == 4 else 15.5) * (1 if "sc" in of.planes else -1)
            blocks[..., at : at + n] = number.to(torch.float16).view(torch.uint8)
        at += n
    weight, kind = blocks.flatten(1), of.name
    if not stored:
        weight, kind = gguf_planes(weight, kind)
    return {"x": t.normal(tokens, size), "weight": torch.nn.Parameter(weight, requires_grad=False), "kind": kind}


def _needs(numbers):
    if numbers["type_id"] not in _NAMES:
        return f"TYPE_ID of {', '.join(f'{i} ({name})' for i, name in _NAMES.items())}, not {numbers['type_id']}"
    block = GGUF_TYPES[_NAMES[numbers["type_id"]]].block_size
    if not numbers["size"] or numbers["size"] % block:
        return f"SIZE of a positive multiple of {block}, not {numbers['size']}"
    return None


def _cost(x, weight, kind, bias=None, below=None, below_kind=None):
    rows = weight.shape[0] + (0 if below is None else below.shape[0])
    return product_cost(x, rows, weight, bias, below)


@op(
    arguments={
        "x": "[..., size]", "weight": "uint8[outputs, row_bytes]", "bias": "[all_outputs]",
        "below": "uint8[more_outputs, more_bytes]",
    },
    inputs=Inputs(
        gguf_inputs,
        needs=_needs,
        small=[
            (1, 37, 1024), (1, 9, 96, 2), (2, 24, 1280, 12, 1), (5, 40, 160, 3), (0, 8, 256), (9, 48, 512, 14),
            (3, 20, 64, 6), (17, 33, 288, 7), (4, 130, 352, 8), (33, 36, 768, 13), (1, 64, 256, 14), (1, 40, 96, 8),
            (1, 33, 512, 12, 0, 17), (3, 24, 256, 13, 0, 9),
        ],
        # Output and down projections of Qwen3-0.6B and 8B in Q4_K, and some in Q6_K and Q8_0.
        decode=[
            (1, 1024, 2048), (8, 1024, 3072), (1, 4096, 4096), (8, 4096, 4096), (1, 4096, 12288), (1, 4096, 12288, 14),
            (1, 4096, 4096, 8), (32, 4096, 12288), (1, 5120, 4096, 12, 0, 1024),
        ],
        large=[(2048, 1024, 3072), (8192, 4096, 4096)],
        scales=(1.0, 50.0),
    ),
    cost=_cost,
)  # fmt: skip
def linear_gguf(
    x: torch.Tensor, weight: torch.Tensor, kind: str, bias: torch.Tensor | None = None,
    below: torch.Tensor | None = None, below_kind: str | None = None,
) -> torch.Tensor:  # fmt: skip
    """x W^T + b with a weight W in GGUF's blocks.

    Args:
        x: [..., size]; size is a multiple of the block.
        weight: uint8 [outputs, bytes of a row]. Rows are blocks as a file has them or, for the kernels of a GPU, the
            planes that `gguf_planes` makes of them.
        kind: "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K" or "Q6_K"; with "/planes" behind it where rows are
            planes: "Q4_K/planes".
        bias: [outputs + more_outputs], of x's dtype, or None.
        below, below_kind: the rest of W, [more_outputs, bytes of a row], if that is stored in blocks of another kind.

    Returns:
        [..., outputs + more_outputs], x's dtype. This reference computes W in float32 as llama.cpp does, to the bit,
        and rounds it to x's dtype before the product.

    Raises:
        ValueError: an unknown kind, a size that is no multiple of the block, or rows of other lengths.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    w = dequantise_gguf(weight, kind, x.shape[-1], wide).to(x.dtype)
    if below is not None and below_kind is not None:
        w = torch.cat([w, dequantise_gguf(below, below_kind, x.shape[-1], wide).to(x.dtype)])
    return F.linear(x, w, bias)
