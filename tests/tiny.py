"""Tiny random checkpoints, their tokenizer, and what transformers says that they do."""

from __future__ import annotations

from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

# Awkward on purpose: the vocabulary is odd, and head_dim is not hidden_size / num_attention_heads.
DEFAULTS: dict[str, Any] = dict(
    vocab_size=199, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=False, bos_token_id=None,
    eos_token_id=None, pad_token_id=None,
)  # fmt: skip
CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
}
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL_TOKENS = ("<|end|>", "<|user|>", "<|assistant|>")


def model(architecture: str = "qwen3", seed: int = 0, **overrides: Any) -> Any:
    """A random transformers model of `CLASSES`, in float32 and eval mode; `overrides` are of its configuration.

    Weights are large enough for logits to be far apart and norms and biases are random too, so that greedy output is
    varied and a weight that is lost or misplaced shows.
    """
    import transformers

    config_class, model_class = (getattr(transformers, name) for name in CLASSES[architecture])
    entries = deepcopy(DEFAULTS | overrides)  # a configuration keeps them, and callers share theirs
    made = model_class(config_class(**entries)).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3, generator=generator)
            elif parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 0.15, generator=generator)
    return made.requires_grad_(False)


def save(
    directory: str | Path, architecture: str = "qwen3", *, seed: int = 0, max_shard_size: str = "1GB", **overrides: Any
) -> Any:
    """Write such a model to `directory` (config.json and safetensors, no tokenizer) and return it."""
    made = model(architecture, seed, **overrides)
    made.save_pretrained(directory, max_shard_size=max_shard_size)
    return made


@lru_cache
def tokenizer() -> Any:
    """Byte-level BPE: the 256 bytes, every pair of lower-case letters, a space before each letter, three special
    tokens.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = "abcdefghijklmnopqrstuvwxyz"
    merges = [("\u0120", x) for x in letters] + [(x, y) for x in letters for y in letters]
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(pair) for pair in merges]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|end|>", chat_template=CHAT_TEMPLATE, clean_up_tokenization_spaces=False
    )


def save_with_tokenizer(directory: str | Path, architecture: str = "qwen3", **overrides: Any) -> Any:
    """As `save`, with `tokenizer()` beside it and a vocabulary of its size, so that every token has a text."""
    made = save(directory, architecture, **dict(vocab_size=len(tokenizer())) | overrides)
    tokenizer().save_pretrained(directory)
    return made


@torch.no_grad()
def greedy(made: Any, prompt: list[int], max_tokens: int) -> list[int]:
    """What transformers' greedy `generate` adds to the prompt."""
    ids = torch.tensor([prompt], device=made.device)
    out = made.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_tokens, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@torch.no_grad()
def greedy_each(made: Any, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """As `greedy` of each prompt, in one batch, which takes a fraction of the time."""
    longest = max(map(len, prompts))
    ids, mask = torch.zeros(2, len(prompts), longest, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(prompt)
        mask[row, longest - len(prompt) :] = 1
    out = made.generate(
        ids.to(made.device), attention_mask=mask.to(made.device), do_sample=False, max_new_tokens=max_tokens,
        pad_token_id=0,
    )  # fmt: skip
    return out[:, longest:].tolist()


@torch.no_grad()
def logprobs(made: Any, token_ids: list[int]) -> torch.Tensor:
    """log_softmax of the logits at every position: [len(token_ids), vocab_size] float32."""
    return made(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)
