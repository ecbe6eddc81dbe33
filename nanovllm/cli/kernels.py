"""`nanovllm kernels`: which provider runs each op, why, whether it is right, and how fast it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import torch

    from nanovllm.kernels import Op
    from nanovllm.kernels.compare import Measurement

app = typer.Typer(no_args_is_help=True, help="The ops and who computes them.")

_OpName = Annotated[
    str | None, typer.Argument(help="An op, or how several begin (attention); all of them if left out.")
]
_Device = Annotated[str, typer.Option(help="The device: auto, cpu, cuda, cuda:N.")]
_Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
_Plugins = Annotated[
    list[str] | None, typer.Option(help="A Python file or module with kernels of your own; repeatable.")
]
_Providers = Annotated[list[str] | None, typer.Option("--provider", help="Only this provider; repeatable.")]
_Shapes = Annotated[list[str] | None, typer.Option("--shape", help="A shape such as 32x1024; repeatable.")]
_Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]


@app.command("list")
def list_kernels(
    op: _OpName = None, device: _Device = "auto", kernel_plugin: _Plugins = None, as_json: _Json = False
) -> None:
    """Every op and its providers: which can run here, why not, and in which order they are taken."""
    from nanovllm.kernels.plugins import failures

    where, ops, origins = _prepare(device, kernel_plugin, must_load=False)
    rows = [row for declared in _matching(ops, op) for row in _provider_rows(declared, where, origins)]
    rows += [
        {"op": "", "provider": name, "rank": None, "chosen": False, "reason": reason, "architectures": ""}
        for name, reason in failures().items()
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = _table("op", "provider", "rank", "available", "architectures", title=f"kernels on {_device_name(where)}")
    for row in rows:
        table.add_row(
            row["op"], row["provider"], str(row["rank"] or ""), row["reason"] or "yes", row["architectures"],
            style="bold" if row["chosen"] else None,
        )  # fmt: skip
    _print(table)


@app.command()
def why(
    op: Annotated[str, typer.Argument(help="An op.")],
    shape: Annotated[str | None, typer.Option(help="A shape such as 32x1024, to ask about such a call.")] = None,
    dtype: _Dtype = "bfloat16",
    device: _Device = "auto",
    kernel_plugin: _Plugins = None,
    as_json: _Json = False,
) -> None:
    """Which provider runs an op here, and what speaks against each of the others."""
    from nanovllm.kernels.selection import explain
    from nanovllm.kernels.verify import Case

    where, ops, origins = _prepare(device, kernel_plugin)
    declared = _only(ops, op)
    rows = _provider_rows(declared, where, origins)
    call: dict[str, Any] = {}
    if shape is not None:
        arguments = Case(_shape(declared, shape), _dtype(dtype)).arguments(declared, where)
        declared.check(arguments)
        call = {"shape": shape, "dtype": dtype}
        if declared.cost is not None:
            cost = declared.cost(**arguments)
            call |= {"bytes": cost.bytes, "flops": cost.flops}
        for row in rows:
            accepts = declared.providers[row["provider"]].accepts
            if row["reason"] is None and accepts is not None:
                row["reason"] = accepts(**arguments)
    because = explain(declared, where, origins)
    taken = next((r["provider"] for r in rows if r["chosen"] and r["reason"] is None), "native")
    if as_json:
        print(json.dumps({"op": op, "runs": taken, "because": because, "call": call, "providers": rows}, indent=2))
        return
    print(f"{op} on {_device_name(where)}: {taken} runs, because {because}.")
    if "bytes" in call:
        print(
            f"A call of shape {shape} in {dtype} moves at least {cost.bytes:,} bytes and computes {cost.flops:,} flops."
        )
    table = _table("provider", "rank", "can it take this?" if call else "can it run here?")
    for row in rows:
        table.add_row(row["provider"], str(row["rank"] or ""), row["reason"] or "yes")
    _print(table)


@app.command()
def verify(
    op: _OpName = None,
    provider: _Providers = None,
    device: _Device = "auto",
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    kernel_plugin: _Plugins = None,
    as_json: _Json = False,
) -> None:
    """Compare every provider with the reference in float64, on every kind of input. Fails if one is wrong.

    Without a GPU, Triton kernels run in Triton's interpreter, on small shapes.
    """
    from nanovllm.kernels.verify import verify_op

    if device in ("auto", "cpu") and _interpret_instead():
        return
    where, ops, _ = _prepare(device, kernel_plugin)
    rows = []
    for declared in _with_provider(_matching(ops, op), provider):
        if declared.inputs is None:
            rows.append({"op": declared.name, "provider": "", "reason": "declares no inputs"})
            continue
        for name, candidate in declared.providers.items():
            if provider and name not in provider:
                continue
            reason = candidate.support(where)
            row: dict[str, Any] = {"op": declared.name, "provider": name, "reason": reason}
            if reason is None:
                verdicts = verify_op(declared, candidate, where, seed=seed)
                failed = [v for v in verdicts if v.failure]
                row |= {
                    "cases": sum(v.skipped is None for v in verdicts),
                    "skipped": sum(v.skipped is not None for v in verdicts),
                    "worst_error_over_tolerance": max((v.error for v in verdicts), default=0.0),
                    "failures": [f"{v.case}: {v.failure}" for v in failed],
                }
            rows.append(row)
    failures = [f"{r['op']}, {r['provider']}: {f}" for r in rows for f in r.get("failures", ())]
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        table = _table(
            "op", "provider", "cases", "not taken", "worst error / tolerance", "verdict", title=_device_name(where)
        )
        for r in rows:
            if r["reason"] is not None:
                table.add_row(r["op"], r["provider"], "", "", "", r["reason"])
            else:
                verdict = "right" if r["cases"] else "nothing to compare: it took none of the cases"
                verdict = f"[red]{len(r['failures'])} wrong[/]" if r["failures"] else verdict
                table.add_row(
                    r["op"],
                    r["provider"],
                    str(r["cases"]),
                    str(r["skipped"]),
                    f"{r['worst_error_over_tolerance']:.2f}",
                    verdict,
                )
        _print(table)
        for failure in failures[:40]:
            print(failure)
        if len(failures) > 40:
            print(f"and {len(failures) - 40} more; --json has all")
    if failures:
        raise typer.Exit(1)


@app.command()
def bench(
    op: _OpName = None,
    shape: _Shapes = None,
    dtype: _Dtype = "bfloat16",
    provider: _Providers = None,
    compile: Annotated[bool, typer.Option(help="Also time torch.compile of the reference.")] = False,
    device: _Device = "auto",
    kernel_plugin: _Plugins = None,
    save: Annotated[Path | None, typer.Option(help="Write the measurements to this JSON file.")] = None,
    save_table: Annotated[
        Path | None, typer.Option(help="Write who is fastest into this directory, for kernels to be chosen by.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Time the providers of an op: medians, inputs from device memory, the share of what the hardware allows."""
    from nanovllm.kernels.compare import bench_cases, compiled, measure

    where, ops, origins = _prepare(device, kernel_plugin)
    if save_table is not None and where.type != "cuda":
        raise ValueError(f"--save-table: a table of kernels is measured on a GPU, this is {where}")
    results = []
    for declared in _with_provider(_matching(ops, op), provider):
        if declared.inputs is None or declared.cost is None:
            print(f"{declared.name} declares no inputs or no cost: not timed", file=sys.stderr)
            continue
        shapes = None if shape is None else [_shape(declared, s) for s in shape]
        if where.type == "cpu" and shapes is None:
            shapes = declared.inputs.decode[:1]
        candidates = [p for name, p in declared.providers.items() if not provider or name in provider]
        candidates += [compiled(declared)] if compile else []
        for case in bench_cases(declared, _dtype(dtype), shapes):
            for candidate in candidates:
                results.append(measure(declared, candidate, case, where))
            if not as_json and sys.stderr.isatty():
                print(f"\r{declared.name} {case}  ", end="", file=sys.stderr)
    document = _bench_document(where, results)
    if as_json:
        print(json.dumps(document, indent=1))
    else:
        _print(_bench_table(where, results))
        _warn_of_slow_choices(ops, results, where, origins)
    if save is not None:
        save.parent.mkdir(parents=True, exist_ok=True)
        save.write_text(json.dumps(document, indent=1) + "\n")
    if save_table is not None:
        print(f"wrote {_save_table(where, results, save_table, document['date'])}")


