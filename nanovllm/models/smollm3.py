"""SmolLM3: the shared decoder. `ModelConfig.layers` says which layers do not rotate queries and keys."""

from nanovllm.models.decoder import DecoderForCausalLM


class SmolLM3ForCausalLM(DecoderForCausalLM):
    qk_norm = False
