"""The ops as `torch.ops.nanovllm.*`, for torch.compile, export and `torch.library.opcheck`.

The engine does not pass through here: it calls the provider's function, which costs some microseconds less a call.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from nanovllm.kernels.op.dispatch import Op


logger = logging.getLogger(__name__)

_LIBRARIES: dict[str, torch.library.Library] = {}
"""One library an op, so that a plugin's op can be removed."""


def register(declared: Op) -> None:
    """Define `torch.ops.nanovllm.<name>`: functional, except for the arguments that the op is declared to write to.

    Results are contiguous, whatever the provider. The schema follows from the reference's annotations. The fields of a
    record are arguments of their own (`records.py`).
    """
    schema = torch.library.infer_schema(declared.records.taking_fields(declared.native), mutates_args=declared.mutates)
    library = torch.library.Library("nanovllm", "FRAGMENT")
    library.define(declared.name + schema, tags=())
    library.impl(declared.name, _implementation(declared), "CompositeExplicitAutograd")
    library.impl(declared.name, _autograd(declared), "Autograd", with_keyset=True)
    torch.library.register_fake(f"nanovllm::{declared.name}", _fake(declared), lib=library)
    _LIBRARIES[declared.name] = library


def unregister(name: str) -> None:
    """Undo `register`, if it was done."""
    if name in _LIBRARIES:
        _LIBRARIES.pop(name)._destroy()


def register_or_warn(declared: Op) -> None:
    """`register`, with a warning if the op cannot be: everything but torch.compile works without."""
    try:
        register(declared)
    except (ValueError, RuntimeError) as e:  # for example parameters without annotations
        logger.warning("op %r is not in torch.ops.nanovllm, so torch.compile cannot take it: %s", declared.name, e)


def _implementation(declared: Op, traced: bool = False) -> Callable[..., Any]:
    parameters = tuple(declared.records.flat.parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(parameters, args), **kwargs)
        declared.check(arguments)
        # As `signature.bind`, but quicker: the operator has matched arguments and parameters already.
        grouped = declared.records.group(arguments)
        bound = inspect.BoundArguments(declared.signature, {n: grouped[n] for n in declared.parameters if n in grouped})
        # fresh: a result must not be an argument's memory
        return _apart(declared.run(bound, traced, fresh=True), (*args, *kwargs.values()))

    return call


def _autograd(declared: Op) -> Callable[..., Any]:
    """What a call enters first. (In `torch.inference_mode()` it goes straight to the implementation.)

    A call to be differentiated is run here, where PyTorch records the operators that it consists of for the backward
    pass: those of the reference, or of a provider with a backward pass. torch.compile traces the reference's.
    """
    run, trace = _implementation(declared), _implementation(declared, traced=True)
    operator = getattr(torch.ops.nanovllm, declared.name).default

    @torch._disable_dynamo  # where the graph breaks at an operator, nothing of the operator is to be compiled
    def differentiated(keyset: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        return (run if _on_device(keyset.raw_repr()) else trace)(*args, **kwargs)

    def call(keyset: torch.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and _requires_grad((*args, *kwargs.values())):
            return differentiated(keyset, *args, **kwargs)
        if _on_device(keyset.raw_repr()):
            return run(*args, **kwargs)
        with torch._C._AutoDispatchBelowAutograd():
            return operator.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    return call


def _requires_grad(arguments: Iterable[Any]) -> bool:
    return any(
        a.requires_grad if isinstance(a, torch.Tensor) else isinstance(a, (list, tuple)) and _requires_grad(a)
        for a in arguments
    )


@cache
def _on_device(keyset: int) -> bool:
    """Whether a call goes straight to a device: its tensors have values, and no mode intercepts the call."""
    below = torch._C.DispatchKeySet.from_raw_repr(keyset) & torch._C._after_ADInplaceOrView_keyset
    return below.highestPriorityTypeId() in (torch._C.DispatchKey.CPU, torch._C.DispatchKey.CUDA)


def _fake(declared: Op) -> Callable[..., Any]:
    reference = declared.fake or declared.records.taking_fields(declared.native)

    def call(*args: Any, **kwargs: Any) -> Any:
        return _without_data(reference(*args, **kwargs))

    return call


def _apart(result: Any, arguments: tuple[Any, ...]) -> Any:
    """Contiguous results, none of which is an argument."""
    if isinstance(result, torch.Tensor):
        if any(result is a for a in arguments):
            return result.clone(memory_format=torch.contiguous_format)
        return result.contiguous()
    return None if result is None else tuple(_apart(r, arguments) for r in result)


def _without_data(result: Any) -> Any:
    """What `_apart` gives, as far as it is known without values."""
    if isinstance(result, torch.Tensor):
        return torch.empty_like(result, memory_format=torch.contiguous_format)
    return None if result is None else tuple(_without_data(r) for r in result)
