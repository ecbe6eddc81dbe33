"""`nanovllm fuse`: which kernels of a module should be one, the predicted gain, and the measured one.

fuse_target.py makes the module, fuse_tables.py prints the tables, fuse_loops.py answers for loop nests.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm.cli.kernels_common import DTYPES, GPUS, Json, Wide, dtype_option
from nanovllm.cli.option_records import takes_records
from nanovllm.console import StatusLine, import_torch, working
from nanovllm.json_output import STDOUT, write_json
from nanovllm.wording import counted

if TYPE_CHECKING:
    import torch

    from nanovllm.cli.fuse_target import FuseTarget
    from nanovllm.fuse import FusionAnalyzer, FusionDevice

_PHASES = ("decode", "prefill")
_NOTHING = "{}: nothing to fuse, it runs no kernel"


@dataclass(frozen=True)
class _Analysed:
    """The module, and the batch that it gets; or loop nests."""

    preset: Annotated[str | None, typer.Option(help="The decoder layer of this model; by default qwen3-0.6b.")] = None
    module: Annotated[
        str | None,
        typer.Option(
            help="A module of your own: package.module:function or file.py:function, which returns (module, arguments)."
        ),
    ] = None
    loops: Annotated[
        Path | None,
        typer.Option(
            help="A Python file of loop nests, in place of a module: can they be fused and tiled? Needs islpy."
        ),
    ] = None
    size: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=N", help="With --loops: the value of a variable, such as N=64; repeatable."),
    ] = None
    tokens: Annotated[int, typer.Option(help="Tokens of the batch.")] = 64
    context: Annotated[
        int | None, typer.Option(help="Tokens of each sequence, new ones included; by default 1024.")
    ] = None
    phase: Annotated[str, typer.Option(help="decode: sequences of one new token each; prefill: one prompt.")] = "decode"
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES)}; by default the preset's.")] = None

    def check(self) -> None:
        """Raise a ValueError that names the options that do not go."""
        if self.phase not in _PHASES:
            raise ValueError(f"--phase {self.phase}: expected one of {', '.join(_PHASES)}")
        if self.dtype is not None:
            dtype_option(self.dtype)
        if sum(given is not None for given in (self.preset, self.module, self.loops)) > 1:
            raise ValueError("--preset, --module, --loops: expected one of them")

    def target(self, where: torch.device | None) -> FuseTarget:
        """The module. where: the device that it is measured on."""
        from nanovllm.cli.fuse_target import layer_of_preset, own_module

        if self.module:
            return own_module(self.module, where)
        dtype = None if self.dtype is None else dtype_option(self.dtype)
        with working("building the layer"):
            return layer_of_preset(self.preset or "qwen3-0.6b", self.tokens, self.context, self.phase, dtype, where)


@dataclass(frozen=True)
class _Measured:
    """Whether groups are timed, and how."""

    measure: Annotated[
        bool, typer.Option("--measure", help="Time every group here: unfused, with torch.compile, with our ops.")
    ] = False
    device: Annotated[str, typer.Option(help="Where to measure: auto, cpu, cuda, cuda:N.")] = "auto"
    compile: Annotated[bool, typer.Option(help="Measure torch.compile too.")] = True
    iters: Annotated[int, typer.Option(help="Timed calls of each.")] = 30
    save: Annotated[
        Path | None,
        typer.Option(
            help="Keep measurements in <device>/fusion.json of this folder; a GPU's go to results by default."
        ),
    ] = None


@takes_records
def fuse(
    analysed: _Analysed,
    gpu: Annotated[str | None, typer.Option(help=f"Predict for this GPU: {GPUS}. By default h100.")] = None,
    left: Annotated[bool, typer.Option("--left", help="Also show the merges that were not made, and why.")] = False,
    *,
    measured: _Measured,
    wide: Wide = False,
    json_file: Json = None,
) -> None:
    """Which kernels of a module should be one kernel, what a GPU saves by it, and which of our ops does it."""
    analysed.check()
    if measured.iters < 1:
        raise ValueError(f"--iters {measured.iters}: expected at least 1")
    import_torch()
    from nanovllm.hardware.devices import select_device
    from nanovllm.hardware.gpu_presets import device_model

    model = device_model(gpu) if gpu is not None else None  # an unknown one is said before anything else is done
    if analysed.loops is not None:
        from nanovllm.cli.fuse_loops import show_loops

        show_loops(analysed.loops, analysed.size or [], model or device_model("h100"), json_file)
        return
    where = select_device(measured.device) if measured.measure else None
    target = analysed.target(where)
    if where is not None:
        if model is not None:
            raise ValueError("--gpu and --measure: what is measured is predicted for the device that it is measured on")
        _measure(target, where, measured, json_file)
        return
    if json_file != STDOUT and not sys.stderr.isatty():
        print(f"analysing {target.title} ...", file=sys.stderr, flush=True)
    status = StatusLine()
    report = _analyzer(target, model or device_model("h100"), status).report()
    status.clear()
    if not write_json(json_file, {**target.about, **report.to_json()}):
        _print(target, report, wide, left, " (by default; --gpu names another GPU)" if gpu is None else "")


def _print(target: FuseTarget, report: Any, wide: bool, left: bool, remark: str) -> None:
    from nanovllm.cli.fuse_tables import print_groups, print_left_out

    if not report.rows:
        print(_NOTHING.format(target.title))
        return
    print(f"{target.title}\npredicted for {report.device}{remark}")
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
    become = "becomes" if kernels == 1 else "become"
    return (
        f"{counted(kernels, 'kernel')} {become} {groups}: {1e6 * report.unfused:.1f} -> {1e6 * report.fused:.1f} us"
        f" predicted, {report.unfused / report.fused:.1f} times as fast.\n"
        f"Groups that a single op of ours computes: {served} of {groups}."
    )


def _measure(target: FuseTarget, where: torch.device, how: _Measured, json_file: str | None) -> None:
    import torch

    from nanovllm.cli import fuse_tables
    from nanovllm.fuse import kept_timings
    from nanovllm.fuse.group_timing import WAYS, Agreement, measure
    from nanovllm.hardware.gpu_name import device_name

    ways, status = tuple(w for w in WAYS if how.compile or w != "compile"), StatusLine()
    with torch.inference_mode(False):
        analyzer = _analyzer(target, _here(where), status)
        progress = None if json_file == STDOUT else status.show
        rows, interrupted = [], False
        try:
            for row in measure(analyzer, target.args, target.kwargs, ways=ways, iters=how.iters, progress=progress):
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
    folder = how.save or (Path("results") if where.type == "cuda" else None)
    if folder is not None:
        path = kept_timings.keep(document, folder)
        print(f"kept in {path}", file=sys.stderr)


def _here(where: torch.device) -> FusionDevice:
    if where.type == "cuda":
        from nanovllm.hardware.gpu_presets import this_device

        return this_device(where)
    from nanovllm.fuse.cpu_model import measure_cpu

    return measure_cpu(DTYPES)
