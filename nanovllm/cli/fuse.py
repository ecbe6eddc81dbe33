"""`nanovllm fuse`: which kernels of a module should be one, the predicted gain, and the measured one.

fuse_target.py makes the module, fuse_tables.py prints the tables, fuse_loops.py answers for loop nests.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm.cli.kernels_common import DTYPES, GPUS, Json, Wide, dtype_option
from nanovllm.console import StatusLine, import_torch, working
from nanovllm.json_output import STDOUT, write_json
from nanovllm.wording import counted

if TYPE_CHECKING:
    import torch

    from nanovllm.cli.fuse_target import FuseTarget
    from nanovllm.fuse import FusionAnalyzer, FusionDevice

_PHASES = ("decode", "prefill")
_NOTHING = "{}: nothing to fuse, it runs no kernel"


_Preset = Annotated[str | None, typer.Option(help="The decoder layer of this model; by default qwen3-0.6b.")]
_Module = Annotated[
    str | None,
    typer.Option(
        help="A module of your own: package.module:function or file.py:function, which returns (module, arguments)."
    ),
]
_Loops = Annotated[
    Path | None,
    typer.Option(help="A Python file of loop nests, in place of a module: can they be fused and tiled? Needs islpy."),
]
_Size = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=N", help="With --loops: the value of a variable, such as N=64; repeatable."),
]
_Context = Annotated[int | None, typer.Option(help="Tokens of each sequence, new ones included; by default 1024.")]
_Phase = Annotated[str, typer.Option(help="decode: sequences of one new token each; prefill: one prompt.")]
_Measure = Annotated[
    bool, typer.Option("--measure", help="Time every group here: unfused, with torch.compile, with our ops.")
]
_Save = Annotated[
    Path | None,
    typer.Option(help="Keep measurements in <device>/fusion.json of this folder; a GPU's go to results by default."),
]


def fuse(
    preset: _Preset = None,
    module: _Module = None,
    loops: _Loops = None,
    size: _Size = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the batch.")] = 64,
    context: _Context = None,
    phase: _Phase = "decode",
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES)}; by default the preset's.")] = None,
    gpu: Annotated[str | None, typer.Option(help=f"Predict for this GPU: {GPUS}. By default h100.")] = None,
    left: Annotated[bool, typer.Option("--left", help="Also show the merges that were not made, and why.")] = False,
    measure: _Measure = False,
    device: Annotated[str, typer.Option(help="Where to measure: auto, cpu, cuda, cuda:N.")] = "auto",
    compile: Annotated[bool, typer.Option(help="Measure torch.compile too.")] = True,
    iters: Annotated[int, typer.Option(help="Timed calls of each.")] = 30,
    save: _Save = None,
    wide: Wide = False,
    json_file: Json = None,
) -> None:
    """Which kernels of a module should be one kernel, what a GPU saves by it, and which of our ops does it."""
    if phase not in _PHASES:
        raise ValueError(f"--phase {phase}: expected one of {', '.join(_PHASES)}")
    if dtype is not None:
        dtype = dtype_option(dtype)
    if sum(given is not None for given in (preset, module, loops)) > 1:
        raise ValueError("--preset, --module, --loops: expected one of them")
    if iters < 1:
        raise ValueError(f"--iters {iters}: expected at least 1")
    import_torch()
    from nanovllm.hardware.devices import select_device
    from nanovllm.hardware.gpu_presets import device_model

    model = device_model(gpu) if gpu is not None else None  # an unknown one is said before anything else is done
    if loops is not None:
        from nanovllm.cli.fuse_loops import show_loops

        show_loops(loops, size or [], model or device_model("h100"), json_file)
        return
    from nanovllm.cli.fuse_target import layer_of_preset, own_module

    where = select_device(device) if measure else None
    if module:
        target = own_module(module, where)
    else:
        with working("building the layer"):
            target = layer_of_preset(preset or "qwen3-0.6b", tokens, context, phase, dtype, where)
    if where is not None:
        if model is not None:
            raise ValueError("--gpu and --measure: what is measured is predicted for the device that it is measured on")
        folder = save or (Path("results") if where.type == "cuda" else None)
        _measure(target, where, compile, iters, folder, json_file)
        return
    status = StatusLine()
    report = _analyzer(target, model or device_model("h100"), status).report()
    status.clear()
    if not write_json(json_file, {**target.about, **report.to_json()}):
        _print(target, report, wide, left)


def _print(target: FuseTarget, report: Any, wide: bool, left: bool) -> None:
    from nanovllm.cli.fuse_tables import print_groups, print_left_out

    if not report.rows:
        print(_NOTHING.format(target.title))
        return
    print(f"{target.title}\npredicted for {report.device}")
    print_groups(report, wide)
    if left:
        print_left_out(report)
    print(_summary(report))


def _analyzer(target: FuseTarget, device: FusionDevice, status: StatusLine) -> FusionAnalyzer:
    from nanovllm.fuse import FusionAnalyzer

    return FusionAnalyzer(
        target.module, target.args, target.kwargs, device=device, known=target.known, progress=status.show
    )


def _summary(report: Any) -> str:
    if not report.fused:
        return "Every tensor is empty, so no kernel has anything to do."
    kernels, groups = sum(len(r.group.kernels) for r in report.rows), len(report.rows)
    served = sum(len(r.served.ops) == 1 and r.served.covered == r.served.kernels for r in report.rows)
    return (
        f"{counted(kernels, 'kernel')} become {groups}: {1e6 * report.unfused:.1f} -> {1e6 * report.fused:.1f} us"
        f" predicted, {report.unfused / report.fused:.1f} times as fast.\n"
        f"Groups that a single op of ours computes: {served} of {groups}."
    )


def _measure(
    target: FuseTarget, where: torch.device, compile: bool, iters: int, save: Path | None, json_file: str | None
) -> None:
    import torch

    from nanovllm.cli import fuse_tables
    from nanovllm.fuse import kept_timings
    from nanovllm.fuse.group_timing import WAYS, Agreement, measure
    from nanovllm.hardware.gpu_name import device_name

    ways, status = tuple(w for w in WAYS if compile or w != "compile"), StatusLine()
    with torch.inference_mode(False):
        analyzer = _analyzer(target, _here(where), status)
        progress = None if json_file == STDOUT else status.show
        rows, interrupted = [], False
        try:
            for row in measure(analyzer, target.args, target.kwargs, ways=ways, iters=iters, progress=progress):
                rows.append(row)
        except KeyboardInterrupt:
            interrupted = True
    name = device_name(where)
    document = kept_timings.document(rows, name, target.about, Path.cwd())
    if not write_json(json_file, document):
        status.clear()
        if not analyzer.groups:
            print(_NOTHING.format(target.title))
            return
        print(f"{target.title}\nmeasured on {name}, in microseconds")
        fuse_tables.print_measured(rows)
        print(fuse_tables.agreement_line(Agreement.of(rows)))
        if where.type == "cpu":
            print("On a CPU, other programs disturb these times, and the model is made for GPUs.")
    if interrupted:
        wanted = counted(len(analyzer.groups), "group")
        print(f"nanovllm: interrupted; measured {len(rows)} of {wanted}", file=sys.stderr)
        raise typer.Exit(130)
    if save is not None:
        path = kept_timings.keep(document, save)
        print(f"kept in {path}", file=sys.stderr)


def _here(where: torch.device) -> FusionDevice:
    if where.type == "cuda":
        from nanovllm.hardware.gpu_presets import this_device

        return this_device(where)
    from nanovllm.fuse.cpu_model import measure_cpu

    return measure_cpu(DTYPES)
