"""`nanovllm tune`: find the fastest configuration of a kernel on this GPU, or show what would be tried, and what is in force."""

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
    from nanovllm.tune.search import Budget
    from nanovllm.tune.targets import Job, Target
    from nanovllm.tune.tune import Result

_DEFAULT_GPU = "h100"


def tune(
    op: Annotated[str | None, typer.Argument(help="An op; with --preset, or --list, all of them if left out.")] = None,
    shape: Annotated[
        list[str] | None, typer.Option(help="A shape such as 64x1024, as of `nanovllm kernels bench`; repeatable.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    preset: Annotated[str | None, typer.Option(help="The shapes of a model, such as qwen3-0.6b.")] = None,
    search: Annotated[str, typer.Option(help="exhaustive (the most promising first) or random.")] = "exhaustive",
    seed: Annotated[int, typer.Option(help="Of a random search.")] = 0,
    limit: Annotated[float | None, typer.Option(help="Seconds for everything; trials under way are finished.")] = None,
    patience: Annotated[
        int | None, typer.Option(help="End a search after so many trials without a faster one.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="The directory to write to; by default the one that NANOVLLM_KERNEL_CONFIGS names."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Leave out what the directory has already, measured with these versions and kernels."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be tried and what not, and why. Needs no GPU.")
    ] = False,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="With --dry-run, for such a GPU (a100, h100, h200, ...), and compile for it; with --list, what it has."
        ),
    ] = None,
    compile: Annotated[
        bool | None, typer.Option(help="With --dry-run, compile what is left; the default with --gpu.")
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
    if limit is not None and not limit > 0:
        raise ValueError(f"--limit {limit:g}: expected a positive number of seconds")
    from nanovllm.tune.search import Budget, ordered

    ordered([], search, seed)  # an unknown strategy is an error before anything runs
    budget = Budget(patience=patience)
    if show_list:
        from nanovllm.cli.tune_show import show_configurations

        others = {"--shape": shape, "--preset": preset, "--dry-run": dry_run, "--resume": resume, "--out": out}
        if given := [name for name, value in others.items() if value]:
            raise ValueError(f"--list, {', '.join(given)}: expected one of them; a list takes an op at most, and --gpu")
        show_configurations(op, device, gpu, as_json)
        return
    requests = _requests(op, shape, preset)
    if resume and dry_run:
        raise ValueError("--resume, --dry-run: expected one of them; a dry run measures nothing")
    if dry_run:
        from nanovllm.cli.tune_show import dry_run as show

        model = _model(gpu, device)
        jobs = _jobs(requests, dtype, model)
        show(jobs, model, gpu is not None if compile is None else compile, limit, as_json, search, seed)
        return
    if gpu is not None or compile is not None:
        raise ValueError("--gpu, --compile: only with --dry-run; configurations are timed on the GPU that is here")
    _tune(requests, dtype, device, out, search, seed, limit, budget, resume, as_json)


def _requests(
    op: str | None, shapes: list[str] | None, preset: str | None
) -> list[tuple[Target, list[tuple[int, ...]] | None]]:
    """(target, its shapes; None: those that the op declares)."""
    from nanovllm.tune.targets import target

    if preset is not None:
        from nanovllm.models.model_presets import preset as preset_config
        from nanovllm.tune.shapes import shapes_of

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


def _directory(out: Path | None) -> Path:
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


def _jobs(requests: Any, dtype: str, model: DeviceModel) -> list[Job]:
    from nanovllm.tune.targets import jobs

    found = []
    for chosen, shapes in requests:
        of_target, remarks = jobs(chosen, shapes, dtype_of(dtype), model)
        found += of_target
        for remark in remarks:
            print(f"{remark}: not tuned", file=sys.stderr)
    return found


def _model(gpu: str | None, device: str) -> DeviceModel:

    from nanovllm.hardware.gpu_presets import device_model, this_device

    if gpu is not None:
        return device_model(gpu)
    from nanovllm.engine.model_runner import select_device

    where = select_device(device)  # also without a GPU: what is asked for is not silently another
    if where.type == "cuda":
        return this_device(where)
    print(f"no GPU here: planned for {_DEFAULT_GPU}; --gpu names another", file=sys.stderr)
    return device_model(_DEFAULT_GPU)


# ---------------------------------------------------------------------------------------------------------------- tuning


def _tune(
    requests: Any, dtype: str, device: str, out: Path | None, search: str, seed: int, limit: float | None, budget: Budget, resume: bool,
    as_json: bool,
) -> None:  # fmt: skip
    from nanovllm.engine.model_runner import select_device
    from nanovllm.hardware.gpu_presets import this_device
    from nanovllm.kernels.op.config_files import DIRECTORY_VARIABLE
    from nanovllm.tune.resume import ContextLost
    from nanovllm.tune.tune import LEAST_SECONDS, MEASURED
    from nanovllm.tune.tune import tune as run

    where = select_device(device)
    if where.type != "cuda":
        raise ValueError(f"configurations are timed on a GPU, this is {where}; --dry-run shows what would be tried")
    out = _directory(out)
    import torch

    results = []
    with torch.cuda.device(where):
        model = this_device(where)
        jobs = _jobs(requests, dtype, model)
        if limit is not None and limit < LEAST_SECONDS * len(jobs):
            print(
                f"--limit {limit:g}: {limit / len(jobs):.1f} s for each of {len(jobs)} jobs, of which one takes some {LEAST_SECONDS:g} s; "
                "the last may get none, and --resume goes on with them",
                file=sys.stderr,
            )
        lost = None
        try:
            for result in run(
                jobs, where, model, out, strategy=search, seed=seed, limit=limit, budget=budget, resume=resume
            ):
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
        print(
            json.dumps({"device": model.name, "directory": str(out), "entries": written, "without": reasons}, indent=1)
        )
    elif before:
        print(f"{before} of {len(results)} jobs were measured before, with these versions and kernels")
    if written and not as_json:
        print(f"wrote {len(written)} configurations to {out}; kernels read them with {DIRECTORY_VARIABLE}={out}")
    if lost or (not written and before < len(results)):
        raise typer.Exit(1)


def _line(result: Result) -> str:
    from nanovllm.cli.tune_show import short

    job, outcome = result.job, result.outcome
    if outcome is None or outcome.best is None or outcome.seconds is None:
        why = result.reason or "; ".join(
            f"{reason} ({n})" for reason, n in (outcome.skipped.items() if outcome else ())
        )
        end = f"; ended by the {outcome.stopped}" if outcome is not None and outcome.stopped else ""
        return f"{job}\n    nothing found: {why or 'no candidates'}{end}"
    text = f"{job}\n    {1e6 * outcome.seconds:.2f} us  {short(job, outcome.best)}"
    if outcome.best == job.builtin:
        text += "  (the built-in choice)"
    elif outcome.default_seconds is not None:
        text += f"\n    built in: {1e6 * outcome.default_seconds:.2f} us  {short(job, job.builtin)}"
    if outcome.runner_up is not None and outcome.runner_up_seconds is not None:
        text += f"\n    second: {1e6 * outcome.runner_up_seconds:.2f} us  {short(job, outcome.runner_up)}"
    skipped = "; ".join(f"{n} {reason}" for reason, n in outcome.skipped.most_common())
    counts = f"tried {outcome.tried} ({outcome.slower} given up early), skipped {sum(outcome.skipped.values())}"
    text += f"\n    {counts}{f' ({skipped})' if skipped else ''}, untried {outcome.untried} in {outcome.elapsed:.1f} s"
    return text + (f"; ended by the {outcome.stopped}" if outcome.stopped else "")
