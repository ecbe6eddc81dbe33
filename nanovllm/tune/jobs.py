"""The ops that can be tuned: which tunable a call looks up, with which key, and what is built in for it."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.kernels import all_ops
from nanovllm.kernels.op.dispatch import Op
from nanovllm.kernels.op.inputs import Arguments, Shape, Tensors, written
from nanovllm.kernels.op.provider import Provider, imported
from nanovllm.kernels.op.tunable import Key, Tunable, bucket
from nanovllm.kernels.triton import tunables as t
from nanovllm.kernels.triton.gemm.packed_plan import MAX_TOKENS
from nanovllm.tune.builtin import builtin_plan, hopper_product_key, key_on
from nanovllm.tune.launches import recorded

if TYPE_CHECKING:
    from nanovllm.hardware.gpu_presets import DeviceModel

_DECODE = (t.ATTENTION_DECODE_HOPPER, t.ATTENTION_DECODE)
TUNABLES: Mapping[str, tuple[Tunable, ...]] = {
    "rms_norm": (t.RMS_NORM,),
    "add_rms_norm": (t.ADD_RMS_NORM,),
    "layer_norm": (t.LAYER_NORM,),
    "softmax": (t.SOFTMAX,),
    "silu_and_mul": (t.ACTIVATE_AND_MUL,),
    "gelu_and_mul": (t.ACTIVATE_AND_MUL,),
    "fused_activation": (t.ACTIVATION,),
    "fused_add_gelu": (t.ADD_ACTIVATION,),
    "element_wise_mul_add": (t.MUL_ADD,),
    "embedding": (t.EMBEDDING,),
    "rotary_embedding": (t.ROTARY,),
    "qk_norm_rope": (t.ROTARY,),
    "qk_norm_rope_store": (t.ROTARY_STORE,),
    "linear_bias_act": (t.PRODUCT,),
    "gated_mlp": (t.PRODUCT,),
    "linear": (t.HOPPER_PRODUCT, t.SMALL_PRODUCT),
    "linear_silu_and_mul": (t.HOPPER_PRODUCT,),
    "linear_add_rms_norm": (t.HOPPER_PRODUCT,),
    "add_rms_norm_linear": (t.SMALL_PRODUCT,),
    "add_rms_norm_gate_up": (t.SMALL_PRODUCT,),
    **dict.fromkeys(
        ("linear_fp8", "linear_gguf", "linear_int4", "linear_int8", "linear_packed_add_rms_norm"), (t.PACKED_PRODUCT,)
    ),
    "attention_decode": _DECODE,
    "qk_norm_rope_attention": _DECODE,
    "attention_prefill": (t.ATTENTION_PREFILL_HOPPER, t.ATTENTION_PREFILL),
}
"""op -> the tunables that its calls may look up. The first lookup of a call is tuned."""


def check_tunable(op: str) -> str:
    """The name of an op that can be tuned.

    Raises:
        ValueError: the op is unknown, or its kernels choose nothing that could be tuned.
    """
    if op in TUNABLES:
        return op
    known = f"ops to tune are {', '.join(TUNABLES)}"
    if op in all_ops():
        raise ValueError(f"{op}: its kernels choose nothing that can be tuned; {known}")
    near = difflib.get_close_matches(op.lower(), TUNABLES, 1)
    raise ValueError(f"unknown op {op!r}; {f'did you mean {near[0]!r}? ' if near else ''}{known}")


@dataclass(frozen=True)
class TuningJob:
    """One key to find a plan for, with the calls that the plan is to be fast for.

    Attributes:
        tunable, key: where the plan is looked up.
        shapes: the shapes of the op's inputs; all have this key.
        variant: further keyword arguments of the op.
        builtin: the plan that the kernel chooses by itself.
    """

    op: Op
    tunable: Tunable
    key: Key
    shapes: tuple[Shape, ...]
    dtype: torch.dtype
    variant: Mapping[str, Any]
    builtin: Any

    @property
    def provider(self) -> Provider:
        """The provider that is tuned."""
        return self.op.providers["triton"]

    def __str__(self) -> str:
        key = " ".join(f"{k}={v}" for k, v in self.tunable.key_to_json(self.key).items())
        return f"{self.op.name}: {self.tunable.name} {key}"


class _Empty(Tensors):
    """Tensors of which only shapes matter: the numbers are uninitialised memory, which costs nothing."""

    def normal(self, *shape: int, dtype: torch.dtype | None = None, scale: float | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)


def shortened(op: Op, shape: Shape, length: int) -> Shape:
    """A shape with the same key whose sequences have at most `length` tokens; not of attention: the shape itself."""
    assert op.inputs is not None
    most = {"least": length // 2, "most": length, "cached": length}
    return tuple(min(n, most.get(name, n)) for name, n in zip(op.inputs.dimensions, shape))


def call_arguments(op: Op, shape: Shape, dtype: torch.dtype, variant: Mapping[str, Any]) -> Arguments:
    """The op's arguments on the CPU, for calls whose launches are only recorded.

    Raises:
        ValueError: the shape does not fit the op.
    """
    assert op.inputs is not None
    if wrong := op.inputs.wrong_with(shape):  # of the shape that was given, not of the shortened one
        raise ValueError(f"shape {written(shape)}: {op.name} {wrong}")
    # 128 tokens are more than a run of few queries has.
    return op.inputs(_Empty(dtype, torch.device("cpu")), shortened(op, shape, 128), variant)


def jobs(
    op: str, shapes: Sequence[Shape] | None, dtype: torch.dtype, device: DeviceModel
) -> tuple[list[TuningJob], list[str]]:
    """(the keys that calls of these shapes look up, each with its shapes; remarks on shapes that look up none).

    Args:
        shapes: None: those that the op declares for benchmarks.
        device: the GPU that the calls are to run on. Nothing runs for the keys, so it need not be here.

    Raises:
        ValueError: a shape does not fit the op or in memory, Triton is not installed, or runs in its interpreter.
    """
    _need_triton()
    declared = all_ops()[check_tunable(op)]
    assert declared.inputs is not None
    if TUNABLES[op] == (t.HOPPER_PRODUCT,) and device.capability != 90:
        return [], [f"{op}: only its kernel for Hopper chooses anything, and {device.name} is another GPU"]
    found: dict[tuple[str, Key], TuningJob] = {}
    remarks = []
    for shape in (*declared.inputs.decode, *declared.inputs.large) if shapes is None else shapes:
        try:
            job = _job(declared, tuple(shape), dtype, declared.inputs.variants[0], device)
        except (MemoryError, RuntimeError) as e:  # no memory for the tensors, or their size is no number of bytes
            said = str(e).splitlines()[0] if str(e) else type(e).__name__
            if isinstance(e, RuntimeError) and not any(
                w in said.lower() for w in ("memory", "overflow", "storage size")
            ):
                raise
            which = f"--shape {written(shape)}: tensors of {op} of this size"
            raise ValueError(f"{which} do not fit here ({said:.120})") from None
        if job is None:
            call = f"{op} {written(shape)} {str(dtype).removeprefix('torch.')}"
            remarks.append(f"{call}: its kernel chooses nothing for such a call")
            continue
        before = found.get((job.tunable.name, job.key), replace(job, shapes=()))
        found[job.tunable.name, job.key] = replace(before, shapes=(*before.shapes, *job.shapes))
    return list(found.values()), remarks


def _need_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise ValueError("tuning needs Triton, which is not installed; pip install triton (Linux)")
    import triton

    if triton.knobs.runtime.interpret:
        raise ValueError("TRITON_INTERPRET=1: expected it not to be set; the interpreter launches nothing to tune")


def _job(op: Op, shape: Shape, dtype: torch.dtype, variant: Mapping[str, Any], device: DeviceModel) -> TuningJob | None:
    """The job of one shape; None: its kernel chooses nothing."""
    arguments, launch = call_arguments(op, shape, dtype, variant), None
    if TUNABLES[op.name] == (t.PACKED_PRODUCT,) and arguments["x"].shape[:-1].numel() > MAX_TOKENS:
        return None  # the library would multiply, on this CPU
    tunable, key = t.HOPPER_PRODUCT, hopper_product_key(op.name, arguments, device)
    if key is None:
        with ExitStack() as stack, recorded() as launches:
            cpu = torch.device("cpu")
            lookups = [(of_op, stack.enter_context(of_op.using(cpu, (), None))) for of_op in TUNABLES[op.name]]
            op.providers["triton"].fn(**op.records.group(arguments))
        tunable, key = next(((of_op, keys[0]) for of_op, keys in lookups if keys), (tunable, None))
        if key is None:
            return None
        kernels = [imported(kernel) for kernel in tunable.kernels]
        launch = next(made for made in launches if made.kernel in kernels)
        tunable, key = key_on(tunable, key, device)
    builtin = builtin_plan(tunable, key, arguments, launch, device)
    return TuningJob(op, tunable, key, (shape,), dtype, variant, builtin)


def neighbour(shape: Shape) -> Shape | None:
    """A shape with the same key whose first number is one less, so that masks are in use; None: there is none."""
    first = shape[0]
    return (first - 1, *shape[1:]) if first > 2 and bucket(first - 1, 4) == bucket(first, 4) else None
