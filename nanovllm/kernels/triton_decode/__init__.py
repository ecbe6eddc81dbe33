"""Decode of few tokens in five to seven kernels a layer: fused products that read their weights at memory speed."""

from nanovllm.kernels.triton_decode.launch import (
    add_rms_norm_gate_up,
    add_rms_norm_linear,
    linear,
    linear_add_rms_norm,
    linear_silu_and_mul,
)

__all__ = ["add_rms_norm_gate_up", "add_rms_norm_linear", "linear", "linear_add_rms_norm", "linear_silu_and_mul"]
