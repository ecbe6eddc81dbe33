"""Functions of vLLM's platform that the plugin changes, in this process, until they are put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_HOOKED = "_nanovllm_replaced"


def hook(name: str, change: Callable[..., Any]) -> None:
    """Let a function change what the platform's function `name` returns. It takes that result, then the arguments."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    before, original = platform.__dict__.get(name), getattr(platform, name)

    def hooked(cls: Any, *args: Any) -> Any:
        return change(original(*args), *args)

    setattr(hooked, _HOOKED, before)
    setattr(platform, name, classmethod(hooked))


def unhook() -> None:
    """Undo every `hook`."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    for name, function in list(vars(platform).items()):
        hooked = getattr(function, "__func__", None)
        if not hasattr(hooked, _HOOKED):
            continue
        before = getattr(hooked, _HOOKED)
        if before is None:
            delattr(platform, name)
        else:
            setattr(platform, name, before)
