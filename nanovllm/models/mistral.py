"""Mistral: the shared decoder. `ModelConfig.layers` has the window, which is the same in all layers."""

from nanovllm.models.decoder import DecoderForCausalLM


class MistralForCausalLM(DecoderForCausalLM):
    qk_norm = False
