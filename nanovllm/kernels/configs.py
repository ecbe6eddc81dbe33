"""Launch configurations that were measured on a GPU: one JSON file a GPU, written by `nanovllm tune`, read here and never written.

The files that come with the package are in `configs/`. A file of the same name in the directory that the environment variable
`NANOVLLM_KERNEL_CONFIGS` names is read after it, and its entries take precedence. An entry counts only for the versions and the
kernel source that it was measured with: any other may be slower than the built-in choice, or no longer launch. A kernel asks
`Tunable.find` before every launch, which is a lookup or two in dicts; files are read when the first kernel asks. Without an entry
the kernel chooses as if there were none of this.
"""

from __future__ import annotations

import difflib
import importlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from nanovllm.kernels.source_hash import source_hash
from nanovllm.kernels.tables import canonical_gpu_name
from nanovllm.kernels.versions import versions

logger = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "NANOVLLM_KERNEL_CONFIGS"
SHIPPED = Path(__file__).parent / "configs"
SCHEMA = 1

Key = tuple[Any, ...]


def bucket(n: int, steps: int = 1) -> int:
    """n rounded up, so that one configuration serves many sizes: to a power of two, or above 256 to one of `steps` equal steps
    from each power of two to the next."""
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
        key: what the choice may depend on, by name, with its type: int, bool, str or torch.dtype. Counts that vary while
            serving are buckets.
        plans: "module:class" of the frozen dataclasses of integers and bools, one of which is a choice.
        kernels: "module:function" of the Triton kernels that it configures.
        refuse: (plan, key by name) -> None, or why no kernel can be launched so.
        batch: names in `key` that count what happens to run together. A kernel that promises a sequence the same bits
            whatever is beside it has none.
        rounded: names in `key` that are rounded -> how. A file with another number has an entry that no call would ever find.
        changes_bits: whether results may differ in their last bits from plan to plan, sums being added in another order.
    """

    name: str
    key: Mapping[str, type]
    plans: tuple[str, ...]
    kernels: tuple[str, ...]
    refuse: Callable[[Any, Mapping[str, Any]], str | None] = lambda plan, key: None
    batch: tuple[str, ...] = ()
    changes_bits: bool = True
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
        """Within the block, `find` gives `plan` for `key` (None: what the kernel chooses); yields the keys that were asked for."""
        before = self._tables.get(device)
        if before is None:
            before = self._read(device)
        asked: list[Key] = []
        self._tables[device] = _Watched({**before, key: plan}, asked)
        try:
            yield asked
        finally:
            self._tables[device] = before

    def forget(self) -> None:
        """Read the files again when asked next."""
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
                raise ValueError(f"key.{name}: expected {_kind(kind)}, not {data[name]!r}")
            if name in self.rounded and self.rounded[name](value) != value:
                raise ValueError(
                    f"key.{name}: expected {self.rounded[name](value)}, to which kernels round {value} before they ask"
                )
            key.append(value)
        return tuple(key)

    def plan_to_json(self, plan: Any) -> dict[str, Any]:
        values = {f.name: getattr(plan, f.name) for f in fields(plan)}
        return {"plan": type(plan).__name__, **values} if len(self.plans) > 1 else values

    def plan_from_json(self, data: Any, key: Key) -> Any:
        """Raises ValueError with the field's name if a field is missing, unknown or out of range, or the kernel refuses the plan."""
        if not isinstance(data, dict):
            raise ValueError(f"config: expected an object, not {data!r:.60}")
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
        gpu = gpu_of(device)
        found = [] if gpu is None else entries(self, gpu)
        for path in dict.fromkeys(e.path for e in found if e.stale):
            stale = [e for e in found if e.path == path and e.stale]
            # Of one's own files one wants to know; what was shipped for other versions is no news.
            level = logging.INFO if path.parent == SHIPPED else logging.WARNING
            logger.log(
                level, "%s: %d configurations of %s are not used (%s); measure again with `nanovllm tune`",
                path, len(stale), self.name, "; ".join(dict.fromkeys(str(e.stale) for e in stale)),
            )  # fmt: skip
        self._tables[device] = {e.key: e.plan for e in found if not e.stale}
        if self._tables[device]:
            logger.info("%d tuned configurations of %s for %s", len(self._tables[device]), self.name, gpu)
        return self._tables[device]


class _Watched(dict):
    """Notes which keys are asked for."""

    def __init__(self, items: Mapping[Key, Any], asked: list[Key]) -> None:
        super().__init__(items)
        self._asked = asked

    def get(self, key: Key, default: Any = None) -> Any:
        self._asked.append(key)
        return super().get(key, default)


@dataclass(frozen=True)
class Entry:
    """One configuration of a file. `stale`: why it is not used; `data`: as in the file, with what was measured."""

    key: Key
    plan: Any
    path: Path
    stale: str | None
    data: Mapping[str, Any]


