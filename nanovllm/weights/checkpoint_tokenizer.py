"""The tokenizer and the end tokens of an engine's checkpoint."""

from __future__ import annotations

from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.weights.checkpoint import Checkpoint
from nanovllm.weights.tokenizer import eos_token_ids, load_tokenizer


def checkpoint_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Any:
    """The transformers tokenizer; None if none is wanted, or dummy weights have none.

    Raises:
        ValueError: there is none.
    """
    source = config.tokenizer or checkpoint.path
    if config.skip_tokenizer_init or source is None:
        return None
    tokenizer = load_tokenizer(source)
    if tokenizer is None and (checkpoint.format != "dummy" or config.tokenizer):
        raise ValueError(
            f"{source} holds no tokenizer; copy tokenizer.json and tokenizer_config.json into it, or pass a directory"
            " that has them (LLM(tokenizer=...), nanovllm serve --tokenizer); LLM(skip_tokenizer_init=True) takes token"
            " ids"
        )
    return tokenizer


def checkpoint_eos_token_ids(checkpoint: Checkpoint, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end a sequence, as far as the model has logits for them.

    A tokenizer may know more tokens than the model, and some files say -1 for none.
    """
    path = checkpoint.path
    found = eos_token_ids(path if path and path.is_dir() else checkpoint.config.raw, tokenizer)
    return tuple(token for token in found if 0 <= token < checkpoint.config.vocab_size)
