"""From traces and costs to where the time goes: per op, per step, per kernel, against the hardware's limit."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from nanovllm.bench.job import percentile
from nanovllm.bench.trace_reader import WINDOW, Kernel, Owner, Range, Step, Trace, busy, flame, gaps, name_graph_kernels
from nanovllm.bench.workloads import Workload
from nanovllm.hardware.measured_rates import Rates
from nanovllm.hardware.roofline import Work, op_floor

OTHER = ("no op", "", "torch")


@dataclass(frozen=True)
class OpTime:
    """An op at a place in the model, per step of a kind. Times in microseconds.

    Attributes:
        device_us: of its kernels, each from its turn on (`Kernel.own`), and `read_early_us`; on a CPU, of the
            op itself.
        host_us: inside the op on the host, launches included; None where it ran from a CUDA graph.
        bytes, flops: what it must do at least; 0 if that is not declared.
        floor_us: the least time that needs, by the measured rates.
        early_us: its kernels' time before their turn, beside kernels of earlier ops; not in device_us.
        read_early_us: what was taken from the ops before it since it cannot have been faster: see
            `_with_early_reading`.
    """

    phase: str
    op: str
    module: str
    provider: str
    calls: float
    device_us: float
    host_us: float | None
    bytes: float
    flops: float
    floor_us: float | None
    early_us: float = 0.0
    read_early_us: float = 0.0

    @property
    def share(self) -> float | None:
        """The share of the limit, from 0 to 1."""
        return self.floor_us / self.device_us if self.floor_us and self.device_us else None

    @property
    def label(self) -> str:
        return f"{self.op} {self.module}".strip()


@dataclass(frozen=True)
class StepTime:
    """A kind of step. Microseconds, the means over `count` steps.

    Attributes:
        device_us: in which at least one kernel ran; on a CPU, of the whole step.
        idle: the device's share of waiting, of 1.
    """

    phase: str
    what: str
    count: int
    wall_us: float
    device_us: float
    kernels: float
    idle: float | None
    gap_p50_us: float | None
    gap_p99_us: float | None
    gaps_us: float | None


@dataclass(frozen=True)
class KernelTime:
    """Kernels of one name in one op, per step of a kind; microseconds from their turn on."""

    phase: str
    name: str
    op: str
    calls: float
    us: float


@dataclass
class Profile:
    """A profile in numbers: everything that the reports show."""

    workload: str
    load: str
    model: str
    about: dict[str, Any]
    rates: Rates
    dtype: str
    ops: list[OpTime] = field(default_factory=list)
    steps: list[StepTime] = field(default_factory=list)
    kernels: list[KernelTime] = field(default_factory=list)
    unprofiled_us: float | None = None
    memory: list[dict[str, Any]] = field(default_factory=list)
    flame: dict[str, Any] = field(default_factory=dict)
    timeline: dict[str, list[tuple[str, float, float]]] = field(default_factory=dict)
    """Of one step of each kind: (op, start, duration) in microseconds."""
    named_from_eager: bool = False

    @property
    def on_gpu(self) -> bool:
        return bool(self.about.get("device", "cpu") != "cpu")

    def phases(self) -> list[str]:
        return [p for p in ("prefill", "mixed", "decode") if any(s.phase == p for s in self.steps)]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Profile:
        """What `to_json` gave.

        Raises:
            ValueError: the profile counts a kernel's waiting as its op's time, as they did once.
        """
        if any("early_us" not in o for o in data["ops"]):
            raise ValueError(
                "this profile was made by an earlier version, which counted times differently; profile again"
            )
        return cls(**{
            **data, "rates": Rates(**data["rates"]), "ops": [OpTime(**o) for o in data["ops"]],
            "steps": [StepTime(**s) for s in data["steps"]], "kernels": [KernelTime(**k) for k in data["kernels"]],
        })  # fmt: skip


def summarize(
    as_run: Trace, named: Trace, result: dict[str, Any], costs: Sequence[dict[str, Any]], rates: Rates,
    workload: Workload, model: str,
) -> Profile:  # fmt: skip
    """Put a profile together.

    Args:
        as_run: the engine with its graphs; named: without (the same trace where there are none).
        result: what `profiler.profile` returned for `as_run`; costs: what it returned for `named`.
    """
    about = result["about"]
    profile = Profile(
        workload.name, workload.description, model, about, rates, about["dtype"], unprofiled_us=result["unprofiled_us"],
        memory=result["memory"], named_from_eager=as_run is not named,
    )  # fmt: skip
    on_gpu = bool(as_run.kernels)
    known = _costs_per_step(costs, named)
    for phase in ("prefill", "mixed", "decode"):
        steps = [s for s in as_run.steps if s.kind == phase]
        if not steps:
            continue
        owners = name_graph_kernels(steps, [s for s in named.steps if s.kind == phase])
        profile.steps.append(_step_time(phase, steps))
        profile.ops += _ops(phase, steps, owners, known, profile, on_gpu)
        if on_gpu:
            profile.kernels += _kernels(phase, steps, owners)
        profile.timeline[phase] = _timeline(steps[-1], owners[-1], on_gpu)
    profile.ops.sort(key=lambda o: -o.device_us)
    profile.kernels.sort(key=lambda k: -k.us)
    profile.flame = flame(as_run.steps)
    return profile


def _costs_per_step(
    costs: Sequence[dict[str, Any]], named: Trace
) -> dict[tuple[str, str, str, str], tuple[float, Work, int]]:
    """(phase, op, module, provider) -> (calls a step, the work of one call, its cold bytes)."""
    count = Counter(step.kind for step in named.steps)
    known = {}
    for c in costs:
        if count[c["phase"]] and c["calls"]:
            work = Work(*(round(c[name] / c["calls"]) for name in ("bytes", "flops", "fp8_flops")))
            known[c["phase"], c["op"], c["module"], c["provider"]] = (
                c["calls"] / count[c["phase"]],
                work,
                round(c["cold_bytes"] / c["calls"]),
            )
    return known


def _ops(
    phase: str, steps: Sequence[Step], owners: Sequence[Sequence[Owner | None]],
    known: dict[tuple[str, str, str, str], tuple[float, Work, int]], profile: Profile, on_gpu: bool,
) -> list[OpTime]:  # fmt: skip
    device: dict[Owner, float] = defaultdict(float)
    host: dict[Owner, float] = defaultdict(float)
    calls: dict[Owner, int] = defaultdict(int)
    for step in steps:
        for owner, node in step.ops():
            host[owner] += node.duration / len(steps)
            calls[owner] += 1
        if not on_gpu:
            device[OTHER] += (step.range.duration - sum(node.duration for _, node in step.ops())) / len(steps)
    if not on_gpu:
        device.update(host)
    kernels = [(k, owner or OTHER) for step, of in zip(steps, owners) for k, owner in zip(step.kernels, of)]
    for kernel, owner in kernels:
        device[owner] += kernel.own / len(steps)
    beside = _beside(kernels, len(steps))
    rates = profile.rates
    matmul, fp8_matmul = (rates.matmul.get(dtype) or float("inf") for dtype in (profile.dtype, "float8"))
    # A small model's weights may all stay in the cache from one step to the next.
    own = [known[key] for key in ((phase, *owner) for owner in device) if key in known]
    fits = sum(per_step * cold for per_step, _, cold in own) <= rates.cache_bytes
    floors = {}
    for owner in device:
        per_step, work, cold = known.get((phase, *owner), (0.0, Work(), 0))
        if work.bytes or work.flops:
            cold = 0 if fits else cold
            least = op_floor(work, rates.bandwidth, matmul, rates.cache_bytes, rates.cache_bandwidth, cold, fp8_matmul)
            floors[owner] = 1e6 * per_step * least
    taken = _with_early_reading(device, floors, beside)
    times = []
    for owner, us in taken.items():
        per_step, work, _ = known.get((phase, *owner), (calls[owner] / len(steps), Work(), 0))
        times.append(OpTime(
            phase, *owner, per_step, us, host.get(owner), per_step * work.bytes, per_step * work.flops,
            floors.get(owner), sum(beside[owner].values()), max(0.0, us - device[owner]),
        ))  # fmt: skip
    return times


def _beside(kernels: Sequence[tuple[Kernel, Owner]], num_steps: int) -> dict[Owner, dict[Owner, float]]:
    """How long an op's kernels ran before their turn, in the time of which earlier op: microseconds a step."""
    beside: dict[Owner, dict[Owner, float]] = defaultdict(lambda: defaultdict(float))
    ordered = sorted(kernels, key=lambda item: item[0].start)
    for i, (kernel, owner) in enumerate(ordered):
        early_end = min(kernel.turn, kernel.end)
        for other, of in reversed(ordered[:i]) if early_end > kernel.start else ():
            both = min(early_end, other.end) - max(kernel.start, other.turn)
            if both > 0 and of != owner:
                beside[owner][of] += both / num_steps
            if other.turn <= kernel.start:
                break
    return beside


