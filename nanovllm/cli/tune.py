"""`nanovllm tune`: find a kernel's fastest configuration on this GPU, or show what would be tried or is in force."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm.cli.kernels_common import dtype_of, shape_of

if TYPE_CHECKING:
    from nanovllm.hardware.gpu_presets import DeviceModel
    from nanovllm.tune.jobs import Job, Target
    from nanovllm.tune.run import Result
    from nanovllm.tune.search import Budget

Request = tuple["Target", "list[tuple[int, ...]] | None"]
_DEFAULT_GPU = "h100"


def tune(
    op: Annotated[str | None, typer.Argument(help="An op; with --preset, or --list, all of them if left out.")] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="A shape such as 64x1024, as of `nanovllm kernels bench`; repeatable.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    preset: Annotated[str | None, typer.Option(help="The shapes of a model, such as qwen3-0.6b.")] = None,
    limit: Annotated[float | None, typer.Option(help="Seconds for everything; trials under way are finished.")] = None,
    patience: Annotated[
        int | None, typer.Option(help="End a search after this many trials without a faster one.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The directory to write to; by default the one that NANOVLLM_KERNEL_CONFIGS names."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Leave out what the directory has already, of these versions and kernels."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be tried and what not, and why. Needs no GPU.")
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(help="With --dry-run, for such a GPU (a100, h100, h200, ...); with --list, what it has."),
    ] = None,
    show_list: Annotated[
        bool, typer.Option("--list", help="What can be tuned, and what is in force here and from where.")
    ] = False,
    device: Annotated[str, typer.Option(help="The device: auto, cuda, cuda:N.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Time a kernel's configurations on this GPU, keep the fastest right one, and write it where kernels find it.

    Serving never tunes: it reads these files when it starts.
    """
    from nanovllm.cli.tune_show import show_configurations, show_dry_run
    from nanovllm.tune.search import Budget

    budget = Budget(seconds=limit, patience=patience)
    if show_list:
        others = {"--shape": shape, "--preset": preset, "--dry-run": dry_run, "--resume": resume, "--out": out}
        if given := [name for name, value in others.items() if value]:
            raise ValueError(f"--list, {', '.join(given)}: expected one of them; a list takes an op at most, and --gpu")
        show_configurations(op, device, gpu, as_json)
        return
    requests = _requests(op, shape, preset)
    if resume and dry_run:
        raise ValueError("--resume, --dry-run: expected one of them; a dry run measures nothing")
    if dry_run:
        model = _model(gpu, device)
        show_dry_run(_jobs(requests, dtype, model), model, as_json)
        return
    if gpu is not None:
        raise ValueError("--gpu: only with --dry-run and --list; configurations are timed on the GPU that is here")
    _tune(requests, dtype, device, out, budget, resume, as_json)


def _requests(op: str | None, shapes: list[str] | None, preset: str | None) -> list[Request]:
    """(target, its shapes; None: those that the op declares)."""
    from nanovllm.tune.jobs import target

    if preset is not None:
        from nanovllm.models.model_presets import preset as preset_config
        from nanovllm.tune.model_shapes import shapes_of

        if shapes:
            raise ValueError("--preset, --shape: expected one of them")
        known = shapes_of(preset_config(preset))
        names = list(known) if op is None else [target(op).op]
        if op is not None and op not in known:
            raise ValueError(f"{op}: --preset has shapes for {', '.join(known)}")
        return [(target(name), list(known[name])) for name in names]
    if op is None:
        raise ValueError("expected an op to tune, or --preset with a model's name, or --list")
    chosen = target(op)
    return [(chosen, None if not shapes else [_shape(chosen, text) for text in shapes])]


def _shape(chosen: Target, text: str) -> tuple[int, ...]:
    shape = shape_of(chosen.declared, text)
    if shape[0] < 1:
        raise ValueError(f"--shape {text}: expected at least 1 of the first number; there is nothing to time")
    return shape


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


def _jobs(requests: list[Request], dtype: str, model: DeviceModel) -> list[Job]:
    from nanovllm.tune.jobs import jobs

    found = []
    for chosen, shapes in requests:
        of_target, remarks = jobs(chosen, shapes, dtype_of(dtype), model)
        found += of_target
        for remark in remarks:
            print(f"{remark}: not tuned", file=sys.stderr)
    return found


