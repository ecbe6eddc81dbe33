"""Compiles the Triton kernels that a call launches, for a GPU that need not be here.

Triton's interpreter runs a kernel as Python, so it accepts what Triton's compiler does not, such as `if` on a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

_TYPES = {
    torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5", torch.int64: "i64", torch.int32: "i32",
    torch.int16: "i16", torch.int8: "i8", torch.uint64: "u64", torch.uint32: "u32", torch.uint16: "u16",
    torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip


class Launch(NamedTuple):
    """A launch of a kernel: a `triton.jit` function, its arguments in the order of its parameters, and options such as
    `num_warps`.
    """

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Specialisation(NamedTuple):
    """What Triton compiles a kernel for: the types of its parameters, and by the parameters' positions the values of
    constants and what is known of the others.
    """

    types: dict[str, str]
    constants: dict[tuple[int], Any]
    attributes: dict[tuple[int], Any]


@contextmanager
def recorded(launches: list[Launch], check_grid: Callable[[Sequence[int]], None] = lambda grid: None) -> Iterator[None]:
    """Within the block, launches of Triton kernels are appended to `launches` and do not run. Of the configurations of
    an autotuned kernel, the first counts.

    Args:
        check_grid: is called with the number of programs of each launch.
    """
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    run, tune = JITFunction.run, Autotuner.run

    def record(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        given = {p.name: p.default for p in self.params if p.has_default}
        given |= {p.name: value for p, value in zip(self.params, args)}
        given |= {p.name: options.pop(p.name) for p in self.params if p.name in options}
        check_grid(grid(given) if callable(grid) else grid)
        launches.append(Launch(self, tuple(given[p.name] for p in self.params), options))

    def run_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())

    JITFunction.run, Autotuner.run = record, run_first
    try:
        yield
    finally:
        JITFunction.run, Autotuner.run = run, tune


def specialised(kernel: Any, arguments: Sequence[Any]) -> Specialisation:
    """What Triton compiles a kernel for, of a launch's arguments.

    Raises:
        KeyError, TypeError: of an argument whose type is none of those that kernels here have.
    """
    from triton.runtime.jit import mangle_type
    from triton.tools.tensor_descriptor import TensorDescriptor

    found = Specialisation({}, {}, {})
    for i, (parameter, value) in enumerate(zip(kernel.params, arguments, strict=True)):
        one = type(value) is int and value == 1 and not parameter.do_not_specialize
        aligned = False
        if parameter.is_constexpr or value is None or one:
            found.types[parameter.name], found.constants[(i,)] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            found.types[parameter.name] = f"tensordesc<{_TYPES[value.base.dtype]}{list(value.block_shape)}>"
        elif isinstance(value, torch.Tensor):
            found.types[parameter.name] = "*" + _TYPES[value.dtype]
            aligned = value.data_ptr() % 16 == 0 and not parameter.do_not_specialize_on_alignment
        elif hasattr(value, "layout"):  # Gluon's descriptors
            found.types[parameter.name] = mangle_type(value)
        elif isinstance(value, bool):
            found.types[parameter.name] = "i1"
        elif isinstance(value, int):
            found.types[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            aligned = value % 16 == 0 and not parameter.do_not_specialize
        elif isinstance(value, float):
            found.types[parameter.name] = "fp32"
        else:
            raise TypeError(f"{parameter.name}: {type(value).__name__}: it is not known how Triton compiles that")
        if aligned:
            found.attributes[(i,)] = [["tt.divisibility", 16]]
    return found


def compiled(kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any], capability: int) -> Any:
    """What Triton would compile for a launch on a GPU of a compute capability (90 for 9.0): its compiled kernel."""
    import triton
    from triton.backends.compiler import GPUTarget

    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as source_of
    else:
        from triton.compiler import ASTSource as source_of
    source = source_of(kernel, *specialised(kernel, arguments))
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=dict(options))
