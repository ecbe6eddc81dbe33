"""Whether a change made the engine slower: revisions of this repository on one GPU, measured in turns.

    python -m benchmarks.revisions HEAD~1 . --workloads bs1,bs8,bs32,bs128,prefill --num-kvcache-blocks 650
    python -m benchmarks.revisions . HEAD~1 HEAD~1 . --num-kvcache-blocks 650    # two engines each: which takes its
                                                                                 # memory first cancels out
    python -m benchmarks.revisions HEAD~1 . --option kv_cache_dtype=fp8 --workloads std256

A revision is whatever git knows, or "." for the files as they are. Each engine is a process of its own; all get ready
together, and a round is a run of each, every other round the other way round. Requests are the same for all and differ
from round to round. A row has each revision's median of seconds, and of the rounds' speeds relative to the revision
named first the median and the quartiles: above 1 is faster. Weights are random; temperature 0.6.

All engines hold their memory at the same time, so --num-kvcache-blocks has to fit as often as there are engines.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

from benchmarks.needs import progress
from benchmarks.turns import Peer, serve, stop_on_signals

ROOT = Path(__file__).resolve().parents[1]
WORKLOADS = "bs1,bs8,bs32,bs128,prefill"


class RevisionEngine:
    """nanovllm of one revision, in a process of its own. It uses what all revisions have in common."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options = options

    def answer(self, request: dict[str, Any]) -> Any:
        """{} -> the vocabulary's size and the folder of the code; {"prompts", "lengths"} -> seconds of a run."""
        return self._run(**request) if request else self._start()

    def _start(self) -> list[Any]:
        import nanovllm

        self._llm = nanovllm.LLM(**self._options)
        return [self._llm.engine.model_config.vocab_size, str(Path(nanovllm.__file__).parent)]

    def _run(self, prompts: list[list[int]], lengths: list[int]) -> float:
        from nanovllm import SamplingParams

        params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length) for length in lengths]
        start = time.perf_counter()
        self._llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start