@app.command("table")
def markdown_table() -> None:
    """The Markdown table of docs/kernels.md: every op, what it does, its providers and where they run."""
    from nanovllm.kernels import all_ops

    print("| op | what it does | arguments | providers |\n|---|---|---|---|")
    for name, declared in sorted(all_ops().items()):
        what = (declared.__doc__ or "").strip().split("\n")[0].rstrip(".").replace("|", "\\|")
        arguments = ", ".join(declared.signature.parameters)
        providers = ", ".join(
            p.name if p.architectures == "any" else f"{p.name} ({p.architectures})" for p in declared.providers.values()
        )
        print(f"| `{name}` | {what} | {arguments} | {providers} |")


def _prepare(
    device: str, plugins: list[str] | None, must_load: bool = True
) -> tuple[torch.device, dict[str, Op], list[str]]:
    """(the device, the ops by name, what the plugins' providers have as their origin)."""
    from nanovllm.engine.model_runner import select_device
    from nanovllm.kernels import all_ops
    from nanovllm.kernels.plugins import failures, load_plugins

    where = select_device(device)
    origins = load_plugins(plugins or ())
    if must_load and len(origins) < len(plugins or ()):
        raise ValueError("; ".join(f"plugin {name} failed: {reason}" for name, reason in failures().items()))
    return where, dict(sorted(all_ops().items())), origins


