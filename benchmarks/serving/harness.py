"""Servers, deadlines and rows for the measurements of `benchmarks.serving.parts`."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving import dummy_tokenizer
from benchmarks.serving.result_file import OURS, ResultFile
from benchmarks.serving.server_process import ServerFailed, ServerProcess
from nanovllm.bench.command_line import engine_paths
from nanovllm.bench.engines.engine_interface import model_directory
from nanovllm.bench.job import Job
from nanovllm.bench.launcher import with_causes
from nanovllm.bench.workloads import WORKLOADS
from nanovllm.models.model_presets import PRESETS, preset

_OURS_COMMAND = (
    "{python} -m nanovllm serve --model {model} --tokenizer {directory} --load-format {load_format} --port {port}"
    " --max-model-len {max_model_len} --gpu-memory-utilization {share}"
)
_PEER_ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1"}
_WARM_UP_TOKENS = 8
_LAST_LINES = 5


class PartFailed(RuntimeError):
    """A measurement gave no result; the message is its row's error."""


class LimitReached(PartFailed):
    """The part has had its time."""


@dataclass(frozen=True)
class Deadline:
    """When a part ends, on the clock `time.monotonic`."""

    at: float
    limit: float

    def left(self) -> float:
        """Seconds. Raises: LimitReached: none."""
        left = self.at - time.monotonic()
        if left <= 0:
            raise self.reached()
        return left

    def reached(self) -> LimitReached:
        return LimitReached(f"stopped after {self.limit:g} s (--limit)")


