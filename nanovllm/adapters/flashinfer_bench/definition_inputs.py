"""The inputs of a Definition: its workloads, and small shapes of random numbers where all inputs may be random."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from nanovllm.adapters.flashinfer_bench.documents import Definition, DefinitionWorkload, DocumentError, Spec
from nanovllm.kernels import Inputs, Tensors
from nanovllm.kernels.op.inputs import Shape

_ODD = (1, 3, 17)
"""Sizes of the variable axes that are verified in addition to the workloads."""
_MOST_SMALL = 4
_SMALL = 1 << 22
"""Elements of the inputs up to which a workload counts as small."""
_MOST_BYTES = 1 << 38
"""Of a tensor: more than a GPU has. A larger one is a slip."""
_ANOTHER = "another_workload"
"""A further number of a shape: which one it is among workloads of the same sizes."""


def main_dtype(of: Definition) -> torch.dtype:
    """The dtype that the cases of a Definition are named for: of its first output that is a float, else input."""
    for spec in (*of.outputs.values(), *of.inputs.values()):
        dtype: torch.dtype = getattr(torch, spec.dtype, torch.float32)
        if dtype in (torch.float32, torch.float16, torch.bfloat16):
            return dtype
    return torch.float32


def declared_inputs(of: Definition, workloads: Sequence[DefinitionWorkload], root: Path | None) -> Inputs:
    """The inputs of a Definition's op: the numbers of a shape are the sizes of its variable axes.

    Raises:
        DocumentError: there is no workload, and the inputs are not such that random ones would do.
    """
    by_shape: dict[Shape, DefinitionWorkload] = {}
    for workload in workloads:
        sizes = tuple(workload.axes[a] for a in of.variable)
        number = sum(shape[: len(sizes)] == sizes for shape in by_shape)
        by_shape[(*sizes, number) if number else sizes] = workload
    free = all(s.shape is None or s.dtype.startswith(("float", "bfloat")) for s in of.inputs.values())
    if not by_shape and not free:
        name = next(
            n for n, s in of.inputs.items() if s.shape is not None and not s.dtype.startswith(("float", "bfloat"))
        )
        raise DocumentError(
            f"Definition {of.name}: inputs.{name}: random integers would be no valid input, and there are no "
            "workloads; import the directory that has them"
        )
    shapes = sorted(by_shape, key=lambda shape: _elements(of, shape))
    small = [tuple(n for _ in of.variable) for n in _ODD] if free and of.variable else []
    small += [shape for shape in shapes if _elements(of, shape) <= _SMALL][:_MOST_SMALL] or shapes[:1]
    if not shapes and not of.variable:
        small = [()]

    def make(tensors: Tensors, *shape: int) -> dict[str, Any]:
        sizes = {**{n: s for n, s in of.axes.items() if s is not None}, **dict(zip(of.variable, shape))}
        short = shape[: len(of.variable)] if not any(shape[len(of.variable) :]) else shape
        workload = by_shape.get(short)
        given = workload.inputs if workload is not None else _defaults(of, workloads)
        return {n: _value(of, n, spec, given[n], sizes, tensors, root) for n, spec in of.inputs.items()}

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(n, kind) for n in ("tensors", *of.variable)]
    if any(len(shape) > len(of.variable) for shape in by_shape):
        parameters.append(inspect.Parameter(_ANOTHER, kind, default=0))
    make.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    decode = shapes or small[-1:]
    return Inputs(make, list(dict.fromkeys(small)), decode, scales=(1.0,), dtypes=(main_dtype(of),))


def check_sizes(of: Definition, workloads: Sequence[DefinitionWorkload], root: Path, where: str) -> None:
    """Check what a Definition and its workloads need of this machine: dtypes, memory and files of tensors.

    where: the file of the workloads, for errors.

    Raises:
        DocumentError: torch has no such dtype, a tensor would be too large, or a file is not there or another one.
    """
    for name, spec in (*of.inputs.items(), *of.outputs.items()):
        if not hasattr(torch, spec.dtype):
            kind = "inputs" if name in of.inputs else "outputs"
            raise DocumentError(f"Definition {of.name}: {kind}.{name}.dtype: torch has no {spec.dtype}")
    for given in workloads or [DefinitionWorkload(dict.fromkeys(of.variable, 1), {}, "")]:
        sizes = {**{n: s for n, s in of.axes.items() if s is not None}, **given.axes}
        for name, spec in (*of.inputs.items(), *of.outputs.items()):
            size = math.prod(sizes[a] for a in spec.shape or ()) * getattr(torch, spec.dtype).itemsize
            if size > _MOST_BYTES:
                axis = max(spec.shape or (), key=lambda a: sizes[a])
                at = "workload.axes" if axis in of.variable else f"Definition {of.name}: axes"
                raise DocumentError(
                    f"{where}: {at}.{axis}: {sizes[axis]} is too large: {name} would take {size >> 30} GiB"
                )
        for name, value in given.inputs.items():
            if name in of.inputs and value["type"] == "safetensors":
                shape = [sizes[a] for a in of.inputs[name].shape or ()]
                _stored(of, name, shape, getattr(torch, of.inputs[name].dtype), value, root)


def _elements(of: Definition, shape: Shape) -> int:
    sizes = {**of.axes, **dict(zip(of.variable, shape))}
    return sum(math.prod(sizes[a] or 0 for a in spec.shape or ()) for spec in of.inputs.values())


def _defaults(of: Definition, workloads: Sequence[DefinitionWorkload]) -> dict[str, Mapping[str, Any]]:
    """Inputs at a shape that no workload has: random tensors, and scalars as the first workload has them."""
    known = workloads[0].inputs if workloads else {}
    scalars = {"bool": False, "float32": 1e-6}
    return {
        n: {"type": "random"}
        if spec.shape is not None
        else known.get(n, {"type": "scalar", "value": scalars.get(spec.dtype, 1)})
        for n, spec in of.inputs.items()
    }


def _value(
    of: Definition, name: str, spec: Spec, given: Mapping[str, Any], sizes: Mapping[str, int], tensors: Tensors,
    root: Path | None,
) -> Any:  # fmt: skip
    if spec.shape is None:
        return given["value"]
    shape = [sizes[a] for a in spec.shape]
    dtype = getattr(torch, spec.dtype)
    if given["type"] == "safetensors":
        return _stored(of, name, shape, dtype, given, root).to(tensors.device)
    if not dtype.is_floating_point:
        low, high = (-128, 128) if dtype == torch.int8 else (0, 2 if dtype == torch.bool else 127)
        return tensors.integers(low, high, *shape).to(dtype)
    if dtype.itemsize == 1:
        return tensors.normal(*shape, dtype=torch.float32).clamp(-2, 2).to(dtype)
    value = tensors.normal(*shape, dtype=dtype)
    return value.softmax(-1) if of.op_type == "sampling" and name == "probs" else value


def _stored(
    of: Definition, name: str, shape: list[int], dtype: torch.dtype, given: Mapping[str, Any], root: Path | None
) -> torch.Tensor:
    """A tensor of a safetensors file, which must be what the Definition says."""
    from safetensors import safe_open

    path = Path(given["path"])
    if not path.is_absolute():
        if root is None:
            raise DocumentError(
                f"workload of {of.name}: inputs.{name}.path: {path} is relative, and its folder is unknown"
            )
        path = root / path
    try:
        with safe_open(path, framework="pt") as file:
            value: torch.Tensor = file.get_tensor(given["tensor_key"])
    except Exception as e:  # whatever a damaged file raises
        raise DocumentError(f"workload of {of.name}: inputs.{name}: {path}: {e}") from e
    if list(value.shape) != shape or value.dtype != dtype:
        wanted = f"{dtype} {shape}".removeprefix("torch.")
        raise DocumentError(
            f"workload of {of.name}: inputs.{name}: {path} has {value.dtype} {list(value.shape)}, expected {wanted}"
        )
    return value
