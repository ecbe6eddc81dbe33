"""The architectures that are the shared decoder as it is.

`ModelConfig` has what differs: biases, windows, which layers rotate queries and keys, and which part of a head.
"""

from nanovllm.models.decoder import DecoderForCausalLM


class LlamaForCausalLM(DecoderForCausalLM):
    """Llama 2 and 3, SmolLM2."""


class MistralForCausalLM(DecoderForCausalLM):
    """With a window in all layers."""


class Phi3ForCausalLM(DecoderForCausalLM):
    """Phi-3 and Phi-4: checkpoints have fused tensors."""

    SPLIT = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


class Qwen2ForCausalLM(DecoderForCausalLM):
    """Qwen2 and Qwen2.5."""


class Qwen3ForCausalLM(DecoderForCausalLM):
    """Dense Qwen3."""

    qk_norm = True


class SmolLM3ForCausalLM(DecoderForCausalLM):
    """Some layers do not rotate."""
