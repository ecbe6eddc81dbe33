"""Products with a packed weight in one op with what follows in a decoder: SiLU, or the residual addition and a norm.

One op stands for all forms of storage. Each form has an op for its product alone: `linear_fp8`, `linear_int4`,
`linear_int8` and `linear_gguf`.
"""

from __future__ import annotations

import torch

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Inputs, product_cost
from nanovllm.kernels.ops.activation import silu_and_mul
from nanovllm.kernels.ops.gguf_blocks import GGUF_TYPES, PLANES
from nanovllm.kernels.ops.linear import ROUNDED_TOLERANCE, normed_cost
from nanovllm.kernels.ops.linear_fp8 import fp8_inputs, linear_fp8
from nanovllm.kernels.ops.linear_gguf import gguf_inputs, linear_gguf
from nanovllm.kernels.ops.linear_int4 import affine_inputs, linear_int4, linear_int8
from nanovllm.kernels.ops.norm import add_rms_norm, norm_inputs
from nanovllm.wording import brief

PRODUCTS = ("linear_fp8", "linear_gguf", "linear_int4", "linear_int8")
_SCALED = ("fp8", "int4", "int8")
_EXAMPLES = ("fp8", "int4", "int8", "Q4_K", "Q6_K", "Q8_0")
"""Of storage, for inputs."""


def check_storage(storage: str, scale: torch.Tensor | None) -> None:
    """Raise ValueError unless `storage` is known, and there is a scale where it has one."""
    if storage not in _SCALED and storage.removesuffix(PLANES) not in GGUF_TYPES:
        raise ValueError(
            f"storage: expected {', '.join(map(repr, _SCALED))} or a kind of linear_gguf, not {brief(storage, 40)}"
        )
    if (scale is not None) != (storage in _SCALED):
        needs = "a tensor" if scale is None else "None, since GGUF's blocks have their scales"
        raise ValueError(f"scale: expected {needs}, for storage {storage!r}")


