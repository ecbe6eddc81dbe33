"""A storm of mixed clients against a server that this script starts: nothing may be lost or mixed up, nor memory grow.

python -m benchmarks.serving.storm --minutes 60                    # the embedded SmolLM2
python -m benchmarks.serving.storm --minutes 60 --kill-engine 300 --serve-args "--model path/to/Qwen3-0.6B"

Clients stream or not, vanish in the middle, read slowly, or send what must be refused. Every answer of a prompt and
seed must be the same each time. A line each ten seconds tells the counts and the memory of both processes and of the
GPU. At the end the engine must be idle with all cache blocks free; the exit code is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serving.server_process import ServerProcess

PROMPTS = 32
REFUSED = (b"{", b'{"prompt": 5}', b'{"prompt": "x", "temperature": -1}', b'{"prompt": "x", "nonsense": 1}')


class Storm:
    """What clients have seen.

    Args:
        exact: answers of a prompt and seed must be equal.
        pause: mean seconds, at random, between a client's requests.
    """

    def __init__(self, port: int, exact: bool, pause: float = 0.0) -> None:
        self.port = port
        self.exact = exact
        self.pause = pause
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.answers: dict[int, str] = {}

    async def send(self, body: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 16)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        return reader, writer

    async def client(self, rng: random.Random, end: float) -> None:
        kinds = {"whole": 40, "stream": 40, "vanishes": 15, "slow": 2, "refused": 3}
        while time.monotonic() < end:
            (kind,) = rng.choices(list(kinds), kinds.values())
            try:
                await asyncio.wait_for(self.once(kind, rng), 300)
                self.counts[kind] += 1
                if self.pause:
                    await asyncio.sleep(min(rng.expovariate(1 / self.pause), end - time.monotonic()))
            except (ConnectionError, asyncio.IncompleteReadError, OSError) as error:
                self.counts[f"{kind}: {type(error).__name__}"] += 1
                await asyncio.sleep(1)
            except asyncio.TimeoutError:
                self.wrong.append(f"{kind}: no answer within 300 seconds")

    async def once(self, kind: str, rng: random.Random) -> None:
        index = rng.randrange(PROMPTS)
        body = {
            "prompt": f"Story number {index}: once upon a time", "seed": index, "max_tokens": 8 + index,
            "ignore_eos": True,
            "stream": kind in ("stream", "slow") or rng.random() < 0.5 * (kind == "vanishes"),
        }  # fmt: skip
        data = rng.choice(REFUSED) if kind == "refused" else json.dumps(body).encode()
        reader, writer = await self.send(data)
        try:
            if kind == "vanishes":
                await asyncio.sleep(rng.random() * 0.5)
            elif kind == "slow":
                found = b""
                while piece := await reader.read(64):
                    found += piece
                    await asyncio.sleep(0.02)
                self.check(kind, index, found)
            else:
                self.check(kind, index, await reader.read(-1))
        finally:
            writer.transport.abort()

    def check(self, kind: str, index: int, data: bytes) -> None:
        status = int(data[9:12] or 0)
        if kind == "refused":
            if status != 400:
                self.wrong.append(f"a bad request got {status}")
            return
        if status in (500, 503) or b'"error":' in data:
            self.counts[f"{kind}: error {status}"] += 1  # overload, or an engine that was killed
            return
        text = "".join(json.loads(t) for t in re.findall(rb'"text":("(?:[^"\\]|\\.)*")', data))
        if status != 200 or not text:
            self.wrong.append(f"{kind}: status {status}, {data[-100:]!r}")
        elif self.answers.setdefault(index, text) != text and self.exact:
            self.wrong.append(f"prompt {index} has two answers: {self.answers[index]!r} and {text!r}")


def memory_mib(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(child) for child in file.read().split()]


def engine_of(pid: int) -> int | None:
    """The engine's process of the server whose process is `pid`; None: none runs now."""
    for child in children(pid):
        with suppress(OSError), open(f"/proc/{child}/cmdline") as file:
            if "nanovllm.serve.engine_process" in file.read().split("\0"):
                return child
    return None


def metric(port: int, name: str) -> float:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


