"""`nanovllm fuse`: what to fuse in a module, what it is predicted to bring, and what it brings."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm.cli.kernels_common import DTYPES, GPUS, dtype_name

if TYPE_CHECKING:
    import torch
    from rich.table import Table

    from nanovllm.perf.fusion import FusionAnalyzer, FusionDevice
    from nanovllm.perf.fusion.nest import LoopNest

_PHASES = ("decode", "prefill")
_NOTHING = "{}: nothing to fuse, it runs no kernel"


@dataclass
class _Target:
    """A module with its arguments, and what tells it from others."""

    module: Any
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    known: Mapping[str, Any] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    title: str = ""


def fuse(
    preset: Annotated[str | None, typer.Option(help="A model, whose decoder layer is taken; qwen3-0.6b if nothing is named.")] = None,
    module: Annotated[
        str | None,
        typer.Option(help="A module of your own: package.module:function or file.py:function, which returns (module, arguments)."),
    ] = None,
    loops: Annotated[Path | None, typer.Option(help="A file with loop nests in Python instead: may they be fused and tiled? One nest is tiled.")] = None,
    size: Annotated[list[str] | None, typer.Option(help="With --loops: the value of a name, such as N=64; repeatable.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of the batch.")] = 64,
    context: Annotated[int | None, typer.Option(help="Tokens of each sequence, the new ones among them; by default 1024.")] = None,
    phase: Annotated[str, typer.Option(help="decode: sequences of one new token each; prefill: one prompt.")] = "decode",
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES)}; by default the preset's.")] = None,
    gpu: Annotated[str | None, typer.Option(help=f"Predict for this GPU: {GPUS}. By default h100.")] = None,
    left: Annotated[bool, typer.Option("--left", help="Also show what was left unfused, and why.")] = False,
    measure: Annotated[bool, typer.Option("--measure", help="Run every group: unfused, with torch.compile, with our ops.")] = False,
    device: Annotated[str, typer.Option(help="Where to measure: auto, cpu, cuda, cuda:N.")] = "auto",
    compile: Annotated[bool, typer.Option(help="Measure torch.compile too.")] = True,
    iters: Annotated[int, typer.Option(help="Timed calls of each.")] = 30,
    save: Annotated[Path | None, typer.Option(help="Keep measurements in <device>/fusion.json of this folder; of a GPU by default in results.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:  # fmt: skip
    """Which operators of a module to run as one kernel, what that saves on a GPU, and which of our ops does it."""
    if phase not in _PHASES:
        raise ValueError(f"--phase {phase}: expected one of {', '.join(_PHASES)}")
    if dtype is not None:
        dtype = dtype_name(dtype)
    if sum(given is not None for given in (preset, module, loops)) > 1:
        raise ValueError("--preset, --module, --loops: expected one of them")
    if iters < 1:
        raise ValueError(f"--iters {iters}: expected at least 1")
    from nanovllm.engine.model_runner import select_device
    from nanovllm.perf.presets import device_model

    model = device_model(gpu) if gpu is not None else None  # an unknown one is said before anything else is done
    if loops is not None:
        _loops(loops, size or [], model or device_model("h100"), as_json)
        return
    where = select_device(device) if measure else None

    def make() -> _Target:
        return _own(module, where) if module else _layer(preset or "qwen3-0.6b", tokens, context, phase, dtype, where)

    if measure:
        if model is not None:
            raise ValueError("--gpu and --measure: what is measured is predicted for the device that it is measured on")
        folder = save or (Path("results") if where.type == "cuda" else None)
        _measure(make(), where, compile, iters, folder, as_json)
        return
    from nanovllm.perf.fusion.tables import decisions_table, groups_table

    target = make()
    report = _analyzer(target, model or device_model("h100")).report()
    if as_json:
        print(json.dumps({**target.about, **report.to_json()}, indent=1))
        return
    if not report.rows:
        print(_NOTHING.format(target.title))
        return
    print(f"{target.title}, predicted for {report.device}")
    _print(groups_table(report))
    if left:
        _print(decisions_table(report))
    print(_summary(report))


def _analyzer(target: _Target, device: FusionDevice) -> FusionAnalyzer:
    from nanovllm.perf.fusion import FusionAnalyzer

    return FusionAnalyzer(target.module, target.args, target.kwargs, device=device, known=target.known)


def _summary(report: Any) -> str:
    kernels, groups = sum(len(r.kernels) for r in report.rows), len(report.rows)
    served = sum(
        not r.served.startswith("none") and len(r.served_by) == 1 and "of" not in r.served.split() for r in report.rows
    )
    if not report.fused:
        return "Every tensor is empty, so no kernel has anything to do."
    return (
        f"{kernels} kernels become {groups}: {1e6 * report.unfused:.1f} -> {1e6 * report.fused:.1f} us predicted, "
        f"{report.unfused / report.fused:.1f} times as fast. One op of ours does all of {served} of the {groups} groups."
    )


# --------------------------------------------------------------------------------------------------------- what to look at


def _layer(
    name: str, tokens: int, context: int | None, phase: str, dtype: str | None, where: torch.device | None
) -> _Target:
    import torch

    from nanovllm.cli.fuse_layer import decoder_layer

    decode = phase == "decode"
    context = context if context is not None else 1024 if decode else tokens
    layer, kwargs, known = decoder_layer(
        name, tokens, context, decode, where or "meta", None if dtype is None else getattr(torch, dtype)
    )
    about = {
        "module": f"{name} decoder layer", "phase": phase, "tokens": tokens, "context": context,
        "dtype": str(kwargs["x"].dtype).removeprefix("torch."),
    }  # fmt: skip
    title = f"{about['module']}, {phase}, tokens {tokens}, context {context}, {about['dtype']}"
    return _Target(layer, (), kwargs, known, about, title)


def _own(text: str, where: torch.device | None) -> _Target:
    """What "package.module:function" returns: (module, arguments) or (module, positional, keyword arguments)."""
    import torch

    function = _function(text)
    try:
        made = function()
    except Exception as e:  # the user's own: their line says more than ours
        raise ValueError(f"--module {text}: {_raised(e)}") from e
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ValueError(f"--module {text}: expected (module, arguments), not {type(made).__name__}")
    module, args, kwargs = (*made, {})[:3]
    if isinstance(args, Mapping):
        args, kwargs = (), {**args, **kwargs}
    if isinstance(args, torch.Tensor):
        args = (args,)
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, Mapping):
        raise ValueError(
            f"--module {text}: expected the arguments as a tuple or by name, not {type(args).__name__}, {type(kwargs).__name__}"
        )
    if where is not None:
        _check_values(text, module, args, kwargs)
        module = module.to(where) if isinstance(module, torch.nn.Module) else module
        args, kwargs = torch.utils._pytree.tree_map_only(
            torch.Tensor, lambda t: t.to(where), (tuple(args), dict(kwargs))
        )
    about = {"module": text, "arguments": _describe(args, kwargs)}
    return _Target(module, tuple(args), dict(kwargs), {}, about, f"{text}({about['arguments']})")


def _raised(e: Exception) -> str:
    """An error of the user's code in one line, with the place."""
    from nanovllm.perf.fusion.trace import place_of

    return f"{type(e).__name__}: {' '.join(str(e).split())[:300]}{place_of(e)}"


