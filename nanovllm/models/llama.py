"""The Llama family (Llama 2 and 3, SmolLM2): the shared decoder as it is."""

from nanovllm.models.decoder import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    qk_norm = False
