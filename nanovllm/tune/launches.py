"""The launches that a call makes: recorded instead of run, so that they can be looked at, or compiled for a GPU that is not here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from nanovllm.plan.compiling import Compiled

_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8e4nv", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
}  # fmt: skip


@dataclass(frozen=True)
class Launch:
    """A kernel, its arguments by parameter name, and options such as num_warps."""

    kernel: Any
    arguments: dict[str, Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.fn.__name__


@contextmanager
def recorded(compile: bool = False) -> Iterator[list[Launch]]:
    """Within the block no kernel runs: each launch is noted. Results of such calls are uninitialised memory.

    Args:
        compile: also compile each launch for the GPU that is here, as its first run would.
    """
    from triton.runtime.jit import JITFunction

    launches: list[Launch] = []
    original = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        names = [p.name for p in self.params]
        arguments = dict(zip(names, args))
        arguments |= {name: options[name] for name in names if name in options}
        rest = {k: v for k, v in options.items() if k not in arguments}
        launches.append(Launch(self, arguments, rest))
        if compile:
            original(self, *args, grid=grid, warmup=True, **options)  # nothing is returned that could be launched

    JITFunction.run = run
    try:
        yield launches
    finally:
        JITFunction.run = original


def compile_together(calls: Sequence[Callable[[], Any]], workers: int) -> None:
    """Compile what the calls launch, several at a time, for the GPU that is here. A failure shows again when the launch is made."""
    import concurrent.futures

    import triton

    def record_all() -> None:
        with recorded(compile=True):
            for call in calls:
                try:
                    call()
                except Exception:
                    continue

    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None or workers < 2:
        return  # each is compiled when it runs first
    with concurrent.futures.ThreadPoolExecutor(workers) as pool, mode(pool, ignore_errors=True):
        record_all()


def compile_for(launch: Launch, capability: int) -> Compiled:
    """What a launch takes of a GPU of that compute capability (90 for 9.0), as the compiler reports it.

    Raises:
        ValueError: an argument is of a kind that cannot be described without the GPU.
        RuntimeError: the compiler gave up.
    """
    from nanovllm.plan.compiling import compile_kernel

    described = {}
    for parameter in launch.kernel.params:
        value = launch.arguments.get(parameter.name, parameter.default)
        described[parameter.name] = value if parameter.is_constexpr else _described(parameter.name, value)
    options = {k: v for k, v in launch.options.items() if k not in ("num_warps", "num_stages", "launch_pdl")}
    warps, stages = launch.options.get("num_warps", 4), launch.options.get("num_stages", 3)
    return compile_kernel(launch.kernel, described, capability, warps, stages, **options)


def _described(name: str, value: Any) -> Any:
    from nanovllm.plan.compiling import Descriptor, Pointer, Scalar

    if value is None or (type(value) is int and value == 1):
        return value  # Triton compiles these in
    if isinstance(value, torch.Tensor):
        return Pointer(_TYPES[value.dtype])
    if isinstance(value, int):
        return Scalar(value % 16 == 0, "i32" if -(2**31) <= value < 2**31 else "i64")
    if isinstance(value, float):
        return "fp32"
    if hasattr(value, "block_shape") and not hasattr(value, "layout"):
        return Descriptor(_TYPES[value.base.dtype], tuple(value.block_shape))
    raise ValueError(f"{name}: a {type(value).__name__} cannot be compiled for another GPU")
