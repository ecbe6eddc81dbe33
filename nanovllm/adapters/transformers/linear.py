"""Linear layers of few tokens, and token embeddings."""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any

import torch
from torch import nn

from nanovllm.adapters.transformers.selected import Call, differentiated


def linear_forward(call: Call, counts: Container[int] | None, original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward of the module by the op `linear`, for the numbers of tokens in `counts`; else by its own code."""

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return original(module, *args, **kwargs)
        x, weight = args[0], module.weight
        if counts is not None and x.numel() // x.shape[-1] not in counts:
            return original(module, x)
        if x.dtype != weight.dtype or differentiated(module, x):
            return original(module, x)
        return call(x, weight, module.bias)

    return forward


def is_embedding(module: nn.Module) -> bool:
    """Whether it is a table of rows and nothing more."""
    return type(module) is nn.Embedding and module.max_norm is None


def embedding_forward(call: Call, original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward of the module by the op `embedding`."""

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or args[0].dtype != torch.int64 or differentiated(module):
            return original(module, *args, **kwargs)
        ids, weight = args[0], module.weight
        return call(ids.reshape(-1), weight).view(*ids.shape, weight.shape[1])

    return forward
