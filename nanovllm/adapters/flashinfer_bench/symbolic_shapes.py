"""The inputs and outputs of an op at one of its shapes, with names in place of sizes: a Definition's axes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from nanovllm.adapters.flashinfer_bench.documents import Spec
from nanovllm.kernels import Op, Tensors
from nanovllm.kernels.op.inputs import Shape, written

_LOAD = ("most", "cached", "shared", "num_groups")
"""Numbers of a shape that say how much there is to do, as its first one does. The others say what the model is like."""


MOST_BYTES = 64 << 20
"""Of the inputs of a workload that are kept in a file."""


class NotExpressible(ValueError):
    """The schema has no way to say what an op takes or gives."""


class _WithoutMemory(torch.Tensor):
    """A tensor of which every element is the same one. What makes inputs need not have them apart."""

    maker: ShapesOnly

    def contiguous(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    def masked_fill_(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    def clamp_(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    def to(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if hasattr(self, "maker") and len(args) == 1 and isinstance(args[0], torch.dtype) and not kwargs:
            return self.maker.without_memory(tuple(self.shape), args[0])
        return super().to(*args, **kwargs)


class ShapesOnly(Tensors):
    """Makes tensors whose random numbers take no memory, and remembers which these are.

    Random numbers are those that are normally distributed, rounded to another dtype or not, and bytes of any value.
    """

    bytes_drawn = False
    """Whether random bytes take memory after all, so that they can be written to."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._storages: dict[int, torch.Tensor] = {}

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float | None = None) -> torch.Tensor:
        return self.without_memory(shape, dtype or self.dtype)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        if (low, high, dtype) == (0, 256, torch.uint8) and not self.bytes_drawn:
            return self.without_memory(shape, dtype)
        if (size := math.prod(shape) * dtype.itemsize) > MOST_BYTES:
            raise NotExpressible(f"it has {size >> 20} MiB of integers to be stored, more than {MOST_BYTES >> 20}")
        return super().integers(low, high, *shape, dtype=dtype)

    def without_memory(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Such a tensor; floats are NaN, so that what follows from them is seen."""
        one = torch.full((1,), math.nan if dtype.is_floating_point else 0, device=self.device).to(dtype)
        self._storages[one.untyped_storage().data_ptr()] = one
        value = one.expand(shape).as_subclass(_WithoutMemory)
        value.maker = self
        return value

    def is_random(self, value: torch.Tensor) -> bool:
        """Whether a tensor is such a one, or a part of one."""
        return value.untyped_storage().data_ptr() in self._storages


@dataclass(frozen=True)
class Signature:
    """An op's call in symbols.

    Attributes:
        axes: name -> size; None: it varies with how much there is to do.
        fixed: arguments that are no inputs of a Definition, such as text and None, with their values.
        sizes: of the variable axes at this shape.
    """

    axes: Mapping[str, int | None]
    inputs: Mapping[str, Spec]
    outputs: Mapping[str, Spec]
    fixed: Mapping[str, Any]
    sizes: Mapping[str, int]


def signature(op: Op, shape: Shape, dtype: torch.dtype, variant: Mapping[str, Any]) -> Signature:
    """The symbols of an op's call at one shape.

    A dimension has the name that the op's declaration gives it. It is a variable axis if it grows with the shape's
    first number, or with another one that says how much there is to do.

    Raises:
        NotExpressible: an output has a variable size that no input has.
    """
    sizes, specs, outputs, fixed = _at(op, shape, dtype, variant)
    varying: set[str] = set()
    assert op.inputs is not None
    for i, number in enumerate(op.inputs.dimensions[: len(shape)]):
        if i == 0 or number in _LOAD:
            larger = (*shape[:i], 2 * shape[i] + 1, *shape[i + 1 :])
            if op.inputs.wrong_with(larger) is None:
                other = _at(op, larger, dtype, variant)[0]
                varying |= {name for name, size in sizes.items() if other.get(name, size) != size}
    bound = {axis for spec in specs.values() for axis in spec.shape or ()}
    for name, spec in outputs.items():
        for axis in spec.shape or ():
            if axis in varying - bound:
                raise NotExpressible(f"{name} at {written(shape)} has a size {axis} that no input has")
    axes = {name: None if name in varying else size for name, size in sizes.items()}
    return Signature(axes, specs, outputs, fixed, {n: sizes[n] for n in axes if axes[n] is None})


def _at(
    op: Op, shape: Shape, dtype: torch.dtype, variant: Mapping[str, Any]
) -> tuple[dict[str, int], dict[str, Spec], dict[str, Spec], dict[str, Any]]:
    """(the size of each axis, the inputs, the outputs, the arguments that are no inputs)."""
    arguments = shapes_only(op, shape, dtype, variant)[0]
    sizes: dict[str, int] = {}
    inputs: dict[str, Spec] = {}
    fixed: dict[str, Any] = {}
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor):
            inputs[name] = Spec(_axes(op, name, value, sizes), str(value.dtype).removeprefix("torch."))
        elif isinstance(value, (bool, int, float)):
            kind = "bool" if isinstance(value, bool) else "int64" if isinstance(value, int) else "float32"
            inputs[name] = Spec(None, kind)
        else:
            fixed[name] = value
    outputs = {}
    results = _results(op, arguments)
    for i, result in enumerate(results):
        name = "output" if len(results) == 1 else f"output_{i}"
        outputs[name] = Spec(_output_axes(result, inputs, sizes), str(result.dtype).removeprefix("torch."))
    return sizes, inputs, outputs, fixed


def shapes_only(
    op: Op, shape: Shape, dtype: torch.dtype, variant: Mapping[str, Any]
) -> tuple[dict[str, Any], ShapesOnly]:
    """The arguments of a call, with random tensors that take no memory, and what made them."""
    assert op.inputs is not None
    tensors = ShapesOnly(dtype, torch.device("cpu"))
    try:
        arguments = op.inputs(tensors, shape, variant)
    except RuntimeError:  # it writes to such a tensor: to bytes, as blocks of GGUF are made
        tensors = ShapesOnly(dtype, torch.device("cpu"))
        tensors.bytes_drawn = True
        try:
            arguments = op.inputs(tensors, shape, variant)
        except RuntimeError as e:
            raise NotExpressible(f"the inputs of shape {written(shape)} cannot be made without their data: {e}") from e
    plain = {
        k: v.detach().as_subclass(torch.Tensor) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()
    }
    return plain, tensors


def _axes(op: Op, name: str, value: torch.Tensor, sizes: dict[str, int]) -> tuple[str, ...]:
    """The names of a tensor's dimensions, whose sizes are added to those known."""
    for pattern in op.arguments.get(name, "").split(" | "):
        found = re.fullmatch(r"\w*\[(.*)\]", pattern)
        dims = [d.strip() for d in found[1].split(",") if d.strip()] if found else []
        if dims[:1] == ["..."] and len(dims) <= value.dim() + 1:
            leading = value.dim() - len(dims) + 1
            dims = [*(["rows"] if leading == 1 else [f"rows_{i}" for i in range(leading)]), *dims[1:]]
        if len(dims) != value.dim():
            continue
        names = tuple(_axis(d) for d in dims)
        if all(sizes.get(n, size) == size for n, size in zip(names, value.shape)):
            sizes.update(zip(names, map(int, value.shape)))
            return names
    names = tuple(f"{name}_dim_{i}" for i in range(value.dim()))
    sizes.update(zip(names, map(int, value.shape)))
    return names


def _axis(dim: str) -> str:
    """An axis for a declared dimension: "n" is n, "2*n" is n_x2, "3" is of_3."""
    times, star, name = dim.rpartition("*")
    if star:
        return f"{name}_x{times}"
    return f"of_{dim}" if dim.isdigit() else dim


def _output_axes(result: torch.Tensor, inputs: Mapping[str, Spec], sizes: dict[str, int]) -> tuple[str, ...]:
    """The names of a result's dimensions: those of an input of the same shape, else by their sizes."""
    shape = tuple(map(int, result.shape))
    of_inputs = [spec.shape for spec in inputs.values() if spec.shape]
    for axes in of_inputs:
        if tuple(sizes[a] for a in axes) == shape:
            return axes
    parts = {m[1]: sizes[a] // int(m[2]) for a in sizes if (m := re.fullmatch(r"(\w+)_x(\d+)", a))}
    names: list[str] = []
    for i, size in enumerate(shape):
        # By position first: the leading dimensions of a result are mostly those of the first input.
        in_place = [axes[i] for axes in of_inputs if i < len(axes)]
        known = [*(a for a in in_place if sizes[a] == size), *(a for a, s in {**parts, **sizes}.items() if s == size)]
        # Not one that the result has already: there may be as many rows as outputs.
        name = min(known, key=lambda a: a in names) if known else f"size_{size}"
        sizes.setdefault(name, size)
        names.append(name)
    return tuple(names)


def _results(op: Op, arguments: Mapping[str, Any]) -> list[torch.Tensor]:
    """What the reference gives, without data."""
    reference = op.fake or op.records.taking_fields(op.native)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        fake = {
            k: mode.fake_tensor_converter.from_real_tensor(mode, v) if isinstance(v, torch.Tensor) else v
            for k, v in arguments.items()
        }
        given = reference(**fake)
    return [given] if isinstance(given, torch.Tensor) else list(given)
