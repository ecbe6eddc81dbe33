"""The groups of a module, what each is predicted to bring on a device, and which op of ours does it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch.fx import Node as FxNode

from nanovllm.fuse import op_matching
from nanovllm.fuse.cost import FusionCostModel, FusionDevice, InputsIn
from nanovllm.fuse.grouping import Decision, Group, Grower
from nanovllm.fuse.op_graph import OpGraph, build
from nanovllm.fuse.op_matching import Match
from nanovllm.hardware.gpu_presets import device_model


@dataclass(frozen=True)
class Served:
    """Which of our ops do a group's work.

    Attributes:
        ops: those that take the place of kernels of the group, the largest first.
        covered: how many of the group's kernels they replace.
        beyond: ops that do this group and neighbouring ones at once.
    """

    ops: tuple[str, ...]
    covered: int
    beyond: tuple[str, ...] = ()
    matches: tuple[Match, ...] = field(default=(), repr=False, compare=False)

    def text(self, kernels: int) -> str:
        """For a table: "rms_norm", "silu_and_mul (2 of 3 kernels)", "none"."""
        own = " + ".join(self.ops)
        if self.ops and self.covered < kernels:
            own += f" ({self.covered} of {kernels} kernels)"
        if self.beyond and (not self.ops or self.covered < kernels):
            own = f"{own}; " if own else ""
            own += f"part of {self.beyond[0]}"
        return own or "none"


@dataclass(frozen=True)
class Row:
    """One group of a report. Times in seconds, predicted.

    Attributes:
        kernels: names of its kernels in the graph; ops: what they are, for people.
        kinds: how many of each kind.
        unfused, fused: the kernels one by one, and as one.
        unfused_bytes, fused_bytes: what they move.
        occupancy, passes, repeated: as of `Estimate`.
    """

    number: int
    ops: str
    kernels: tuple[str, ...]
    kinds: Mapping[str, int]
    unfused: float
    fused: float
    unfused_bytes: int
    fused_bytes: int
    flops: int
    occupancy: float
    passes: int
    repeated: float
    served: str
    served_by: tuple[str, ...]
    beyond: tuple[str, ...]

    @property
    def gain(self) -> float:
        return self.unfused - self.fused


@dataclass(frozen=True)
class FusionReport:
    """The groups of a module on a device, and the merges that were made or left."""

    device: str
    rows: tuple[Row, ...]
    decisions: tuple[Decision, ...]

    @property
    def unfused(self) -> float:
        return sum(r.unfused for r in self.rows)

    @property
    def fused(self) -> float:
        return sum(r.fused for r in self.rows)

    def to_json(self) -> dict[str, Any]:
        """Everything, in microseconds and bytes."""

        def row(r: Row) -> dict[str, Any]:
            seconds = {f"{k}_us": round(1e6 * getattr(r, k), 4) for k in ("unfused", "fused", "gain", "repeated")}
            rest = {k: v for k, v in asdict(r).items() if k not in ("unfused", "fused", "repeated")}
            return {**rest, **seconds}

        def decision(d: Decision) -> dict[str, Any]:
            gain_us = round(1e6 * d.gain, 4)
            return {
                "producer": d.producer,
                "consumer": d.consumer,
                "gain_us": gain_us,
                "made": d.made,
                "reason": d.reason,
            }

        return {
            "device": self.device, "unfused_us": round(1e6 * self.unfused, 4), "fused_us": round(1e6 * self.fused, 4),
            "groups": [row(r) for r in self.rows], "decisions": [decision(d) for d in self.decisions],
        }  # fmt: skip


class FusionAnalyzer:
    """What to fuse in a module.

    Args:
        module: an nn.Module, a torch.fx.GraphModule, a function of tensors, or a torch.export.ExportedProgram.
        example_inputs: its positional arguments. Only shapes and dtypes matter, so tensors may be on the meta device.
        kwargs: its keyword arguments.
        device: a GPU with a preset ("h100"), or a model of a device such as `DeviceModel` or `CpuModel`.
        known: values of integer inputs by name which decide how much work an op has, where the example is on the meta
            device: lengths of sequences, block tables.
        inputs: where what enters a group lies; see `FusionCostModel`.
        siblings: whether kernels that only read the same value may be joined too.

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
        siblings: bool = True,
    ) -> None:
        if isinstance(example_inputs, torch.Tensor):
            raise ValueError("example_inputs: expected a sequence of arguments, not one tensor; write (x,)")
        self.device: FusionDevice = device_model(device) if isinstance(device, str) else device
        self.cost = FusionCostModel(self.device, inputs)
        self.graph: OpGraph = build(module, example_inputs, kwargs, _known(kwargs, known))
        self._grower = Grower(self.graph, self.cost.gain, siblings)

    @cached_property
    def groups(self) -> list[Group]:
        """The groups, in an order in which they can run."""
        return self._grower.groups()

    @property
    def decisions(self) -> list[Decision]:
        """Merges in the order in which they were made, then those that were left and why."""
        _ = self.groups
        return self._grower.decisions

    @cached_property
    def matches(self) -> list[Match]:
        """Every occurrence of one of our ops in the module, the largest first."""
        return op_matching.find(self.graph)

    def served(self, group: Group) -> Served:
        """The ops that do a group's work: one that does all of it, else as few as cover the most."""
        taken: list[Match] = []
        left: set[FxNode] = set(group.members)
        for m in self.matches:
            if m.kernels <= left:
                taken.append(m)
                left -= m.kernels
        beyond = [m.op for m in self.matches if m.kernels > group.members]
        ops, covered = tuple(m.op for m in taken), len(group.members) - len(left)
        return Served(ops, covered, tuple(dict.fromkeys(reversed(beyond))), tuple(taken))

    def report(self) -> FusionReport:
        """Predict every group."""
        rows = []
        for number, group in enumerate(self.groups, 1):
            estimate, served = self.cost.fused(group), self.served(group)
            kinds = Counter(str(k.kind) for k in group.kernels)
            row = Row(
                number, group.name, tuple(k.name for k in group.kernels), dict(kinds), self.cost.unfused(group),
                estimate.seconds, group.unfused_bytes, estimate.bytes, group.flops, estimate.occupancy, estimate.passes,
                estimate.repeated, served.text(len(group.kernels)), served.ops, served.beyond,
            )  # fmt: skip
            rows.append(row)
        return FusionReport(self.device.name, tuple(rows), tuple(map(self._explained, self.decisions)))

    def _explained(self, d: Decision) -> Decision:
        """The decision, with what makes a merge slower than the two if that is why it was left."""
        if d.made or d.both is None or d.gain > 0:
            return d
        e = self.cost.fused(d.both)
        why = [f"{1e6 * e.repeated:.1f} us of it work that every tile repeats"] if e.repeated > 1e-7 else []
        why += ["rows read twice"] if e.passes > 1 else []
        why += [f"occupancy {100 * e.occupancy:.0f} %"] if e.occupancy < 0.25 else []
        details = f" ({', '.join(why)})" if why else ""
        return replace(d, reason=f"as one it would take {1e6 * e.seconds:.1f} us{details}")


def _known(kwargs: Mapping[str, Any] | None, known: Mapping[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """Values of integer arguments: those given, and what the examples themselves say."""
    given = {
        name: value.cpu()
        for name, value in (kwargs or {}).items()
        if isinstance(value, torch.Tensor) and value.device.type != "meta" and value.dtype in (torch.int32, torch.int64)
    }
    return {**given, **(known or {})}
