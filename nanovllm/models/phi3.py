"""Phi-3 and Phi-4: checkpoints have fused tensors, and a part of each head may be rotated alone."""

from nanovllm.models.decoder import DecoderForCausalLM


class Phi3ForCausalLM(DecoderForCausalLM):
    qk_norm = False

    SPLIT = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
