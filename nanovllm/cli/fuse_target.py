"""What `nanovllm fuse` looks at: the decoder layer of a preset or a module of the user's own, with its arguments."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from nanovllm.cli.fuse_layer import decoder_layer
from nanovllm.fuse.module_export import place_of


@dataclass
class FuseTarget:
    """A module with its arguments, and what tells it from others."""

    module: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    known: Mapping[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    title: str = ""


def layer_of_preset(
    name: str, tokens: int, context: int | None, phase: str, dtype: str | None, where: torch.device | None
) -> FuseTarget:
    decode = phase == "decode"
    context = context if context is not None else 1024 if decode else tokens
    layer, kwargs, known = decoder_layer(
        name, tokens, context, decode, where or "meta", None if dtype is None else getattr(torch, dtype)
    )
    about = {
        "module": f"{name} decoder layer", "phase": phase, "tokens": tokens, "context": context,
        "dtype": str(kwargs["x"].dtype).removeprefix("torch."),
    }  # fmt: skip
    title = f"{about['module']}, {phase}, tokens {tokens}, context {context}, {about['dtype']}"
    return FuseTarget(layer, (), kwargs, known, about, title)


def own_module(text: str, where: torch.device | None) -> FuseTarget:
    """What "package.module:function" returns: (module, arguments) or (module, positional, keyword arguments)."""
    function = _function(text)
    try:
        made = function()
    except Exception as e:  # the user's own: their line says more than ours
        raise ValueError(f"--module {text}: {_raised(e)}") from e
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ValueError(f"--module {text}: expected (module, arguments), not {type(made).__name__}")
    module, args = made[:2]
    kwargs: Any = made[2] if len(made) == 3 else {}
    if isinstance(args, Mapping):
        kwargs = {**args, **kwargs}
        args = ()
    if isinstance(args, torch.Tensor):
        args = (args,)
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
        given = f"{type(args).__name__}, {type(kwargs).__name__}"
        raise ValueError(f"--module {text}: expected the arguments as a tuple or by name, not {given}")
    if where is not None:
        _check_values(text, module, args, kwargs)
        module = module.to(where) if isinstance(module, torch.nn.Module) else module
        args, kwargs = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda t: t.to(where), (tuple(args), dict(kwargs))
        )
    about = {"module": text, "arguments": _describe(args, kwargs)}
    return FuseTarget(module, tuple(args), dict(kwargs), {}, about, f"{text}({about['arguments']})")


def _raised(e: Exception) -> str:
    """An error of the user's code in one line, with the place."""
    return f"{type(e).__name__}: {' '.join(str(e).split())[:300]}{place_of(e)}"


def _check_values(text: str, module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """ValueError if something has no values: what is measured is run."""
    flat = torch.utils._pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]
    tensors = [(torch.utils._pytree.keystr(path[1:]).strip("[]'"), "argument", t) for path, t in flat]
    if isinstance(module, torch.nn.Module):
        tensors += [(name, "parameter", t) for name, t in module.named_parameters()]
        tensors += [(name, "buffer", t) for name, t in module.named_buffers()]
    for name, what, t in tensors:
        if isinstance(t, torch.Tensor) and t.is_meta:
            how = "make the module without the meta device"
            if what == "argument":
                how = f"make it with values, such as torch.randn({', '.join(map(str, t.shape))})"
            raise ValueError(
                f"--module {text}: {what} {name} is on the meta device, and --measure needs values: {how}; only "
                "predictions do without"
            )


def _function(text: str) -> Callable[[], Any]:
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise ValueError(f"--module {text}: expected package.module:function or file.py:function")
    if place.endswith(".py") and not Path(place).is_file():
        raise ValueError(f"--module {text}: there is no file {place}")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            assert spec is not None and spec.loader is not None
            loaded = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded)
        else:
            if "" not in sys.path:
                sys.path.insert(0, "")
            loaded = importlib.import_module(place)
    except ImportError as e:
        raise ValueError(f"--module {text}: cannot import {place}: {e}") from e
    except Exception as e:  # raised by the file itself
        raise ValueError(f"--module {text}: cannot import {place}: {_raised(e)}") from e
    if not callable(getattr(loaded, name, None)):
        raise ValueError(f"--module {text}: {place} has no function {name!r}")
    return getattr(loaded, name)


def _describe(args: Any, kwargs: Mapping[str, Any]) -> str:
    leaves = torch.utils._pytree.tree_leaves((args, dict(kwargs)))
    return ", ".join(
        f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in leaves if isinstance(t, torch.Tensor)
    )