def option(text: str) -> tuple[str, Any]:
    """NAME=VALUE: an argument of LLM, whose value is JSON or else a text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE, such as kv_cache_dtype=fp8")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1 on")
    return int(text)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument(
        "revisions", nargs="+", metavar="REVISION", help='two or more; the first is the baseline; ".": the files'
    )
    p.add_argument(
        "--model", default="qwen3-0.6b", help="a preset or a folder; weights are random (default: qwen3-0.6b)"
    )
    p.add_argument("--workloads", default=WORKLOADS, help=f"names of bench.py's workloads (default: {WORKLOADS})")
    p.add_argument("--rounds", type=positive, default=8, help="after one that is not counted (default: 8)")
    p.add_argument("--num-kvcache-blocks", type=positive, metavar="N", help="the cache of each engine, in blocks")
    p.add_argument(
        "--option", type=option, action="append", default=[], metavar="NAME=VALUE", help="an argument of LLM"
    )
    p.add_argument("--budget", type=float, default=3600, help="seconds after which no round begins (default: 3600)")
    p.add_argument("--json", type=Path, metavar="FILE", help="keep the rows in this file")
    p.add_argument("--serve", metavar="OPTIONS", help=argparse.SUPPRESS)
    return p


def code_of(revision: str, folder: Path) -> Path:
    """A folder with the package as a revision has it. A ValueError: git does not know it."""
    if revision == ".":
        return ROOT
    done = subprocess.run(["git", "archive", revision, "nanovllm"], cwd=ROOT, capture_output=True)
    if done.returncode:
        reason = done.stderr.decode(errors="replace").strip().partition("\n")[0]
        raise ValueError(f"revision {revision!r}: git archive says {reason!r}; name a commit, a tag or a branch")
    folder.mkdir()
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def main(argv: list[str] | None = None) -> int:
    p = parser()
    if argv is None and sys.argv[1:2] == ["--serve"]:
        serve(RevisionEngine(json.loads(sys.argv[2])).answer)
        return 0
    args = p.parse_args(argv)
    from nanovllm.bench.workloads import select

    if len(set(args.revisions)) < 2:
        p.error("REVISION: expected two different ones or more")
    stop_on_signals()
    with tempfile.TemporaryDirectory() as folder:
        try:
            workloads = select(args.workloads.split(","))
            code = {name: code_of(name, Path(folder) / str(i)) for i, name in enumerate(dict.fromkeys(args.revisions))}
        except ValueError as error:
            p.error(str(error))
        options = {"load_format": "dummy", "skip_tokenizer_init": True, **dict(args.option), "model": args.model}
        options.setdefault("max_model_len", max(workload.max_len for workload in workloads) + 1)
        if args.num_kvcache_blocks:
            options["num_kvcache_blocks"] = args.num_kvcache_blocks
        peers: list[Peer] = []
        try:
            for i, name in enumerate(args.revisions):
                # By its path: with `-m` the package in this folder would be found first.
                command = [__file__, "--serve", json.dumps(options)]
                environment = {"PYTHONPATH": f"{code[name]}:{ROOT}"}
                peers.append(Peer(name, command, environment, Path(folder) / f"log-{i}"))
                peers[-1].ask({})
            progress(f"loading {args.model} {len(peers)} times")
            return measure(args, peers, workloads, code)
        finally:
            for peer in peers:
                peer.stop()


def measure(args: argparse.Namespace, peers: list[Peer], workloads: list[Any], code: dict[str, Path]) -> int:
    start = time.perf_counter()
    end = start + args.budget
    vocabularies = []
    for peer in peers:
        if (reply := peer.reply(end)) is None:
            return 1
        vocabularies.append(reply[0])
        assert Path(reply[1]) == code[peer.label] / "nanovllm", "another package was imported"
        print(f"{peer.label}: ready after {time.perf_counter() - start:.0f} s", flush=True)
    seconds: dict[str, list[dict[str, float]]] = {workload.name: [] for workload in workloads}
    for turn in range(args.rounds + 1):
        if time.perf_counter() > end:
            print(f"{turn - 1} of {args.rounds} rounds, as the budget allows")
            break
        progress(f"round {turn} of {args.rounds}" if turn else "a round that is not counted")
        for workload in workloads:
            items = workload.draw(turn, vocabularies[0])
            request = {"prompts": [i.prompt for i in items], "lengths": [i.num_output for i in items]}
            found: dict[str, list[float]] = {}
            for peer in peers if turn % 2 else peers[::-1]:
                peer.ask(request)
                if (took := peer.reply(time.perf_counter() + 600)) is None:
                    return 1
                found.setdefault(peer.label, []).append(took)
            if turn:  # the first one is a warm-up
                seconds[workload.name].append({name: mean(each) for name, each in found.items()})
    rows = [row for name, rounds in seconds.items() for row in rows_of(name, args.revisions[0], rounds)]
    show(rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0 if rows else 1


def rows_of(workload: str, first: str, rounds: list[dict[str, float]]) -> list[dict[str, Any]]:
    """A row for each revision. rounds: the seconds of each; first: the revision that speeds are relative to."""
    rows = []
    for name in rounds[0] if rounds else ():
        speeds = [each[first] / each[name] for each in rounds]
        low, _, high = quantiles(speeds) if len(speeds) > 1 else speeds * 3
        rows.append({
            "workload": workload, "revision": name, "seconds": median(each[name] for each in rounds),
            "speed": median(speeds), "quartiles": [low, high], "rounds": [each[name] for each in rounds],
        })  # fmt: skip
    return rows


def show(rows: Iterable[dict[str, Any]]) -> None:
    print("| workload | revision | seconds | speed | quartiles |\n|---|---|---|---|---|")
    for row in rows:
        low, high = row["quartiles"]
        shown = f"{row['seconds']:.4f} | {row['speed']:.3f} | {low:.3f} to {high:.3f}"
        print(f"| {row['workload']} | {row['revision']} | {shown} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
