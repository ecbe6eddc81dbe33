"""`nanovllm lab`, the course: a function in five ways, and how the time of an MLP grows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from nanovllm.cli.command_group import CommandGroup
from nanovllm.cli.kernels_common import GPUS, Device, Json, dtype_of
from nanovllm.cli.option_records import takes_records
from nanovllm.console import StatusLine, import_torch
from nanovllm.json_output import write_json

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="Learn to write kernels: one function in five ways, checked, timed and explained.",
)

LESSONS = {
    "gelu": "Elementwise: each saved pass over memory shows in the time.",
    "softmax": "A reduction over rows: how often is a row read?",
    "layernorm": "Two reductions that depend on each other.",
    "matmul": "Tiles, stages and tensor cores: arithmetic can be the limit.",
}

_Sizes = Annotated[str | None, typer.Option(help="Sizes to time, such as 1024,4096,16384; at most 32768.")]
_Dtype = Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; by default the lesson's first.")]
_Ways = Annotated[
    list[str] | None,
    typer.Option("--way", metavar="WAY", help="plain, torch, compile, cuda or triton; repeatable, all by default."),
]
_Gpu = Annotated[str | None, typer.Option(help=f"Compile PTX for this GPU ({GPUS}), here or not.")]
_Plot = Annotated[Path | None, typer.Option(help="Draw a figure to this file, such as figure.png.")]
_Ptx = Annotated[Path | None, typer.Option("--ptx", help="Write the PTX of both kernels into this folder.")]
_Seed = Annotated[int | None, typer.Option(help="Seed of the random inputs; by default a new one each time.")]
_Refresh = Annotated[bool, typer.Option("--refresh", help="Measure the device's limits again.")]


def _command(name: str) -> Callable[..., None]:
    def command(
        sizes: _Sizes = None,
        dtype: _Dtype = None,
        way: _Ways = None,
        device: Device = "auto",
        gpu: _Gpu = None,
        plot: _Plot = None,
        json_file: Json = None,
        ptx: _Ptx = None,
        seed: _Seed = None,
        refresh: _Refresh = False,
    ) -> None:
        import_torch()
        from nanovllm.cli.lab_show import plot as draw
        from nanovllm.cli.lab_show import show, write_ptx
        from nanovllm.hardware.devices import select_device
        from nanovllm.lab.lesson import lesson
        from nanovllm.lab.lesson_run import run

        chosen = lesson(name)
        _check_plot(plot)
        _check_folder("--ptx", ptx)
        where, dims = select_device(device), _numbers("--sizes", sizes)
        with _telling() as tell:
            result = run(chosen, where, _dtype(dtype), dims, way, gpu, seed, refresh, tell)
        if not write_json(json_file, result.as_dict()):
            show(result)
        if ptx is not None:
            written = write_ptx(result, ptx)
            for path in written:
                print(f"wrote {path}")
            if not written:
                print(f"--ptx {ptx}: neither cuda nor triton was compiled, so there is no PTX to write")
        if plot is not None and not (result.interrupted and not any(r.timing for r in result.rows)):
            draw(result, plot)
            print(f"wrote {plot}")
        _leave_if_interrupted(result.interrupted)
        if result.wrong:
            raise typer.Exit(1)

    return command


for _name, _help in LESSONS.items():
    _ways = "In plain PyTorch, PyTorch's own, torch.compile, CUDA C++ and Triton."
    app.command(_name, short_help=_help, help=f"{_help} {_ways}")(_command(_name))


@dataclass(frozen=True)
class _Training:
    """The MLP, and how long it is trained."""

    dim: Annotated[int | None, typer.Option(help="Width of each layer; by default 1024 on a GPU, 128 on a CPU.")] = None
    batch: Annotated[int | None, typer.Option(help="Rows in a step; by default 1024 on a GPU, 128 on a CPU.")] = None
    layers: Annotated[int, typer.Option(help="Linear layers with GELU.")] = 4
    steps: Annotated[int, typer.Option(help="Forward and backward passes.")] = 2


@app.command()
@takes_records
def mlp(
    sweep: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="steps, layers, batch or dim; repeatable, all by default.")
    ] = None,
    *,
    training: _Training,
    factors: Annotated[str, typer.Option(help="The swept number is multiplied by each of these.")] = "1,2,4,8",
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16.")] = None,
    device: Device = "auto",
    profile: Annotated[
        bool, typer.Option("--profile", help="Also show which kernels take the time, at both ends of each sweep.")
    ] = False,
    plot: _Plot = None,
    json_file: Json = None,
    seed: _Seed = None,
) -> None:
    """How the time to train an MLP grows with the number of steps, layers, rows and with the width."""
    import_torch()
    from nanovllm.cli.lab_show_mlp import plot as draw
    from nanovllm.cli.lab_show_mlp import show
    from nanovllm.hardware.devices import select_device
    from nanovllm.lab.mlp_sweeps import Shape, run_sweeps

    _check_plot(plot)
    where = select_device(device)
    base = Shape.default(where, **vars(training))
    chosen = _numbers("--factors", factors) or ()
    with _telling() as tell:
        result = run_sweeps(base, where, _dtype(dtype), sweep, chosen, profile, seed, tell)
    if not write_json(json_file, result.as_dict()):
        show(result)
    if plot is not None and result.points:
        draw(result, plot)
        print(f"wrote {plot}")
    _leave_if_interrupted(result.interrupted)


@contextmanager
def _telling() -> Iterator[Callable[[str], None]]:
    """What shows, in a status line with its seconds, what a lesson does."""
    status = StatusLine()
    try:
        yield lambda text: status.show(f"{text} ...", timed=True)
    finally:
        status.clear()


def _leave_if_interrupted(interrupted: bool) -> None:
    """End with the exit code of Ctrl-C, after what is there was shown."""
    if interrupted:
        print("nanovllm: interrupted; the rest was not run", file=sys.stderr)
        raise typer.Exit(130)


def _check_plot(path: Path | None) -> None:
    """Say at once, and not after the whole run, that a file cannot be drawn."""
    if path is not None:
        from nanovllm.cli.lab_show import check_figure

        check_figure(path)


def _check_folder(option: str, path: Path | None) -> None:
    """Say at once, and not after the whole run, that a folder cannot be written there."""
    there = next(p for p in (path, *path.absolute().parents) if p.exists()) if path else None
    if there and not there.is_dir():
        raise ValueError(f"{option} {path}: {there} is a file, expected a folder")


def _numbers(option: str, text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(
            f"{option} {text}: expected whole numbers with commas between them, such as 1024,4096"
        ) from None


def _dtype(name: str | None) -> Any:
    return None if name is None else dtype_of(name)
