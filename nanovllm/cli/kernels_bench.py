"""`nanovllm kernels bench`: the time of each provider of an op, also as a share of the hardware limit."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm.cli import kernels_common as common

if TYPE_CHECKING:
    import torch

    from nanovllm.kernels import Op, Provider
    from nanovllm.kernels.op.declaration import Shape
    from nanovllm.kernels.testing.compare import Measurement


def bench(
    op: common.OpName = None,
    shape: common.Shapes = None,
    dtype: common.Dtype = "bfloat16",
    provider: common.Providers = None,
    compile: Annotated[bool, typer.Option(help="Also time torch.compile of the reference.")] = False,
    device: common.Device = "auto",
    kernel_plugin: common.Plugins = None,
    save: Annotated[Path | None, typer.Option(help="Write the measurements to this JSON file.")] = None,
    save_table: Annotated[
        Path | None,
        typer.Option(help="Write the order of the providers by speed into this directory; kernels are selected by it."),
    ] = None,
    as_json: common.Json = False,
) -> None:
    """Time the providers of an op: medians, with inputs in device memory; shares of the hardware limit and of a copy.

    Ctrl-C keeps what was measured. Fails if nothing can be measured.
    """
    from nanovllm.kernels.testing.compare import compiled

    where, ops, origins = common.prepare(device, kernel_plugin)
    if save_table is not None and where.type != "cuda":
        raise ValueError(f"--save-table: a table of kernels is measured on a GPU, this is {where}")
    results: list[Measurement] = []
    skipped, progress = [], not as_json and sys.stderr.isatty()
    try:
        for declared in common.with_provider(common.matching(ops, op), provider):
            if declared.inputs is None or declared.cost is None:
                skipped.append(f"{declared.name}: it declares no inputs or no cost")
                print(f"{skipped[-1]}: not timed", file=sys.stderr)
                continue
            shapes = None if shape is None else [common.shape_of(declared, s) for s in shape]
            candidates = [p for name, p in declared.providers.items() if not provider or name in provider]
            candidates += [compiled(declared)] if compile else []
            _measure(declared, candidates, common.dtype_of(dtype), shapes, where, results, progress)
    except KeyboardInterrupt:
        # The table would lack ops, or providers that were not reached.
        save_table = None
        print("stopped early, with what was measured so far; no table is written", file=sys.stderr)
    else:
        if all(m.timing is None for m in results):
            raise common.nothing_done("timed", [*skipped, *(f"{m.provider}: {m.reason}" for m in results)])
    document = _bench_document(where, results)
    if as_json:
        print(json.dumps(document, indent=1))
    else:
        common.print_table(_bench_table(where, results))
        _warn_of_slow_choices(ops, results, where, origins)
    if save is not None:
        save.parent.mkdir(parents=True, exist_ok=True)
        save.write_text(json.dumps(document, indent=1) + "\n")
    if save_table is not None:
        print(f"wrote {_save_table(where, results, save_table, document['date'])}")


def _measure(
    declared: Op, candidates: Sequence[Provider], dtype: torch.dtype, shapes: list[Shape] | None, where: torch.device,
    results: list[Measurement], progress: bool,
) -> None:  # fmt: skip
    """Append the times of an op's providers; shapes None: the declared ones, on a CPU the first of a decode step."""
    from nanovllm.kernels.testing.compare import bench_cases, measure

    assert declared.inputs is not None
    if where.type == "cpu" and shapes is None:
        shapes = list(declared.inputs.decode[:1])
    for case in bench_cases(declared, dtype, shapes):
        for candidate in candidates:
            results.append(measure(declared, candidate, case, where))
            if results[-1].timing is not None and candidate.planned is not None:
                results.append(measure(declared, candidate, case, where, without_plan=True))
        if progress:
            print(f"\r{declared.name} {case}  ", end="", file=sys.stderr)


def _bench_document(where: torch.device, results: list[Measurement]) -> dict[str, Any]:
    import datetime

    from nanovllm.hardware.versions import versions

    document: dict[str, Any] = {
        "device": common.device_name(where),
        "date": datetime.date.today().isoformat(),
        "versions": versions(),
        "command": "nanovllm " + _command(sys.argv[1:]),
    }
    if where.type == "cuda":
        from nanovllm.hardware.roofline import copy_bandwidth, empty_kernel_time

        document["copy_bytes_per_second"] = copy_bandwidth(where)
        document["empty_kernel_us"] = 1e6 * empty_kernel_time(where)
    return {**document, "measurements": [m.as_dict() for m in results]}


def _command(arguments: Sequence[str]) -> str:
    """The arguments without where the results go: a path of the machine that measured them."""
    text, options = " ".join(arguments), r"--save(-table)?(=|\s+)\S+"
    return " ".join(re.sub(options, "", text).split())


def _bench_table(where: torch.device, results: list[Measurement]) -> Any:
    title = common.device_name(where)
    if where.type == "cuda":
        from nanovllm.hardware.roofline import copy_bandwidth, empty_kernel_time

        title += f": copy {copy_bandwidth(where) / 1e12:.2f} TB/s, empty kernel {1e6 * empty_kernel_time(where):.2f} us"
    table = common.new_table(
        "op", "case", "provider", "us", "p20-p80", "TB/s", "TFLOP/s", "of limit", "of copy", "peak MiB", "how",
        title=title,
    )  # fmt: skip
    if any(m.without_plan for m in results):
        table.caption = (
            "without its plan: planned once for a batch, before the clock started, and run many times; the engine and "
            "the measured order of providers go by the row above, of whole calls"
        )
    for m in results:
        if m.timing is None:
            table.add_row(m.op, str(m.case), m.provider, "", "", "", "", "", "", "", m.reason)
            continue
        t = m.timing
        table.add_row(
            m.op, str(m.case), m.provider, f"{1e6 * t.median:.2f}", f"{1e6 * t.p20:.2f}-{1e6 * t.p80:.2f}",
            f"{m.bytes / t.median / 1e12:.2f}", f"{m.flops / t.median / 1e12:.1f}",
            "" if m.share is None else f"{m.share:.0%}",
            "" if m.copy is None else f"{m.copy / t.median:.0%}",
            "" if m.peak_bytes is None else f"{m.peak_bytes / 2**20:.1f}",
            m.method + (", cold" if m.cold else ""),
        )  # fmt: skip
    return table


def _warn_of_slow_choices(
    ops: dict[str, Op], results: list[Measurement], where: torch.device, origins: list[str]
) -> None:
    from nanovllm.kernels.op.selection import rank
    from nanovllm.kernels.testing.compare import slower_somewhere

    for name in dict.fromkeys(m.op for m in results):
        mine = [m for m in results if m.op == name]
        chosen = rank(ops[name], where, origins)[0].name
        for m in slower_somewhere(mine, chosen):
            print(f"{name} {m.case}: {m.provider} is faster than {chosen}, which is chosen")


def _save_table(where: torch.device, results: list[Measurement], directory: Path, date: str) -> Path:
    import torch

    from nanovllm.hardware.gpu_name import canonical_gpu_name
    from nanovllm.kernels.op.measured_order import save_table
    from nanovllm.kernels.testing.compare import providers_by_speed

    by_op = {}
    for name in dict.fromkeys(m.op for m in results):
        relative = providers_by_speed([m for m in results if m.op == name])
        if relative:
            by_op[name] = {"order": list(relative), "relative": {p: round(t, 3) for p, t in relative.items()}}
    return save_table(canonical_gpu_name(torch.cuda.get_device_name(where)), by_op, date, directory)
