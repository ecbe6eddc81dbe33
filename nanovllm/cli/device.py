"""`nanovllm device`: what a GPU has and what it does, as the planner takes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm.cli.kernels_common import GPUS, Json, Wide
from nanovllm.cli.text_table import print_table
from nanovllm.console import Column, TablePrinter, import_torch, say
from nanovllm.json_output import write_json

if TYPE_CHECKING:
    from nanovllm.hardware.gpu_presets import DeviceModel

app = typer.Typer(add_completion=False)


@app.command()
def device(
    gpu: Annotated[
        str | None, typer.Option(help=f"{GPUS}; by default the CUDA device here, measured, else every preset.")
    ] = None,
    refresh: Annotated[bool, typer.Option(help="Measure again, and keep what is found.")] = False,
    wide: Wide = False,
    json_file: Json = None,
) -> None:
    """What a GPU has (multiprocessors, registers, shared memory) and does (bandwidth, matmul rates, latencies)."""
    from dataclasses import asdict

    from nanovllm.hardware.gpu_presets import PRESETS, device_model, this_device

    if gpu not in (None, "here"):
        if refresh:
            raise ValueError(f"--refresh: measures the GPU that is here, so it does not go with --gpu {gpu}")
        models = [device_model(gpu)]
    else:
        import_torch()
        import torch

        if torch.cuda.is_available():
            models = [this_device(torch.device("cuda", torch.cuda.current_device()), refresh)]
        elif gpu == "here" or refresh:
            raise ValueError("device: there is no CUDA device to measure; --gpu h100 shows a preset")
        else:
            models = list(PRESETS.values())
    found = [asdict(m) | {"vector_flops": m.vector_flops, "matrix_unit": m.matrix_unit} for m in models]
    if write_json(json_file, found[0] if gpu or len(found) == 1 else found):
        return
    if len(models) > 1:
        built = "" if torch.version.cuda else f" for PyTorch {torch.__version__}, built without CUDA"
        say(f"No GPU is here{built}. These are presets:")
    if len(models) > 1 and not wide:
        _print_summary(models)
    else:
        _print(models)


def _print_summary(models: list[DeviceModel]) -> None:
    """One row a GPU."""
    table = TablePrinter(
        Column("GPU", 16), Column("compute", 7, number=True), Column("SMs", 4, number=True),
        Column("L2 MiB", 6, number=True), Column("TB/s", 12, number=True), Column("bf16 TFLOP/s", 12, number=True),
    )  # fmt: skip
    for m in models:
        table.add(
            m.name, f"{m.capability / 10:.1f}", str(m.sms), f"{m.l2_bytes / 2**20:.0f}",
            f"{m.bandwidth / 1e12:.2f} of {m.peak_bandwidth / 1e12:.2f}",
            f"{m.matmul['bfloat16'] / 1e12:.0f} of {m.peak_matmul['bfloat16'] / 1e12:.0f}",
        )  # fmt: skip
    table.end()
    say(f"{_PRESETS_NOTE}\n--gpu NAME shows every figure of one GPU, --wide of all.")


_PRESETS_NOTE = "Presets: the rate that programs reach, of the rate in the data sheet. The H200's are measured."


def _print(models: list[DeviceModel]) -> None:
    """One row a property."""
    head = ["", *(m.name for m in models)]
    print_table(head, [(name, *cells) for name, cells in rows(models)], ("",), wide=True)
    if any(m.measured for m in models):
        print("* measured on this GPU; the rest as the driver says, or of the preset")
    else:
        say(f"{_PRESETS_NOTE}\nOn a machine with a GPU, `nanovllm device` measures it.")


def rows(models: list[DeviceModel]) -> list[tuple[str, list[str]]]:
    """(name, a cell for each model) for every property."""

    def row(name: str, text: Any, field: str = "") -> tuple[str, list[str]]:
        return name, [text(m) + (" *" if field in m.measured else "") for m in models]

    found = [
        row("compute capability", lambda m: f"{m.capability / 10:.1f}"),
        row("multiprocessors (SMs)", lambda m: str(m.sms)),
        row("matrix units", lambda m: m.matrix_unit),
        row("clock, GHz", lambda m: f"{m.clock / 1e9:.2f}"),
        row("registers an SM / a thread", lambda m: f"{m.registers_per_sm} / {m.registers_per_thread}"),
        row("shared memory an SM / a block, KiB", lambda m: f"{m.shared_per_sm >> 10} / {m.shared_per_block >> 10}"),
        row("warps / blocks an SM", lambda m: f"{m.warps_per_sm} / {m.blocks_per_sm}"),
        row("L2 cache, MiB", lambda m: f"{m.l2_bytes / 2**20:.0f}", "l2_bytes"),
        row("L2 bandwidth, TB/s", lambda m: f"{m.l2_bandwidth / 1e12:.2f}", "l2_bandwidth"),
        row("L2 latency, ns", lambda m: f"{1e9 * m.l2_latency:.0f}", "l2_latency"),
        row("memory bandwidth: data sheet, TB/s", lambda m: f"{m.peak_bandwidth / 1e12:.2f}"),
        row("memory bandwidth: sustained, TB/s", lambda m: f"{m.bandwidth / 1e12:.2f}", "bandwidth"),
        row("memory latency, ns", lambda m: f"{1e9 * m.dram_latency:.0f}", "dram_latency"),
        row("empty kernel in a CUDA graph, us", lambda m: f"{1e6 * m.launch:.2f}", "launch"),
        row("ordinary units, TFLOP/s", lambda m: f"{m.vector_flops / 1e12:.1f}"),
    ]
    for dtype in dict.fromkeys(d for m in models for d in m.matmul):

        def rate(m: DeviceModel, dtype: str = dtype) -> str:
            return f"{m.matmul[dtype] / 1e12:.0f} of {m.peak_matmul[dtype] / 1e12:.0f}" if dtype in m.matmul else "-"

        found.append(row(f"{dtype} products, TFLOP/s of data sheet", rate, f"matmul[{dtype}]"))
        found.append(row("  ridge, flops a byte", lambda m, d=dtype: f"{m.ridge(d):.0f}" if d in m.matmul else "-"))
    return found
