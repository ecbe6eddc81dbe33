"""Tiny random models of the architectures that the adapter of transformers is for."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

_COMMON: dict[str, Any] = dict(
    vocab_size=99, hidden_size=32, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, bos_token_id=None, eos_token_id=None,
    pad_token_id=0, tie_word_embeddings=False,
)  # fmt: skip
_WINDOW = 6
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": True, "sliding_window": _WINDOW, "max_window_layers": 1},
    "Qwen3": {"attention_bias": True},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [0]},
    "Mistral": {"sliding_window": _WINDOW},
    "Gemma": {"hidden_act": "gelu_pytorch_tanh", "num_key_value_heads": 1},
    "Gemma2": {"sliding_window": _WINDOW, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "Gemma3": {"sliding_window": _WINDOW, "query_pre_attn_scalar": 16, "sliding_window_pattern": 2},
    "Phi3": {"head_dim": 8},
}
_CLASSES = {"Gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM")}


def tiny(architecture: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """A model in eval mode whose logits are far apart, and whose norms and biases are random too."""
    import transformers

    config_name, model_name = _CLASSES.get(architecture, (f"{architecture}Config", f"{architecture}ForCausalLM"))
    given = _COMMON | ARCHITECTURES[architecture] | changes
    if architecture == "Phi3":
        given.pop("head_dim")
    config = getattr(transformers, config_name)(**given)
    if "attn_logit_softcapping" in given:  # "sdpa", the default of some versions, leaves out the soft cap
        config._attn_implementation = "eager"
    model = getattr(transformers, model_name)(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                low, high = (-0.3, 0.3) if name.endswith("bias") or architecture.startswith("Gemma") else (0.5, 1.5)
                parameter.uniform_(low, high, generator=generator)
            else:
                parameter.normal_(0, 0.3, generator=generator)
    return model.to(dtype)


@functools.cache
def shared(architecture: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model without gradients that every test leaves as it was."""
    return tiny(architecture, dtype).requires_grad_(False)


def put_in(model: Any, captures: bool = False, exclude: Iterable[str] = (), **providers: str) -> Any:
    """Every op but those in `exclude`; with `captures`, decode steps are captured as on a GPU."""
    from nanovllm.adapters.transformers import OPS, apply
    from nanovllm.adapters.transformers.stack import STACK

    # On a CPU oneDNN leaves dense weights to PyTorch.
    report = apply(model, ops=dict.fromkeys(OPS, ()) | {"linear": "native"} | providers, exclude=exclude)
    if captures:
        model.model.__dict__[STACK].captures = True
    return report


def prompts(padding: str | None = None, batch: int = 3, length: int = 9) -> dict[str, torch.Tensor]:
    """Token ids and their mask: rows of different lengths if there is padding, "left" or "right"."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(1, 99, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(batch if padding else 0):
        n = 2 * row
        where = slice(0, n) if padding == "left" else slice(length - n, None)
        mask[row, where] = ids[row, where] = 0
    return {"input_ids": ids, "attention_mask": mask}
