"""How good the planner's ranking is by measured times: those of this run, or kept ones for a model that has changed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.planner_proof.builtin_choice import with_builtin
from benchmarks.planner_proof.gpu_timer import FIRST
from benchmarks.planner_proof.problems import ALL, plan
from nanovllm.hardware.gpu_presets import DeviceModel
from nanovllm.json_output import keep_json
from nanovllm.plan.plan_tables import finite
from nanovllm.plan.resources import Plan

NOISE = 1.01
"""A time within this factor of the best counts as the best: two runs on the same GPU differ by as much."""


def judge(
    plans: Sequence[Plan], seconds: dict[int, float], own: int | None = None, kept: int | None = None
) -> dict[str, Any]:
    """Where the planner's ranking stands among measured times, by rank from 0.

    `share` is the best time over the first choice's, whatever kernel has the best time. If the first choice does not
    run, the next that does counts as the first. `best_in_first_five` is only about plans that the planner ranks:
    whether one of its first five is the best of these, or within `NOISE` of it; `near_rank` is the first such rank.

    Args:
        own: which of the plans is the engine's own; it may be one that the planner does not keep, and is then the last.
        kept: how many of the plans the planner keeps; by default all.
    """
    planned = sorted(rank for rank in seconds if kept is None or rank < kept)
    first, five = planned[0], planned[:FIRST]
    best = min(seconds, key=lambda rank: seconds[rank])
    least = min(seconds[rank] for rank in planned)
    near = next(rank for rank in planned if seconds[rank] <= NOISE * least)

    def entry(rank: int) -> dict[str, Any]:
        us = {"us": 1e6 * seconds[rank], "predicted_us": 1e6 * plans[rank].seconds}
        return {"rank": rank, "config": str(plans[rank].config), **us}

    return {
        "first": entry(first), "best": entry(best), "share": seconds[best] / seconds[first],
        "near_rank": near, "best_in_first_five": near in five,
        "first_five_share": seconds[best] / min(seconds[r] for r in five),
        "limit": plans[first].limit, "builtin": entry(own) if own in seconds else None,
    }  # fmt: skip


def summary(shapes: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """By kind, and of "all": how near the first choice is to the best, how often the first five have the best."""
    found = {}
    kinds = list(dict.fromkeys(s["kind"] for s in shapes))
    for kind in [*kinds, "all"] if kinds else []:
        mine = [s for s in shapes if kind in ("all", s["kind"])]
        shares = [s["share"] for s in mine]
        errors = [abs(s["first"]["predicted_us"] / s["first"]["us"] - 1) for s in mine]
        found[kind] = {
            "shapes": len(mine), "timed": sum(s["timed"] for s in mine), "median_share": statistics.median(shares),
            "worst_share": min(shares), "best_in_first_five": sum(s["best_in_first_five"] for s in mine) / len(mine),
            "best_of_all_in_first_five": sum(NOISE * s["first_five_share"] >= 1 for s in mine) / len(mine),
            "first_five_median_share": statistics.median(s["first_five_share"] for s in mine),
            "median_prediction_error": statistics.median(errors),
        }  # fmt: skip
    return found


def in_words(kind: str, problem: Any) -> dict[str, Any]:
    """A problem as a document has it."""
    return {"kind": kind, "problem": type(problem).__name__, **asdict(problem)}


def judged_again(document: dict[str, Any], times: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A document as it would be with the model of today: the same measured times, another ranking.

    What the planner has kept only since then was not timed, and does not count.

    Args:
        times: what `prove` wrote with it, of every configuration.
    """
    model = DeviceModel(**document["device"])
    us_of = {json.dumps(t["problem"], sort_keys=True): t["us"] for t in times}
    problems = {json.dumps(in_words(kind, p), sort_keys=True): p for kind, ps in ALL.items() for p in ps}
    shapes = []
    for shape in document["shapes"]:
        words = json.dumps(shape["problem"], sort_keys=True)
        if words not in problems or words not in us_of:
            raise ValueError(f"prove: no times, or no shape of today's, for {words}; measure anew")
        few = plan(problems[words], model)
        plans, own = with_builtin(few, problems[words], model)
        seconds = {i: us_of[words][str(p.config)] / 1e6 for i, p in enumerate(plans) if str(p.config) in us_of[words]}
        if own is not None and shape["builtin"] is not None:  # it may be planned by now, under another name
            seconds.setdefault(own, shape["builtin"]["us"] / 1e6)
        if not any(i < len(few) for i in seconds):
            raise ValueError(f"prove: nothing that is planned today was timed for {words}; measure anew")
        kept = {"candidates": len(few), "timed": len(seconds)}
        shapes.append({**shape, **kept, **judge(plans, seconds, own, len(few))})
    return finite({**document, "shapes": shapes, "summary": summary(shapes)})


def judge_file(out: Path | None, times: Path) -> None:
    """Judge the model of today by kept times, and rewrite the document beside them. Needs no GPU.

    Raises:
        ValueError: there is no document, or it and the times are of other shapes.
    """
    if out is None or not out.exists():
        raise ValueError(f"--judge: expected --out with the JSON file of the run that wrote {times}")
    try:
        found = judged_again(json.loads(out.read_text()), json.loads(times.read_text()))
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as e:
        raise ValueError(f"--judge: {out} and {times} are not of one run: {type(e).__name__}: {e}") from e
    keep_json(out, found)
    print(f"rewrote {out}")
