"""What need not be timed: plans that the planner predicts to be slow or not to fit, and plans that the compiler finds too large."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.tune.launches import compile_for, recorded
from nanovllm.tune.space import Pruned
from nanovllm.tune.spaces import spaces_of
from nanovllm.tune.targets import Job, arguments_of

if TYPE_CHECKING:
    from nanovllm.hardware.gpu_presets import DeviceModel

SLOWER = 1.6
"""A plan predicted to take this many times the best prediction is left out. Predictions rank well, but are not exact."""
MOST_PREDICTED = 150
"""Plans of a kernel that the planner knows: the first ones by prediction."""
MOST_UNKNOWN = 150
"""Plans of a class that it does not know: the first ones by their distance from the built-in choice."""


@dataclass
class Candidates:
    """What is left to try, the most promising first.

    Attributes:
        total: combinations of the parameters.
        pruned: source ("constraints", "planner", "distance", "compiler") -> what it left out.
        remarks: what was not done and why.
        predicted: seconds by plan, where the planner knows the kernel.
        compiled: plan -> (shared memory in bytes, registers a thread, spilled bytes a thread).
    """

    plans: list[Any]
    total: int
    pruned: dict[str, Pruned]
    remarks: list[str] = field(default_factory=list)
    predicted: dict[Any, float] = field(default_factory=dict)
    compiled: dict[Any, tuple[int, int, int]] = field(default_factory=dict)

    def counts(self) -> dict[str, int]:
        """Reasons with their source -> how many plans."""
        return {f"{source}: {reason}": n for source, p in self.pruned.items() for reason, n in p.counts.most_common()}


def candidates(job: Job, device: DeviceModel) -> Candidates:
    """The plans of a job that pass its constraints and, where there is one, the planner."""
    plans, pruned = [], Pruned()
    for space in spaces_of(job.tunable, job.named, device):
        kept, left_out = space.split()
        plans += kept
        pruned.merge(left_out)
    plans.sort(key=lambda plan: distance(plan, job.builtin))
    result = Candidates(plans, len(plans) + pruned.total, {"constraints": pruned})
    predict = _planner(job, device, result.remarks)
    if predict is not None:
        _prune_by_prediction(result, predict)
    else:
        result.plans = _nearest(result, result.plans)
    return result


def distance(plan: Any, builtin: Any) -> float:
    """How far a plan is from the built-in one: doublings and halvings. What someone chose is a good place to begin."""
    if type(plan) is not type(builtin):
        return float("inf")
    pairs = ((getattr(plan, f.name), getattr(builtin, f.name)) for f in fields(plan))
    return sum(float(a != b) if isinstance(a, bool) or not (a and b) else abs(math.log2(a / b)) for a, b in pairs)


def _nearest(result: Candidates, plans: Sequence[Any]) -> list[Any]:
    """Of each class the first plans; they are sorted by their distance from the built-in choice."""
    pruned, kept, counts = Pruned(), [], Counter()
    for plan in plans:
        name = type(plan).__name__
        counts[name] += 1
        if counts[name] > MOST_UNKNOWN:
            pruned.add(f"beyond the first {MOST_UNKNOWN} by doublings and halvings from the built-in choice", plan)
        else:
            kept.append(plan)
    for name, count in counts.items():
        if count > MOST_UNKNOWN:
            result.remarks.append(
                f"no prediction for {name}: of {count} only the {MOST_UNKNOWN} nearest to the built-in choice are tried"
            )
    if pruned.total:
        result.pruned["distance"] = pruned
    return kept


def _in_turn(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """One of each, until both are at their end."""
    return [p for pair in itertools.zip_longest(first, second) for p in pair if p is not None]


def _prune_by_prediction(result: Candidates, predict: Callable[[Any], Any]) -> None:
    pruned, kept, unknown = Pruned(), [], []
    for plan in result.plans:
        found = predict(plan)
        if found is None:
            unknown.append(plan)
        elif not found.occupancy.blocks:
            pruned.add(f"does not fit: {found.occupancy.limit}", plan)
        else:
            kept.append(plan)
            result.predicted[plan] = found.seconds
    best = min(result.predicted.values(), default=0.0)
    fast = []
    for plan in sorted(kept, key=result.predicted.__getitem__):
        if result.predicted[plan] > SLOWER * best:
            pruned.add(f"predicted to take more than {SLOWER} times the best prediction", plan)
        elif len(fast) == MOST_PREDICTED:
            pruned.add(f"beyond the first {MOST_PREDICTED} predictions", plan)
        else:
            fast.append(plan)
    result.pruned["planner"] = pruned
    result.plans = _in_turn(fast, _nearest(result, unknown))


def _planner(job: Job, device: DeviceModel, remarks: list[str]) -> Callable[[Any], Any] | None:
    """plan -> the planner's record of it, or None if it does not know such a plan; None: it does not know the kernel."""
    try:
        if job.tunable.name == "product":
            return _gemm_planner(job, device)
        if job.tunable.name == "attention_prefill":
            return _attention_planner(job, device)
    except (ImportError, AttributeError, TypeError, ValueError) as e:
        remarks.append(f"not pruned by the planner: {e}")
        return None
    remarks.append("the planner does not know this kernel: not pruned by it")
    return None


