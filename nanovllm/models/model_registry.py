"""Which class serves an architecture that a config.json names."""

from nanovllm.models import dense, gemma, qwen3_moe
from nanovllm.models.decoder import DecoderForCausalLM

_CLASSES: tuple[type[DecoderForCausalLM], ...] = (
    dense.LlamaForCausalLM, dense.MistralForCausalLM, dense.Phi3ForCausalLM, dense.Qwen2ForCausalLM,
    dense.Qwen3ForCausalLM, dense.SmolLM3ForCausalLM, gemma.Gemma2ForCausalLM, gemma.Gemma3ForCausalLM,
    qwen3_moe.Qwen3MoeForCausalLM,
)  # fmt: skip
MODELS = {cls.__name__: cls for cls in _CLASSES}


def model_class(architecture: str) -> type[DecoderForCausalLM]:
    """The class for a config.json's `architectures` entry; a ValueError that lists the supported ones if none is."""
    try:
        return MODELS[architecture]
    except KeyError:
        raise ValueError(
            f"architecture {architecture!r} is not supported; supported are {', '.join(sorted(MODELS))}"
        ) from None
