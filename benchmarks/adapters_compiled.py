"""What the ops give in a model of transformers that torch.compile compiles, beside the model alone.

    python -m benchmarks.adapters_compiled --models qwen3-0.6b,qwen3-8b --json rows.json         # 2 minutes on an H200

Decode steps are compiled as `generate` does it with a static cache, prefill by torch.compile. Each side is a process
with a model of its own. They compile together, which takes minutes, so models have `--layers` layers. Then they take
turns, every other round the other way round: a row has the median of the rounds, and of their ratios to the first
side. Sides:

    plain       transformers
    nanovllm    after `apply`: the attention alone
    attention   after `apply` with `attention_dense` named, so that no forward of a module is replaced
    named       after `apply` with all ops named: each is a call in the graph
    traced      as `named`, norms, rotations and activations by their references, which Inductor compiles
    packed      as `traced`, and attention by transformers: joined projections alone
    eager       after `apply`, not compiled: decode steps are one loop
    kernels, liger   the package kernels with our layers, and Liger-Kernel, where they are installed

The GPU's time is that of its kernels and copies in one more run, by PyTorch's profiler: the host has no part in it.
The difference is that of logits to the first side's, over the largest: of decode steps as far as tokens are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.adapters_transformers import available, made, side_of
from benchmarks.adapters_work import Prefilling, works
from benchmarks.turns import Peer, serve, stop_on_signals
from nanovllm.adapters.transformers import OPS

STEPS = 9
"""Tokens that are generated to compare logits."""
REPEATS = 2
"""Runs of a round, of which the fastest counts."""
NOT_PACKED = "attention_dense", "attention_decode"
TRACED: dict[str, Any] = {op: () if op in NOT_PACKED else "native" for op in OPS}
SIDES: dict[str, dict[str, Any] | None] = {
    "nanovllm": None, "attention": {"attention_dense": ()}, "eager": None, "named": dict.fromkeys(OPS, ()),
    "traced": TRACED, "packed": {op: by for op, by in TRACED.items() if by},
}  # fmt: skip
"""Those with `apply`, and its ops."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", default="qwen3-0.6b,qwen3-8b", help="presets, or tiny")
    p.add_argument("--sides", default="plain,nanovllm,named,traced,packed,eager,kernels,liger")
    p.add_argument("--layers", type=int, default=4, help="of each model; 0: all")
    p.add_argument("--batches", default="1,32")
    p.add_argument("--prompt-len", type=int, default=128)
    p.add_argument("--output-len", type=int, default=65)
    p.add_argument("--start-len", type=int, default=9, help="tokens that a decode step's time is without")
    p.add_argument("--prefill", default="4x2048", help="batch x tokens; empty: none")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--ready", type=float, default=600, help="seconds after which sides that are not ready are left out")
    p.add_argument("--budget", type=float, default=900, help="seconds after which a work gets only its first round")
    p.add_argument("--backend", default="inductor", help="of torch.compile")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--json", type=Path, help="keep the rows in this file, as they come")
    p.add_argument("--peer", nargs=2, metavar=("MODEL", "SIDE"), help=argparse.SUPPRESS)
    return p


