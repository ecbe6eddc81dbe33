"""Which class serves an architecture that a config.json names."""

from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.gemma import Gemma2ForCausalLM, Gemma3ForCausalLM
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.models.mistral import MistralForCausalLM
from nanovllm.models.phi3 import Phi3ForCausalLM
from nanovllm.models.qwen2 import Qwen2ForCausalLM
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.models.qwen3_moe import Qwen3MoeForCausalLM
from nanovllm.models.smollm3 import SmolLM3ForCausalLM

MODELS: dict[str, type[DecoderForCausalLM]] = {
    "Gemma2ForCausalLM": Gemma2ForCausalLM,
    "Gemma3ForCausalLM": Gemma3ForCausalLM,
    "LlamaForCausalLM": LlamaForCausalLM,
    "MistralForCausalLM": MistralForCausalLM,
    "Phi3ForCausalLM": Phi3ForCausalLM,
    "Qwen2ForCausalLM": Qwen2ForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
    "Qwen3MoeForCausalLM": Qwen3MoeForCausalLM,
    "SmolLM3ForCausalLM": SmolLM3ForCausalLM,
}


def model_class(architecture: str) -> type[DecoderForCausalLM]:
    """The class for a config.json's `architectures` entry; a ValueError that lists the supported ones if none is."""
    try:
        return MODELS[architecture]
    except KeyError:
        raise ValueError(
            f"architecture {architecture!r} is not supported; supported are {', '.join(sorted(MODELS))}"
        ) from None
