"""The prompts that a user passes, as a list."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Set
from typing import Any

from nanovllm.wording import brief


def prompt_list(prompts: Any) -> list[Any]:
    """One prompt, or any iterable of prompts, as a list. A TypeError says what a prompt is."""
    if isinstance(prompts, (str, bytes, Mapping, Set)):  # one prompt, or something that is refused as one
        return [prompts]
    try:
        prompts = iter(prompts)
    except TypeError:
        raise TypeError(
            f"prompts={brief(prompts)}: must be a prompt or a list of prompts; a prompt is a string, a list of token"
            " ids or a dict with one of them"
        ) from None
    prompts = list(prompts)
    # A flat list of integers is one prompt of token ids.
    return [prompts] if prompts and isinstance(prompts[0], numbers.Integral) else prompts