def _check_values(text: str, module: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    """ValueError if something has no values: what is measured is run."""
    import torch

    flat = torch.utils._pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]
    tensors = [(torch.utils._pytree.keystr(path[1:]).strip("[]'"), "argument", t) for path, t in flat]
    if isinstance(module, torch.nn.Module):
        tensors += [(name, "parameter", t) for name, t in module.named_parameters()]
        tensors += [(name, "buffer", t) for name, t in module.named_buffers()]
    for name, what, t in tensors:
        if isinstance(t, torch.Tensor) and t.is_meta:
            how = (
                f"make it with values, such as torch.randn({', '.join(map(str, t.shape))})"
                if what == "argument"
                else "make the module without the meta device"
            )
            raise ValueError(
                f"--module {text}: {what} {name} is on the meta device, and --measure needs values: {how}; only predictions do without"
            )


def _function(text: str) -> Callable[[], Any]:
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise ValueError(f"--module {text}: expected package.module:function or file.py:function")
    try:
        if place.endswith(".py"):
            spec = importlib.util.spec_from_file_location(Path(place).stem, place)
            loaded = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded)
        else:
            if "" not in sys.path:
                sys.path.insert(0, "")
            loaded = importlib.import_module(place)
    except (ImportError, FileNotFoundError) as e:
        raise ValueError(f"--module {text}: cannot import {place}: {e}") from e
    except Exception as e:  # raised by the file itself
        raise ValueError(f"--module {text}: cannot import {place}: {_raised(e)}") from e
    if not callable(getattr(loaded, name, None)):
        raise ValueError(f"--module {text}: {place} has no function {name!r}")
    return getattr(loaded, name)


def _describe(args: Any, kwargs: Mapping[str, Any]) -> str:
    import torch

    leaves = torch.utils._pytree.tree_leaves((args, dict(kwargs)))
    return ", ".join(
        f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for t in leaves if isinstance(t, torch.Tensor)
    )


# -------------------------------------------------------------------------------------------------------------- loop nests