class Compiled:
    """One side of a model, in its process."""

    def __init__(self, args: argparse.Namespace) -> None:
        # A graph for each batch size, as one that is compiled for one only.
        torch._dynamo.config.automatic_dynamic_shapes = False
        args.cache, name, self._side = "static", *args.peer
        compiled = self._side != "eager"
        self._model = made(name, args.device, args.layers)
        self._works: list[Any] = [make(self._model) for make in works(args, compiled)]
        if compiled and args.device == "cpu":  # where transformers compiles if it is told to
            self._model.generation_config.compile_config = _config(args.backend)
        self._folder = Path(os.environ["ADAPTERS_COMPILED"])
        self._stack = ExitStack()
        self._last: Any = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """{} -> what was prepared; {"work": n} -> seconds of one run; and {"busy": True} -> those of the GPU."""
        try:
            if request.get("busy"):
                return {"seconds": self._works[request["work"]].busy_seconds()}
            return {"seconds": self._run(request["work"])} if "work" in request else self._prepare()
        except Exception:
            return {"error": traceback.format_exc()[-4000:]}

    def _prepare(self) -> dict[str, Any]:
        side = "nanovllm" if self._side in SIDES else self._side
        self._stack.enter_context(side_of(self._model, side, SIDES.get(self._side)))
        started, failures = time.perf_counter(), {}
        for i, work in enumerate(self._works):
            try:
                work.prepare()
                torch.save(self._logits(work), self._folder / f"{os.getpid()}-{i}")
            except Exception:
                failures[i] = traceback.format_exc()[-4000:]
        from torch._dynamo.utils import counters

        breaks = counters["graph_break"]
        stats = {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(breaks.values())}
        stats["skips"] = counters["inductor"]["cudagraph_skips"]
        stats["reasons"] = [why[:1200] for why in breaks]
        stats |= {"works": [work.name for work in self._works], "failures": failures}
        return {"took": time.perf_counter() - started, "pid": os.getpid()} | stats

    def _logits(self, work: Any) -> tuple[Any, torch.Tensor]:
        """Tokens of decode steps, and logits."""
        if isinstance(work, Prefilling):
            return None, work.logits().float().cpu()
        out = work.generate(STEPS, output_logits=True, return_dict_in_generate=True)
        return out.sequences[:, -STEPS:].cpu(), torch.stack(out.logits).float().cpu()

    def _run(self, index: int) -> float:
        work = self._works[index]
        if work is not self._last:
            work.seconds()  # a cache of another size is new
            self._last = work
        return work.seconds(REPEATS)


def _config(backend: str) -> Any:
    from transformers import CompileConfig

    config = CompileConfig(backend=backend, mode=None)
    config._compile_all_devices = True
    return config


def difference(a: tuple[Any, torch.Tensor], b: tuple[Any, torch.Tensor]) -> float:
    """The largest difference of logits, over the largest: of steps whose tokens were equal before."""
    (tokens, got), (others, wanted) = a, b
    error = (got - wanted).abs()
    if tokens is not None:
        same = (tokens == others).long().cumprod(1).bool().T  # [steps, batch]
        error = error[torch.cat((torch.ones_like(same[:1]), same[:-1]))]
    return float(error.max() / wanted.abs().max())


