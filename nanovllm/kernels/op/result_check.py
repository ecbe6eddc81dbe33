"""The check of a provider's results: their number, shapes and dtypes are those of the reference.

`verify` checks every case. Of a plugin's providers, the first call of each dtype is checked wherever it comes from, so
that a wrong result is an error of the kernel that made it rather than of a layer behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.kernels.op.provider import NATIVE, KernelError, Provider, describe_call
from nanovllm.wording import counted

if TYPE_CHECKING:
    from nanovllm.kernels.op.declaration import OpDeclaration

_NOT_OF_REFERENCE = ("out", "concurrent", "fresh")
"""Parameters that a provider may have and the reference has not."""


def unlike_results(got: Any, wanted: int) -> str | None:
    """What is wrong with the number of tensors that a provider returned, or None."""
    tensors = "None" if not wanted else "a tensor" if wanted == 1 else f"a tuple of {wanted} tensors"
    if got is None:
        return None if not wanted else f"returned None instead of {tensors}: is a `return` missing?"
    results = [got] if not isinstance(got, (tuple, list)) else got
    other = next((r for r in results if not isinstance(r, torch.Tensor)), None)
    if other is not None:
        inside = "" if results[0] is got else f" in a {type(got).__name__}"
        return f"returned a {type(other).__name__}{inside} instead of {tensors}"
    return None if len(results) == wanted else f"returned {counted(len(results), 'tensor')} instead of {tensors}"


def result_name(number: int, of: int) -> str:
    """What a sentence calls one of several results, counted from 1."""
    return "the result" if of == 1 else f"result {number} of {of}"


def unlike_tensor(name: str, got: torch.Tensor, shape: Sequence[int], dtype: torch.dtype | None) -> str | None:
    """What is wrong with a result's shape or dtype, or None. dtype: None is any."""
    if list(got.shape) != list(shape):
        return f"{name} has shape {list(got.shape)} instead of {list(shape)}"
    if dtype is not None and got.dtype != dtype:
        return f"{name} has dtype {got.dtype} instead of {dtype}".replace("torch.", "")
    return None


def checking_first(declared: OpDeclaration, provider: Provider, fn: Callable[..., Any]) -> Callable[..., Any]:
    """A plugin's function that compares its first result of each dtype with what the reference would return.

    The reference runs on tensors without data ("meta"), so the check reads no memory and waits for no device. Calls
    after the first pay for one look-up. A function of the package is returned as it is.
    """
    if provider.origin is None or provider.name == NATIVE:
        return fn
    seen: set[torch.dtype | None] = set()

    def call(*args: Any, **kwargs: Any) -> Any:
        got = fn(*args, **kwargs)
        dtype = getattr(args[0] if args else next(iter(kwargs.values()), None), "dtype", None)
        if dtype not in seen and not torch.compiler.is_compiling():
            seen.add(dtype)
            if (wrong := _unlike_reference(declared, args, kwargs, got)) is not None:
                seen.discard(dtype)
                who = f"op {declared.name!r}, provider {provider.name!r} of {provider.origin}"
                raise KernelError(f"{who}, called with ({describe_call(args, kwargs)}): {wrong}")
        return got

    return call


def results_without_data(
    declared: OpDeclaration, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Sequence[torch.Tensor] | None:
    """What the reference returns for a call, as tensors without data; None: nothing, or that is not known."""
    if not declared.exported:  # its reference may speak to other ranks
        return None
    given = {name: value for name, value in kwargs.items() if name not in _NOT_OF_REFERENCE}
    flat = declared.records.flatten(declared.signature.bind(*args, **given).arguments)
    meta = {name: _without_data(value) for name, value in flat.items()}
    try:
        with torch.no_grad():
            results = (declared.fake or declared.records.taking_fields(declared.native))(**meta)
    except Exception:  # a reference that needs values: nothing is known without running it
        return None
    return [results] if isinstance(results, torch.Tensor) else results


def _unlike_reference(declared: OpDeclaration, args: Sequence[Any], kwargs: Mapping[str, Any], got: Any) -> str | None:
    """What is wrong with the number, shapes or dtypes of a call's results, or None, also where that is not known."""
    if (wanted := results_without_data(declared, args, kwargs)) is None:
        return None
    if (wrong := unlike_results(got, len(wanted))) is not None:
        return wrong
    results = [got] if isinstance(got, torch.Tensor) else got
    for i, (one, want) in enumerate(zip(results, wanted), 1):
        if (wrong := unlike_tensor(result_name(i, len(wanted)), one, want.shape, want.dtype)) is not None:
            return wrong
    return None


def _without_data(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return type(value)(map(_without_data, value)) if type(value) in (list, tuple) else value
