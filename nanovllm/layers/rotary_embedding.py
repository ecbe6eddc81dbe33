"""Rotary position embedding: the table of angles, with the scalings that extend a model's context."""

import math

import torch
import torch.nn as nn

from nanovllm.kernels import Kernels
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.model_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """The head_dim / 2 angular frequencies (float32, radians a token) and the factor on cos and sin.

    Sources: RoFormer (Su et al., 2021); linear interpolation (Chen et al., 2023); YaRN (Peng et al., 2023);
    Llama 3.1's piecewise scaling; and `freq_factors`, the per-frequency divisors that a GGUF file stores.
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

    Args:
        rope: base frequency and scaling.
        head_dim: all of it is rotated.
        max_position: positions 0 .. max_position - 1 are tabulated.
    """

    cos_sin_cache: torch.Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, max_position: int, kernels: Kernels) -> None:
        super().__init__()
        device = torch.get_default_device()
        with torch.device("cpu"):  # so that every device has the same table
            inv_freq, factor = inverse_frequencies(rope, head_dim)
            angles = torch.outer(torch.arange(max_position, dtype=torch.float32), inv_freq)
            table = torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1)
        self.register_buffer("cos_sin_cache", table.to(device), persistent=False)
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
