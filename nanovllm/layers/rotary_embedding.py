"""Rotary position embedding: the table of angles, with the scalings that extend a model's context."""

import math
from collections.abc import Sequence

import torch
import torch.nn as nn

from nanovllm.kernels import Kernels
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.model_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int, max_position: int = 0) -> tuple[torch.Tensor, float]:
    """The head_dim / 2 angular frequencies (float32, radians a token) and the factor on cos and sin.

    Sources: RoFormer (Su et al., 2021); linear interpolation (Chen et al., 2023); YaRN (Peng et al., 2023); LongRoPE
    (Ding et al., 2024); Llama 3.1's piecewise scaling; and `freq_factors`, the per-frequency divisors that a GGUF file
    stores.

    Args:
        head_dim: the elements of a head that are rotated.
        max_position: positions below this are served. LongRoPE has two sets of frequencies. The set for long contexts
            is taken if this is beyond the context of the original training.
    """
    p = dict(rope.scaling)
    inv_freq = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.scaling_type == "linear":
        return inv_freq / p["factor"], 1.0
    if rope.scaling_type == "freq_factors":
        return inv_freq / torch.tensor(p["factors"], dtype=torch.float32), 1.0
    if rope.scaling_type == "llama3":
        return _llama3(
            inv_freq, p["factor"], p["low_freq_factor"], p["high_freq_factor"], p["original_max_position_embeddings"]
        ), 1.0
    if rope.scaling_type == "longrope":
        return _longrope(rope.theta, head_dim, p["long_factor" if rope.is_long(max_position) else "short_factor"], p)
    if rope.scaling_type == "yarn":
        return _yarn(inv_freq, rope.theta, head_dim, p)
    return inv_freq, 1.0


def _llama3(inv_freq: torch.Tensor, factor: float, low: float, high: float, original_len: int) -> torch.Tensor:
    # Long wavelengths are interpolated, short ones kept, those between blended.
    wavelength = 2 * math.pi / inv_freq
    blend = (original_len / wavelength - low) / (high - low)
    smooth = (1 - blend) * inv_freq / factor + blend * inv_freq
    scaled = torch.where(wavelength > original_len / low, inv_freq / factor, inv_freq)
    between = (wavelength <= original_len / low) & (wavelength >= original_len / high)
    return torch.where(between, smooth, scaled)


def _longrope(theta: float, head_dim: int, divisors: Sequence[float], p: dict) -> tuple[torch.Tensor, float]:
    factor, attention_factor, original_len = (
        p["factor"],
        p.get("attention_factor"),
        p["original_max_position_embeddings"],
    )
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original_len)) if factor > 1 else 1.0
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (torch.tensor(divisors, dtype=torch.float32) * theta**exponents), attention_factor


def _yarn(inv_freq: torch.Tensor, theta: float, head_dim: int, p: dict) -> tuple[torch.Tensor, float]:
    factor = p["factor"]
    original_len = p["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        # The dimension whose frequency turns `rotations` times over the original context.
        return head_dim * math.log(original_len / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)).clamp(0, 1)
    scaled = inv_freq / factor * ramp + inv_freq * (1 - ramp)

    def temperature(m: float = 1.0) -> float:
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = p.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all = p.get("mscale"), p.get("mscale_all_dim")
        attention_factor = temperature(mscale) / temperature(mscale_all) if mscale and mscale_all else temperature()
    return scaled, attention_factor


class RotaryEmbedding(nn.Module):
    """Rotates q and k by their positions.

    A head's rotated pairs are its elements i and i + head_dim / 2. Pairs that are not rotated have an angle of 0, so
    that every kernel serves them. If a part of the head is rotated, weights must have the order `head_order`.

    Args:
        rope: base frequency and scaling; None: nothing is rotated.
        head_dim: elements of a head.
        max_position: positions 0 .. max_position - 1 are tabulated.
    """

    cos_sin_cache: torch.Tensor

    def __init__(self, rope: RopeConfig | None, head_dim: int, max_position: int, kernels: Kernels) -> None:
        super().__init__()
        device = torch.get_default_device()
        with torch.device("cpu"):  # so that every device has the same table
            table = _table(rope, head_dim, max_position)
        table = table.to(device)
        self.register_buffer("cos_sin_cache", table.expand(max_position, -1), persistent=False)
        self._rotary_embedding = kernels.rotary_embedding
        self._qk_norm_rope = kernels.qk_norm_rope

    def forward(
        self,
        positions: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q and k [num_tokens, heads, head_dim], rotated; the norm of every head before, if there is one."""
        if q_norm is None or k_norm is None:
            return self._rotary_embedding(positions, q, k, self.cos_sin_cache)
        return self._qk_norm_rope(positions, q, k, q_norm.weight, k_norm.weight, q_norm.eps, self.cos_sin_cache)


def _table(rope: RopeConfig | None, head_dim: int, max_position: int) -> torch.Tensor:
    """cos and sin of the angles, [max_position, head_dim] float32; one row if all rows are the same."""
    half = head_dim // 2
    if rope is None:
        return torch.cat((torch.ones(1, half), torch.zeros(1, half)), dim=-1)
    rotated = rope.rotary_dim(head_dim)
    inv_freq, factor = inverse_frequencies(rope, rotated, max_position)
    angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inv_freq)
    cos, sin = angles.cos() * factor, angles.sin() * factor
    if rotated == head_dim:
        return torch.cat((cos, sin), dim=-1)
    rest = max_position, half - rotated // 2
    return torch.cat((cos, torch.ones(rest), sin, torch.zeros(rest)), dim=-1)


def head_order(head_dim: int, rotary_dim: int) -> list[int]:
    """For each element of a head in this engine, which element of a checkpoint's head it is.

    A checkpoint rotates the leading `rotary_dim` elements in pairs i and i + rotary_dim / 2. Here the pairs are i and
    i + head_dim / 2 of the whole head. Products of queries and keys are the same in any order.
    """
    half, rotated = head_dim // 2, rotary_dim // 2
    first = [*range(rotated), *range(rotary_dim, rotary_dim + half - rotated)]
    second = [*range(rotated, rotary_dim), *range(rotary_dim + half - rotated, head_dim)]
    return first + second
