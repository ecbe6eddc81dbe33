"""A chain of four operations that post-norm transformers run over every activation, as one op."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.op.dispatch import op
from nanovllm.kernels.op.inputs import Cost, Inputs, nbytes
from nanovllm.kernels.ops.sample import philox


def _inputs(t, rows, size):
    return {
        "x": t.normal(rows, size),
        "residual": t.normal(rows, size),
        "weight": t.parameter(size, scale=1),
        "bias": t.parameter(size, scale=1),
    }


_STEPS = 1 << 15
"""Dropout compares 15 random bits: probabilities are multiples of 2^-15."""
DROPOUT_ROUNDS = 7
"""Rounds of Philox, as in FlashAttention's dropout."""


def dropout_counts(p: float) -> tuple[int, float]:
    """How many of 2^15 equally likely numbers, the lowest, drop an element, and what the others are multiplied by.

    The number is p * 2^15 rounded to nearest, but only p = 1 drops all. The factor is the reciprocal of the probability
    of being kept that results, so that dropout keeps the expectation exactly for every p < 1 (0 for p = 1).

    Raises:
        ValueError: p is outside [0, 1].
    """
    if not 0 <= p <= 1:
        raise ValueError(f"p: expected a probability in [0, 1], not {p}")
    drops = _STEPS if p == 1 else min(round(p * _STEPS), _STEPS - 1)
    return drops, _STEPS / (_STEPS - drops) if drops < _STEPS else 0.0


@op(
    arguments={"x": "[..., size]", "residual": "[..., size]", "weight": "[size]", "bias": "[size]"},
    inputs=Inputs(
        _inputs,
        small=[(1, 2), (3, 96), (0, 64), (7, 33), (2, 1024), (1, 1025), (2, 33000)],
        decode=[(1, 1024), (64, 1024), (256, 5120)],
        large=[(8192, 1024), (16384, 4096)],
        variants=[{}, {"p": 0.1, "seed": 7}, {"approximate": "tanh", "p": 0.5, "seed": -1}],
        scales=(1.0, 50.0),
    ),
    cost=lambda x, residual, weight, bias, **_: Cost(nbytes(x, residual, weight, bias, x), 20 * x.numel()),
    # Four roundings in a row.
    tolerance={torch.float16: 3e-3, torch.bfloat16: 2.5e-2},
    magnitude=1.0,  # of a layer norm's result; gelu makes any smaller
)
def layernorm_residual_dropout_gelu(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float = 1e-5,
    p: float = 0.0,
    seed: int = 0,
    approximate: str = "none",
) -> torch.Tensor:
    """gelu(dropout(layer_norm(x) + residual)).

    Dropout zeroes an element with probability q, p rounded to a multiple of 2^-15, and divides the others by 1 - q, so
    that the expectation is exact for q. A p of at most 2^-16 rounds to 0: nothing is drawn and nothing changes. A p
    below 1 never rounds to 1: q is then 1 - 2^-15 at most.

    Which elements depends on the seed and on the element's place alone. Of column c of row r (of x seen as a matrix),
    let w be word (c % 8) // 2 of Philox4x32-7 under the key `seed` and the counter (c // 8, r, 0, 0), and h the low
    half of w for even c, the high half for odd c. The element stays if the low 15 bits of h are at least q * 2^15. So a
    counter serves eight elements, 16 bytes of a 16-bit dtype, which a thread loads at once.

    Args:
        x, residual: [..., size], any float dtype; weight, bias: [size], same dtype.
        eps: the eps of the norm, as in `layer_norm`.
        p: in [0, 1].
        seed: an integer; its low 64 bits count.
        approximate: "none" or "tanh", as in `fused_add_gelu`.

    Returns:
        [..., size], the dtype of x. Every one of the four results is rounded to that dtype.

    Raises:
        ValueError: p or `approximate` is none of these.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate: expected 'none' or 'tanh', not {approximate!r}")
    drops, factor = dropout_counts(p)
    y = F.layer_norm(x, x.shape[-1:], weight, bias, eps) + residual
    if drops:
        size = x.shape[-1]
        rows, eights = (torch.arange(n, device=x.device) for n in (x.numel() // max(size, 1), -(-size // 8)))
        zero = torch.zeros(1, 1, dtype=torch.int64, device=x.device)
        key = torch.full((1, 1), (seed + 2**63) % 2**64 - 2**63, dtype=torch.int64, device=x.device)
        words = torch.stack(philox(eights[None, :], rows[:, None] & 0xFFFFFFFF, zero, zero, key, DROPOUT_ROUNDS), -1)
        bits = torch.stack((words, words >> 16), -1).flatten(1)[:, :size] & (_STEPS - 1)
        y = torch.where((bits >= drops).view(x.shape), y * factor, 0.0)
    return F.gelu(y, approximate=approximate)
