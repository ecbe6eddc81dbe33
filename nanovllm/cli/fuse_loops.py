"""`nanovllm fuse --loops`: whether the loop nests of a file may be fused and tiled, and the fused loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nanovllm.fuse.loop_fusion import LoopFusionAnalyzer
from nanovllm.fuse.loop_nest import LoopNest, parse
from nanovllm.fuse.tile_fusion import TileFusion
from nanovllm.hardware.gpu_presets import DeviceModel
from nanovllm.json_output import write_json
from nanovllm.wording import counted


def show_loops(path: Path, sizes: list[str], model: DeviceModel, json_file: str | None) -> None:
    """Print what may be done with the nests of a file, with tiles for a GPU.

    Args:
        sizes: values of names, such as "N=64".

    Raises:
        ValueError: there is no such file, a size or the file is malformed, or a nest runs no iteration.
    """
    values: dict[str, int] = {}
    for text in sizes:
        name, _, number = text.partition("=")
        if not name.isidentifier() or not number.isdigit():
            raise ValueError(f"--size {text}: expected a name and a number, such as N=64")
        values[name] = int(number)
    if not path.is_file():
        raise ValueError(f"--loops {path}: no such file")
    nests = parse(path.read_text(), **values)
    for i, nest in enumerate(nests, 1):
        for variable, (low, high) in zip(nest.variables, nest.bounds):
            if high <= low:
                given = f" with {', '.join(f'{name}={value}' for name, value in values.items())}" if values else ""
                raise ValueError(
                    f"--loops {path}: nest {i} runs no iteration{given}: `for {variable} in range({low}, {high})` is "
                    "empty, so there is nothing to fuse or tile"
                )
    capacity = model.shared_per_block // 4
    found = _fused_nests(nests) if len(nests) > 1 else _one_nest(nests[0])
    if found["shift"] is not None:
        tiles = TileFusion(*nests)
        found["tiles_forbidden_by"] = tiles.why_not()
        if found["tiles_forbidden_by"] is None:
            best = tiles.best(capacity)
            found["tile"] = {**asdict(best), "traffic": best.traffic}
    if write_json(json_file, found):
        return
    print("\n".join(found["dependences"]) or "no dependences")
    if len(nests) == 1:
        print("One nest, nothing to fuse:")
    elif found["legal"]:
        print("All loops can be fused:")
    else:
        levels = found["fused_levels"]
        print(f"{counted(levels, 'common loop') if levels else 'No common loops'} can be fused:\n  {found['reason']}")
        if found["shift"] is not None:
            later = ", ".join(f"nest {i} by {s}" for i, s in enumerate(found["shift"], 1) if any(s))
            print(f"All loops can be fused with a delay: {later}.")
    if found["fused_levels"]:
        print(found["fused"])
    if found.get("tiles_forbidden_by"):
        print(f"Tiles are not legal: {found['tiles_forbidden_by']}")
    elif "tile" in found:
        t = found["tile"]
        print(
            f"Tiles for {capacity:,} floats (the shared memory of a block on {model.name}):\n"
            f"{t['tile']}, {counted(t['tiles'], 'tile', ',')} of {counted(t['footprint'], 'element', ',')} each,"
            f" {counted(t['traffic'], 'element', ',')} moved"
        )


def _fused_nests(nests: Sequence[LoopNest]) -> dict[str, Any]:
    analyzer = LoopFusionAnalyzer(*nests)
    return {
        "nests": len(nests), "fused_levels": analyzer.depth, "legal": analyzer.legal, "reason": analyzer.reason,
        "shift": analyzer.shift, "dependences": [str(d) for d in analyzer.dependences], "fused": analyzer.source(),
    }  # fmt: skip


def _one_nest(nest: LoopNest) -> dict[str, Any]:
    """The same of a nest by itself, which can only be cut into tiles."""
    met = [d.forwards() for d in TileFusion(nest).dependences]
    return {
        "nests": 1, "fused_levels": nest.depth, "legal": True, "reason": "", "shift": ((0,) * nest.depth,),
        "dependences": [d.text for d in met if any(map(any, d.distances.ranges))], "fused": nest.source(),
    }  # fmt: skip