class Turns:
    """The rows of one model's sides."""

    def __init__(self, args: argparse.Namespace) -> None:
        now = time.perf_counter()
        self._args, self._ready, self._end = args, now + args.ready, now + args.budget
        self.rows: list[dict[str, Any]] = []
        self.failed = False

    def ready(self, model: str, peers: dict[str, Peer]) -> dict[str, dict[str, Any]]:
        """What each side has prepared; those that failed are left out."""
        found = {}
        for side, peer in peers.items():
            reply = peer.reply(self._ready)
            error = "" if reply is None else reply.get("error", "")
            for text in (error, *(reply or {}).get("failures", {}).values()):
                self._fail(f"{model}, {side}: {text}" if text else "")
            if reply is not None and not error:
                found[side] = reply
                graphs = f"{reply['graphs']} graphs, {reply['breaks']} breaks, {reply['skips']} CUDA graphs skipped"
                print(f"{model}, {side}: ready after {reply['took']:.0f} s; {graphs}", flush=True)
                for why in reply["reasons"]:
                    print(f"{model}, {side}: a graph breaks: {why}", file=sys.stderr, flush=True)
        return found

    def measure(self, model: str, peers: dict[str, Peer], ready: dict[str, dict[str, Any]], folder: Path) -> None:
        names = next((reply["works"] for reply in ready.values()), [])
        for index, name in enumerate(names):
            sides = [side for side, reply in ready.items() if str(index) not in reply["failures"]]
            times: dict[str, list[float]] = {side: [] for side in sides}
            for turn in range(self._args.rounds):
                if turn and time.perf_counter() > self._end:
                    break
                for side in [*times][:: -1 if turn % 2 else 1]:
                    peers[side].ask({"work": index})
                    reply = peers[side].reply(time.perf_counter() + 60)
                    if reply is None or "error" in reply:
                        self._fail(f"{model}, {side}, {name}: {(reply or {}).get('error', 'no reply')}")
                        del times[side]
                    else:
                        times[side].append(reply["seconds"])
            busy = self._busy(peers, times, index)
            self._show(model, name, times, busy, {side: folder / f"{ready[side]['pid']}-{index}" for side in times})

    def _busy(self, peers: dict[str, Peer], sides: Iterable[str], index: int) -> dict[str, float]:
        """Seconds of the GPU, of sides that could be profiled."""
        found = {}
        for side in sides if self._args.device.startswith("cuda") else ():
            peers[side].ask({"work": index, "busy": True})
            reply = peers[side].reply(time.perf_counter() + 60)
            if reply is None or "error" in reply:
                self._fail(f"{side}, the GPU's time: {(reply or {}).get('error', 'no reply')}")
            else:
                found[side] = reply["seconds"]
        return found

    def _show(
        self, model: str, name: str, times: dict[str, list[float]], busy: dict[str, float], logits: dict[str, Path]
    ) -> None:
        if not times:
            return
        first = next(iter(times))
        base = torch.load(logits[first])
        for side, each in times.items():
            row = {
                "model": model, "layers": self._args.layers, "work": name, "side": side, "seconds": median(each),
                "speedup": median(a / b for a, b in zip(times[first], each)), "rounds": each,
                "busy": busy.get(side), "difference": difference(torch.load(logits[side]), base),
            }  # fmt: skip
            self.rows.append(row)
            least, most = min(each) * 1e3, max(each) * 1e3
            of_gpu = f"{busy[side] * 1e3:.3f} ms" if side in busy else ""
            print(
                f"| {model} | {name} | {side} | {row['seconds'] * 1e3:.3f} ms | {least:.3f}-{most:.3f} "
                f"| {row['speedup']:.3f} | {of_gpu} | {row['difference']:.1e} |",
                flush=True,
            )
        if self._args.json:
            self._args.json.write_text(json.dumps(self.rows, indent=1))

    def _fail(self, message: str) -> None:
        if message:
            self.failed = True
            print(f"failed: {message}", file=sys.stderr, flush=True)


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.peer:
        serve(Compiled(args).answer)
        return 0
    import transformers

    turns = Turns(args)
    sides = [side for side in args.sides.split(",") if side]
    for side in [side for side in sides if side not in ("plain", *SIDES, "kernels", "liger")]:
        raise SystemExit(f"--sides: unknown {side!r}; known are plain, {', '.join(SIDES)}, kernels, liger")
    for side in [side for side in sides if not available(side)]:
        sides.remove(side)
        print(f"left out: {side}, which is not installed in a version that transformers takes", file=sys.stderr)
    gpu = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    print(f"{gpu}, torch {torch.__version__}, transformers {transformers.__version__}, {args.layers} layers\n")
    stop_on_signals()
    arguments = sys.argv[1:] if argv is None else argv
    everyone: dict[str, dict[str, Peer]] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for model in args.models.split(","):
                everyone[model] = {}
                for side in sides:
                    command = ["-m", "benchmarks.adapters_compiled", *arguments, "--peer", model, side]
                    given = {"ADAPTERS_COMPILED": folder, "TORCHINDUCTOR_COMPILE_THREADS": "2"}
                    peer = Peer(f"{model}, {side}", command, given, Path(folder) / f"log-{model}-{side}")
                    peer.ask({})
                    everyone[model][side] = peer
            ready = {model: turns.ready(model, peers) for model, peers in everyone.items()}
            print("\n| model | work | side | time | of rounds | speedup | of the GPU | difference |")
            print("|---|---|---|---|---|---|---|---|", flush=True)
            for model, peers in everyone.items():
                turns.measure(model, peers, ready[model], Path(folder))
        finally:
            for peers in everyone.values():
                for peer in peers.values():
                    peer.stop()
    return 1 if turns.failed or not turns.rows else 0


if __name__ == "__main__":
    sys.exit(main())
