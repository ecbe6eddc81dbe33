"""The measurements of `benchmarks.serving.beside_vllm`."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.serving.harness import Bench, LimitReached, PartFailed, last_lines
from benchmarks.serving.result_file import OFFLINE, OURS
from benchmarks.serving.server_process import ServerFailed
from benchmarks.serving.storm import Memory, Storm, attack
from benchmarks.structured_output import SCHEMA
from nanovllm.bench.serving import Load, measure
from nanovllm.bench.serving_client import Target, get_json

_FEWEST_REQUESTS = 8


@dataclass(frozen=True)
class PartlyStructured(Load):
    """A load whose first requests must write JSON."""

    num_structured: int = 0

    def bodies(self, target: Target) -> list[bytes]:
        bodies = super().bodies(target)
        for index in range(self.num_structured):
            body = json.loads(bodies[index]) | {"structured_outputs": {"json": SCHEMA}, "ignore_eos": False}
            bodies[index] = json.dumps(body).encode()
        return bodies


def numbers(option: str, text: str, count: int) -> list[int]:
    """Whole numbers above 0. Raises: ValueError: the text is something else."""
    parts = text.split(",")
    if len(parts) != count or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{option} {text}: must be {count} whole numbers above 0, with commas between them")
    return [int(part) for part in parts]


def _offline(bench: Bench, load: str) -> None:
    """`LLM.generate` in a process of its own. Its rows come as its runs end."""
    deadline, log, turn = bench.deadline(), bench.folder / "offline.log", 0
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serving.offline"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=errors, text=True,
        )  # fmt: skip
        alarm = threading.Timer(deadline.left(), process.kill)
        alarm.start()
        try:
            assert process.stdin is not None and process.stdout is not None  # pipes, as asked for above
            process.stdin.write(json.dumps(bench.job.to_json()))
            process.stdin.close()
            for line in process.stdout:
                bench.rows.add("std256", OFFLINE, load, turn, json.loads(line))
                turn += 1
            process.wait()
        finally:
            alarm.cancel()
            process.kill()
            process.wait()
    if process.returncode and deadline.at <= time.monotonic():
        bench.rows.add("std256", OFFLINE, load, turn, {"error": str(deadline.reached())})
    elif process.returncode:
        printed = log.read_text(errors="replace")
        bench.rows.add("std256", OFFLINE, load, turn, {"error": last_lines("no result", printed)})


def std256(bench: Bench) -> None:
    load = bench.args.workload
    _offline(bench, load)
    if not bench.runs(OURS):
        return
    deadline = bench.deadline()
    for turn in range(bench.args.rounds):
        bench.attempt("std256", OURS, load, turn, lambda turn=turn: bench.bench_serve(  # type: ignore[misc]
            bench.server(OURS), deadline, "--workload", load, "--seed", str(turn)
        ))  # fmt: skip


def structured(bench: Bench) -> None:
    if not bench.runs(OURS):
        return
    bench.wait_for_go()
    deadline = bench.deadline()
    streams, constrained, tokens = numbers("--structured", bench.args.structured, 3)

    def once(count: int, turn: int) -> dict[str, Any]:
        server = bench.server(OURS)
        load = PartlyStructured(
            num_requests=streams, input_len=128, output_len=tokens, concurrency=streams, seed=1000 + turn,
            vocab_size=bench.args.vocab_size, num_structured=count, timeout=deadline.left(),
            extra={"temperature": 0.6, "ignore_eos": True},
        )  # fmt: skip
        try:
            target = Target(server.url)
            found = measure(Target(server.url, model=get_json(target, "models")["data"][0]["id"]), load)
        except ValueError as error:
            raise PartFailed(str(error)) from None
        if found.num_failed or found.num_output_tokens != streams * tokens:
            raise PartFailed(f"{found.num_output_tokens} of {streams * tokens} tokens; errors: {found.errors}")
        return found.as_dict()

    for turn in range(-1, bench.args.rounds):
        for count in (0, constrained):
            name = f"{count} of {streams}"
            if turn >= 0:
                bench.attempt("structured", OURS, name, turn, lambda c=count, t=turn: once(c, t))  # type: ignore[misc]
                continue
            try:
                once(count, turn)  # compiles the grammar, and whatever is made at its first use
            except (PartFailed, ServerFailed) as error:
                bench.rows.add("structured", OURS, name, turn, {"error": str(error)})
                return


def storm(bench: Bench) -> None:
    seconds, clients = numbers("--storm", bench.args.storm, 2)
    if not bench.runs(OURS):
        return

    def once() -> dict[str, Any]:
        server = bench.server(OURS)
        # The kernels of a GPU round differently in batches of other sizes.
        found = Storm(server.port, exact=False)
        try:
            sizes = asyncio.run(attack(found, server.pid, seconds, clients))
        except OSError as error:
            raise PartFailed(f"{type(error).__name__}: {error}") from None
        if found.wrong:
            raise PartFailed("; ".join(found.wrong[:5]))
        return {
            "counts": dict(found.counts), "memory": [asdict(size) for size in sizes],
            "said": f"nothing was lost or left over: {dict(found.counts)}; {_memory(sizes)}",
        }  # fmt: skip

    bench.attempt("storm", OURS, f"{clients} clients", 0, once)


def _memory(sizes: Sequence[Memory]) -> str:
    first, last = asdict(sizes[0]), asdict(sizes[-1])
    parts = [f"{name} {first[name]:.0f} to {last[name]:.0f}" for name in first if first[name] and last[name]]
    return f"memory, MiB: {', '.join(parts)}"


def streams(bench: Bench) -> None:
    args = bench.args
    peer = args.peer if args.peer != OURS else "peer"
    if args.together:
        bench.launch(OURS, peer)
    sides = [side for side in (OURS, peer) if bench.runs(side)]  # one starts after the other: each looks for memory
    bench.wait_for_go()
    deadline = bench.deadline()
    for turn in range(args.rounds):
        for index, load in enumerate(args.loads.split(",")):
            common = ["--input-len", str(args.input_len), "--output-len", str(args.output_len)]
            # Other prompts each time, so that none is cached; the same for both sides.
            common += ["--seed", str(1 + turn * 100 + index)]
            if load.endswith("/s"):
                common += ["--rate", load.removesuffix("/s"), "--num-requests", str(args.rate_requests)]
            else:
                common += [
                    "--concurrency",
                    load,
                    "--num-requests",
                    str(max(_FEWEST_REQUESTS, args.per_stream * int(load))),
                ]
            for side in sides if turn % 2 == 0 else sides[::-1]:
                bench.attempt("streams", side, load, turn, lambda side=side, common=common: bench.bench_serve(  # type: ignore[misc]
                    bench.server(side), deadline, *common
                ))  # fmt: skip


PARTS: dict[str, Callable[[Bench], None]] = {
    "std256": std256, "structured": structured, "storm": storm, "streams": streams
}  # fmt: skip


def run(bench: Bench, name: str) -> None:
    """Run a part until its time has passed; what fails is a row."""
    print(f"-- {name}", flush=True)
    try:
        PARTS[name](bench)
    except LimitReached:  # a row says so
        pass
    except PartFailed as error:
        bench.rows.add(name, "", "", 0, {"error": str(error)})
