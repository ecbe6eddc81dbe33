"""What a token costs the server's front end: the engine is only a clock, and `nanovllm bench serve` reads the streams.

python -m benchmarks.serving.front_end --streams 128 --tokens 400 --step-ms 4
python -m benchmarks.serving.front_end --streams 256 --requests 512 --tokens 128 --step-ms 3  # TTFT beside streams
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks.serving.dummy_tokenizer import write
from nanovllm import AsyncLLM
from nanovllm.frontend.core_messages import (
    AbortRequest,
    CompletionEnd,
    Deliver,
    Died,
    EngineInfo,
    EngineStats,
    FirstToken,
    StartRequest,
    StepOutputs,
    completion_key,
)
from nanovllm.serve.options import ServeOptions
from nanovllm.serve.server import Listener, Server

VOCAB_SIZE = 32000


class Clock:
    """An `EngineClient` whose steps take a fixed time and give every request a token."""

    alive = True

    def __init__(self, tokenizer: Path, step_seconds: float) -> None:
        self.info = EngineInfo("clock", str(tokenizer), VOCAB_SIZE, 100_000, 4096, 20, 1, 16, "none", None)
        self.num_tokens = 0
        self._step_seconds = step_seconds
        self._left: dict[int, int] = {}
        self._new: list[int] = []

    def listen(self, deliver: Deliver, died: Died) -> None:
        self._deliver = deliver

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._task = loop.create_task(self._run())

    def start(self, request: StartRequest) -> None:
        self._left[request.key] = request.params.get("max_tokens", 64)
        self._new.append(request.key)

    def abort(self, request: AbortRequest) -> None:
        self._left.pop(request.key, None)

    def close(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        due = time.perf_counter()
        while True:
            due = max(due + self._step_seconds, time.perf_counter() - 1)  # late steps are caught up with
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            first, self._new = [FirstToken(key, 0, 0.0) for key in self._new], []
            keys = [completion_key(key, 0) for key in self._left]
            self._left = {key: left - 1 for key, left in self._left.items()}
            ended = [CompletionEnd(completion_key(key, 0), "length") for key, left in self._left.items() if not left]
            self._left = {key: left for key, left in self._left.items() if left}
            if keys:
                self.num_tokens += len(keys)
                stats = EngineStats(num_running=len(keys), step_seconds=self._step_seconds, has_work=bool(self._left))
                tokens = [300 + (self.num_tokens + i) % 30000 for i in range(len(keys))]
                self._deliver(StepOutputs(stats, keys, tokens, first, ended, [], []))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=128)
    parser.add_argument("--requests", type=int, help="in all; by default one a stream")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--step-ms", type=float, default=4)
    args = parser.parse_args()
    requests = args.requests or args.streams
    with tempfile.TemporaryDirectory() as directory:
        write(Path(directory), VOCAB_SIZE)
        clock = Clock(Path(directory), args.step_ms / 1000)
        sock = Listener(port=0).open()
        server = Server(AsyncLLM(client=clock), ServeOptions())
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        command = [sys.executable, "-m", "nanovllm", "bench", "serve", f"http://127.0.0.1:{sock.getsockname()[1]}",
                   "--endpoint", "chat", "--input-len", "4", "--output-len", str(args.tokens),
                   "--concurrency", str(args.streams), "--num-requests", str(requests)]  # fmt: skip
        try:
            before = time.process_time()
            subprocess.run(command, check=True)
            spent = time.process_time() - before
        finally:
            server.handle_exit(15, None)
            thread.join()
    print(f"{1e6 * spent / clock.num_tokens:.1f} us of CPU time a token in the front end, {clock.num_tokens} tokens")


if __name__ == "__main__":
    main()
