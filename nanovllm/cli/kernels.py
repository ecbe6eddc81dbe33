"""`nanovllm kernels`: which provider runs each op, why, whether it is right, and how fast it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm.cli import kernels_common as common
from nanovllm.cli.command_group import CommandGroup
from nanovllm.cli.kernels_bench import bench
from nanovllm.cli.kernels_exchange import export_op, import_solutions
from nanovllm.cli.kernels_show import show
from nanovllm.cli.kernels_verify import verify
from nanovllm.cli.text_table import print_table
from nanovllm.console import Column, TablePrinter, say
from nanovllm.json_output import write_json

if TYPE_CHECKING:
    import torch

    from nanovllm.kernels import Cost, Op, Provider

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    help="The ops (functions of the engine) and their providers (implementations).",
)


@app.command("list", short_help="The providers of every op, and which one runs here.")
def list_kernels(
    op: common.OpName = None,
    device: common.Device = "auto",
    kernel_plugin: common.Plugins = None,
    wide: common.Wide = False,
    json_file: common.Json = None,
) -> None:
    """The providers of every op: which one runs here, which ones could, and why the others cannot.

    Providers stand in order of preference, rank 1 first. Name an op for one row
    a provider.
    """
    where, ops, origins = common.prepare(device, kernel_plugin)
    from nanovllm.kernels.op.plugins import failures

    rows = [row for declared in common.matching(ops, op) for row in _provider_rows(declared, where, origins)]
    rows += [
        {"op": "", "provider": name, "rank": None, "chosen": False, "reason": reason, "architectures": ""}
        for name, reason in failures().items()
    ]
    title = f"kernels on {common.short_device_name(where)}"
    if write_json(json_file, rows):
        return
    if wide:
        head = "op", "provider", "rank", "available", "architectures"
        cells = [(r["op"], r["provider"], str(r["rank"] or ""), r["reason"] or "yes", r["architectures"]) for r in rows]
        print_table(head, cells, head, title, wide=True)
    elif op is None:
        _print_ops(rows, title)
    else:
        _print_providers(rows, title)


def _print_ops(rows: list[dict[str, Any]], title: str) -> None:
    """One row an op."""
    table = TablePrinter(Column("op", 31), Column("providers: the first runs, [n] cannot", 48), title=title)
    for name in dict.fromkeys(row["op"] for row in rows):
        mine = [row for row in rows if row["op"] == name]
        marks = ["" if row["reason"] is None else table.note(row["reason"]) for row in mine]
        table.add(name or "(plugin)", " ".join(row["provider"] + mark for row, mark in zip(mine, marks)))
    table.end()


def _print_providers(rows: list[dict[str, Any]], title: str) -> None:
    """One row a provider."""
    columns = Column("op", 31), Column("provider", 16), Column("rank", 4, number=True), Column("GPUs", 7)
    table = TablePrinter(*columns, Column("can it run here?", 17), title=title)
    for row in rows:
        can = "yes" if row["reason"] is None else f"no {table.note(row['reason'])}"
        table.add(
            row["op"], row["provider"], str(row["rank"] or ""), row["architectures"], can,
            style="bold" if row["chosen"] else "",
        )  # fmt: skip
    table.end()


@app.command()
def why(
    op: Annotated[str, typer.Argument(metavar="OP", help="The name of an op; `nanovllm kernels list` shows all.")],
    shape: Annotated[
        str | None, typer.Option(metavar="SHAPE", help="A shape such as 32x1024, to ask about such a call.")
    ] = None,
    dtype: common.Dtype = "bfloat16",
    gpu: Annotated[
        str | None, typer.Option(help=f"With --shape: the least time of the call on this GPU: {common.GPUS}, or here.")
    ] = None,
    device: common.Device = "auto",
    kernel_plugin: common.Plugins = None,
    json_file: common.Json = None,
) -> None:
    """Which provider runs an op here, and why the others do not."""
    if gpu is not None and shape is None:
        raise ValueError(f"--gpu {gpu}: the least time is that of a call; add --shape")
    where, ops, origins = common.prepare(device, kernel_plugin)
    from nanovllm.kernels import KernelError
    from nanovllm.kernels.op.selection import fused_ops_left_out, why_selected
    from nanovllm.kernels.testing.verify import Case

    declared = common.only(ops, op)
    rows = _provider_rows(declared, where, origins)
    call: dict[str, Any] = {}
    if shape is not None:
        arguments = Case(common.shape_of(declared, shape), common.dtype_of(dtype)).arguments(declared, where)
        declared.check(arguments)
        call = {"shape": shape, "dtype": common.dtype_option(dtype)}
        if declared.cost is not None:
            cost = declared.cost(**arguments)
            call |= {"bytes": cost.bytes, "flops": cost.flops}
            call |= {} if gpu is None else _least_time(cost, call["dtype"], gpu)
        for row in rows:
            provider = declared.providers[row["provider"]]
            row["reason"] = row["reason"] or declared.why_reference(provider, arguments)
            if row["reason"] is None:
                try:
                    row["reason"] = declared.refusal(provider, **declared.records.group(arguments))
                except KernelError as e:
                    row["reason"] = str(e)
    because = why_selected(declared, where, origins)
    taken = next((r["provider"] for r in rows if r["chosen"] and r["reason"] is None), "native")
    unused = fused_ops_left_out(declared, where, origins)
    document = {"op": op, "runs": taken, "because": because, "call": call, "providers": rows, "left_out": unused}
    if write_json(json_file, document):
        return
    say(f"{op} on {common.short_device_name(where)}: {taken} runs, because {because}.")
    if unused:
        say(f"So engines do without these fused ops, which contain {op}: {', '.join(unused)}.")
    if "bytes" in call:
        moved = f"moves at least {cost.bytes:,} bytes and computes {cost.flops:,} flops"
        say(f"A call of shape {shape} in {call['dtype']} {moved}.")
    if "least_us" in call:
        limit = f"{call['rate'] / 1e12:.4g} {'TFLOP' if call['limit'] == 'flops' else 'TB'}/s"
        say(f"At the {limit} of {call['gpu']}, that takes at least {call['least_us']:.3g} us.")
    question = "can it take this call?" if call else "can it run here?"
    table = TablePrinter(Column("provider", 24), Column("rank", 4, number=True), Column(question, 50))
    for row in rows:
        can = "yes" if row["reason"] is None else f"no {table.note(row['reason'])}"
        table.add(row["provider"], str(row["rank"] or ""), can)
    table.end()


def _least_time(cost: Cost, dtype: str, gpu: str) -> dict[str, Any]:
    """The least time of a call on a GPU: the preset of that name, or "here"."""
    import torch

    from nanovllm.hardware.gpu_presets import device_model, this_device

    if gpu == "here" and not torch.cuda.is_available():
        raise ValueError(f"--gpu here: there is no CUDA device; name one of {common.GPUS}")
    model = this_device(torch.device("cuda", torch.cuda.current_device())) if gpu == "here" else device_model(gpu)
    by_flops = dtype in model.matmul and cost.flops > model.ridge(dtype) * cost.bytes
    limit, rate = ("flops", model.rate(dtype)) if by_flops else ("bytes", model.bandwidth)
    return {"gpu": model.name, "limit": limit, "rate": rate, "least_us": 1e6 * getattr(cost, limit) / rate}


app.command(short_help="The declaration, the reference and the providers of an op.")(show)
app.command(short_help="Compare every provider with the reference in float64.")(verify)
app.command(short_help="Time the providers of an op.")(bench)
app.command("export", short_help="Write an op and its kernels as FlashInfer-Bench's files.")(export_op)
app.command("import", short_help="Verify and time kernels of FlashInfer-Bench's files.")(import_solutions)


@app.command("table", hidden=True)
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


def _missing(provider: Provider) -> str | None:
    """Why there is no function of a provider that could run here, or None."""
    try:
        _ = provider.fn
    except (ImportError, AttributeError) as e:
        return str(e)
    return None


def _provider_rows(declared: Op, where: torch.device, plugins: Any) -> list[dict[str, Any]]:
    from nanovllm.kernels.op.selection import ranked_providers

    ranked = [p.name for p in ranked_providers(declared, where, plugins)]
    rows = [
        {
            "op": declared.name,
            "provider": p.name,
            "rank": ranked.index(p.name) + 1 if p.name in ranked else None,
            "chosen": p.name == ranked[0],
            "reason": p.support(where) or _missing(p),
            "architectures": p.architectures,
        }
        for p in declared.providers.values()
    ]
    return sorted(rows, key=lambda r: (r["rank"] is None, r["rank"]))