def _with_early_reading(
    device: dict[Owner, float], floors: dict[Owner, float], beside: dict[Owner, dict[Owner, float]]
) -> dict[Owner, float]:
    """The ops' times, with what they certainly read before their turn.

    A kernel that is launched early reads its weights in the time of the op before it; a trace does not tell how much.
    If its own time is less than what the op needs by the measured rates, at least the difference was spent before its
    turn. This difference is moved to it from the ops that it ran beside, as far as they do not need it. The sum stays
    the same. An op that is still too fast after that has a wrong account.
    """
    times = dict(device)
    for owner, floor in floors.items():
        for other, us in sorted(beside[owner].items(), key=lambda item: -item[1]):
            lacking = floor - times[owner]
            moved = min(lacking, us, times[other] - floors.get(other, 0.0))
            if moved > 0:
                times[other] -= moved
                times[owner] = floor if moved == lacking else times[owner] + moved
    return times


def _step_time(phase: str, steps: Sequence[Step]) -> StepTime:
    kernels = [k for s in steps for k in s.kernels]
    n = len(steps)
    starts = [s.range.start for s in steps]
    # From one step's beginning to the next's, where they follow one another; a lone step has its own length.
    apart = [b - a for a, b in zip(starts, starts[1:])] or [steps[0].range.duration]
    what = steps[-1].range.name.partition(": ")[2]
    if not kernels:
        host = sum(s.range.duration for s in steps) / n
        return StepTime(phase, what, n, statistics.median(apart), host, 0, None, None, None, None)
    runs = list(_runs(steps))
    span = sum(max(k.end for k in run) - min(k.start for k in run) for run in runs)
    between = [gap for run in runs for gap in gaps(run)]
    active = sum(busy(run) for run in runs)
    return StepTime(
        phase, what, n, span / n, active / n, len(kernels) / n, 1 - active / span if span else 0.0,
        percentile(between, 50), percentile(between, 99), sum(between) / n,
    )  # fmt: skip


