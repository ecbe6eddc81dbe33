"""The ops as `torch.ops.nanovllm.*`, for torch.compile, export and `torch.library.opcheck`.

The engine does not pass through here: it calls the provider's function, which costs some microseconds less a call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from nanovllm.kernels.registry import Op, all_ops, told_of_ops

logger = logging.getLogger(__name__)

_LIBRARIES: dict[str, torch.library.Library] = {}
"""One an op, so that a plugin's op can go."""


def register(declared: Op) -> None:
    """Define `torch.ops.nanovllm.<name>`: functional but for the arguments that the op is declared to write to.

    Results are contiguous, whatever the provider. The schema follows from the reference's annotations.
    """
    schema = torch.library.infer_schema(declared.native, mutates_args=declared.mutates)
    library = torch.library.Library("nanovllm", "FRAGMENT")
    library.define(declared.name + schema, tags=())
    torch.library.impl(library, declared.name, "CompositeExplicitAutograd")(_implementation(declared))
    torch.library.register_fake(f"nanovllm::{declared.name}", _fake(declared), lib=library)
    _LIBRARIES[declared.name] = library


def unregister(name: str) -> None:
    """Undo `register`, if it was done."""
    if name in _LIBRARIES:
        _LIBRARIES.pop(name)._destroy()


def register_or_warn(declared: Op) -> None:
    """`register`, of an op that may not be ready for it: all but torch.compile works without."""
    try:
        register(declared)
    except (ValueError, RuntimeError) as e:  # for example parameters without annotations
        logger.warning("op %r is not in torch.ops.nanovllm, so torch.compile cannot take it: %s", declared.name, e)


def _implementation(declared: Op) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = declared.signature.bind(*args, **kwargs)
        declared.check(arguments.arguments)
        for name in declared.reuses:  # a result must not be an argument's memory
            arguments.arguments[name] = arguments.arguments[name].clone()
        result = declared.run(arguments)
        return _contiguous(result)

    return call


def _fake(declared: Op) -> Callable[..., Any]:
    reference = declared.fake or declared.native

    def call(*args: Any, **kwargs: Any) -> Any:
        result = reference(*args, **kwargs)
        # An argument handed back is a new tensor in what `_implementation` gives.
        return _contiguous(result, new=True)

    return call


def _contiguous(result: Any, new: bool = False) -> Any:
    if result is None:
        return None
    if isinstance(result, torch.Tensor):
        return torch.empty_like(result, memory_format=torch.contiguous_format) if new else result.contiguous()
    return tuple(_contiguous(r, new) for r in result)


for _op in all_ops().values():
    register(_op)
told_of_ops.append(register_or_warn)
