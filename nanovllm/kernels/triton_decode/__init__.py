"""Decode of a few tokens in about five kernels a layer: fused products that read their weights at memory speed."""

from nanovllm.kernels.triton_decode.launch import add_rms_norm_gate_up, add_rms_norm_linear, linear

__all__ = ["add_rms_norm_gate_up", "add_rms_norm_linear", "linear"]