def _runs(steps: Sequence[Step]) -> Iterator[list[Kernel]]:
    """The kernels of steps that were recorded one after the other; what lies between two recordings is no gap."""
    groups: dict[Range | None, list[Kernel]] = defaultdict(list)
    for step in steps:
        groups[next((r for r in step.range.up() if r.name == WINDOW), None)] += step.kernels
    yield from (kernels for kernels in groups.values() if kernels)


def _kernels(phase: str, steps: Sequence[Step], owners: Sequence[Sequence[Owner | None]]) -> list[KernelTime]:
    groups: dict[tuple[str, str], list[Kernel]] = defaultdict(list)
    for step, of_kernels in zip(steps, owners):
        for kernel, owner in zip(step.kernels, of_kernels):
            groups[kernel.name, (owner or OTHER)[0]].append(kernel)
    return [
        KernelTime(phase, name, op, len(ks) / len(steps), sum(k.own for k in ks) / len(steps))
        for (name, op), ks in groups.items()
    ]


def _timeline(step: Step, owners: Sequence[Owner | None], on_gpu: bool) -> list[tuple[str, float, float]]:
    if on_gpu:
        first = min((k.start for k in step.kernels), default=0.0)
        return [((o or OTHER)[0], k.turn - first, k.own) for k, o in zip(step.kernels, owners) if k.own]
    return [(owner[0], node.start - step.range.start, node.duration) for owner, node in step.ops()]


def host_times(profile: Profile) -> list[tuple[str, float]]:
    """The 15 names with the most host time of their own, over all recorded steps: (name, microseconds)."""
    own: dict[str, float] = defaultdict(float)

    def add(node: dict[str, Any]) -> None:
        own[node["name"]] += node["us"] - sum(c["us"] for c in node["children"])
        for child in node["children"]:
            add(child)

    for child in profile.flame.get("children", []):
        add(child)
    return sorted(own.items(), key=lambda item: -item[1])[:15]
