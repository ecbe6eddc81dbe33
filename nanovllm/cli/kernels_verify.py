"""`nanovllm kernels verify`: every provider's results against the reference."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm.cli import kernels_common as common

if TYPE_CHECKING:
    import torch

    from nanovllm.kernels.testing.verify import Verdict


def verify(
    op: common.OpName = None,
    provider: common.Providers = None,
    device: common.Device = "auto",
    seed: Annotated[
        int | None, typer.Option(help="Seed of the random inputs; by default a random one, which is printed.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Only small shapes, once in each dtype: for compute-sanitizer.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes that share the cases.")] = 1,
    kernel_plugin: common.Plugins = None,
    as_json: common.Json = False,
) -> None:
    """Compare every provider with the reference in float64, on every kind of input.

    Fails if a provider is wrong, or if none can run.

    Without a GPU, Triton kernels run in Triton's interpreter, on small shapes.
    """
    if device in ("auto", "cpu") and _interpret_instead():
        return
    where, ops, _ = common.prepare(device, kernel_plugin)
    if seed is None:
        seed = secrets.randbelow(1 << 31)
        print(f"inputs of --seed {seed}", file=sys.stderr)
    rows: list[dict[str, Any]] = []
    for declared in common.with_provider(common.matching(ops, op), provider):
        if declared.inputs is None:
            rows.append({"op": declared.name, "provider": "", "reason": "declares no inputs"})
            continue
        for name, candidate in declared.providers.items():
            if not provider or name in provider:
                rows.append({"op": declared.name, "provider": name, "reason": candidate.support(where)})
    pairs = [(r["op"], r["provider"]) for r in rows if r["reason"] is None]
    if not pairs:
        raise common.nothing_done("verified", (f"{r['provider'] or r['op']}: {r['reason']}" for r in rows))
    verdicts = _verdicts(pairs, where, kernel_plugin or [], seed, quick, jobs)
    for row in rows:
        if row["reason"] is None:
            row |= _summary(verdicts[row["op"], row["provider"]], seed)
    failures = [f"{r['op']}, {r['provider']}: {f}" for r in rows for f in r.get("failures", ())]
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        _print_rows(rows, failures, common.device_name(where))
    if failures:
        raise typer.Exit(1)


def _verdicts(
    pairs: list[tuple[str, str]], where: torch.device, plugins: list[str], seed: int, quick: bool, jobs: int
) -> dict[tuple[str, str], list[Verdict]]:
    """Of each op and provider, in the order of the op's cases."""
    from nanovllm.kernels import all_ops
    from nanovllm.kernels.testing.verify import verify_op
    from nanovllm.kernels.testing.verify_jobs import verify_in_processes

    ops = all_ops()
    if jobs > 1:
        named = {op: ops[op] for op, _ in pairs}
        return verify_in_processes(list(named.values()), pairs, where, plugins, seed, quick, jobs)
    return {
        (op, name): verify_op(ops[op], ops[op].providers[name], where, seed=seed, quick=quick) for op, name in pairs
    }


def _summary(verdicts: list[Verdict], seed: int) -> dict[str, Any]:
    return {
        "seed": seed,
        "cases": sum(v.skipped is None for v in verdicts),
        "skipped": sum(v.skipped is not None for v in verdicts),
        "worst_error_over_tolerance": max((v.error for v in verdicts), default=0.0),
        "failures": [f"{v.case}: {v.failure}" for v in verdicts if v.failure],
    }


def _print_rows(rows: list[dict[str, Any]], failures: list[str], title: str) -> None:
    table = common.new_table("op", "provider", "cases", "not taken", "worst error / tolerance", "verdict", title=title)
    for r in rows:
        if r["reason"] is not None:
            table.add_row(r["op"], r["provider"], "", "", "", r["reason"])
            continue
        verdict = "right" if r["cases"] else "nothing to compare: it took none of the cases"
        verdict = f"[red]{len(r['failures'])} wrong[/]" if r["failures"] else verdict
        worst = f"{r['worst_error_over_tolerance']:.2f}"
        table.add_row(r["op"], r["provider"], str(r["cases"]), str(r["skipped"]), worst, verdict)
    common.print_table(table)
    for failure in failures[:40]:
        print(failure)
    if len(failures) > 40:
        print(f"and {len(failures) - 40} more; --json has all")


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
