"""Predicted against measured: time what the planner keeps, and see where its first choice and its first five stand.

    python -m nanovllm.plan.proof --limit 270 --docs docs/planner.md

Needs a CUDA device. Inputs rotate through more than twice the L2 cache, calls run in a CUDA graph. Every configuration that the planner
keeps is timed, and the engine's own, those near the best several times; the fastest of these and the planner's first five are timed again,
in turns, and their results compared with a float32 reference: what is wrong does not count. What does not compile or launch is
counted, with its reason. Other processes compile each distinct kernel once
meanwhile; a shape's turn comes when its kernels are there. What was measured is written every few seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from nanovllm.hardware.gpu_presets import DeviceModel
from nanovllm.plan import docs_table
from nanovllm.plan.compile_queue import Ahead
from nanovllm.plan.judging import in_words, judge, summary
from nanovllm.plan.measuring import GpuTimer, sample
from nanovllm.plan.report import finite
from nanovllm.plan.resources import Plan
from nanovllm.plan.shapes import ALL, plan

Timer = Callable[[Any, Sequence[Plan], float, "int | None"], dict[str, Any]]
_KEEP_SECONDS = 5.0
"""Between writings of what has been measured so far."""


def prove(
    model: DeviceModel, problems: dict[str, Sequence[Any]], timer: Timer, limit: float, most: int = 0, ahead: Ahead | None = None,
    keep: Callable[[dict[str, Any]], None] | None = None, times: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Plan and time every problem until `limit` seconds have passed; what was not reached is named.

    Args:
        timer: (problem, plans, deadline, index of the engine's own plan) -> {"seconds": {index: seconds}, ...}; what else it
            returns goes into the document.
        ahead: compiles the plans; a problem is timed once they are.
        keep: told every few seconds what there is so far, in the form of the result.
        times: takes, of each problem, the microseconds of every configuration: what the model can be fitted to.
    """
    deadline = time.monotonic() + limit
    from nanovllm.plan.builtin import with_builtin

    shapes, errors, stopped, kept = [], [], None, time.monotonic()
    # Kinds in turns, so that a short run has some of each.
    turns = [(kind, p) for kind, ps in problems.items() for p in ps]
    turns.sort(key=lambda t: problems[t[0]].index(t[1]) / len(problems[t[0]]))
    planned = {}
    for kind, problem in turns:
        if time.monotonic() > deadline:
            break
        try:
            few = plan(problem, model)
            plans, own = with_builtin(few, problem, model)
            chosen = sample(few, most)
            if own is not None:
                chosen = sorted({*chosen, own})
            if ahead is not None:
                ahead.ask(problem, [plans[i] for i in chosen], model)
        except Exception as e:  # noqa: BLE001 - one shape must not cost the others
            errors.append({"problem": in_words(kind, problem), "reason": _first_line(e)})
            continue
        planned[problem] = plans, chosen, len(few), own

    def found() -> dict[str, Any]:
        have = [s["problem"] for s in shapes]
        words = [in_words(*turn) for turn in turns]
        missing = [w for w in words if w not in have]
        mine = sorted(shapes, key=lambda s: words.index(s["problem"]))
        return {"shapes": mine, "not_measured": missing, "summary": summary(mine), "stopped": stopped, "errors": errors}

    left = [turn for turn in turns if turn[1] in planned]
    while left and not stopped and time.monotonic() <= deadline:
        # The first whose kernels are compiled; else the first.
        kind, problem = turn = next((t for t in left if ahead is None or ahead.ready(t[1])), left[0])
        left.remove(turn)
        if ahead is not None and not ahead.wait(problem, deadline):
            break
        plans, chosen, num_kept, own = planned[problem]
        words = in_words(kind, problem)
        began = time.monotonic()
        try:
            result = timer(problem, [plans[i] for i in chosen], deadline, None if own is None else chosen.index(own))
        except RuntimeError as e:
            if type(e).__name__ == "OutOfMemoryError":
                errors.append({"problem": words, "reason": _first_line(e)})
            else:  # a kernel broke the CUDA context: what was measured before it is kept
                stopped = f"{words}: {_first_line(e)}"
            continue
        seconds = {chosen[i]: s for i, s in result.pop("seconds").items()}
        if result.pop("cut", False) or not any(i < num_kept for i in seconds):
            continue
        if times is not None:
            times.append(
                {"problem": words, "us": {str(plans[i].config): round(1e6 * s, 2) for i, s in seconds.items()}}
            )
        shapes.append(
            {
                "kind": kind,
                "problem": words,
                "candidates": num_kept,
                "timed": len(seconds),
                "took_s": round(time.monotonic() - began, 3),
                **judge(plans, seconds, own, num_kept),
                **result,
            }
        )
        if keep is not None and time.monotonic() > kept + _KEEP_SECONDS:
            keep(found())
            kept = time.monotonic()
    return found()


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]:.160}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m nanovllm.plan.proof", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="the JSON file; by default results/<gpu>/planner.json")
    parser.add_argument("--docs", type=Path, help="a Markdown file whose table is to be filled")
    parser.add_argument("--limit", type=float, default=270, help="seconds in all")
    parser.add_argument("--most", type=int, default=0, help="time at most so many configurations of a shape; 0: all")
    parser.add_argument("--workers", type=int, default=processes(), help="that compile")
    parser.add_argument("--kinds", nargs="+", choices=list(ALL), default=list(ALL))
    parser.add_argument("--times", type=Path, help="a JSON file for the time of every configuration")
    parser.add_argument("--resume", action="store_true", help="leave out what the JSON file has already")
    parser.add_argument(
        "--tables", action="store_true", help="measure nothing: fill the table of --docs from the JSON files there are"
    )
    a = parser.parse_args(arguments)
    if a.tables:
        fill_tables(a.docs, a.out)
        return
    run(a.out, a.docs, a.limit, a.most, a.workers, a.kinds, a.resume, a.times)


