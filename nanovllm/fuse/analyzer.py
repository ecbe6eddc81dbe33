"""The groups of a module, their predicted gain on a device, and the ops of ours that compute them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from nanovllm.fuse import op_matching
from nanovllm.fuse.cost import Estimate, FusionCostModel, FusionDevice, InputsIn
from nanovllm.fuse.grouping import Decision, Grower, KernelGroup
from nanovllm.fuse.op_graph import OpGraph, build
from nanovllm.fuse.op_matching import Match
from nanovllm.hardware.gpu_presets import device_model


@dataclass(frozen=True)
class Served:
    """Which of our ops compute a group of `kernels` kernels.

    Attributes:
        ops: those that replace kernels of the group, the largest first; `covered`: how many kernels they replace.
        beyond: ops that compute this group and neighbouring ones at once.
    """

    kernels: int
    ops: tuple[str, ...]
    covered: int
    beyond: tuple[str, ...] = ()
    matches: tuple[Match, ...] = field(default=(), repr=False, compare=False)

    def __str__(self) -> str:
        """For a table: "rms_norm", "silu_and_mul (2 of 3 kernels)", "none"."""
        whole = bool(self.ops) and self.covered == self.kernels
        found = [" + ".join(self.ops) + ("" if whole else f" ({self.covered} of {self.kernels} kernels)")]
        found = found if self.ops else []
        if self.beyond and not whole:
            found.append(f"part of {self.beyond[0]}")
        return "; ".join(found) or "none"


@dataclass(frozen=True)
class GroupRow:
    """One group of a report, predicted. `unfused`: seconds of its kernels one after the other."""

    number: int
    group: KernelGroup
    unfused: float
    estimate: Estimate
    served: Served

    @property
    def fused(self) -> float:
        """Seconds as one kernel."""
        return self.estimate.seconds

    @property
    def gain(self) -> float:
        return self.unfused - self.fused

    def as_dict(self) -> dict[str, Any]:
        """For JSON, in microseconds and bytes."""
        g, e = self.group, self.estimate
        seconds = {"unfused": self.unfused, "fused": self.fused, "gain": self.gain, "repeated": e.repeated}
        return {
            "number": self.number, "ops": g.name, "kernels": [k.name for k in g.kernels],
            "kinds": Counter(str(k.kind) for k in g.kernels), "unfused_bytes": g.unfused_bytes, "fused_bytes": e.bytes,
            "flops": g.flops, "occupancy": e.occupancy, "passes": e.passes, "served": str(self.served),
            "served_by": self.served.ops, "beyond": self.served.beyond,
            **{f"{name}_us": _micros(value) for name, value in seconds.items()},
        }  # fmt: skip


@dataclass(frozen=True, repr=False)
class FusionReport:
    """The groups of a module on a device, and the merges that were made or not."""

    device: str
    rows: tuple[GroupRow, ...]
    decisions: tuple[Decision, ...]

    @property
    def unfused(self) -> float:
        return sum(r.unfused for r in self.rows)

    @property
    def fused(self) -> float:
        return sum(r.fused for r in self.rows)

    def __repr__(self) -> str:
        """A line for the device and one for each group, as `nanovllm fuse` shows them."""
        kernels = sum(len(r.group.kernels) for r in self.rows)
        lines = [f"<fusion report for {self.device}: {kernels} kernels become {len(self.rows)}"]
        for r in self.rows:
            lines.append(f"{r.number}: {r.group.name}: {1e6 * r.unfused:.1f} -> {1e6 * r.fused:.1f} us, {r.served}")
        return "\n  ".join(lines) + ">"

    def to_json(self) -> dict[str, Any]:
        """Everything, in microseconds and bytes."""
        decisions = [
            {"producer": d.producer, "consumer": d.consumer, "gain_us": _micros(d.gain), "made": d.made,
             "reason": d.reason}
            for d in self.decisions
        ]  # fmt: skip
        return {
            "device": self.device, "unfused_us": _micros(self.unfused), "fused_us": _micros(self.fused),
            "groups": [r.as_dict() for r in self.rows], "decisions": decisions,
        }  # fmt: skip


def _micros(seconds: float) -> float:
    return round(1e6 * seconds, 4)


class FusionAnalyzer:
    """Which kernels of a module should be one kernel.

    Args:
        module: an nn.Module, a torch.fx.GraphModule, a function of tensors, or a torch.export.ExportedProgram.
        example_inputs: its positional arguments. Only shapes and dtypes matter, so tensors may be on the meta device.
        kwargs: its keyword arguments.
        device: a GPU with a preset ("h100"), or a model of a device such as `DeviceModel` or `CpuModel`.
        known: values of integer inputs by name that decide how much work an op has (lengths of sequences, block
            tables), if the example is on the meta device.
        inputs: where the inputs of a group lie; see `FusionCostModel`.
        progress: called with a line for each step, as some take seconds.

    Raises:
        TraceError: the module cannot be traced; the message says why and what can.
        ValueError: an unknown GPU.
    """

    def __init__(
        self,
        module: torch.nn.Module | torch.export.ExportedProgram | Callable[..., Any],
        example_inputs: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        device: str | FusionDevice = "h100",
        known: Mapping[str, torch.Tensor] | None = None,
        inputs: InputsIn = "computed",
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        if isinstance(example_inputs, torch.Tensor):
            raise ValueError("example_inputs: expected a sequence of arguments, not one tensor; write (x,)")
        self.device: FusionDevice = device_model(device) if isinstance(device, str) else device
        self.cost = FusionCostModel(self.device, inputs)
        self._progress = progress
        integers = {
            name: value.cpu()
            for name, value in (kwargs or {}).items()
            if isinstance(value, torch.Tensor) and not value.is_meta and value.dtype in (torch.int32, torch.int64)
        }
        progress("tracing the module")
        self.graph: OpGraph = build(module, example_inputs, kwargs, {**integers, **(known or {})})
        self._grower = Grower(self.graph, self.cost.gain)

    @cached_property
    def groups(self) -> list[KernelGroup]:
        """The groups, in an order in which they can run."""
        self._progress("merging kernels")
        return self._grower.groups()

    @property
    def decisions(self) -> list[Decision]:
        """Merges in the order in which they were made, then those that were not made, and why."""
        _ = self.groups
        return self._grower.decisions

    @cached_property
    def matches(self) -> list[Match]:
        """Every occurrence of one of our ops in the module, the largest first."""
        return op_matching.find(self.graph, self._progress)

    def served(self, group: KernelGroup) -> Served:
        """The ops that compute a group: one that computes all of it, else as few as cover the most."""
        taken, left = [], set(group.members)
        for m in self.matches:
            if m.kernels <= left:
                taken.append(m)
                left -= m.kernels
        beyond = dict.fromkeys(m.op for m in reversed(self.matches) if m.kernels > group.members)
        ops, total = tuple(m.op for m in taken), len(group.members)
        return Served(total, ops, total - len(left), tuple(beyond), tuple(taken))

    def report(self) -> FusionReport:
        """Predict every group."""
        rows = (
            GroupRow(number, g, self.cost.unfused(g), self.cost.fused(g), self.served(g))
            for number, g in enumerate(self.groups, 1)
        )
        return FusionReport(self.device.name, tuple(rows), tuple(map(self._explained, self.decisions)))

    def _explained(self, d: Decision) -> Decision:
        """The decision; if the merge would be slower than the two groups, with the cause."""
        if d.made or d.both is None or d.gain > 0:
            return d
        e = self.cost.fused(d.both)
        why = [f"{1e6 * e.repeated:.1f} us for work that every tile repeats"] if e.repeated > 1e-7 else []
        why += ["rows read twice"] if e.passes > 1 else []
        why += [f"occupancy {100 * e.occupancy:.0f} %"] if e.occupancy < 0.25 else []
        details = f" ({', '.join(why)})" if why else ""
        return replace(d, reason=f"one kernel would take {1e6 * e.seconds:.1f} us{details}")
