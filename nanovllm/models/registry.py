"""Which class serves an architecture that a config.json names."""

from nanovllm.models.decoder import DecoderForCausalLM
from nanovllm.models.llama import LlamaForCausalLM
from nanovllm.models.qwen3 import Qwen3ForCausalLM

MODELS: dict[str, type[DecoderForCausalLM]] = {
    "LlamaForCausalLM": LlamaForCausalLM,
    "Qwen3ForCausalLM": Qwen3ForCausalLM,
}


def model_class(architecture: str) -> type[DecoderForCausalLM]:
    """The class for a config.json's `architectures` entry; a ValueError that lists the supported ones if none is."""
    try:
        return MODELS[architecture]
    except KeyError:
        raise ValueError(
            f"architecture {architecture!r} is not supported; supported are {', '.join(sorted(MODELS))}"
        ) from None
