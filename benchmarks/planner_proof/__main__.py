"""The command line: `python -m benchmarks.planner_proof`, from the repository root. Measuring needs a CUDA device."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.planner_proof import docs_table
from benchmarks.planner_proof.compile_queue import CompileQueue
from benchmarks.planner_proof.gpu_timer import GpuTimer
from benchmarks.planner_proof.judging import in_words, judge_file, summary
from benchmarks.planner_proof.problems import ALL
from benchmarks.planner_proof.proof import Proof, prove
from nanovllm.json_output import keep_json
from nanovllm.plan.plan_tables import finite


def main(arguments: Sequence[str] | None = None) -> None:
    workers = max(1, min(16, os.cpu_count() or 1) - 1)  # a core is left to the process that times
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner_proof",
        description="On a GPU: time everything that the planner keeps for some 50 problems, and report where its first "
        "choices stand.",
    )
    add = parser.add_argument
    add("--out", type=Path, help="the JSON file; by default results/<gpu>/planner.json")
    add("--docs", type=Path, help="a Markdown file whose table is to be filled, such as docs/log/planner.md")
    add("--limit", type=float, default=270, help="seconds in all")
    add("--most", type=int, default=0, help="time at most this many configurations of a problem; 0: all")
    add("--workers", type=int, default=workers, help="processes that compile")
    add("--kinds", nargs="+", choices=list(ALL), default=list(ALL))
    add("--times", type=Path, help="a JSON file for the time of every configuration, to fit the model to")
    add("--resume", action="store_true", help="leave out what the JSON file has already")
    add("--judge", type=Path, help="measure nothing: judge today's model by a file of --times, and rewrite its --out")
    add("--tables", action="store_true", help="measure nothing: fill the table of --docs from the JSON files there are")
    a = parser.parse_args(arguments)
    try:
        if a.judge is not None:
            judge_file(a.out, a.judge)
        if a.judge is None and not a.tables:
            run(a.out, a.limit, a.most, a.workers, a.kinds, a.resume, a.times)
        if a.docs is not None or a.tables:
            fill_tables(a.docs, a.out)
    except ValueError as e:
        parser.error(str(e))


def run(
    out: Path | None,
    limit: float,
    most: int = 0,
    workers: int = 1,
    kinds: Sequence[str] = tuple(ALL),
    resume: bool = False,
    times: Path | None = None,
) -> None:
    """Measure on the CUDA device here, and write the JSON file.

    What an earlier run on the same GPU and versions measured stays in the file.

    Raises:
        ValueError: there is no CUDA device.
    """
    import torch

    from nanovllm.hardware.gpu_presets import this_device
    from nanovllm.hardware.versions import versions

    if not torch.cuda.is_available():
        raise ValueError("the proof needs a CUDA device: it times what `nanovllm plan` predicts")
    began = time.monotonic()
    queue = CompileQueue(workers)
    try:
        model = this_device(torch.device("cuda", torch.cuda.current_device()))
        out = out or Path("results") / model.name / "planner.json"
        known = json.loads(out.read_text()) if out.exists() else None
        head = {
            "schema": 3, "gpu": torch.cuda.get_device_name(), "versions": versions(), "most": most,
            "date": datetime.now(timezone.utc).date().isoformat(), "device": asdict(model),
        }  # fmt: skip
        goes_on = known is not None and same_setting(known, head)
        problems = {k: list(ALL[k]) for k in kinds}
        if resume and known is not None and goes_on:
            have = [s["problem"] for s in known["shapes"]]
            problems = {k: [p for p in ps if in_words(k, p) not in have] for k, ps in problems.items()}

        def write(proof: Proof) -> None:
            keep_json(out, merged(known, finite({**head, **proof.document()})))

        with torch.inference_mode():
            left = limit - (time.monotonic() - began)
            proof = prove(model, problems, GpuTimer(model, queue.failure), left, most, queue, write)
        if times is not None:
            # As in the document, what an earlier run measured of other problems stays.
            old = json.loads(times.read_text()) if times.exists() and goes_on else []
            new = [t["problem"] for t in proof.times]
            keep_json(times, [*(t for t in old if t["problem"] not in new), *proof.times])
        print(f"{queue.num_kernels} kernels, {time.monotonic() - began:.0f} s", file=sys.stderr)
    finally:
        queue.close()
    write(proof)
    print(f"wrote {out}")
    print(docs_table.markdown([json.loads(out.read_text())]))


def merged(known: dict[str, Any] | None, document: dict[str, Any]) -> dict[str, Any]:
    """The document with the shapes of an earlier one that it lacks, if GPU and versions are the same."""
    if known is None or not same_setting(known, document):
        return document
    new = [s["problem"] for s in document["shapes"]]
    shapes = [*(s for s in known["shapes"] if s["problem"] not in new), *document["shapes"]]
    shapes.sort(key=lambda s: list(ALL).index(s["kind"]))
    have = [s["problem"] for s in shapes]
    missing = [p for p in (*known["not_measured"], *document["not_measured"]) if p not in have]
    missing = [p for i, p in enumerate(missing) if p not in missing[:i]]
    return {**document, "shapes": shapes, "not_measured": missing, "summary": summary(shapes)}


def same_setting(known: dict[str, Any], document: dict[str, Any]) -> bool:
    """Whether both were measured on the same GPU, with the same versions and options."""
    return all(known.get(k) == document[k] for k in ("schema", "gpu", "versions", "most"))


def fill_tables(docs: Path | None, out: Path | None = None) -> None:
    """Fill the table of a Markdown file from the JSON files that there are; needs no GPU.

    Args:
        out: a JSON file; those of other GPUs lie beside its directory. By default all of results.

    Raises:
        ValueError: no Markdown file is named, or there is no JSON file, or one has another content.
    """
    if docs is None:
        raise ValueError(
            "--tables: expected --docs with the file whose table is to be filled, such as docs/log/planner.md"
        )
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
            raise ValueError(f"{path}: not a file of the planner's proof: {type(e).__name__}: {e}") from e
    docs_table.fill(docs, documents)
    print(f"filled the table of {docs} from {', '.join(map(str, every))}")


if __name__ == "__main__":
    main()
