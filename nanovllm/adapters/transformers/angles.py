"""cos and sin as transformers computes them, as the table that the ops of rotary embedding take."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from nanovllm.adapters.transformers.probe import run, same, stand_in

Tensor = torch.Tensor
_KEPT = 4


class Angles:
    """The tables of the last forwards. The layers of a model get the same cos and sin, so a table is made once."""

    def __init__(self) -> None:
        self._made: list[tuple[Tensor, int, tuple[Tensor, Tensor]]] = []

    def table(self, cos: Tensor, sin: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """The row of each token in a table, and the table.

        Args:
            cos, sin: [batch or 1, tokens, head_dim], the second half of a row being the same as the first.

        Returns:
            (positions [batch * tokens] int64, cos_sin_cache [rows, head_dim] float32), as of `rotary_embedding`.
        """
        if torch.compiler.is_compiling():
            return _table(cos, sin, batch)
        for known, rows, made in self._made:
            if known is cos and rows == batch:
                return made
        made = _table(cos, sin, batch)
        self._made = [(cos, batch, made), *self._made[: _KEPT - 1]]
        return made


def _table(cos: Tensor, sin: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    half = cos.shape[-1] // 2
    table = torch.cat((cos[..., :half], sin[..., :half]), -1).float().flatten(0, 1)
    positions = torch.arange(table.shape[0], device=table.device)
    return positions if cos.shape[0] == batch else positions.repeat(batch), table


def unsuited_rotary(model: nn.Module, head_dim: int) -> str | None:
    """Why a model's rotary embedding is not the one of the ops: pairs (i, i + head_dim / 2) turn by one angle a token.

    Its modules are those with a buffer of inverse frequencies. They are run on positions 0 to 2.
    """
    found = False
    for module in model.modules():
        if not any("inv_freq" in name for name in module._buffers):
            continue
        found = True
        buffers = {name: b if b is None else b.detach().cpu() for name, b in module._buffers.items()}
        x, positions = torch.zeros(1, 3, 1), torch.arange(3)[None]
        try:
            pairs = _cos_and_sin(stand_in(module), module, buffers, x, positions)
        except Exception as error:  # code of others, with arguments that it may not have
            return f"its rotary embedding could not be run ({type(error).__name__})"
        for values in pairs:
            half = head_dim // 2
            if values.shape != (1, 3, head_dim) or not same(values[..., :half], values[..., half:]):
                return "its rotary embedding turns only a part of a head, or other pairs"
    return None if found else "it has no rotary embedding that was recognised"


def _cos_and_sin(copy: Any, module: nn.Module, buffers: dict[str, Any], x: Tensor, positions: Tensor) -> list[Tensor]:
    copy._buffers.update(buffers)
    types = {name.removesuffix("_inv_freq") for name in buffers if name.endswith("_inv_freq")} - {"original"}
    types = {t for t in types if not t.endswith("_original")}
    if not types:
        return list(run(copy, x, positions))
    return [values for t in sorted(types) for values in run(copy, x, positions, t)]
