"""Names for what an engine does, and what each op costs: for profiles, never for timed runs.

Three kinds of names end up in a trace: ops, "rms_norm [triton]", by decorating the engine's kernels; modules, "layer
3" and "qkv_proj", by hooks; the host's stages, "Scheduler.schedule", by wrapping the engine's methods. Recording and
costing are apart: a cost may wait for the device (attention's depends on lengths that lie there), which a trace must
not show.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.profiler import record_function

from nanovllm.hardware.roofline import Work
from nanovllm.kernels import all_ops
from nanovllm.wording import counted

OP_NAME = re.compile(r"^(?P<op>[a-z]\w*)(?: (?P<module>\w+))? \[(?P<provider>[\w.-]+)\]$")
STEP_NAME = re.compile(r"^(?P<kind>prefill|decode|mixed): (?P<what>.*)$")


@dataclass(frozen=True)
class OpCall:
    """Which op ran, by which provider, where in the model ("" if that does not matter), in what kind of step."""

    op: str
    provider: str
    module: str
    phase: str
    registered: bool = True
    """False for a matrix product that no op stands for."""

    @property
    def name(self) -> str:
        """As it stands in the trace."""
        return f"{self.op}{' ' + self.module if self.module else ''} [{self.provider}]"


class Instrument:
    """Attached to an engine, it can be off, record names, or add up costs."""

    def __init__(self) -> None:
        self._mode = "off"
        self._phase = ""
        self._depth = 0  # of ops within ops: only the outermost counts
        self._ops_seen = 0
        self._weights: dict[int, str] = {}
        self.costs: dict[OpCall, Work] = defaultdict(Work)
        """Filled by `costing`; ops without a cost have zeros."""
        self.calls: dict[OpCall, int] = defaultdict(int)
        self.cold: dict[OpCall, int] = defaultdict(int)
        """Of the costs, the bytes that come from device memory: see `cold_bytes`."""
        self.last_step: Any = None
        """What an engine that this is attached to executed last."""

    @contextmanager
    def _in_mode(self, mode: str) -> Iterator[None]:
        # Layers look the function up when they call it, so this finds every product that no op stands for.
        linear = F.linear
        self._mode, F.linear = mode, self._named_linear(linear)
        try:
            yield
        finally:
            self._mode, F.linear = "off", linear

    def recording(self) -> AbstractContextManager[None]:
        return self._in_mode("record")

    def costing(self) -> AbstractContextManager[None]:
        return self._in_mode("cost")

    @contextmanager
    def step(self, phase: str, what: str) -> Iterator[None]:
        """One step of the engine: `phase` is "prefill", "decode" or "mixed"."""
        self._phase = phase
        with record_function(f"{phase}: {what}") if self._mode == "record" else nullcontext():
            yield

    def decorate(self, op: str, provider: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        """What is called in place of an op's function."""
        declared = all_ops()[op]

        @functools.wraps(fn)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._mode == "off":
                return fn(*args, **kwargs)
            # A provider may take more than the op has: where the result goes, say.
            given = {name: value for name, value in kwargs.items() if name in declared.signature.parameters}
            arguments = declared.records.flatten(declared.signature.bind(*args, **given).arguments)
            key = OpCall(op, provider, self._place(op, arguments), self._phase)
            # Before the call: it may write to its arguments.
            if self._mode == "cost" and not self._depth:
                cost = declared.cost(**arguments) if declared.cost is not None else Work()
                work = Work(cost.bytes, cost.flops, cost.fp8_flops)
                self._count(key, work, min(work.bytes, cold_bytes(op, arguments, work)))
            with self._op(key):
                return fn(*args, **kwargs)

        return call

    @contextmanager
    def _op(self, key: OpCall) -> Iterator[None]:
        self._depth += 1
        try:
            with record_function(key.name) if self._mode == "record" and self._depth == 1 else nullcontext():
                yield
        finally:
            self._depth -= 1

    def _count(self, key: OpCall, work: Work, cold: int) -> None:
        self._ops_seen += 1
        self.calls[key] += 1
        self.costs[key] += work
        self.cold[key] += cold

    def _place(self, op: str, arguments: Mapping[str, Any]) -> str:
        """The module whose weight matrix an op is given, "" if none: matrix products differ by place."""
        if op == "embedding":
            return ""
        return next((self._weights[id(v)] for v in arguments.values() if id(v) in self._weights), "")

    def _named_linear(self, linear: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            if self._depth:
                return linear(x, weight, bias)
            key = OpCall("linear", "torch", self._weights.get(id(weight), ""), self._phase, registered=False)
            if self._mode == "cost":
                self._count(key, linear_work(x.numel() // x.shape[-1], weight, bias), cold=weight.nbytes)
            with self._op(key):
                return linear(x, weight, bias)

        return call

    def attach(self, engine: Any) -> None:
        """Name an engine's modules and stages, whatever it is made of: nothing is expected but its `runner`."""
        for model in [m for m in vars(engine.runner).values() if isinstance(m, torch.nn.Module)]:
            for path, module in model.named_modules():
                self._hook(path, module)
        parts = [engine, *vars(engine).values(), *vars(engine.runner).values()]
        fast = getattr(engine.runner, "fast", None)
        if fast is not None:
            parts += [*vars(fast).values(), getattr(fast.decoder, "state", None)]
        for part in parts:
            if type(part).__module__.startswith("nanovllm.engine.") and hasattr(part, "__dict__"):
                self._wrap_methods(part)
        execute = engine.runner.execute

        def named_execute(step: Any, *args: Any, **kwargs: Any) -> Any:
            self.last_step = step
            if self._mode == "off":
                return execute(step, *args, **kwargs)
            phase, what = describe_step(step)
            with self.step(phase, what):
                return execute(step, *args, **kwargs)

        engine.runner.execute = named_execute

    def _wrap_methods(self, part: Any) -> None:
        for name, method in vars(type(part)).items():
            plain = callable(method) and not isinstance(method, (type, staticmethod, classmethod))
            if plain and not name.startswith("__"):
                setattr(part, name, self._named(f"{type(part).__name__}.{name}", getattr(part, name)))

    def _named(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._mode != "record":
                return method(*args, **kwargs)
            with record_function(name):
                return method(*args, **kwargs)

        return call

    def _hook(self, path: str, module: torch.nn.Module) -> None:
        last = path.rpartition(".")[2]
        name = f"layer {last}" if last.isdigit() else last
        weight = getattr(module, "weight", None)
        matrix = weight if isinstance(weight, torch.Tensor) and weight.dim() == 2 and "embed" not in last else None
        is_product = matrix is not None
        for plane in getattr(weight, "planes", ()):  # of a packed weight, whose ops are found by it
            self._weights[id(plane)] = name
        if is_product:
            self._weights[id(matrix)] = name
        if not (last.isdigit() or is_product):
            return
        open_ranges: list[tuple[ExitStack, int]] = []

        def before(_: Any, args: Any) -> None:
            if self._mode == "off":
                return
            stack = ExitStack()
            if self._mode == "record":
                stack.enter_context(record_function(f"linear {name} [torch]" if is_product else name))
            open_ranges.append((stack, self._ops_seen))

        def after(_: Any, args: Any, output: Any) -> None:
            if not open_ranges:
                return
            stack, seen_before = open_ranges.pop()
            stack.close()
            # A module may do its product by another function than F.linear.
            if self._mode == "cost" and matrix is not None and self._ops_seen == seen_before:
                key = OpCall("linear", "torch", name, self._phase, registered=False)
                rows = args[0].numel() // args[0].shape[-1]
                self._count(key, linear_work(rows, matrix, getattr(module, "bias", None)), cold=matrix.nbytes)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)


def cold_bytes(op: str, arguments: Mapping[str, Any], work: Work) -> int:
    """How many of an op's bytes are a weight matrix or the KV cache, which a step reads once and which no cache holds.

    What else it reads are activations, which may still be in the L2 cache from the kernel before.
    """
    if op.startswith(("attention_decode", "qk_norm_rope_attention")):
        # All but queries and results, and new keys and values, which come from the projection and go to the cache.
        return max(0, work.bytes - 2 * sum(arguments[name].nbytes for name in "qkv" if name in arguments))
    if op == "embedding":
        return 0  # rows, and the same one for equal tokens
    return sum(
        v.nbytes for name, v in arguments.items() if "weight" in name and isinstance(v, torch.Tensor) and v.dim() == 2
    )


def linear_work(rows: int, weight: torch.Tensor, bias: torch.Tensor | None) -> Work:
    """x [rows, k] by weight [n, k]: x, weight and bias read, [rows, n] written."""
    n, k = weight.shape
    elements = rows * (n + k) + n * k + (0 if bias is None else n)
    return Work(elements * weight.element_size(), 2 * rows * n * k)


def describe_step(step: Any) -> tuple[str, str]:
    """(kind, size) of a scheduled step: ("decode", "8 sequences")."""
    # A step that continues another has as many tokens of each sequence.
    lengths = [part.num_tokens for part in step.first_parts]
    prompts = [n for n in lengths if n > 1]
    decodes = len(lengths) - len(prompts)
    if not prompts:
        return "decode", counted(decodes, "sequence")
    what = f"{counted(sum(prompts), 'token')} of {counted(len(prompts), 'prompt')}"
    return ("mixed", f"{what}, {counted(decodes, 'sequence')}") if decodes else ("prefill", what)
