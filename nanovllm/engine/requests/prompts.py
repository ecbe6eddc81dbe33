"""From what a user passes as a prompt to checked token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from nanovllm.foreign_arguments import CALL_ARGUMENTS
from nanovllm.weights.token_lengths import MostCharacters, most_characters
from nanovllm.wording import brief, counted

Prompt = str | Sequence[int] | Mapping[str, Any]
"""What a user passes: a text, token ids, or a dict with "prompt" or "prompt_token_ids", and maybe "cache_salt"."""
_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
_UNCHECKED_CHARACTERS = 16
"""A text with at most this many characters for each token that fits is tokenised without a check of its length. So the
longest token of the vocabulary need not be known."""


class CheckedPrompt(NamedTuple):
    """A prompt that fits the model."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None


RAISE_MAX_MODEL_LEN = "shorten the prompt or raise max_model_len"
"""What to do with a prompt that is too long, if `max_model_len` is all that limits it."""


class PromptReader:
    """Turns prompts to token ids. A prompt that cannot be served is refused before it costs time or memory.

    Args:
        tokenizer: a transformers tokenizer, or None for an engine that serves token ids only.
        vocab_size: the number of token ids of the model.
        max_model_len: most tokens of a prompt and its output. An output has at least one token.
        remedy: what to do with a prompt that is too long.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, max_model_len: int, remedy: str = RAISE_MAX_MODEL_LEN) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._remedy = remedy

    def read(self, prompt: Any, name: str) -> CheckedPrompt:
        """A prompt's text and token ids. name: what the user calls the prompt.

        Args:
            prompt: a text, token ids, or a dict with "prompt" or "prompt_token_ids", and maybe "cache_salt".

        Raises:
            ValueError, TypeError: the prompt cannot be served.
        """
        salt = None
        if isinstance(prompt, Mapping):
            _check_dict(prompt, name)
            text, salt = prompt.get("prompt"), prompt.get("cache_salt")
            if "prompt_token_ids" in prompt:
                return CheckedPrompt(text, self._token_ids(prompt["prompt_token_ids"], name), salt)
            prompt = text
        if not isinstance(prompt, str):
            return CheckedPrompt(None, self._token_ids(prompt, name), salt)
        token_ids = self.encode(prompt, name)
        self.check_ids(token_ids)
        self._check_length(len(token_ids))
        return CheckedPrompt(prompt, token_ids, salt)

    def encode(self, text: str, name: str, add_special_tokens: bool = True) -> list[int]:
        """The tokenizer's ids of a text; a ValueError that calls it `name` if that cannot be."""
        if self._tokenizer is None:
            raise ValueError(
                "this engine has no tokenizer, so it serves token ids: pass a list of integers, or tokenizer= to LLM"
            )
        self._check_characters(text)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name}={brief(text)}: half of a surrogate pair, at position {error.start}, is no text; remove it"
            ) from None
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def check_ids(self, token_ids: list[int] | np.ndarray) -> None:
        """Raise a ValueError for a token id outside of the vocabulary."""
        if not len(token_ids):
            return
        if isinstance(token_ids, np.ndarray):  # Python's own functions would be slow
            low, high = token_ids.min(), token_ids.max()
        else:
            low, high = min(token_ids), max(token_ids)
        if low < 0 or high >= self._vocab_size:
            size = self._vocab_size
            raise ValueError(
                f"token id {low if low < 0 else high} is outside the vocabulary of {size} (0 to {size - 1})"
            )

    def _check_characters(self, text: str) -> None:
        """Refuse a text that surely has too many tokens, before the seconds and gigabytes that tokenising it takes."""
        fits = self._max_model_len - 1
        if len(text) <= fits * _UNCHECKED_CHARACTERS or self._most_characters is None:
            return
        most = fits * self._most_characters.number
        if len(text) > most:
            length = len("".join(text.split())) if self._most_characters.without_spaces else len(text)
            if length > most:
                raise ValueError(
                    f"the prompt has {counted(len(text), 'character')}, but max_model_len={self._max_model_len} allows"
                    f" {counted(fits, 'token')} and one of output, and a token has at most"
                    f" {counted(self._most_characters.number, 'character')}; {self._remedy}"
                )

    @cached_property
    def _most_characters(self) -> MostCharacters | None:
        return most_characters(self._tokenizer)

    def _check_length(self, length: int) -> None:
        if not length:
            raise ValueError("the prompt is empty: it needs at least one token")
        limit = self._max_model_len
        if length >= limit:
            raise ValueError(
                f"the prompt has {counted(length, 'token')}, but max_model_len={limit} allows {limit - 1} and one of"
                f" output; {self._remedy}"
            )

    def _token_ids(self, prompt: Any, name: str) -> list[int]:
        if isinstance(prompt, (list, tuple)):
            self._check_length(len(prompt))  # before millions of entries are looked at
        try:
            array = np.asarray(prompt)
        except (ValueError, TypeError, OverflowError, RuntimeError):  # ragged, or not an array at all
            array = np.empty(0)
        if array.ndim == 1 and array.dtype.kind in "iu":
            self._check_length(len(array))
            self.check_ids(array)
            return array.tolist()
        try:
            if isinstance(prompt, (bytes, bytearray, Set)) or array.dtype.kind == "b":  # Python's integers, but no ids
                raise TypeError
            token_ids = [int(t.__index__()) for t in prompt]
        except (TypeError, AttributeError):
            raise TypeError(
                f"{name}: a prompt is a string, a list of token ids or a dict with one of them, not {brief(prompt)}"
            ) from None
        self._check_length(len(token_ids))
        self.check_ids(token_ids)
        return token_ids


def _check_dict(prompt: Mapping[str, Any], name: str) -> None:
    """Raise a ValueError for a prompt dict with other keys than `PromptReader.read` takes, or with an empty salt."""
    unknown = sorted(map(str, prompt.keys() - _KEYS))
    for key in unknown:
        if key in CALL_ARGUMENTS:
            raise ValueError(
                f'{name}: a prompt dict has "prompt" or "prompt_token_ids", not "{key}": {CALL_ARGUMENTS[key].answer}'
            )
    if unknown or not ("prompt" in prompt or "prompt_token_ids" in prompt):
        raise ValueError(
            f'{name}={brief(prompt)}: a prompt dict has "prompt" or "prompt_token_ids", and maybe "cache_salt",'
            f" not {sorted(map(str, prompt))}"
        )
    salt = prompt.get("cache_salt")
    if "cache_salt" in prompt and not (isinstance(salt, str) and salt):
        raise ValueError(f"{name}: cache_salt={brief(salt)}: must be a string that is not empty; or leave it out")