def _provider_rows(declared: Op, where: torch.device, plugins: Any) -> list[dict[str, Any]]:
    from nanovllm.kernels.selection import rank

    ranked = [p.name for p in rank(declared, where, plugins)]
    rows = [
        {
            "op": declared.name,
            "provider": p.name,
            "rank": ranked.index(p.name) + 1 if p.name in ranked else None,
            "chosen": p.name == ranked[0],
            "reason": p.support(where),
            "architectures": p.architectures,
        }
        for p in declared.providers.values()
    ]
    return sorted(rows, key=lambda r: (r["rank"] is None, r["rank"]))


def _matching(ops: dict[str, Op], name: str | None) -> list[Op]:
    if name is None:
        return list(ops.values())
    return [ops[name]] if name in ops else [o for n, o in ops.items() if n.startswith(name)] or [_only(ops, name)]


def _with_provider(ops: list[Op], providers: list[str] | None) -> list[Op]:
    """Those of the ops that have one of the providers; a ValueError if none has a provider of one of these names."""
    known = sorted({name for declared in ops for name in declared.providers})
    for name in providers or ():
        if name not in known:
            raise ValueError(f"--provider {name}: expected one of {', '.join(known)}")
    return [o for o in ops if not providers or set(providers) & set(o.providers)]


def _only(ops: dict[str, Op], name: str) -> Op:
    from nanovllm.arguments import reject_unknown

    try:
        reject_unknown("nanovllm kernels", [name], ops)
    except TypeError as e:
        raise ValueError(str(e).replace("argument", "op")) from None
    return ops[name]


def _shape(declared: Op, text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(n) for n in text.lower().split("x"))
    except ValueError:
        raise ValueError(f"--shape {text}: expected numbers with x between them, such as 32x1024") from None
    if declared.inputs is None:
        raise ValueError(f"--shape: op {declared.name!r} declares no inputs")
    if any(n < 0 for n in shape) or len(shape) > len(declared.inputs.dimensions):
        raise ValueError(
            f"--shape {text}: {declared.name} takes {'x'.join(d.upper() for d in declared.inputs.dimensions)}"
        )
    return shape


def _dtype(name: str) -> torch.dtype:
    import torch

    dtypes = {n: getattr(torch, n) for n in ("bfloat16", "float16", "float32")}
    if name not in dtypes:
        raise ValueError(f"--dtype {name}: expected one of {', '.join(dtypes)}")
    return dtypes[name]