def entries(tunable: Tunable, gpu: str) -> list[Entry]:
    """What the files of a GPU say of a tunable, shipped ones first: of entries for the same key the last one counts.

    Raises:
        ValueError: a file is malformed; the message names it and the field.
    """
    found = []
    for path in paths(gpu):
        for index, data in _entries(path):
            if data["tunable"] != tunable.name:
                continue
            try:
                read = entry_of(tunable, data, path)
            except ValueError as e:
                raise ValueError(f"{path}: entries[{index}].{e}; write it anew with `nanovllm tune`") from None
            found += [] if read is None else [read]
    return found


def entry_of(tunable: Tunable, data: Mapping[str, Any], path: Path) -> Entry | None:
    """One entry of a file; None: its parameters are those of another source.

    Raises:
        ValueError: it is malformed; the message begins with the field.
    """
    stale = _stale(data, tunable)
    try:
        key = tunable.key_from_json(data["key"])
        return Entry(key, tunable.plan_from_json(data["config"], key), path, stale, data)
    except ValueError:
        if not stale:
            raise
        return None


def paths(gpu: str) -> list[Path]:
    """The files of a GPU that there are, in the order of reading."""
    user = os.environ.get(DIRECTORY_VARIABLE)
    if user:
        _warn_of(user)
    directories = [SHIPPED, *([Path(user).expanduser()] if user else [])]
    return [path for d in directories if (path := d / f"{gpu}.json").exists()]


@cache
def _warn_of(directory: str) -> None:
    """Say it, once, if the user's directory is none."""
    path = Path(directory).expanduser()
    if not path.is_dir():
        what = "is no directory" if path.exists() else "does not exist"
        logger.warning(
            "%s=%s: it %s, so none of your kernel configurations is used", DIRECTORY_VARIABLE, directory, what
        )


def gpu_of(device: torch.device) -> str | None:
    """The canonical name of a CUDA device; None for any other, for which nothing is tuned."""
    return canonical_gpu_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def document(path: Path) -> dict[str, Any]:
    """A file's content.

    Raises:
        ValueError: it is not JSON or lacks a field that every file or entry has.
    """
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as e:
        raise ValueError(f"{path}: not a file of kernel configurations: {e}") from e
    try:
        if not isinstance(data, dict):
            raise ValueError(f"expected an object, not {data!r:.60}")
        for name, kind in {"schema": int, "gpu": str, "entries": list}.items():
            if type(data.get(name)) is not kind:
                raise ValueError(f"{name}: expected {_kind(kind)}, not {data.get(name)!r:.60}")
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema: expected {SCHEMA}, not {data['schema']}")
        if data["gpu"] != path.stem:
            raise ValueError(f"gpu: expected {path.stem!r}, which the file is named after, not {data['gpu']!r}")
        for i, entry in enumerate(data["entries"]):
            if not isinstance(entry, dict):
                raise ValueError(f"entries[{i}]: expected an object, not {entry!r:.60}")
            for name, kind in {"tunable": str, "source": str, "versions": dict, "key": dict, "config": dict}.items():
                if type(entry.get(name)) is not kind:
                    raise ValueError(f"entries[{i}].{name}: expected {_kind(kind)}, not {entry.get(name)!r:.60}")
    except ValueError as e:
        raise ValueError(f"{path}: {e}; write it anew with `nanovllm tune`") from None
    return data


@cache
def _entries(path: Path) -> Sequence[tuple[int, Mapping[str, Any]]]:
    from nanovllm.kernels.tunables import ALL

    found = list(enumerate(document(path)["entries"]))
    # Perhaps of another version of this package, whose kernels chose other things: no error, as for another source.
    for name, count in Counter(data["tunable"] for _, data in found if data["tunable"] not in ALL).items():
        near = difflib.get_close_matches(name, ALL, 1)
        logger.warning(
            "%s: %d configurations are not used: there is no tunable %r%s", path, count, name,
            f"; did you mean {near[0]!r}?" if near else "",
        )  # fmt: skip
    return found


def forget_files() -> None:
    """Read the files again when asked next; tunables keep what they have until their own `forget`."""
    _entries.cache_clear()
    _warn_of.cache_clear()


def _stale(data: Mapping[str, Any], tunable: Tunable) -> str | None:
    here = versions()
    other = [f"{k} {data['versions'].get(k)}, here {v}" for k, v in here.items() if data["versions"].get(k) != v]
    if other:
        return "measured with " + ", ".join(other)
    if data["source"] != tunable.source:
        return "the kernels' source has changed since"
    return None


_POWERS = {"block", "block_m", "block_n", "block_k", "rows", "tokens", "tile", "depth", "split", "heads", "pack", "merge_registers"}  # fmt: skip
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
        raise ValueError(f"{where}: expected an object, not {data!r:.60}")
    for name in names:
        if name not in data:
            raise ValueError(f"{where}.{name}: missing")
    for name in data:
        if name not in names:
            raise ValueError(f"{where}.{name}: unknown; known are {', '.join(names)}")


def _kind(kind: type) -> str:
    names = {int: "a whole number", bool: "true or false", str: "a text", list: "a list", dict: "an object"}
    return names.get(kind, "the name of a dtype")


def imported(target: str) -> Any:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)
