"""`nanovllm kernels export` and `import`: ops and kernels as files of FlashInfer-Bench."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanovllm.cli import kernels_common as common
from nanovllm.console import import_torch

if TYPE_CHECKING:
    from nanovllm.adapters.flashinfer_bench.importing import Found


def export_op(
    op: Annotated[str, typer.Argument(metavar="OP", help="The name of an op; `nanovllm kernels list` shows all.")],
    out: Annotated[
        Path, typer.Option(help="The directory that gets definitions/, workloads/, blob/ and solutions/.")
    ] = Path("flashinfer-trace"),
    provider: common.Providers = None,
    dtype: common.Dtype = "bfloat16",
    shape: common.Shapes = None,
    author: Annotated[str, typer.Option(help="The author's name in the Solutions.")] = "nanovllm",
    kernel_plugin: common.Plugins = None,
) -> None:
    """Write an op as FlashInfer-Bench's Definitions with their workloads, and its providers as Solutions.

    There is one Definition for each model's sizes among the op's shapes. The number of rows, tokens or sequences
    varies. The Solution of `native` is self-contained. The others call this package, which has to be installed where
    they run.
    """
    _, ops, _ = common.prepare("cpu", kernel_plugin)
    from nanovllm.adapters.flashinfer_bench import export_op as write

    declared = common.only(ops, op)
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out}: it is a file, expected a directory")
    shapes = None if shape is None else [common.shape_of(declared, s) for s in shape]
    done = write(declared, out, common.dtype_of(dtype), shapes, provider, author)
    for path in done.files:
        print(path)
    for reason in done.left_out:
        print(f"left out: {reason}", file=sys.stderr)


def import_solutions(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A Solution's JSON file, or a directory of FlashInfer-Bench.")
    ],
    definition: Annotated[
        Path | None, typer.Option(help="The Definition's file; by default it is looked for by its name.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Only this Solution or Definition; repeatable.", metavar="NAME")
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Keep the plugin in this .py file, for --kernel-plugin.", metavar="FILE.py")
    ] = None,
    bench: Annotated[bool, typer.Option(help="Time the Solutions that are right.")] = True,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that a case may take.")] = 120,
    seed: Annotated[int | None, typer.Option(help="Seed of the random inputs; by default a random one.")] = None,
    device: common.Device = "auto",
) -> None:
    """Read Solutions of FlashInfer-Bench as a plugin, compare them with their Definition, and time them.

    Each Definition becomes an op, each of its Solutions in Python or Triton a provider of it. Their code runs in
    processes of their own, with a time limit. It is not confined: import only code that you would run. Fails if a
    Solution is wrong.
    """
    import_torch()
    from nanovllm.adapters.flashinfer_bench import find, write_plugin

    if save is not None and save.suffix != ".py":
        raise ValueError(f"--save {save}: expected a file whose name ends in .py")
    found = find(path, definition, only or ())
    with tempfile.TemporaryDirectory() as folder:
        plugin = save if save is not None else Path(folder, "imported.py")
        write_plugin(found, plugin)
        if save is not None:
            print(f"wrote {save}")
        code = 0
        for one in found:
            code = code or _check_and_time(one, plugin, bench, timeout, seed, device)
    if code:
        raise typer.Exit(code)


def _check_and_time(one: Found, plugin: Path, bench: bool, timeout: float, seed: int | None, device: str) -> int:
    """Verify the Solutions of a Definition, and time them if they are right; the exit code."""
    from nanovllm.adapters.flashinfer_bench.plugin import provider_name

    names = [provider_name(s["name"], s["definition"]) for s in one.solutions]
    solutions = [word for name in names for word in ("--provider", name)]
    shared = [one.op, "--kernel-plugin", str(plugin), "--device", device]
    drawn = [] if seed is None else ["--seed", str(seed)]
    # In processes of their own, since the time of whole commands is limited: a kernel may hang the benchmark too.
    verify = ["verify", *shared, *solutions, "--timeout", f"{timeout:g}", *drawn]
    code = _run(verify, None)
    if code == 0 and bench:
        calls = (1 + len(one.solutions)) * max(1, len(one.workloads))
        code = _run(["bench", *shared, "--dtype", one.dtype, "--provider", "native", *solutions], timeout * calls)
    return code


def _run(command: list[str], limit: float | None) -> int:
    """The exit code of a command of `nanovllm kernels`, which writes to this program's output."""
    sys.stdout.flush()
    try:
        code = subprocess.run([sys.executable, "-m", "nanovllm", "kernels", *command], timeout=limit).returncode
    except subprocess.TimeoutExpired:
        print(f"nanovllm: `kernels {command[0]}` took longer than {limit:g} s and was ended", file=sys.stderr)
        return 1
    if code not in (0, 1):
        print(f"nanovllm: a Solution ended the process of `kernels {command[0]}` with code {code}", file=sys.stderr)
    return min(abs(code), 1)
