"""A chain of four operations that post-norm transformers run over every activation, as one op."""

import torch
import torch.nn.functional as F

from nanovllm.kernels.declaration import Cost, Inputs, nbytes
from nanovllm.kernels.ops.sample import philox, uniform
from nanovllm.kernels.registry import op


def _inputs(t, rows, size):
    return {
        "x": t.normal(rows, size),
        "residual": t.normal(rows, size),
        "weight": t.normal(size, scale=1),
        "bias": t.normal(size, scale=1),
    }


def _cost(x, residual, weight, bias, **_):
    return Cost(nbytes(x, residual, weight, bias, x), 20 * x.numel())


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
    cost=_cost,
    # Four roundings in a row.
    tolerance={torch.float16: 3e-3, torch.bfloat16: 2.5e-2},
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

    Dropout zeroes an element with probability p and divides the others by 1 - p. Which ones depends on the seed and on
    the element's place alone: column c of row r (of x seen as a matrix) stays if uniform(w) >= p, w being word c % 4 of
    Philox4x32-10 under the key `seed` and the counter (c // 4, r, 0, 0). p = 0 draws nothing and changes nothing.

    Args:
        x, residual: [..., size], any float dtype; weight, bias: [size], same dtype.
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
    if not 0 <= p <= 1:
        raise ValueError(f"p: expected a probability in [0, 1], not {p}")
    y = F.layer_norm(x, x.shape[-1:], weight, bias, eps) + residual
    if p > 0:
        size = x.shape[-1]
        rows, fours = (torch.arange(n, device=x.device) for n in (x.numel() // max(size, 1), -(-size // 4)))
        zero = torch.zeros(1, 1, dtype=torch.int64, device=x.device)
        key = torch.full((1, 1), (seed + 2**63) % 2**64 - 2**63, dtype=torch.int64, device=x.device)
        words = torch.stack(philox(fours[None, :], rows[:, None] & 0xFFFFFFFF, zero, zero, key), -1)
        keep = (uniform(words.flatten(1)[:, :size]) >= p).view(x.shape)
        y = torch.where(keep, y * (1 / (1 - p) if p < 1 else 0.0), 0.0)
    return F.gelu(y, approximate=approximate)
