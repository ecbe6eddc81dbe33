"""Qwen2 and Qwen2.5: the shared decoder. Queries, keys and values have biases (`ModelConfig.attention_bias`)."""

from nanovllm.models.decoder import DecoderForCausalLM


class Qwen2ForCausalLM(DecoderForCausalLM):
    qk_norm = False