def _model(gpu: str | None, device: str) -> DeviceModel:
    from nanovllm.engine.devices import select_device
    from nanovllm.hardware.gpu_presets import device_model, this_device

    if gpu is not None:
        return device_model(gpu)
    where = select_device(device)  # also without a GPU: a device that was named is not silently another
    if where.type == "cuda":
        return this_device(where)
    print(f"no GPU here: planned for {_DEFAULT_GPU}; --gpu names another", file=sys.stderr)
    return device_model(_DEFAULT_GPU)


def _tune(
    requests: list[Request], dtype: str, device: str, out: Path | None, budget: Budget, resume: bool, as_json: bool
) -> None:
    import torch

    from nanovllm.engine.devices import select_device
    from nanovllm.hardware.gpu_presets import this_device
    from nanovllm.kernels.op.config_files import DIRECTORY_VARIABLE, gpu_of
    from nanovllm.tune.run import LEAST_SECONDS, MEASURED, ContextLost
    from nanovllm.tune.run import tune as run

    where = select_device(device)
    gpu = gpu_of(where)
    if gpu is None:
        raise ValueError(f"configurations are timed on a GPU, this is {where}; --dry-run shows what would be tried")
    out = output_directory(out)
    results: list[Result] = []
    lost = None
    with torch.cuda.device(where):
        # With its index, as tensors name it.
        where = torch.device("cuda", torch.cuda.current_device()) if where.index is None else where
        model = this_device(where)
        jobs = _jobs(requests, dtype, model)
        limit = budget.seconds
        if limit is not None and limit < LEAST_SECONDS * len(jobs):
            print(
                f"--limit {limit:g}: {limit / len(jobs):.1f} s for each of {len(jobs)} jobs, of which one takes some "
                f"{LEAST_SECONDS:g} s; the last may get none, and --resume goes on with them",
                file=sys.stderr,
            )
        try:
            for result in run(jobs, where, model, gpu, out, budget=budget, resume=resume):
                results.append(result)
                if not as_json and result.reason != MEASURED:
                    print(_line(result), flush=True)
        except ContextLost as e:
            lost = str(e)
            print(lost, file=sys.stderr)
    written = [r.entry for r in results if r.entry is not None]
    before = sum(r.reason == MEASURED for r in results)
    if as_json:
        reasons = {str(r.job): r.reason or "nothing right was found" for r in results if r.entry is None}
        found = {"device": model.name, "directory": str(out), "entries": written, "without": reasons}
        print(json.dumps(found, indent=1))
    else:
        if before:
            print(f"{before} of {len(results)} jobs were measured before, with these versions and kernels")
        if written:
            print(f"wrote {len(written)} configurations to {out}; kernels read them with {DIRECTORY_VARIABLE}={out}")
    if lost or (not written and before < len(results)):
        raise typer.Exit(1)


def _line(result: Result) -> str:
    from nanovllm.cli.tune_show import short

    job, outcome = result.job, result.outcome
    if outcome is None or outcome.seconds is None:
        skipped: Any = outcome.skipped.items() if outcome else ()
        why = result.reason or "; ".join(f"{reason} ({n})" for reason, n in skipped)
        end = f"; ended by the {outcome.stopped}" if outcome is not None and outcome.stopped else ""
        return f"{job}\n    nothing found: {why or 'no candidates'}{end}"
    text = f"{job}\n    {1e6 * outcome.seconds:.2f} us  {short(job, outcome.best)}"
    if outcome.best == job.builtin:
        text += "  (the built-in choice)"
    elif outcome.default_seconds is not None:
        text += f"\n    built in: {1e6 * outcome.default_seconds:.2f} us  {short(job, job.builtin)}"
    if outcome.runner_up_seconds is not None:
        text += f"\n    second: {1e6 * outcome.runner_up_seconds:.2f} us  {short(job, outcome.runner_up)}"
    reasons = "; ".join(f"{n} {reason}" for reason, n in outcome.skipped.most_common())
    counts = f"tried {outcome.tried} ({outcome.slower} given up early), skipped {outcome.skipped.total()}"
    text += f"\n    {counts}{f' ({reasons})' if reasons else ''}, untried {outcome.untried} in {outcome.elapsed:.1f} s"
    return text + (f"; ended by the {outcome.stopped}" if outcome.stopped else "")
