"""`nanovllm plan`: tiles, stages and warps for a kernel, by a model of the GPU; nothing runs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm.cli.command_group import CommandGroup
from nanovllm.cli.kernels_common import GPUS, Json, Wide
from nanovllm.cli.option_records import takes_records
from nanovllm.console import import_torch
from nanovllm.json_output import write_json
from nanovllm.wording import counted

if TYPE_CHECKING:
    from nanovllm.hardware.gpu_presets import DeviceModel
    from nanovllm.plan import Plan

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Predict which tiles, stages and warps a kernel should use on a GPU, and how long it runs. No GPU is needed.",
)

_Floats = Annotated[str, typer.Option(help="Type of the elements: bfloat16, float16 or float32.")]


@dataclass(frozen=True)
class _Shown:
    """For which GPU plans are made, how many are shown, and in which form."""

    gpu: Annotated[
        str | None, typer.Option(help=f"{GPUS}, or 'here'. By default the CUDA device here, measured, else h100.")
    ] = None
    top: Annotated[int, typer.Option(min=1, help="How many configurations to show, fastest first.")] = 10
    wide: Wide = False
    json_file: Json = None


@dataclass(frozen=True)
class _ShownAndCompiled(_Shown):
    """The same of kernels that this package has."""

    compile: Annotated[
        bool,
        typer.Option(
            "--compile", help="Also compile the plans shown, and show the compiler's shared memory and registers."
        ),
    ] = False


@app.command()
@takes_records
def gemm(
    m: Annotated[int, typer.Option(help="Rows of x: tokens.")],
    n: Annotated[int, typer.Option(help="Rows of the weight: outputs.")],
    k: Annotated[int, typer.Option(help="Columns of both.")],
    *,
    dtype: Annotated[
        str, typer.Option(help="Type of x and of the output: bfloat16, float16, float32, tfloat32 or float8.")
    ] = "bfloat16",
    weight: Annotated[str | None, typer.Option(help="Packed type of the weight: int4, int8 or float8.")] = None,
    group: Annotated[int, typer.Option(help="How many packed weights share a scale.")] = 128,
    shown: _ShownAndCompiled,
) -> None:
    """Tiles of a matrix product: x of m x k times the transpose of a weight of n x k."""
    from nanovllm.hardware.gpu_presets import checked_dtype_name
    from nanovllm.plan.gemm_tiles import DTYPES, WEIGHTS, GemmProblem, plan_gemm

    if dtype in WEIGHTS and dtype not in DTYPES:
        raise ValueError(
            f"dtype: expected one of {', '.join(DTYPES)}, not {dtype!r}; packed weights are --weight {dtype}"
        )
    packed = None if weight is None else checked_dtype_name(weight, WEIGHTS, "weight")
    _show("gemm", GemmProblem(m, n, k, checked_dtype_name(dtype, DTYPES), packed, group), plan_gemm, shown)


@app.command()
@takes_records
def attention(
    query: Annotated[int, typer.Option(help="New tokens of each sequence; 1 for decoding.")],
    *,
    context: Annotated[
        int | None, typer.Option(help="Keys of each sequence; by default the number of new tokens.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences.")] = 1,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(help="Heads of keys and values.")] = 8,
    head_dim: Annotated[int, typer.Option(help="Width of a head.")] = 128,
    causal: Annotated[bool, typer.Option(help="A token sees no later token.")] = True,
    dtype: Annotated[str, typer.Option(help="Type of queries, keys and values: bfloat16 or float16.")] = "bfloat16",
    shown: _ShownAndCompiled,
) -> None:
    """Tiles of attention: query rows of a block, keys of a step."""
    from nanovllm.hardware.gpu_presets import checked_dtype_name
    from nanovllm.plan.attention_tiles import DTYPES, AttentionProblem, plan_attention

    context = query if context is None else context
    problem = AttentionProblem(
        batch, query, context, heads, kv_heads, head_dim, causal, checked_dtype_name(dtype, DTYPES)
    )
    _show("attention", problem, plan_attention, shown)


@dataclass(frozen=True)
class _Window:
    """What the filters of a convolution cover."""

    kernel: Annotated[str, typer.Option(help="Filter taps, such as 3 or 3x5 (height x width).")] = "3"
    stride: Annotated[int, typer.Option(help="Stride of both dimensions.")] = 1
    padding: Annotated[int, typer.Option(help="Zeros on each side.")] = 0
    dilation: Annotated[int, typer.Option(help="Distance between taps.")] = 1


@app.command()
@takes_records
def conv(
    channels: Annotated[int, typer.Option(help="Input channels.")],
    filters: Annotated[int, typer.Option(help="Output channels.")],
    height: Annotated[int, typer.Option(help="Height of the input in pixels.")],
    width: Annotated[int, typer.Option(help="Width of the input in pixels.")],
    *,
    batch: Annotated[int, typer.Option(help="Images.")] = 1,
    window: _Window,
    dtype: Annotated[
        str, typer.Option(help="Type of the operands: bfloat16, float16, float32 or tfloat32.")
    ] = "bfloat16",
    shown: _Shown,
) -> None:
    """Tiles of a convolution, computed as a matrix product over image patches; channels innermost."""
    from nanovllm.hardware.gpu_presets import checked_dtype_name
    from nanovllm.plan.conv_problem import DTYPES, ConvProblem
    from nanovllm.plan.conv_tiles import plan_conv

    taps = window.kernel.lower().split("x")
    if not all(t.isdigit() for t in taps) or len(taps) > 2:
        raise ValueError(f"--kernel: expected a size such as 3 or 3x5, not {window.kernel!r}")
    sizes = batch, channels, height, width, filters, int(taps[0]), int(taps[-1])
    moves = window.stride, window.padding, window.dilation
    _show("conv", ConvProblem(*sizes, *moves, checked_dtype_name(dtype, DTYPES)), plan_conv, shown)


@app.command()
@takes_records
def elementwise(
    elements: Annotated[int, typer.Option(help="Elements of the result.")],
    *,
    inputs: Annotated[int, typer.Option(help="Tensors read, each as large as the result.")] = 1,
    outputs: Annotated[int, typer.Option(help="Tensors written.")] = 1,
    operations: Annotated[int, typer.Option(help="Instructions per element besides loads and stores.")] = 8,
    dtype: _Floats = "bfloat16",
    shown: _ShownAndCompiled,
) -> None:
    """Blocks of an elementwise kernel: elements a thread, width of loads, warps."""
    from nanovllm.hardware.gpu_presets import checked_dtype_name
    from nanovllm.plan.elementwise_tiles import DTYPES, ElementwiseProblem, plan_elementwise

    problem = ElementwiseProblem(elements, inputs, outputs, checked_dtype_name(dtype, DTYPES), operations)
    _show("elementwise", problem, plan_elementwise, shown)


@app.command()
@takes_records
def reduction(
    kind: Annotated[
        str, typer.Argument(metavar="KIND", help="softmax, layer_norm or rms_norm, also as layernorm and rmsnorm.")
    ],
    rows: Annotated[int, typer.Option(help="Rows.")],
    size: Annotated[int, typer.Option(help="Elements of a row.")],
    *,
    dtype: _Floats = "bfloat16",
    shown: _ShownAndCompiled,
) -> None:
    """Blocks of a row kernel: one pass if the row fits into registers, else pieces."""
    from nanovllm.hardware.gpu_presets import checked_dtype_name
    from nanovllm.plan.reduction_tiles import DTYPES, KINDS, ReductionProblem, plan_reduction

    short = kind.lower().replace("-", "").replace("_", "")
    named = {known.replace("_", ""): known for known in KINDS}.get(short, kind)
    _show("reduction", ReductionProblem(named, rows, size, checked_dtype_name(dtype, DTYPES)), plan_reduction, shown)


def _device(gpu: str | None) -> DeviceModel:
    """The named preset; else the CUDA device that is here; else an H100."""
    from nanovllm.hardware.gpu_presets import device_model, this_device

    if gpu not in (None, "here"):
        return device_model(gpu)
    import_torch()
    import torch

    if torch.cuda.is_available():
        return this_device(torch.device("cuda", torch.cuda.current_device()))
    if gpu == "here":
        raise ValueError(f"--gpu here: there is no CUDA device; name one of {GPUS}")
    return device_model("h100")


def _show(kind: str, problem: Any, planner: Callable[[Any, DeviceModel], list[Plan]], shown: _Shown) -> None:
    from nanovllm.cli.text_table import print_table
    from nanovllm.plan.plan_tables import compiled, document, table_rows

    device = _device(shown.gpu)
    import_torch()  # as the kernels whose plans are made do
    plans, least_bytes = planner(problem, device), problem.least_bytes
    rate = device.vector_flops if kind in ("elementwise", "reduction") else device.rate(problem.dtype)
    floor = max(plans[0].flops / rate, least_bytes / device.bandwidth)  # all arithmetic, or every byte moved once
    best = plans[: shown.top]
    reported = compiled(best, _compiler(kind, problem, device)) if getattr(shown, "compile", False) else None
    found = document(kind, problem, device, best, len(plans), floor)
    for plan, resources in zip(found["plans"], reported or ()):
        plan["compiled"] = resources
    if write_json(shown.json_file, found):
        return
    bound = "arithmetic" if plans[0].flops / rate >= least_bytes / device.bandwidth else "memory"
    print(textwrap.fill(f"{kind} on {device.name}: {_words(problem)}", 80))
    print(
        f"{plans[0].flops:.4g} flops, {least_bytes:.4g} bytes: {plans[0].flops / least_bytes:.1f} flops a byte "
        f"(ridge {rate / device.bandwidth:.0f})\nat best {_microseconds(floor)} us, bound by {bound}; "
        f"{counted(len(plans), 'configuration')} fit\npredicted, not measured:"
    )
    if least_bytes > device.memory:
        needed, has = least_bytes / 1e9, device.memory / 1e9
        print(f"It does not fit {device.name}: it takes {needed:,.0f} GB at least, the GPU has {has:,.0f} GB.")
    columns, rows, notes = table_rows(best, floor, reported, shown.wide)
    print_table(columns, rows, ("configuration", "bound by", "limited by"), wide=shown.wide)
    for note in notes:
        print(note)
    times = [round(1e6 * plan.seconds, 2) for plan in best]
    if times != sorted(times):
        print(
            "Plans within 0.5 % of each other count as equally fast. Of these, the first\n"
            "covers the latency, or else takes less of the multiprocessor."
        )


def _microseconds(seconds: float) -> str:
    """With two decimals, or for less than 0.1 us two digits: no time is 0."""
    us = 1e6 * seconds
    return f"{us:.2f}" if us >= 0.1 else f"{us:.2g}"


def _words(problem: Any) -> str:
    shown = {name: value for name, value in asdict(problem).items() if value is not None}
    if "group" in shown and "weight" not in shown:
        del shown["group"]  # of packed weights
    return ", ".join(f"{name} {value}" for name, value in shown.items())


def _compiler(kind: str, problem: Any, device: DeviceModel) -> Callable[[Any], Any]:
    try:
        from nanovllm.plan import triton_kernels
    except ImportError as e:
        raise ValueError(f"--compile: needs Triton ({e})") from e
    compile = getattr(triton_kernels, f"compile_{kind}")
    return lambda config: compile(config, problem, device)
