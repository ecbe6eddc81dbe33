"""Models whose attention computes with its mask, as sparse attention does, which it cannot with a plan of ours."""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from typing import Any

import torch

_KNOWN: dict[type, bool] = {}


def computes_with_masks(config: Any) -> bool:
    """Whether an attention of the model with this configuration gives its attention function another mask than it gets.

    The source of the model's file says it: its configuration cannot. A compiled graph takes the answer that was given
    before; without one it takes the usual.
    """
    kind = type(config)
    if torch.compiler.is_compiling():
        return _KNOWN.get(kind, False)
    if kind not in _KNOWN:
        code = sys.modules.get(kind.__module__.replace("configuration_", "modeling_"))
        _KNOWN[kind] = code is not None and any(
            changes_its_mask(c) for c in vars(code).values() if isinstance(c, type) and c.__module__ == code.__name__
        )
    return _KNOWN[kind]


def changes_its_mask(kind: type) -> bool:
    """Whether a class calls a function of transformers' `AttentionInterface` with a mask that it made itself."""
    forward = kind.__dict__.get("forward")
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(forward)))  # type: ignore[arg-type]
    except (OSError, TypeError):  # no source, or no forward of its own
        return False
    if ".get_interface(" not in source:
        return False
    function: Any = ast.parse(source).body[0]
    given = {a.arg for a in (*function.args.args, *function.args.kwonlyargs)}
    made = {
        target.id
        for node in ast.walk(function) if isinstance(node, ast.Assign) and not _is_choice(node.value)
        for target in node.targets if isinstance(target, ast.Name)
    }  # fmt: skip
    return any(
        isinstance(mask, ast.Name) and (mask.id in made or mask.id not in given)
        for node in ast.walk(function) if isinstance(node, ast.Call) and (mask := _mask_of(node)) is not None
    )  # fmt: skip


def _is_choice(value: ast.expr) -> bool:
    """Whether an expression is one of several things that have names."""
    if isinstance(value, ast.IfExp):
        return _is_choice(value.body) and _is_choice(value.orelse)
    return isinstance(value, ast.Name)


def _mask_of(call: ast.Call) -> ast.expr | None:
    """The mask in a call such as `attention_interface(self, query, key, value, attention_mask, ...)`."""
    if not (isinstance(call.func, ast.Name) and call.args and ast.unparse(call.args[0]) == "self"):
        return None
    named = {k.arg: k.value for k in call.keywords}
    return call.args[4] if len(call.args) > 4 else named.get("attention_mask")
