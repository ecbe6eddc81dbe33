"""The ops that can be tuned: which tunable a call asks, with which key, and what is built in for it."""

from __future__ import annotations

import difflib
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.kernels import all_ops
from nanovllm.kernels.op.declaration import Arguments, Shape, Tensors, written
from nanovllm.kernels.op.dispatch import Op
from nanovllm.kernels.op.provider import Provider, imported
from nanovllm.kernels.op.tunable import Tunable, bucket
from nanovllm.kernels.triton import tunables
from nanovllm.tune.choices import asked_on, builtin_plan, hopper_product_key
from nanovllm.tune.launches import recorded
from nanovllm.tune.space import nearest
from nanovllm.tune.spaces import spaces_of

if TYPE_CHECKING:
    from nanovllm.hardware.gpu_presets import DeviceModel

Named = Mapping[str, Any]
VERIFIED_LENGTH = 700
"""Tokens a sequence in the check of an attention plan, whose reference in float64 holds all scores."""
_RECORDED_LENGTH = 128
"""Tokens a sequence where launches are only recorded: more than a run of few queries has."""


@dataclass(frozen=True)
class Target:
    """An op whose Triton kernel's launch is tuned.

    Attributes:
        choices: the tunables that a call may ask; the first whose key `wants` is tuned.
        wants: of several keys that a call asks for, the one that counts.
        shrink: (shape, tokens) -> a shape with the same key and sequences of at most this many tokens.
    """

    op: str
    choices: tuple[Tunable, ...]
    wants: Callable[[Named], bool] = lambda key: True
    shrink: Callable[[Shape, int], Shape] = lambda shape, length: shape

    @property
    def declared(self) -> Op:
        return all_ops()[self.op]

    @property
    def launcher(self) -> Provider:
        """The provider that is tuned."""
        return self.declared.providers["triton"]


