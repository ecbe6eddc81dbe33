"""A choice that a kernel makes before it launches: its key, the possible plans, and the plan that was measured to be
best.

`triton/tunables.py` declares all of them; `config_files.py` reads the files with the measured plans.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch

from nanovllm.kernels.op import config_files
from nanovllm.kernels.op.provider import imported
from nanovllm.kernels.op.source_hash import source_hash
from nanovllm.wording import brief

Key = tuple[Any, ...]


def bucket(n: int, steps: int = 1) -> int:
    """n rounded up, so that one configuration serves many sizes.

    It is rounded to a power of two; above 256, to one of `steps` equal steps from each power of two to the next.
    """
    if n <= 1:
        return 1
    bits = (n - 1).bit_length()
    if steps == 1 or n <= 256:
        return 1 << bits
    step = (1 << (bits - 1)) // steps
    return -(-n // step) * step


@dataclass(frozen=True, eq=False)
class Tunable:
    """A choice that a kernel makes before it launches.

    Attributes:
        name: in the files.
        key: what the choice may depend on, by name, with its type: int, bool, str or torch.dtype. Counts that vary
            while serving are buckets.
        plans: "module:class" of the frozen dataclasses of integers and bools, one of which is a choice.
        kernels: "module:function" of the Triton kernels that it configures.
        refuse: (plan, key by name) -> None, or why no kernel can be launched so.
        batch: names in `key` that count what happens to run together. A kernel that promises a sequence the same bits
            whatever else is in the batch has none.
        rounded: names in `key` that are rounded -> how. A file with another number has an entry that no call would ever
            find.
    """

    name: str
    key: Mapping[str, type]
    plans: tuple[str, ...]
    kernels: tuple[str, ...]
    refuse: Callable[[Any, Mapping[str, Any]], str | None] = lambda plan, key: None
    batch: tuple[str, ...] = ()
    rounded: Mapping[str, Callable[[int], int]] = field(default_factory=dict)
    _tables: dict[torch.device, Mapping[Key, Any]] = field(default_factory=dict, repr=False)

    def find(self, device: torch.device, *key: Any) -> Any | None:
        """The plan measured for a key, in the order of `self.key`; None: none was, and the kernel chooses by itself."""
        table = self._tables.get(device)
        if table is None:
            table = self._read(device)
        return table.get(key) if table else None

    @contextmanager
    def using(self, device: torch.device, key: Key, plan: Any) -> Iterator[list[Key]]:
        """Within the block, `find` gives `plan` for `key` (None: the kernel chooses). Yields the keys looked up."""
        before = self._tables.get(device)
        if before is None:
            before = self._read(device)
        looked_up: list[Key] = []
        self._tables[device] = _RecordingTable({**before, key: plan}, looked_up)
        try:
            yield looked_up
        finally:
            self._tables[device] = before

    def forget(self) -> None:
        """Read the files again at the next lookup."""
        self._tables.clear()

    @cached_property
    def classes(self) -> dict[str, type]:
        """The classes of plans by name."""
        return {plan.partition(":")[2]: imported(plan) for plan in self.plans}

    @cached_property
    def source(self) -> str:
        """What the kernels' source hashes to."""
        return source_hash([imported(kernel) for kernel in self.kernels])

    def named(self, key: Key) -> dict[str, Any]:
        return dict(zip(self.key, key, strict=True))

    def key_to_json(self, key: Key) -> dict[str, Any]:
        return {
            n: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for n, v in self.named(key).items()
        }

    def key_from_json(self, data: Any) -> Key:
        """Raises ValueError with the field's name."""
        _check_names(data, "key", self.key)
        key = []
        for name, kind in self.key.items():
            value = data[name]
            if kind is torch.dtype and isinstance(value, str):
                value = getattr(torch, value, value)
            if type(value) is not kind:
                raise ValueError(f"key.{name}: expected {config_files.kind_name(kind)}, not {data[name]!r}")
            if name in self.rounded and (rounded := self.rounded[name](data[name])) != value:
                raise ValueError(f"key.{name}: expected {rounded}, to which kernels round {value} before they ask")
            key.append(value)
        return tuple(key)

    def plan_to_json(self, plan: Any) -> dict[str, Any]:
        values = {f.name: getattr(plan, f.name) for f in fields(plan)}
        return {"plan": type(plan).__name__, **values} if len(self.plans) > 1 else values

    def plan_text(self, plan: Any) -> str:
        """A plan in one line."""
        return " ".join(f"{k}={v}" for k, v in self.plan_to_json(plan).items())

    def plan_from_json(self, data: Any, key: Key) -> Any:
        """The plan of an entry.

        Raises:
            ValueError: a field is missing, unknown or out of range, or the kernel refuses the plan. It names the field.
        """
        if not isinstance(data, dict):
            raise ValueError(f"config: expected an object, not {brief(data, 60)}")
        (name, *others) = self.classes
        if others:
            name = data.get("plan", "")
            if name not in self.classes:
                raise ValueError(f"config.plan: expected one of {', '.join(self.classes)}, not {name!r}")
            data = {k: v for k, v in data.items() if k != "plan"}
        plan_class = self.classes[name]
        _check_names(data, "config", [f.name for f in fields(plan_class)])
        for f in fields(plan_class):
            expected = _out_of_range(f.name, str(f.type), data[f.name])
            if expected:
                raise ValueError(f"config.{f.name}: expected {expected}, not {data[f.name]!r}")
        plan = plan_class(**data)
        reason = self.refuse(plan, self.named(key))
        if reason:
            raise ValueError(f"config: {reason}")
        return plan

    def _read(self, device: torch.device) -> Mapping[Key, Any]:
        gpu = config_files.gpu_of(device)
        self._tables[device] = {} if gpu is None else config_files.plans_in_force(self, gpu)
        return self._tables[device]


class _RecordingTable(dict):
    """Records the keys that are looked up."""

    def __init__(self, items: Mapping[Key, Any], looked_up: list[Key]) -> None:
        super().__init__(items)
        self._looked_up = looked_up

    def get(self, key: Key, default: Any = None) -> Any:
        self._looked_up.append(key)
        return super().get(key, default)


_POWERS = {
    "block", "block_m", "block_n", "block_k", "rows", "tokens", "tile", "depth", "split", "heads", "pack",
    "merge_registers",
}  # fmt: skip
_MAY_BE_ZERO = {"programs", "cluster"}


def _out_of_range(name: str, kind: str, value: Any) -> str | None:
    """What is expected of a field of a plan, if the value is not that."""
    if kind == "bool":
        return None if type(value) is bool else "true or false"
    if name == "warps":
        return None if type(value) is int and value in (1, 2, 4, 8, 16, 32) else "1, 2, 4, 8, 16 or 32"
    if type(value) is not int or value < (0 if name in _MAY_BE_ZERO else 1):
        return "a whole number from 0 on" if name in _MAY_BE_ZERO else "a positive whole number"
    return "a power of two" if name in _POWERS and value & (value - 1) else None


def _check_names(data: Any, where: str, names: Sequence[str] | Mapping[str, Any]) -> None:
    if not isinstance(data, dict):
        raise ValueError(f"{where}: expected an object, not {brief(data, 60)}")
    for name in names:
        if name not in data:
            raise ValueError(f"{where}.{name}: missing")
    for name in data:
        if name not in names:
            raise ValueError(f"{where}.{name}: unknown; known are {', '.join(names)}")