def _product(
    x: torch.Tensor, storage: str, weight: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    check_storage(storage, scale)
    if scale is None:
        return linear_gguf.native(x, weight, storage, bias)
    if storage == "fp8":
        return linear_fp8.native(x, weight, scale, bias)
    return (linear_int4 if storage == "int4" else linear_int8).native(x, weight, scale, zero, bias)


def weight_inputs(t, tokens, outputs, size, storage):
    """x and a weight of _EXAMPLES[storage - 1]."""
    name = _EXAMPLES[storage - 1]
    if name in GGUF_TYPES:
        made = gguf_inputs(t, tokens, outputs, size, GGUF_TYPES[name].type_id)
        return {"x": made["x"], "storage": made["kind"], "weight": made["weight"], "scale": None, "zero": None}
    if name == "fp8":
        made = fp8_inputs(t, tokens, outputs, size)
    else:
        group = next((n for n in (128, 32) if size % n == 0), size)
        made = affine_inputs(t, tokens, outputs, size, group, int(name[3:]))
    return {"x": made.pop("x"), "storage": name, "zero": None, **made}


def _silu_inputs(t, tokens, outputs, size, storage=2):
    """storage: 1 (fp8), 2 (int4), 3 (int8), 4 (Q4_K), 5 (Q6_K) or 6 (Q8_0)."""
    return weight_inputs(t, tokens, 2 * outputs, size, storage)


def _norm_inputs(t, tokens, outputs, size, storage=2):
    """storage: as of `_silu_inputs`."""
    norm = norm_inputs(t, tokens, outputs)
    return {**weight_inputs(t, tokens, outputs, size, storage), **norm}


def needs_storage(numbers):
    if not 1 <= numbers["storage"] <= len(_EXAMPLES):
        return f"STORAGE of {', '.join(f'{i} ({name})' for i, name in enumerate(_EXAMPLES, 1))}"
    name = _EXAMPLES[numbers["storage"] - 1]
    block = GGUF_TYPES[name].block_size if name in GGUF_TYPES else 2
    if not numbers["size"] or numbers["size"] % block:
        return f"SIZE of a positive multiple of {block}, not {numbers['size']}"
    return None


def _silu_cost(x, storage, weight, scale, zero):
    return product_cost(x, weight.shape[0], weight, scale, zero, written=weight.shape[0] // 2)


def _norm_cost(x, storage, weight, scale, zero, residual, norm_weight, eps, bias=None):
    return normed_cost(x, residual, norm_weight, weight, scale, zero, bias)


# (tokens, outputs, size, storage): no power of two, several tiles, no token.
_SMALL = [
    (1, 2, 32), (2, 9, 96, 2), (5, 72, 1024), (3, 40, 320, 1), (0, 8, 32), (9, 33, 160, 3), (17, 20, 512, 4),
    (2, 37, 256, 5), (33, 40, 64, 6), (4, 24, 120),
]  # fmt: skip
SCALES = {
    "scale": "float32[scale_rows, scale_columns] | float16[scale_rows, scale_columns] | "
    "bfloat16[scale_rows, scale_columns]",
    "zero": "uint8[scale_rows, scale_columns]",
}


@op(
    arguments={
        "x": "[..., size]", "weight": "uint8[2*outputs, bytes] | float8_e4m3fn[2*outputs, bytes]", **SCALES,
    },
    inputs=Inputs(
        _silu_inputs,
        needs=needs_storage,
        small=_SMALL,
        # Qwen3-0.6B and 8B.
        decode=[
            (1, 3072, 1024), (1, 12288, 4096), (32, 12288, 4096), (1, 12288, 4096, 1), (1, 12288, 4096, 4),
        ],
        scales=(1.0, 50.0),
    ),
    cost=_silu_cost,
    cancels=True,
    tolerance=ROUNDED_TOLERANCE,
    fuses=(*PRODUCTS, "silu_and_mul"),
)  # fmt: skip
def linear_packed_silu_and_mul(
    x: torch.Tensor, storage: str, weight: torch.Tensor, scale: torch.Tensor | None, zero: torch.Tensor | None
) -> torch.Tensor:
    """silu(x G^T) * (x U^T) with a packed weight: `linear_silu_and_mul` of other forms of storage.

    Args:
        x: [..., size].
        storage: "fp8", "int4", "int8", or a kind of `linear_gguf` such as "Q4_K/planes".
        weight, scale, zero: as the product's op (`linear_fp8` and so on) takes them, [2 * outputs, ...]: the rows of
            the gate, then those of the up projection. What the storage does not have is None.

    Returns:
        [..., outputs], x's dtype. Gate, up, SiLU and the product are each rounded, as the separate ops round.

    Raises:
        ValueError: an unknown storage, a scale that is missing, or what the product's op raises.
    """
    return silu_and_mul.native(_product(x, storage, weight, scale, zero))


@op(
    arguments={
        "x": "[..., size]", "weight": "uint8[outputs, bytes] | float8_e4m3fn[outputs, bytes]", **SCALES,
        "residual": "[..., outputs]", "norm_weight": "[outputs]", "bias": "[outputs]",
    },
    inputs=Inputs(
        _norm_inputs,
        needs=needs_storage,
        small=_SMALL,
        # Down projections of Qwen3-0.6B and 8B.
        decode=[
            (1, 1024, 3072), (1, 4096, 12288), (32, 4096, 12288), (1, 4096, 12288, 1), (1, 4096, 12288, 4),
        ],
        scales=(1.0, 50.0),
    ),
    cost=_norm_cost,
    tolerance=ROUNDED_TOLERANCE,
    fuses=("add_rms_norm", *PRODUCTS),
)  # fmt: skip
def linear_packed_add_rms_norm(
    x: torch.Tensor,
    storage: str,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    zero: torch.Tensor | None,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """rms_norm(residual + x W^T + b), and the sum that it is the norm of, with a packed weight W.

    Args:
        x: [..., size].
        storage, weight, scale, zero: as of `linear_packed_silu_and_mul`, [outputs, ...].
        residual: [..., outputs]; norm_weight: [outputs]; bias: [outputs] or None; x's dtype.
        eps: the eps of the norm, as in `rms_norm`.

    Returns:
        (y [..., outputs], new residual [..., outputs]), x's dtype, rounded as the separate ops round.

    Raises:
        ValueError: as `linear_packed_silu_and_mul`.
    """
    return add_rms_norm.native(_product(x, storage, weight, scale, zero, bias), residual, norm_weight, eps)