def _gemm_planner(job: Job, device: DeviceModel) -> Callable[[Any], Any]:
    from nanovllm.plan.gemm import GemmProblem, GemmTile, predict

    key = job.named
    wide = 2 if key["gated"] else 1
    problem = GemmProblem(key["m"], wide * key["n"], key["k"], str(key["dtype"]).removeprefix("torch."))
    names = [f.name for f in fields(GemmTile)]

    def planned(plan: Any) -> Any:
        if type(plan).__name__ != "TilePlan":
            return None
        values = {name: getattr(plan, name) for name in names if hasattr(plan, name)}
        return predict(GemmTile(**{**values, "block_n": wide * plan.block_n}), problem, device)

    return planned


def _attention_planner(job: Job, device: DeviceModel) -> Callable[[Any], Any]:
    from nanovllm.plan.attention import AttentionProblem, AttentionTile, predict

    num_seqs, _, most, cached, heads, kv_heads, head_dim, _ = job.shapes[0]
    dtype = str(job.dtype).removeprefix("torch.")
    problem = AttentionProblem(num_seqs, most, most + cached, heads, kv_heads, head_dim, dtype=dtype)

    def planned(plan: Any) -> Any:
        if plan.stages < 2:  # nothing is read ahead, which the planner does not model
            return None
        return predict(AttentionTile(plan.rows, plan.tile, plan.warps, plan.stages), problem, device)

    return planned


def compile_all(
    job: Job, result: Candidates, device: DeviceModel, limit: float | None, clock: Callable[[], float] = time.monotonic
) -> None:
    """Compile the plans for `device`, which need not be here, and leave out those that do not compile, do not fit, or spill."""
    pruned, kept = Pruned(), []
    start = clock()
    result.pruned["compiler"] = pruned
    if job.asked is None or job.asked[0] is not job.tunable:
        result.remarks.append("not compiled: only a GPU of that kind makes such a launch")
        return
    plans = result.plans
    for i, plan in enumerate(plans):
        if limit is not None and clock() - start >= limit:
            result.remarks.append(f"not compiled: {len(plans) - i} of {len(plans)}, for the time limit of {limit:g} s")
            kept += plans[i:]
            break
        reason = _compile(job, plan, device, result)
        if reason:
            pruned.add(reason, plan)
        else:
            kept.append(plan)
    result.plans = kept


def _compile(job: Job, plan: Any, device: DeviceModel, result: Candidates) -> str | None:
    assert job.asked is not None
    tunable, key = job.asked
    arguments = arguments_of(job.target, job.shapes[0], job.dtype, job.variant)
    with tunable.using(torch.device("cpu"), key, plan), recorded() as launches:
        job.target.launcher.fn(**arguments)
    try:
        found = [compile_for(launch, device.capability) for launch in _configured(tunable, launches)]
    except Exception as e:  # whatever the compiler raises: the report says it
        return f"does not compile: {str(e).splitlines()[0]:.100}"
    shared, registers, spilled = (max(getattr(c, name) for c in found) for name in ("shared", "registers", "spilled"))
    result.compiled[plan] = shared, registers, spilled
    if shared > device.shared_per_block:
        return f"takes more than {device.shared_per_block >> 10} KiB of shared memory, as compiled"
    return "spills registers, as compiled" if spilled else None


def _configured(tunable: Any, launches: Sequence[Any]) -> list[Any]:
    """The launches that the plan is about."""
    names = {kernel.partition(":")[2] for kernel in tunable.kernels}
    return [launch for launch in launches if launch.name in names]