def _loops(path: Path, sizes: list[str], model: Any, as_json: bool) -> None:
    from nanovllm.perf.fusion.nest import parse
    from nanovllm.perf.fusion.tile_fusion import TileFusion

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
                    f"--loops {path}: nest {i} runs no iteration{given}: `for {variable} in range({low}, {high})` is empty, "
                    "so there is nothing to fuse or tile"
                )
    capacity = model.shared_per_block // 4
    found = _fused_nests(nests) if len(nests) > 1 else _one_nest(nests[0])
    if found["shift"] is not None:
        tiles = TileFusion(*nests)
        found["tiles_forbidden_by"] = tiles.why_not()
        if found["tiles_forbidden_by"] is None:
            found["tile"] = asdict(tiles.best(capacity))
    if as_json:
        print(json.dumps(found, indent=1))
        return
    print("\n".join(found["dependences"]) or "no dependences")
    if len(nests) == 1:
        print("One nest, nothing to fuse:")
    elif found["legal"]:
        print("All loops can be fused:")
    else:
        print(f"{found['fused_levels'] or 'No'} common loop(s) can be fused: {found['reason']}")
        if found["shift"] is not None:
            later = ", ".join(f"nest {i} by {s}" for i, s in enumerate(found["shift"], 1) if any(s))
            print(f"With a delay all can: {later}.")
    print(found["fused"])
    if found.get("tiles_forbidden_by"):
        print(f"Tiles are not legal: {found['tiles_forbidden_by']}")
    elif "tile" in found:
        t = found["tile"]
        print(
            f"Tiles for {capacity:,} floats (the shared memory of a block on {model.name}): {t['tile']}, {t['tiles']:,} of them, "
            f"{t['footprint']:,} elements each, {t['traffic']:,} moved in all"
        )


def _fused_nests(nests: Sequence[LoopNest]) -> dict[str, Any]:
    from nanovllm.perf.fusion.loops import LoopFusionAnalyzer

    analyzer = LoopFusionAnalyzer(*nests)
    return {
        "nests": len(nests), "fused_levels": analyzer.depth, "legal": analyzer.legal, "reason": analyzer.reason,
        "shift": analyzer.shift, "dependences": [str(d) for d in analyzer.dependences], "fused": analyzer.source(),
    }  # fmt: skip


def _one_nest(nest: LoopNest) -> dict[str, Any]:
    """The same of a nest by itself, which can only be cut into tiles."""
    from nanovllm.perf.fusion.loops import source_of
    from nanovllm.perf.fusion.tile_fusion import TileFusion

    return {
        "nests": 1, "fused_levels": nest.depth, "legal": True, "reason": "", "shift": ((0,) * nest.depth,),
        "dependences": [d.forwards().text for d, _ in TileFusion(nest).dependences if any(map(any, d.distances.ranges))], "fused": source_of(nest),
    }  # fmt: skip


# -------------------------------------------------------------------------------------------------------------- measuring


def _measure(target: _Target, where: torch.device, compile: bool, iters: int, save: Path | None, as_json: bool) -> None:
    import torch

    from nanovllm.perf.device import device_name
    from nanovllm.perf.fusion import saved, tables
    from nanovllm.perf.fusion.measure import WAYS, agreement
    from nanovllm.perf.fusion.measure import measure as run

    ways = tuple(w for w in WAYS if compile or w != "compile")
    with torch.inference_mode(False):
        analyzer = _analyzer(target, _here(where))
        rows = run(
            analyzer, target.args, target.kwargs, ways=ways, iters=iters, progress=None if as_json else _progress
        )
    name = device_name(where)
    document = saved.document(rows, name, target.about, Path.cwd())
    if as_json:
        print(json.dumps(document, indent=1))
    else:
        _progress("")
        if not rows:
            print(_NOTHING.format(target.title))
            return
        print(f"{target.title}, measured on {name}")
        _print(tables.measured_table(rows))
        for line in tables.missing(rows):
            print(line)
        print(tables.agreement_line(agreement(rows)))
        if where.type == "cpu":
            print("On a CPU this is a wall clock that other programs disturb; the model is made for GPUs.")
    if save is not None:
        path = saved.keep(document, save)
        print(f"kept in {path}", file=sys.stderr)


def _here(where: torch.device) -> FusionDevice:
    if where.type == "cuda":
        from nanovllm.perf.presets import this_device

        return this_device(where)
    from nanovllm.perf.fusion.host import measure_host

    return measure_host(DTYPES)


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text[:100]}", end="", file=sys.stderr, flush=True)


def _print(table: Table) -> None:
    from rich.console import Console

    console = Console()
    # Into a file or a pipe wide, so that little is broken up.
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=200)
    console.print(table)