def _interpret_instead() -> bool:
    """Without a GPU, run this command again with Triton's interpreter, which is chosen when Triton is imported."""
    import importlib.util

    import torch

    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1" or not importlib.util.find_spec("triton"):
        return False
    print("No CUDA device: Triton kernels run in Triton's interpreter, on small shapes.", file=sys.stderr)
    # NumPy, which computes there, warns of overflows that a GPU passes over in silence.
    command = [sys.executable, "-W", "ignore::RuntimeWarning", "-m", "nanovllm", *sys.argv[1:]]
    code = subprocess.run(command, env={**os.environ, "TRITON_INTERPRET": "1"}).returncode
    if code:
        raise typer.Exit(code)
    return True


def _bench_document(where: torch.device, results: list[Measurement]) -> dict[str, Any]:
    import datetime

    from nanovllm.kernels.versions import versions

    document: dict[str, Any] = {
        "device": _device_name(where),
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "command": "nanovllm " + " ".join(sys.argv[1:]),
    }
    if where.type == "cuda":
        from nanovllm.kernels.benchmark import copy_bandwidth, empty_kernel_time

        document["copy_bytes_per_second"] = copy_bandwidth(where)
        document["empty_kernel_us"] = 1e6 * empty_kernel_time(where)
    return {**document, "measurements": [m.as_dict() for m in results]}


def _bench_table(where: torch.device, results: list[Measurement]) -> Any:
    title = _device_name(where)
    if where.type == "cuda":
        from nanovllm.kernels.benchmark import copy_bandwidth, empty_kernel_time

        title += f": copy {copy_bandwidth(where) / 1e12:.2f} TB/s, empty kernel {1e6 * empty_kernel_time(where):.2f} us"
    table = _table(
        "op", "case", "provider", "us", "p20-p80", "TB/s", "TFLOP/s", "of limit", "peak MiB", "how", title=title
    )
    for m in results:
        if m.timing is None:
            table.add_row(m.op, str(m.case), m.provider, "", "", "", "", "", "", m.reason)
            continue
        t = m.timing
        table.add_row(
            m.op, str(m.case), m.provider, f"{1e6 * t.median:.2f}", f"{1e6 * t.p20:.2f}-{1e6 * t.p80:.2f}",
            f"{m.bytes / t.median / 1e12:.2f}", f"{m.flops / t.median / 1e12:.1f}",
            "" if m.share is None else f"{m.share:.0%}",
            "" if m.peak_bytes is None else f"{m.peak_bytes / 2**20:.1f}",
            m.method + (", cold" if m.cold else ""),
        )  # fmt: skip
    return table


def _warn_of_slow_choices(
    ops: dict[str, Op], results: list[Measurement], where: torch.device, origins: list[str]
) -> None:
    from nanovllm.kernels.compare import slower_somewhere
    from nanovllm.kernels.selection import rank

    for name in dict.fromkeys(m.op for m in results):
        mine = [m for m in results if m.op == name]
        chosen = rank(ops[name], where, origins)[0].name
        for m in slower_somewhere(mine, chosen):
            print(f"{name} {m.case}: {m.provider} is faster than {chosen}, which is chosen")


def _save_table(where: torch.device, results: list[Measurement], directory: Path, date: str) -> Path:
    import torch

    from nanovllm.kernels.compare import providers_by_speed
    from nanovllm.kernels.tables import canonical_gpu_name, save_table

    by_op = {}
    for name in dict.fromkeys(m.op for m in results):
        relative = providers_by_speed([m for m in results if m.op == name])
        if relative:
            by_op[name] = {"order": list(relative), "relative": {p: round(t, 3) for p, t in relative.items()}}
    return save_table(canonical_gpu_name(torch.cuda.get_device_name(where)), by_op, date, directory)


def _device_name(where: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(where) if where.type == "cuda" else str(where)


def _table(*columns: str, title: str | None = None) -> Any:
    from rich.table import Table

    return Table(*columns, title=title)


def _print(table: Any) -> None:
    from rich.console import Console

    # A file or a pipe has no width: nothing is cut off there.
    console = Console() if sys.stdout.isatty() else Console(width=240)
    console.print(table)
