"""What `bench.py` does without measuring: show what was measured before."""

from __future__ import annotations

import argparse

from nanovllm.bench import result_tables as text
from nanovllm.bench import results
from nanovllm.bench.arguments import names_in
from nanovllm.bench.workloads import WORKLOADS


def report(args: argparse.Namespace) -> int:
    """Draw the reports of an earlier profile again."""
    from nanovllm.bench.profile_job import draw_again

    for line in draw_again(args.report, args.profile_dir, args.plots):
        print(line)
    return 0


def history(args: argparse.Namespace) -> int:
    """Print how the kept workloads moved."""
    files = results.kept_files(args.results)
    if args.workload is not None:
        wanted = set(names_in("--workload", args.workload, WORKLOADS))
        files = [f for f in files if f.stem in wanted]
    if not files:
        print(f"nothing is kept in {args.results} yet; keep a run with --save")
        return 1
    for path in files:
        print("\n".join(text.history_lines(path)))
    return 0


def tables(args: argparse.Namespace) -> int:
    """Write the kept results as tables: to the standard output, or between a file's markers."""
    made = text.markdown(results.kept_files(args.results))
    if str(args.tables) == "-":
        print(made)
    else:
        text.write_between_markers(args.tables, made)
        print(f"written: {args.tables}")
    return 0
