"""What providers say of themselves, `support` and `accepts`, held to their form, and how a call is described in errors."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

logger = logging.getLogger(__name__)

Support = Callable[[torch.device], "str | None"]


def reason_if_it_fails(support: Support, who: str) -> Support:
    """A stranger's support function that fails must not stop those who merely list the providers: they are warned, once."""
    warned = False

    @functools.wraps(support)
    def checked(device: torch.device) -> str | None:
        nonlocal warned
        try:
            return checked_reason(support(device))
        except Exception as e:
            reason = f"its support function failed: {type(e).__name__}: {e}"
            if not warned:
                warned = True
                logger.warning("%s: %s", who, reason)
            return reason

    return checked


def checked_reason(given: Any) -> str | None:
    """What `support` or `accepts` returned; a TypeError if it is neither None nor a string."""
    if given is None or isinstance(given, str):
        return given
    raise TypeError(
        f"it returned {given!r:.40}; it must return None where the provider can run, else a string that says why not"
    )


def describe_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """A call's arguments for people, tensors as their dtype, shape and strides."""
    return ", ".join([*map(_describe, args), *(f"{k}={_describe(v)}" for k, v in kwargs.items())])


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        gap = "" if value.is_contiguous() else f" strides {list(value.stride())}"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{gap}"
    return f"{value!r:.40}"
