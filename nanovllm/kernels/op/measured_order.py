"""Which provider is fastest on a GPU, as measured: one JSON file a GPU, written by `nanovllm kernels bench
--save-table`.

The files that come with the package are in `tables/`. A file of the same name in the directory that the environment
variable `NANOVLLM_KERNEL_TABLES` names takes precedence. An entry was measured with certain versions of torch and
Triton; the one for this machine's versions counts, else the newest.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from nanovllm.hardware.gpu_name import canonical_gpu_name
from nanovllm.hardware.versions import versions
from nanovllm.json_output import keep_json

logger = logging.getLogger(__name__)

DIRECTORY_VARIABLE = "NANOVLLM_KERNEL_TABLES"
SHIPPED = Path(__file__).parents[1] / "tables"


def measured_order(op: str, device: torch.device) -> Sequence[str] | None:
    """The providers of an op on a CUDA device, fastest first; None if nothing was measured for it on such a GPU."""
    gpu = canonical_gpu_name(torch.cuda.get_device_name(device))
    return _orders(gpu, os.environ.get(DIRECTORY_VARIABLE, "")).get(op)


@cache
def _orders(gpu: str, directory: str) -> Mapping[str, Sequence[str]]:
    path = table_path(gpu, Path(directory) if directory else None)
    if path is None:
        logger.info("no measured kernel table for %s: the built-in order is used", gpu)
        return {}
    try:
        entries = json.loads(path.read_text())["entries"]
        here = versions()
        best = max(entries, key=lambda e: (sum(e["versions"].get(k) == v for k, v in here.items()), e["date"]))
        return {name: list(op["order"]) for name, op in best["ops"].items()}
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(
            f"{path} is not a kernel table ({e!r}); write it anew with `nanovllm kernels bench --save-table`"
        ) from e


def table_path(gpu: str, directory: Path | None) -> Path | None:
    """The file of a GPU: the user's if there is one, else the shipped one, else None."""
    for place in (directory, SHIPPED):
        if place is not None and (place / f"{gpu}.json").exists():
            return place / f"{gpu}.json"
    return None


def _with_known(found: Mapping[str, Any], known: Mapping[str, Any] | None) -> dict[str, Any]:
    """What was measured of an op now, with the providers that only an earlier measurement has.

    Their times are scaled by a provider that both measurements have. If there is none, the earlier order stays and new
    providers follow it.
    """
    old, new = (known or {}).get("relative", {}), found["relative"]
    if not set(old) - set(found["order"]):
        return dict(found)
    common = next((p for p in found["order"] if p in old), None)
    if common is None:
        order = [*known["order"], *(p for p in found["order"] if p not in known["order"])]  # type: ignore[index]
        return {"order": order, "relative": old}
    times = {**{p: t * new[common] / old[common] for p, t in old.items()}, **new}
    least = min(times.values())
    relative = {p: round(times[p] / least, 3) for p in sorted(times, key=lambda p: times[p])}
    return {"order": list(relative), "relative": relative}


def save_table(gpu: str, ops: Mapping[str, Mapping[str, Any]], date: str, directory: Path) -> Path:
    """Write the entry for this machine's versions into a GPU's file, and keep the other entries.

    An earlier entry for these versions keeps its ops and providers that were not measured now.

    Args:
        ops: op -> {"order": providers, fastest first, "relative": provider -> its time over the fastest's}.
    """
    path = directory / f"{gpu}.json"
    entries = json.loads(path.read_text())["entries"] if path.exists() else []
    here = versions()
    known: Mapping[str, Any] = next((e["ops"] for e in entries if e["versions"] == here), {})
    new = {**known, **{op: _with_known(found, known.get(op)) for op, found in ops.items()}}
    entries = [e for e in entries if e["versions"] != here] + [{"versions": here, "date": date, "ops": new}]
    keep_json(path, {"gpu": gpu, "entries": entries})
    return path