class Bench:
    """What the parts share; `close` in every case. Servers stay for the parts that follow.

    Args:
        args: of `benchmarks.serving.beside_vllm`, with the peer's `command`.
        folder: for the model's configuration, its tokenizer and logs.
    """

    def __init__(self, args: argparse.Namespace, folder: Path, rows: ResultFile) -> None:
        self.args = args
        self.rows = rows
        self.folder = folder
        self._servers: dict[str, ServerProcess | None] = {}
        """By side; None: it did not start."""
        self._launched: dict[str, ServerProcess] = {}
        """Processes that `server` has not yet waited for."""
        random_weights = args.model in PRESETS and not Path(args.model).exists()
        config = preset(args.model) if random_weights else None
        workload = WORKLOADS[args.workload]
        self.job = Job(
            "nanovllm", "", args.model, (workload,), config, {"gpu_memory_utilization": args.share},
            repeat=args.rounds, max_model_len=args.max_model_len,
        )  # fmt: skip
        directory = model_directory(self.job, folder)
        if config is not None:
            ends = config.get("eos_token_id")
            dummy_tokenizer.write(folder, config["vocab_size"], ends[0] if isinstance(ends, list) else ends)
        self._names = {
            "python": sys.executable, "model": args.model, "directory": directory, "port": "{port}",
            "load_format": "dummy" if random_weights else "auto", "max_model_len": str(args.max_model_len),
            "share": str(args.share),
        }  # fmt: skip

    def close(self) -> None:
        for server in (*self._servers.values(), *self._launched.values()):
            if server is not None:
                server.close()

    def deadline(self) -> Deadline:
        return Deadline(time.monotonic() + self.args.limit, self.args.limit)

    def server(self, side: str) -> ServerProcess:
        """A side's server, which is started and warmed up at the first call.

        Raises:
            ServerFailed: it did not start, which is a row of its own, or it has ended.
        """
        if side not in self._servers:
            self._servers[side] = self._start(side)
        server = self._servers[side]
        if server is None:
            raise ServerFailed(f"{side} did not start")
        server.check()
        return server

    def runs(self, side: str) -> bool:
        """Whether a side's server runs; it is started and warmed up at the first call."""
        with suppress(ServerFailed):
            self.server(side)
            return True
        return False

    def wait_for_go(self) -> None:
        """Wait for the file of --go, at most for the time that a server may take to start."""
        file, end = self.args.go, time.monotonic() + self.args.start_limit
        if file is not None:
            print(f"waits for {file}", flush=True)
        while file is not None and not file.exists():
            if time.monotonic() > end:
                raise PartFailed(f"{file} (--go) is not there after {self.args.start_limit:g} s")
            time.sleep(0.1)

    def launch(self, *sides: str) -> None:
        """Start the processes of several servers at once. Their KV caches need given sizes: none may look for memory
        that another one is about to take."""
        for side in sides:
            if side not in self._servers:
                self._launched[side] = self._process(side)

    def _process(self, side: str) -> ServerProcess:
        args, env = self.args, dict(os.environ)
        template, extra = (_OURS_COMMAND, args.serve_args) if side == OURS else (args.command, args.peer_args)
        if side != OURS:
            env = {**_PEER_ENVIRONMENT, **env}
            folder = engine_paths(args.engine_path, [args.peer]).get(args.peer)
            env["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, env.get("PYTHONPATH"))))
        try:
            command = [part.format_map(self._names) for part in shlex.split(f"{template} {extra}")]
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(f"--peer-command {template!r}: {error} is none of {', '.join(self._names)}") from None
        return ServerProcess(side, command, env, self.folder / f"{side}.log")

    def _start(self, side: str) -> ServerProcess | None:
        server = self._launched.pop(side, None) or self._process(side)
        try:
            seconds = server.wait(self.args.start_limit)
            self.rows.add("start", side, "", 0, {"seconds": seconds, "said": f"ready after {seconds:.1f} s"})
            self._warm_up(server)
        except (ServerFailed, PartFailed) as error:
            server.close()
            self.rows.add("start", side, "", 0, {"error": str(error)})
            return None
        except BaseException:
            server.close()
            raise
        return server

    def _warm_up(self, server: ServerProcess) -> None:
        streams = max((int(n) for n in self.args.loads.split(",") if not n.endswith("/s")), default=16)
        self.bench_serve(
            server, Deadline(time.monotonic() + self.args.start_limit, self.args.start_limit), "--concurrency",
            str(streams), "--num-requests", str(streams), "--input-len", str(self.args.input_len), "--output-len",
            str(_WARM_UP_TOKENS), "--seed", "999999",
        )  # fmt: skip

    def bench_serve(self, server: ServerProcess, deadline: Deadline, *arguments: str) -> dict[str, Any]:
        """What `nanovllm bench serve` says of one load.

        Raises:
            PartFailed: it did not end in time, or no request succeeded.
        """
        command = [sys.executable, "-m", "nanovllm", "bench", "serve", server.url, "--json", "-"]
        command += ["--vocab-size", str(self.args.vocab_size), *arguments]
        (found,) = json.loads(_output_of(command, deadline))["loads"]
        if not found["num_ok"]:
            raise PartFailed(f"no request succeeded: {found['errors']}")
        return dict(found)

    def attempt(self, part: str, side: str, load: str, turn: int, measured: Callable[[], dict[str, Any]]) -> None:
        """Add the row of a measurement, or of why there is none.

        Raises:
            LimitReached: the part's time has passed.
        """
        try:
            self.rows.add(part, side, load, turn, measured())
        except (PartFailed, ServerFailed) as error:
            self.rows.add(part, side, load, turn, {"error": str(error)})
            if isinstance(error, LimitReached):
                raise


def last_lines(reason: str, printed: str) -> str:
    """A reason, with the end of what a process printed and the errors in it."""
    return with_causes(f"{reason}: {' | '.join(printed.strip().splitlines()[-_LAST_LINES:])}", printed)


def _output_of(command: Sequence[str], deadline: Deadline) -> str:
    """The standard output of a command, which is ended at the deadline. Raises: PartFailed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline.left())
    except subprocess.TimeoutExpired:
        raise deadline.reached() from None
    if done.returncode:
        raise PartFailed(last_lines(f"exit code {done.returncode}", done.stderr))
    return done.stdout