def _short_decode(shape: Shape, length: int) -> Shape:
    num_seqs, least, most, *rest = shape
    return (num_seqs, min(least, length // 2), min(most, length), *rest)


def _short_prefill(shape: Shape, length: int) -> Shape:
    num_seqs, least, most, cached, *rest = shape
    return (min(num_seqs, 2), min(least, length), min(most, length), min(cached, length), *rest)


_TARGETS = (
    Target("rms_norm", (tunables.RMS_NORM,)),
    Target("add_rms_norm", (tunables.ADD_RMS_NORM,)),
    Target("layer_norm", (tunables.LAYER_NORM,)),
    Target("softmax", (tunables.SOFTMAX,)),
    Target("silu_and_mul", (tunables.ACTIVATE_AND_MUL,)),
    Target("gelu_and_mul", (tunables.ACTIVATE_AND_MUL,)),
    Target("fused_activation", (tunables.ACTIVATION,)),
    Target("fused_add_gelu", (tunables.ADD_ACTIVATION,)),
    Target("element_wise_mul_add", (tunables.MUL_ADD,)),
    Target("embedding", (tunables.EMBEDDING,)),
    Target("rotary_embedding", (tunables.ROTARY,)),
    Target("qk_norm_rope", (tunables.ROTARY,)),
    Target("qk_norm_rope_store", (tunables.ROTARY_STORE,)),
    Target("linear_bias_act", (tunables.PRODUCT,)),
    Target("gated_mlp", (tunables.PRODUCT,), wants=lambda key: key["gated"]),
    Target("linear", (tunables.HOPPER_PRODUCT, tunables.SMALL_PRODUCT)),
    Target("linear_silu_and_mul", (tunables.HOPPER_PRODUCT,)),
    Target("linear_add_rms_norm", (tunables.HOPPER_PRODUCT,)),
    Target("add_rms_norm_linear", (tunables.SMALL_PRODUCT,)),
    Target("add_rms_norm_gate_up", (tunables.SMALL_PRODUCT,)),
    Target(
        "attention_decode", (tunables.ATTENTION_DECODE_HOPPER, tunables.ATTENTION_DECODE), shrink=_short_decode
    ),
    Target(
        "qk_norm_rope_attention", (tunables.ATTENTION_DECODE_HOPPER, tunables.ATTENTION_DECODE), shrink=_short_decode
    ),
    Target(
        "attention_prefill", (tunables.ATTENTION_PREFILL_HOPPER, tunables.ATTENTION_PREFILL), shrink=_short_prefill
    ),
)  # fmt: skip
TARGETS: Mapping[str, Target] = {t.op: t for t in _TARGETS}


def target(op: str) -> Target:
    """The target of an op.

    Raises:
        ValueError: the op is unknown, or its kernels choose nothing that could be tuned.
    """
    if op in TARGETS:
        return TARGETS[op]
    if op in all_ops():
        raise ValueError(f"{op}: its kernels choose nothing that can be tuned; ops to tune are {', '.join(TARGETS)}")
    near = difflib.get_close_matches(op.lower(), TARGETS, 1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"unknown op {op!r}; {meant}ops to tune are {', '.join(TARGETS)}")


@dataclass(frozen=True)
class Job:
    """One key to find a plan for, with the calls that it is to be fast for.

    Attributes:
        tunable, key: where the plan is looked up.
        shapes: of the op's inputs; all have this key.
        variant: further keyword arguments of the op.
        builtin: what the kernel chooses by itself.
    """

    target: Target
    tunable: Tunable
    key: tuple[Any, ...]
    shapes: tuple[Shape, ...]
    dtype: torch.dtype
    variant: Mapping[str, Any]
    builtin: Any

    @property
    def named(self) -> dict[str, Any]:
        return self.tunable.named(self.key)

    def __str__(self) -> str:
        key = " ".join(f"{k}={v}" for k, v in self.tunable.key_to_json(self.key).items())
        return f"{self.target.op}: {self.tunable.name} {key}"


class _Empty(Tensors):
    """Tensors of which only shapes matter: the numbers are uninitialised memory, which costs nothing."""

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)


def arguments_of(job_target: Target, shape: Shape, dtype: torch.dtype, variant: Mapping[str, Any]) -> Arguments:
    """The op's arguments on the CPU, for launches that are recorded only.

    Raises:
        ValueError: there are none of such a shape, or they do not fit in memory.
    """
    inputs = job_target.declared.inputs
    assert inputs is not None
    wrong = inputs.wrong_with(shape)  # said of the shape that was given, not of the one that is recorded
    if wrong:
        raise ValueError(f"shape {written(shape)}: {job_target.op} {wrong}")
    with _fitting(job_target, shape):
        return inputs(_Empty(dtype, torch.device("cpu")), job_target.shrink(shape, _RECORDED_LENGTH), variant)


@contextmanager
def _fitting(job_target: Target, shape: Shape) -> Iterator[None]:
    """Name the shape whose tensors the allocator has no memory for, or whose size is no number of bytes at all."""
    try:
        yield
    except (MemoryError, RuntimeError) as e:
        said = str(e).splitlines()[0] if str(e) else type(e).__name__
        known = any(word in said.lower() for word in ("memory", "overflow", "storage size"))
        if isinstance(e, RuntimeError) and not known:
            raise
        raise ValueError(
            f"--shape {written(shape)}: tensors of {job_target.op} of this size do not fit here ({said:.120})"
        ) from None


def jobs(
    job_target: Target, shapes: Sequence[Shape] | None, dtype: torch.dtype, device: DeviceModel
) -> tuple[list[Job], list[str]]:
    """(the keys that calls of these shapes look up, each with its shapes; remarks on shapes that look up none).

    Args:
        shapes: None: those that the op declares for benchmarks.
        device: where calls are to run. Nothing runs for the keys, so it need not be here.

    Raises:
        ValueError: a shape does not fit the op, Triton is not installed, or runs in its interpreter.
    """
    _need_triton()
    inputs = job_target.declared.inputs
    assert inputs is not None
    if job_target.choices == (tunables.HOPPER_PRODUCT,) and device.capability != 90:
        return [], [f"{job_target.op}: only its kernel for Hopper chooses anything, and {device.name} is another GPU"]
    found: dict[tuple[str, tuple[Any, ...]], Job] = {}
    remarks = []
    for shape in (*inputs.decode, *inputs.large) if shapes is None else shapes:
        job = _job(job_target, tuple(shape), dtype, inputs.variants[0], device)
        if job is None:
            call = f"{job_target.op} {written(shape)} {str(dtype).removeprefix('torch.')}"
            remarks.append(f"{call}: its kernel chooses nothing for such a call")
            continue
        before = found.get((job.tunable.name, job.key))
        joined = job if before is None else replace(before, shapes=(*before.shapes, *job.shapes))
        found[job.tunable.name, job.key] = joined
    return list(found.values()), remarks


def _need_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise ValueError("Triton is not installed, whose kernels are tuned; pip install triton (Linux)")
    import triton

    if triton.knobs.runtime.interpret:
        raise ValueError("TRITON_INTERPRET=1: expected it not to be set; the interpreter launches nothing to tune")


def _job(job_target: Target, shape: Shape, dtype: torch.dtype, variant: Named, device: DeviceModel) -> Job | None:
    """The job of one shape; None: its kernel chooses nothing."""
    cpu, launch = torch.device("cpu"), None
    arguments = arguments_of(job_target, shape, dtype, variant)
    tunable, key = tunables.HOPPER_PRODUCT, hopper_product_key(job_target.op, arguments, device)
    if key is None:
        choices = [t for t in job_target.choices if t is not tunables.HOPPER_PRODUCT]
        if not choices:
            return None
        with ExitStack() as stack, recorded() as launches:
            asked = [(t, stack.enter_context(t.using(cpu, (), None))) for t in choices]
            with _fitting(job_target, shape):
                job_target.launcher.fn(**job_target.declared.records.group(arguments))
        wanted = ((t, k) for t, keys in asked for k in keys if job_target.wants(t.named(k)))
        tunable, key = next(wanted, (tunable, None))
        if key is None:
            return None
        kernels = [imported(kernel) for kernel in tunable.kernels]
        launch = next(i for i in launches if i.kernel in kernels)
        tunable, key = asked_on(tunable, key, device)
    builtin = builtin_plan(tunable, key, arguments, launch, device)
    return Job(job_target, tunable, key, (shape,), dtype, variant, builtin)


def neighbour(shape: Shape) -> Shape | None:
    """A shape with the same key whose first number is one less, so that masks are in use; None: there is none."""
    first = shape[0]
    return (first - 1, *shape[1:]) if first > 2 and bucket(first - 1, 4) == bucket(first, 4) else None


@dataclass
class Candidates:
    """What may be tried for a job.

    Attributes:
        plans: those near the built-in choice first.
        left_out: reason -> how many other combinations were left out for it.
    """

    plans: list[Any]
    left_out: Counter[str]

    @property
    def total(self) -> int:
        """Combinations of all values."""
        return len(self.plans) + self.left_out.total()


def candidates(job: Job, device: DeviceModel) -> Candidates:
    """The plans of a job that its spaces allow, in the order of a search in which none is faster than the built-in."""
    found = [space.split() for space in spaces_of(job.tunable, job.named, device)]
    plans = nearest([plan for plans, _ in found for plan in plans], {}, job.builtin)
    return Candidates(plans, sum((left_out for _, left_out in found), Counter()))
