"""`nanovllm tune`: find a kernel's fastest configuration on this GPU, or show what would be tried or is in force."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm.cli.kernels_common import Dtype, Json, Wide, dtype_of, shape_of
from nanovllm.cli.option_records import takes_records
from nanovllm.console import import_torch
from nanovllm.json_output import STDOUT, write_json
from nanovllm.wording import counted

if TYPE_CHECKING:
    import torch

    from nanovllm.hardware.gpu_presets import DeviceModel
    from nanovllm.tune.jobs import TuningJob
    from nanovllm.tune.run import Result
    from nanovllm.tune.search import Budget

Request = tuple[str, "list[tuple[int, ...]] | None"]
_DEFAULT_GPU = "h100"


@dataclass(frozen=True)
class _Problems:
    """What is tuned."""

    op: Annotated[
        str | None, typer.Argument(metavar="OP", help="An op; with --preset or --list by default all ops.")
    ] = None
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="SHAPE", help="A shape such as 64x1024, as for `nanovllm kernels bench`; repeatable."),
    ] = None
    dtype: Dtype = "bfloat16"
    preset: Annotated[str | None, typer.Option(help="The shapes of a model, such as qwen3-0.6b.")] = None


@dataclass(frozen=True)
class _Search:
    """How long configurations are searched for, and where they are kept."""

    limit: Annotated[
        float | None, typer.Option(help="Seconds for all searches together; a trial that has begun is finished.")
    ] = None
    patience: Annotated[int | None, typer.Option(help="End a search after this many trials without a faster one.")] = (
        None
    )
    out: Annotated[
        Path | None,
        typer.Option(help="The directory to write to; by default the one that NANOVLLM_KERNEL_CONFIGS names."),
    ] = None
    resume: Annotated[
        bool, typer.Option("--resume", help="Skip what the directory already has for these versions and kernels.")
    ] = False


@takes_records
def tune(
    problems: _Problems,
    search: _Search,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show what would be tried, and what would be left out and why. Needs no GPU."),
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(help="With --dry-run or --list: for this GPU (a100, h100, h200, ...), not the one here."),
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="Show what can be tuned, what is in use here, and from which file.")
    ] = False,
    device: Annotated[str, typer.Option(help="The device: auto, cuda, cuda:N.")] = "auto",
    wide: Wide = False,
    json_file: Json = None,
) -> None:
    """Time a kernel's configurations on this GPU, keep the fastest right one, and write it where kernels find it.

    Serving never tunes: it reads these files when it starts.
    """
    import_torch()
    from nanovllm.cli.tune_show import show_configurations, show_dry_run
    from nanovllm.tune.search import Budget

    budget = Budget(seconds=search.limit, patience=search.patience)
    if show_list:
        others = {
            "--shape": problems.shape, "--preset": problems.preset, "--dry-run": dry_run, "--resume": search.resume,
            "--out": search.out,
        }  # fmt: skip
        if given := [name for name, value in others.items() if value]:
            raise ValueError(f"--list, {', '.join(given)}: expected one of them; --list goes with an op and --gpu only")
        show_configurations(problems.op, device, gpu, wide, json_file)
        return
    requests = _requests(problems.op, problems.shape, problems.preset)
    if search.resume and dry_run:
        raise ValueError("--resume, --dry-run: expected one of them; a dry run measures nothing")
    if dry_run:
        model = _model(gpu, device)
        show_dry_run(_jobs(requests, problems.dtype, model), model, json_file)
        return
    if gpu is not None:
        raise ValueError("--gpu: only with --dry-run and --list; configurations are timed on the GPU that is here")
    _tune(requests, problems.dtype, device, search.out, budget, search.resume, json_file)


def _requests(op: str | None, shapes: list[str] | None, preset: str | None) -> list[Request]:
    """(op, its shapes; None: those that the op declares)."""
    from nanovllm.kernels import all_ops
    from nanovllm.tune.jobs import check_tunable

    if preset is not None:
        from nanovllm.models.model_presets import preset as preset_config
        from nanovllm.tune.model_shapes import shapes_of

        if shapes:
            raise ValueError("--preset, --shape: expected one of them")
        known = shapes_of(preset_config(preset))
        if op is not None and check_tunable(op) not in known:
            raise ValueError(f"{op}: --preset has shapes for {', '.join(known)}")
        return [(name, list(known[name])) for name in ([op] if op else known)]
    if op is None:
        raise ValueError("expected an op to tune, or --preset with a model's name, or --list")
    if op == "list" and op not in all_ops():
        raise ValueError("unknown op 'list'; did you mean `nanovllm tune --list`?")
    declared = all_ops()[check_tunable(op)]
    found = [shape_of(declared, text) for text in shapes or ()]
    if empty := [text for text, shape in zip(shapes or (), found) if shape[0] < 1]:
        raise ValueError(f"--shape {empty[0]}: expected at least 1 of the first number; there is nothing to time")
    return [(op, found or None)]


def output_directory(out: Path | None) -> Path:
    """Where to write: the named directory, else the one of the environment variable.

    Raises:
        ValueError: neither is given, or a file is in the way.
    """
    from nanovllm.kernels.op.config_files import DIRECTORY_VARIABLE

    named = out or (Path(user) if (user := os.environ.get(DIRECTORY_VARIABLE)) else None)
    if named is None:
        raise ValueError(
            f"--out: expected a directory to write to, here or in {DIRECTORY_VARIABLE}, which kernels read"
        )
    path = named.expanduser()
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not there.is_dir():
        raise ValueError(f"--out {named}: expected a directory, and {there} is a file")
    return path


def _jobs(requests: list[Request], dtype: str, model: DeviceModel) -> list[TuningJob]:
    from nanovllm.tune.jobs import jobs

    found = []
    for op, shapes in requests:
        of_op, remarks = jobs(op, shapes, dtype_of(dtype), model)
        found += of_op
        for remark in remarks:
            print(f"{remark}: not tuned", file=sys.stderr)
    return found


def _model(gpu: str | None, device: str) -> DeviceModel:
    from nanovllm.hardware.devices import select_device
    from nanovllm.hardware.gpu_presets import device_model, this_device

    if gpu is not None:
        return device_model(gpu)
    where = select_device(device)  # also without a GPU: a device that was named is not silently another
    if where.type == "cuda":
        return this_device(where)
    print(f"no GPU here: planned for {_DEFAULT_GPU}; --gpu names another", file=sys.stderr)
    return device_model(_DEFAULT_GPU)


def _tune(
    requests: list[Request], dtype: str, device: str, out: Path | None, budget: Budget, resume: bool,
    json_file: str | None,
) -> None:  # fmt: skip
    import torch

    from nanovllm.hardware.devices import select_device
    from nanovllm.hardware.gpu_presets import this_device
    from nanovllm.kernels.op.config_files import gpu_of

    where = select_device(device)
    gpu = gpu_of(where)
    if gpu is None:
        raise ValueError(f"configurations are timed on a GPU, this is {where}; --dry-run shows what would be tried")
    directory = output_directory(out)
    with torch.cuda.device(where):
        # With its index, as tensors name it.
        where = torch.device("cuda", torch.cuda.current_device()) if where.index is None else where
        model = this_device(where)
        tune_jobs(_jobs(requests, dtype, model), where, model, gpu, directory, budget, resume, json_file)


def tune_jobs(
    jobs: list[TuningJob], device: torch.device, model: DeviceModel, gpu: str, directory: Path, budget: Budget,
    resume: bool, json_file: str | None, **options: Any,
) -> None:  # fmt: skip
    """`tune.run.tune`, which takes the options, with a printed result for each job.

    Raises:
        typer.Exit: with code 1 if nothing was written, or the GPU was lost; with 130 after Ctrl-C.
    """
    from nanovllm.kernels.op.config_files import DIRECTORY_VARIABLE
    from nanovllm.tune.run import LEAST_SECONDS, MEASURED, ContextLost, tune

    limit = budget.seconds
    if limit is not None and limit < LEAST_SECONDS * len(jobs):
        print(
            f"--limit {limit:g}: {limit / len(jobs):.1f} s for each of {len(jobs)} jobs, of which one takes some "
            f"{LEAST_SECONDS:g} s; the last may get none, and --resume goes on with them",
            file=sys.stderr,
        )
    results: list[Result] = []
    code = 0
    try:
        for result in tune(jobs, device, model, gpu, directory, budget=budget, resume=resume, **options):
            results.append(result)
            if json_file != STDOUT and result.reason != MEASURED:
                print(_line(result), flush=True)
    except ContextLost as e:
        print(e, file=sys.stderr)
        code = 1
    except KeyboardInterrupt:
        print(f"interrupted after {len(results)} of {len(jobs)} jobs; --resume goes on", file=sys.stderr)
        code = 130
    written = [r.entry for r in results if r.entry is not None]
    before = sum(r.reason == MEASURED for r in results)
    reasons = {str(r.job): r.reason or "nothing right was found" for r in results if r.entry is None}
    document = {"device": model.name, "directory": str(directory), "entries": written, "without": reasons}
    if not write_json(json_file, document):
        if before:
            print(f"{before} of {len(results)} jobs were measured before, with these versions and kernels")
        if written:
            print(f"wrote {counted(len(written), 'configuration')} to {directory}")
            print(f"kernels read them with {DIRECTORY_VARIABLE}={directory}")
    code = code or int(not written and before < len(results))
    if code:
        raise typer.Exit(code)


def _line(result: Result) -> str:
    job, outcome = result.job, result.outcome

    def found(plan: Any, seconds: float) -> str:
        return f"{1e6 * seconds:.2f} us  {job.tunable.plan_text(plan)}"

    if outcome is None or not outcome.ranking:
        skipped = "; ".join(f"{reason} ({n})" for reason, n in (outcome.skipped.items() if outcome else ()))
        end = f"; ended by the {outcome.stopped}" if outcome is not None and outcome.stopped else ""
        return f"{job}\n    nothing found: {result.reason or skipped or 'no candidates'}{end}"
    (best, seconds), *others = outcome.ranking.items()
    text = f"{job}\n    {found(best, seconds)}"
    if best == job.builtin:
        text += "  (the built-in choice)"
    elif job.builtin in outcome.ranking:
        text += f"\n    built in: {found(job.builtin, outcome.ranking[job.builtin])}"
    text += f"\n    second: {found(*others[0])}" if others else ""
    reasons = "; ".join(f"{n} {reason}" for reason, n in outcome.skipped.most_common())
    counts = f"tried {outcome.tried} ({outcome.slower} given up early), skipped {outcome.skipped.total()}"
    text += f"\n    {counts}{f' ({reasons})' if reasons else ''}, untried {outcome.untried} in {outcome.elapsed:.1f} s"
    return text + (f"; ended by the {outcome.stopped}" if outcome.stopped else "")
