"""What an op declares for tests and benchmarks: realistic inputs, the tensors in them, and the cost of a call."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch

Shape = tuple[int, ...]
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Cost:
    """The least that a call must do: bytes of device memory (inputs read once, outputs written once), and flops.

    fp8_flops: those of the flops that are products of 8-bit floats with 8-bit floats.
    """

    bytes: int
    flops: int = 0
    fp8_flops: int = 0


def nbytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of the elements of some tensors."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def product_cost(
    x: torch.Tensor, rows: int, *read: torch.Tensor | None, written: int | None = None, size: int | None = None,
    more_flops: int = 0, fp8: bool = False,
) -> Cost:  # fmt: skip
    """Of x [..., size] times a weight [rows, size], stored in any form.

    Args:
        read: the tensors besides x that are read: the weight, its scales, a bias.
        written: results of a row of x; None: `rows`.
        size: columns of the weight, where x is not yet what it is multiplied with; None: those of x.
        more_flops: those of what else is computed.
        fp8: the product is of 8-bit floats with 8-bit floats.
    """
    tokens = x.numel() // max(1, x.shape[-1])
    moved = nbytes(x, *read) + tokens * (rows if written is None else written) * x.element_size()
    products = 2 * tokens * rows * (x.shape[-1] if size is None else size)
    return Cost(moved, products + more_flops, products if fp8 else 0)


def copy_of(value: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, for which kernels are compiled. The copy of a parameter is a parameter."""
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(
        value.detach()
    )
    return torch.nn.Parameter(copy, value.requires_grad) if isinstance(value, torch.nn.Parameter) else copy


@dataclass
class Tensors:
    """Makes the tensors of one call: random, repeatable by the seed, of one dtype and device.

    Attributes:
        scale: the standard deviation of `normal`.
        strided: no tensor is contiguous. Matrices have a gap after every row, as in a slice of a fused projection.
            Vectors, and what `spread` returns, have a gap after every element, as a column has.
        apart: if strided, matrices too have a gap after every element, not after every row.
    """

    dtype: torch.dtype
    device: torch.device
    seed: int = 0
    scale: float = 1.0
    strided: bool = False
    apart: bool = False
    _generator: torch.Generator = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._generator = torch.Generator(self.device).manual_seed(self.seed)

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float | None = None) -> torch.Tensor:
        """Normally distributed, mean 0."""
        scale = self.scale if scale is None else scale
        dtype = dtype or self.dtype
        drawn = torch.float64 if dtype == torch.float64 else torch.float32
        x = torch.randn(*shape, generator=self._generator, device=self.device, dtype=drawn).mul_(scale).to(dtype)
        if len(shape) < 2 or self.apart:
            return self.spread(x)
        if not self.strided:
            return x
        wide = torch.full((*shape[:-1], shape[-1] + 8), math.nan, dtype=dtype, device=self.device)
        wide[..., : shape[-1]] = x
        return wide[..., : shape[-1]]

    def spread(self, x: torch.Tensor) -> torch.Tensor:
        """x; if strided, with a gap after every element of its last dimension, which holds NaN (of integers: 0)."""
        if not self.strided or not x.dim():
            return x
        gap = math.nan if x.is_floating_point() else 0
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), gap, dtype=x.dtype, device=x.device)
        wide[..., ::2] = x
        return wide[..., ::2]

    def parameter(self, *shape: int, scale: float | None = None) -> torch.nn.Parameter:
        """As `normal`, and a parameter of a module: what does not change, so that a kernel may read it early."""
        return torch.nn.Parameter(self.normal(*shape, scale=scale), requires_grad=False)

    def uniform(
        self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Uniform in [low, high)."""
        x = torch.rand(*shape, generator=self._generator, device=self.device)
        return self._vector((x * (high - low) + low).to(dtype or self.dtype))

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Uniform in [low, high)."""
        return self._vector(torch.randint(low, high, shape, generator=self._generator, device=self.device, dtype=dtype))

    def permutation(self, n: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """0 .. n - 1, shuffled."""
        return self._vector(torch.randperm(n, generator=self._generator, device=self.device, dtype=dtype))

    def _vector(self, x: torch.Tensor) -> torch.Tensor:
        return self.spread(x) if x.dim() == 1 else x


@dataclass(frozen=True)
class Inputs:
    """Realistic inputs of an op.

    Attributes:
        make: (tensors, *shape) -> the call's arguments by name. The names of the shape's numbers are those of its
            parameters.
        small: shapes that every provider is verified on, in the interpreter too: odd sizes, one row, no row.
        decode: shapes of a decode step: few rows, where latency counts.
        large: shapes where bandwidth or arithmetic counts.
        variants: further keyword arguments, each a case of its own.
        scales: magnitudes of the random numbers to verify with.
        dtypes: what the op computes in.
        needs: (the shape's numbers by name) -> None, or what the op needs of them, such as "N of at least 1, not 0".
    """

    make: Callable[..., Arguments]
    small: Sequence[Shape]
    decode: Sequence[Shape] = ()
    large: Sequence[Shape] = ()
    variants: Sequence[Mapping[str, Any]] = (MappingProxyType({}),)
    scales: Sequence[float] = (1.0, 1e-3, 50.0)
    dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16, torch.float16)
    needs: Callable[[Mapping[str, int]], str | None] = lambda numbers: None

    @property
    def dimensions(self) -> list[str]:
        """The names of a shape's numbers, for example ["rows", "size"]."""
        return list(inspect.signature(self.make).parameters)[1:]

    @property
    def form(self) -> str:
        """How a shape is written: "ROWSxSIZE", with what may be left out in brackets."""
        parameters = [p for p in inspect.signature(self.make).parameters.values()][1:]
        names = [f"x{p.name.upper()}" if p.default is p.empty else f"[x{p.name.upper()}]" for p in parameters]
        return "".join(names).removeprefix("x")

    def wrong_with(self, shape: Shape) -> str | None:
        """Why there are no inputs of a shape, to follow the op's name: "takes ROWSxSIZE, ..."; None: there are."""
        try:
            bound = inspect.signature(self.make).bind(None, *shape)
        except TypeError:
            return f"takes {self.form}, not {len(shape)} number{'s' * (len(shape) != 1)}"
        if any(n < 0 for n in shape):
            return f"takes {self.form}, numbers from 0 on"
        bound.apply_defaults()
        needs = self.needs(dict(zip(self.dimensions, bound.args[1:])))
        return None if needs is None else f"needs {needs} ({self.form})"

    def __call__(self, tensors: Tensors, shape: Shape, variant: Mapping[str, Any] | None = None) -> Arguments:
        wrong = self.wrong_with(shape)
        if wrong:
            raise ValueError(f"shape {written(shape)}: the op {wrong}")
        return {**self.make(tensors, *shape), **(variant or {})}


def at_least_one(*names: str) -> Callable[[Mapping[str, int]], str | None]:
    """For `Inputs.needs`: none of these numbers may be 0."""

    def needs(numbers: Mapping[str, int]) -> str | None:
        return next((f"{n.upper()} of at least 1, not {numbers[n]}" for n in names if numbers[n] < 1), None)

    return needs


def written(shape: Shape) -> str:
    """A shape as a user writes it: 4x64."""
    return "x".join(map(str, shape))
