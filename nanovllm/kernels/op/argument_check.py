"""The check of a call's arguments against the patterns that an op declares."""

from __future__ import annotations

import inspect
import numbers
import re
from collections.abc import Mapping
from typing import Any

import torch

from nanovllm.wording import brief

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class ArgumentCheck:
    """Checks tensors against patterns such as `{"x": "[..., n]", "weight": "[n]", "ids": "int64[rows]"}`.

    A pattern is alternatives separated by " | ". A dimension is a name (the same number wherever it occurs), a number,
    a multiple of a name ("2*n"), or "..." at the start (the same dimensions wherever it occurs). Without a dtype in
    front, a tensor has the dtype of the first tensor that has none, and that is a float. All tensors are on one device.

    Args:
        signature: of the op. A parameter annotated as a float must be a number, `eps` not negative. A tensor may be
            None only if its annotation allows None or is missing.
    """

    def __init__(self, op: str, patterns: Mapping[str, str], signature: inspect.Signature | None = None) -> None:
        self._op = op
        self.patterns = dict(patterns)
        annotations = {name: str(p.annotation) for name, p in (signature.parameters if signature else {}).items()}
        self._required = {
            name for name, a in annotations.items() if "Tensor" in a and "None" not in a and "Optional" not in a
        }
        self._numbers = [name for name, a in annotations.items() if a in ("float", str(float))]
        self._parsed = {name: [_parse(p) for p in pattern.split(" | ")] for name, pattern in patterns.items()}

    def __call__(self, arguments: Mapping[str, Any]) -> None:
        """Raises ValueError with the argument's name, what was expected and what came."""
        sizes: dict[str, Any] = {}
        first: tuple[str, torch.Tensor] | None = None
        first_float: tuple[str, torch.Tensor] | None = None
        leading = ""
        for name, alternatives in self._parsed.items():
            value = arguments.get(name)
            if value is None and name not in self._required:
                continue
            if not isinstance(value, torch.Tensor):
                raise ValueError(f"{self._op}: {name}: expected a tensor {self.patterns[name]}, not {brief(value)}")
            first = first or (name, value)
            if value.device != first[1].device:
                wanted = f"a tensor on {first[1].device}, where {first[0]} is"
                raise ValueError(f"{self._op}: {name}: expected {wanted}, not on {value.device}")
            dtypes = {d for d, _ in alternatives}
            if dtypes == {None}:
                first_float = first_float or (name, value)
                if value.dtype not in FLOATS:
                    raise ValueError(f"{self._op}: {name}: expected float16, bfloat16 or float32, not {value.dtype}")
                if value.dtype != first_float[1].dtype:
                    wanted = f"{first_float[1].dtype}, the dtype of {first_float[0]}"
                    raise ValueError(f"{self._op}: {name}: expected {wanted}, not {value.dtype}")
            elif not any(d is None or d == _name(value.dtype) or d == "any" for d in dtypes):
                wanted = " or ".join(sorted(d for d in dtypes if d))
                raise ValueError(f"{self._op}: {name}: expected {wanted}, not {_name(value.dtype)}")
            if not any(_matches(dims, value.shape, sizes) for _, dims in alternatives):
                known = ", ".join(f"{k}={v}" for k, v in sizes.items() if k != "...")
                known += leading if "..." in self.patterns[name] else ""
                raise ValueError(
                    f"{self._op}: {name}: expected the shape {self.patterns[name]}{f' with {known}' if known else ''}, "
                    f"not {list(value.shape)}"
                )
            if "..." in sizes and not leading:
                leading = f" as in {name} of shape {list(value.shape)}"
        for name in self._numbers:
            value = arguments.get(name, 0.0)
            if not isinstance(value, numbers.Real) or (name == "eps" and not float(value) >= 0):
                expected = "a number, at least 0" if name == "eps" else "a number"
                raise ValueError(f"{self._op}: {name}: expected {expected}, not {_describe(value)}")

    @property
    def patterns_lead(self) -> bool:
        """Whether a pattern begins with "...": a tensor with any number of leading dimensions."""
        return any(dims[:1] == ["..."] for alternatives in self._parsed.values() for _, dims in alternatives)

    def leads(self, name: str, value: Any) -> bool:
        """Whether an argument is a tensor with at least one dimension that "..." stands for."""
        shortest = [len(dims) for _, dims in self._parsed.get(name, ()) if dims[:1] == ["..."]]
        return bool(shortest) and isinstance(value, torch.Tensor) and value.dim() >= min(shortest)

    def leading_float(self, arguments: Mapping[str, Any]) -> tuple[str, torch.dtype] | None:
        """The first tensor whose pattern says no dtype, and its dtype, which a call computes in."""
        for name, alternatives in self._parsed.items():
            value = arguments.get(name)
            if isinstance(value, torch.Tensor) and all(d is None for d, _ in alternatives):
                return name, value.dtype
        return None


def _describe(value: Any) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, torch.Tensor) else brief(value)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _parse(pattern: str) -> tuple[str | None, list[str]]:
    found = re.fullmatch(r"(\w*)\[(.*)\]", pattern.strip())
    if found is None:
        raise ValueError(f"arguments: {pattern!r} is no pattern; expected such as '[..., size]' or 'int32[rows, 2*n]'")
    return found[1] or None, [d.strip() for d in found[2].split(",") if d.strip()]


def _matches(dims: list[str], shape: torch.Size, sizes: dict[str, Any]) -> bool:
    """Whether a shape fits, given the sizes known so far; learns the sizes that it fixes."""
    learned: dict[str, Any] = {}

    def is_or_becomes(name: str, size: Any) -> bool:
        return learned.setdefault(name, sizes.get(name, size)) == size

    if dims and dims[0] == "...":
        lead = len(shape) - len(dims) + 1
        if lead < 0 or not is_or_becomes("...", tuple(shape[:lead])):
            return False
        dims, shape = dims[1:], shape[lead:]
    if len(dims) != len(shape):
        return False
    for dim, size in zip(dims, shape):
        times, star, name = dim.rpartition("*")
        if star:
            ok = size % int(times) == 0 and is_or_becomes(name, size // int(times))
        else:
            ok = size == int(dim) if dim.isdigit() else is_or_becomes(dim, size)
        if not ok:
            return False
    sizes.update(learned)
    return True
