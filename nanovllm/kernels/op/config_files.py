"""Launch configurations that were measured on a GPU: one JSON file a GPU, written by `nanovllm tune` and read here.

The files that come with the package are in `configs/`. A file of the same name in the directory that the environment
variable `NANOVLLM_KERNEL_CONFIGS` names is read after it, and its entries take precedence. An entry counts only for the
versions and the kernel source that it was measured with: with others it may be slower than the built-in choice, or fail
to launch. A kernel calls `Tunable.find` before every launch, which is one or two lookups in dicts. Files are read at
the first such call. Without an entry the kernel makes its built-in choice.
"""

from __future__ import annotations

import difflib
import json
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.hardware.gpu_name import canonical_gpu_name
from nanovllm.hardware.versions import versions
from nanovllm.kernels.op.provider import imported
from nanovllm.wording import brief

if TYPE_CHECKING:
    from nanovllm.kernels.op.tunable import Key, Tunable

logger = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "NANOVLLM_KERNEL_CONFIGS"
SHIPPED = Path(__file__).parents[1] / "configs"
SCHEMA = 1
TUNABLES = "nanovllm.kernels.triton.tunables:ALL"
"""Named, not imported: only a file with entries makes it load."""
ENTRY_FIELDS = {"tunable": str, "source": str, "versions": dict, "key": dict, "config": dict}
"""What every entry of a file has; `nanovllm tune` writes more."""


@dataclass(frozen=True)
class Entry:
    """One configuration of a file. `stale`: why it is not used; `data`: as in the file, with what was measured."""

    key: Key
    plan: Any
    path: Path
    stale: str | None
    data: Mapping[str, Any]


def plans_in_force(tunable: Tunable, gpu: str, shipped: Path = SHIPPED) -> dict[Key, Any]:
    """The plans by key that a tunable has on a GPU. What its files have for other versions or another source is logged.

    Args:
        shipped: the directory of the files that come with the package.

    Raises:
        ValueError: a file is malformed.
    """
    found = entries(tunable, gpu, shipped)
    for path in dict.fromkeys(e.path for e in found if e.stale):
        stale = [e for e in found if e.path == path and e.stale]
        # Stale entries of the user's own files deserve a warning; shipped ones for other versions are usual.
        level = logging.INFO if path.parent == shipped else logging.WARNING
        logger.log(
            level, "%s: %d configurations of %s are not used (%s); measure again with `nanovllm tune`",
            path, len(stale), tunable.name, "; ".join(dict.fromkeys(str(e.stale) for e in stale)),
        )  # fmt: skip
    plans = {e.key: e.plan for e in found if not e.stale}
    if plans:
        logger.info("%d tuned configurations of %s for %s", len(plans), tunable.name, gpu)
    return plans


def entries(tunable: Tunable, gpu: str, shipped: Path = SHIPPED) -> list[Entry]:
    """What the files of a GPU say of a tunable, shipped ones first: of entries for the same key the last one counts.

    Raises:
        ValueError: a file is malformed; the message names it and the field.
    """
    found = []
    for path in paths(gpu, shipped):
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


def paths(gpu: str, shipped: Path = SHIPPED) -> list[Path]:
    """The files of a GPU that there are, in the order of reading."""
    user = os.environ.get(DIRECTORY_VARIABLE)
    if user:
        _warn_of(user)
    directories = [shipped, *([Path(user).expanduser()] if user else [])]
    return [path for d in directories if (path := d / f"{gpu}.json").exists()]


@cache
def _warn_of(directory: str) -> None:
    """Warn, once, if the user's directory is not a directory."""
    path = Path(directory).expanduser()
    if not path.is_dir():
        what = "is no directory" if path.exists() else "does not exist"
        logger.warning(
            "%s=%s: it %s, so none of your kernel configurations is used", DIRECTORY_VARIABLE, directory, what
        )


def gpu_of(device: torch.device) -> str | None:
    """The canonical name of a CUDA device; None for any other, for which nothing is tuned."""
    return canonical_gpu_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def read_document(path: Path) -> dict[str, Any]:
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
            raise ValueError(f"expected an object, not {brief(data, 60)}")
        for name, kind in {"schema": int, "gpu": str, "entries": list}.items():
            if type(data.get(name)) is not kind:
                raise ValueError(f"{name}: expected {kind_name(kind)}, not {brief(data.get(name), 60)}")
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema: expected {SCHEMA}, not {data['schema']}")
        if data["gpu"] != path.stem:
            raise ValueError(f"gpu: expected {path.stem!r}, which the file is named after, not {data['gpu']!r}")
        for i, entry in enumerate(data["entries"]):
            if not isinstance(entry, dict):
                raise ValueError(f"entries[{i}]: expected an object, not {brief(entry, 60)}")
            for name, kind in ENTRY_FIELDS.items():
                if type(entry.get(name)) is not kind:
                    raise ValueError(
                        f"entries[{i}].{name}: expected {kind_name(kind)}, not {brief(entry.get(name), 60)}"
                    )
    except ValueError as e:
        raise ValueError(f"{path}: {e}; write it anew with `nanovllm tune`") from None
    return data


@cache
def _entries(path: Path) -> Sequence[tuple[int, Mapping[str, Any]]]:
    known = imported(TUNABLES)
    found = list(enumerate(read_document(path)["entries"]))
    # Perhaps from another version of this package, with other tunables: not an error, as for another source.
    for name, count in Counter(data["tunable"] for _, data in found if data["tunable"] not in known).items():
        near = difflib.get_close_matches(name, known, 1)
        logger.warning(
            "%s: %d configurations are not used: there is no tunable %r%s", path, count, name,
            f"; did you mean {near[0]!r}?" if near else "",
        )  # fmt: skip
    return found


def forget_files() -> None:
    """Read the files again at the next lookup; tunables keep their plans until their own `forget`."""
    _entries.cache_clear()
    _warn_of.cache_clear()


def _stale(data: Mapping[str, Any], tunable: Tunable) -> str | None:
    here, then = versions(), data["versions"]
    if other := [k for k, v in here.items() if then.get(k) != v]:
        said = [", ".join(f"{k} {of.get(k) or 'none'}" for k in other) for of in (then, here)]
        return f"measured with {said[0]}; here: {said[1]}"
    if data["source"] != tunable.source:
        return "the kernels' source has changed since"
    return None


def kind_name(kind: type) -> str:
    names = {int: "a whole number", bool: "true or false", str: "a text", list: "a list", dict: "an object"}
    return names.get(kind, "the name of a dtype")