def merged(known: dict[str, Any] | None, document: dict[str, Any]) -> dict[str, Any]:
    """The document with the shapes of an earlier one that it lacks, if GPU and versions are the same."""
    if known is None or not _same(known, document):
        return document
    new = [s["problem"] for s in document["shapes"]]
    shapes = [*(s for s in known["shapes"] if s["problem"] not in new), *document["shapes"]]
    shapes.sort(key=lambda s: list(ALL).index(s["kind"]))
    have = [s["problem"] for s in shapes]
    missing = [p for p in (*known["not_measured"], *document["not_measured"]) if p not in have]
    missing = [p for i, p in enumerate(missing) if p not in missing[:i]]
    return {**document, "shapes": shapes, "not_measured": missing, "summary": summary(shapes)}


def _same(known: dict[str, Any], document: dict[str, Any]) -> bool:
    """Whether what was measured then may stand beside what is measured now."""
    return all(known.get(k) == document[k] for k in ("schema", "gpu", "versions", "most"))


def processes() -> int:
    """Processes that compile: a core is left to the one that times."""
    return max(1, min(16, os.cpu_count() or 1) - 1)


def run(
    out: Path | None, docs: Path | None, limit: float, most: int = 0, workers: int | None = None, kinds: Sequence[str] = tuple(ALL),
    resume: bool = False, times: Path | None = None,
) -> dict[str, Any] | None:  # fmt: skip
    """The whole proof on the CUDA device here: measure, write the JSON, fill the table of `docs`.

    What an earlier run on the same GPU and versions measured stays in the file.

    Raises:
        ValueError: there is no CUDA device, or a kind is unknown.
    """
    import torch

    from nanovllm.hardware.gpu_presets import this_device
    from nanovllm.hardware.versions import versions

    if unknown := set(kinds) - set(ALL):
        raise ValueError(f"kinds: expected some of {', '.join(ALL)}, not {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        raise ValueError("prove: needs a CUDA device: it times what `nanovllm plan` predicts")
    began = time.monotonic()
    ahead = Ahead(workers or processes())
    try:
        model = this_device(torch.device("cuda", torch.cuda.current_device()))
        out = out or Path("results") / model.name / "planner.json"
        known = json.loads(out.read_text()) if out.exists() else None
        head = {
            "schema": 3, "gpu": torch.cuda.get_device_name(), "versions": versions(), "most": most,
            "date": datetime.now(timezone.utc).date().isoformat(), "device": asdict(model),
        }  # fmt: skip
        problems = {k: list(ALL[k]) for k in kinds}
        if resume and known is not None and _same(known, head):
            have = [s["problem"] for s in known["shapes"]]
            problems = {k: [p for p in ps if in_words(k, p) not in have] for k, ps in problems.items()}

        def write(found: dict[str, Any]) -> dict[str, Any]:
            document = merged(known, finite({**head, **found}))
            out.parent.mkdir(parents=True, exist_ok=True)
            part = out.with_suffix(".part")
            part.write_text(json.dumps(document, indent=1) + "\n")
            part.replace(out)
            return document

        every: list[dict[str, Any]] = []
        with torch.inference_mode():
            left = limit - (time.monotonic() - began)
            found = prove(model, problems, GpuTimer(model, ahead.failure), left, most, ahead, write, every)
        if times is not None:
            # As in the document, what an earlier run measured of other shapes stays.
            old = json.loads(times.read_text()) if times.exists() and known is not None and _same(known, head) else []
            new = [t["problem"] for t in every]
            times.write_text(json.dumps([*(t for t in old if t["problem"] not in new), *every]) + "\n")
        print(f"{ahead.kernels} kernels, {time.monotonic() - began:.0f} s", file=sys.stderr)
    finally:
        ahead.close()
    document = write(found)
    print(f"wrote {out}")
    print(docs_table.markdown([document]))
    if docs is not None:
        fill_tables(docs, out)
    return document


def fill_tables(docs: Path | None, out: Path | None = None) -> None:
    """Fill the table of a Markdown file from documents that are there; needs no GPU.

    Args:
        out: a document; those of other GPUs stand beside it. By default all of results.

    Raises:
        ValueError: no file is named or there is no document, or one is none.
    """
    if docs is None:
        raise ValueError("--tables: expected --docs with the file whose table is to be filled, such as docs/planner.md")
    folder = Path("results") if out is None else out.parent.parent
    every = sorted({*folder.glob("*/planner.json"), *([out] if out is not None else [])})
    if not every:
        raise ValueError(f"--tables: there is no {folder}/<gpu>/planner.json; --out names another file")
    documents = []
    for path in every:
        try:
            documents.append(json.loads(path.read_text()))
            docs_table.markdown(documents[-1:])
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise ValueError(f"{path}: not a file of `nanovllm plan prove`: {type(e).__name__}: {e}") from e
    docs_table.fill(docs, documents)
    print(f"filled the table of {docs} from {', '.join(map(str, every))}")


if __name__ == "__main__":
    main()