@dataclass(frozen=True)
class Memory:
    """MiB at one time: of the API processes, of the engine's process, and in use on the GPU; None: there is no such."""

    front: float
    engine: float | None
    gpu: float | None


def memory_of(pid: int) -> Memory:
    """Of a server's process `pid` with its children but the engine's, of the engine's process, and of the whole GPU."""
    engine = engine_of(pid)
    front = sum(memory_mib(process) for process in (pid, *children(pid)) if process != engine)
    return Memory(front, None if engine is None else memory_mib(engine), gpu_memory_mib())


def gpu_memory_mib() -> float | None:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return float(subprocess.run(command, capture_output=True, text=True, timeout=10).stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


async def watch(storm: Storm, pid: int, end: float, kill_every: float) -> list[Memory]:
    found, next_kill = [], time.monotonic() + kill_every
    interval = min(10.0, (end - time.monotonic()) / 10)
    while time.monotonic() < end:
        await asyncio.sleep(interval)
        found.append(await asyncio.to_thread(memory_of, pid))
        sizes = " + ".join(f"{size:.0f}" for size in (found[-1].front, found[-1].engine, found[-1].gpu) if size)
        print(f"{dict(storm.counts)}, memory {sizes} MiB, {len(storm.wrong)} wrong", flush=True)
        if kill_every and time.monotonic() > next_kill and (engine := engine_of(pid)) is not None:
            next_kill += kill_every
            os.kill(engine, signal.SIGKILL)
    return found


async def attack(storm: Storm, pid: int, seconds: float, clients: int, kill_every: float = 0) -> list[Memory]:
    """Let the clients loose on the server whose process is `pid`. What went wrong is added to `storm.wrong`.

    Args:
        kill_every: seconds between two kills of the engine's process; 0: none.

    Returns:
        The memory, at least ten times.
    """
    end = time.monotonic() + seconds
    running = [storm.client(random.Random(i), end) for i in range(clients)]
    sizes, *_ = await asyncio.gather(watch(storm, pid, end, kill_every), *running)
    await asyncio.sleep(min(5.0, seconds / 10))
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        if (left := await asyncio.to_thread(metric, storm.port, name)) != 0:
            storm.wrong.append(f"{name} is {left} after the storm")
    # An engine that was started again begins with less.
    for kind in ("front",) if kill_every else ("front", "engine", "gpu"):
        values = [value for size in sizes if (value := getattr(size, kind)) is not None]
        first, second = values[: len(values) // 2], values[len(values) // 2 :]
        if first and max(second) > 1.2 * max(first) + 50:
            storm.wrong.append(f"memory ({kind}) grew from {max(first):.0f} to {max(second):.0f} MiB")
    return sizes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--pause", type=float, default=0, help="mean seconds between two requests of a client")
    parser.add_argument("--kill-engine", type=float, default=0, help="seconds between two kills of the engine")
    parser.add_argument("--serve-args", default="", help="further arguments of `nanovllm serve`")
    parser.add_argument("--start-limit", type=float, default=600, help="seconds in which the server must be ready")
    parser.add_argument(
        "--exact", action=argparse.BooleanOptionalAction, default=True,
        help="answers of a prompt and a seed must be equal; not for kernels whose results depend on the batch",
    )  # fmt: skip
    args = parser.parse_args()
    command = [sys.executable, "-m", "nanovllm", "serve", "--port", "{port}", *shlex.split(args.serve_args)]
    with tempfile.TemporaryDirectory() as folder:
        server = ServerProcess("the server", command, os.environ, Path(folder) / "log")
        try:
            print(f"ready after {server.wait(args.start_limit):.1f} s", flush=True)
            storm = Storm(server.port, args.exact, args.pause)
            asyncio.run(attack(storm, server.pid, 60 * args.minutes, args.clients, args.kill_engine))
            server.check()
        finally:
            server.close()
    print("\n".join(storm.wrong[:20]) or "nothing was lost, mixed up or left over")
    return 1 if storm.wrong else 0


if __name__ == "__main__":
    from nanovllm.console import run_program

    run_program("storm", main)
