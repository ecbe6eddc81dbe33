"""Qwen3 (dense): the shared decoder, with an RMS norm over each query and key head."""

from nanovllm.models.decoder import DecoderForCausalLM


class Qwen3ForCausalLM(DecoderForCausalLM):
    qk_norm = True
