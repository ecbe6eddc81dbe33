"""A server in a thread of the test's process, on a free port of 127.0.0.1."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx

from nanovllm import AsyncLLM
from nanovllm.config import EngineConfig
from nanovllm.frontend.engine_client import ThreadClient
from nanovllm.serve.options import ServeOptions
from nanovllm.serve.server import Listener, Server
from tests.engine import slow_engine
from tests.waiting import LONG, wait_until

SIZES: dict[str, Any] = dict(
    max_model_len=256, max_num_seqs=16, num_kvcache_blocks=256, kvcache_block_size=16, seed=0, device="cpu"
)

SLOW_PLUGIN = """
import pathlib
import time

from nanovllm.engine.llm_engine import LLMEngine

HERE, step = pathlib.Path(__file__).parent, LLMEngine.step

def wait_while(name):
    while (HERE / name).exists():
        time.sleep(0.01)

def slow_step(engine):
    time.sleep(0.02)
    wait_while("no step")
    return step(engine)

LLMEngine.step = slow_step
wait_while("no start")
"""
"""A kernel plugin for an engine in another process: its steps take at least 20 ms. While there is a file "no start" or
"no step" beside the plugin, it does not start, or stands still.
"""


def slow_client(path: Any, **engine: Any) -> ThreadClient:
    return slow_engine.slow_client(path, **SIZES | engine)


class RunningServer:
    """Serves a model until the `with` block ends; `client` makes requests with httpx. tls: as of `Listener`."""

    def __init__(
        self, path: Any, options: ServeOptions | None = None, client: Any = None, tls: Any = (), **engine: Any
    ) -> None:
        self.engine_client = client or ThreadClient(EngineConfig(str(path), **SIZES | engine))
        self.engine = AsyncLLM(client=self.engine_client)
        self.options = options or ServeOptions()
        self._sock = Listener(port=0).open()
        self.port: int = self._sock.getsockname()[1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"
        self.server = Server(self.engine, self.options, Listener(tls=tls))
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self._sock]}, daemon=True)
        headers = {"authorization": f"Bearer {self.options.api_keys[0]}"} if self.options.api_keys else {}
        self.client = httpx.Client(base_url=self.url, headers=headers, timeout=LONG, trust_env=False)

    def __enter__(self) -> RunningServer:
        self._thread.start()
        wait_until(lambda: self.server.started)
        return self

    def __exit__(self, *_: object) -> None:
        self.go()
        self.client.close()
        self.stop()
        self.engine.close()

    def hold(self, steps: int = 20) -> None:
        """Stop the engine of a `slow_client` after so many steps."""
        self.engine_client.engine.hold(steps)

    def go(self) -> None:
        """Undo `hold`."""
        engine = getattr(self.engine_client, "engine", None)
        if isinstance(engine, slow_engine.SlowEngine):
            engine.go()

    def stop(self) -> None:
        self.server.handle_exit(15, None)
        self._thread.join(LONG)
        assert not self._thread.is_alive(), "the server does not end"

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def refused(self, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
        """(status, error) of a request that must be refused."""
        answer = self.client.post(path, json=body)
        assert answer.status_code >= 400, answer.text
        return answer.status_code, answer.json()["error"]

    def events(self, path: str, **body: Any) -> list[Any]:
        """The events of a streamed answer, decoded but for "[DONE]"."""
        with self.client.stream("POST", path, json=body | {"stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            lines = [line[6:] for line in answer.iter_lines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    def assert_idle(self) -> None:
        """Wait until nothing runs; every block is free then."""
        wait_until(lambda: not self.engine.num_unfinished and not self.engine_client.engine.has_unfinished)
        self.engine_client.engine.check()
        admission = self.server.service.admission
        wait_until(lambda: not admission.num_open)
        assert admission.waiting == 0 and admission.waiting_tokens == 0

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        lines = self.client.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith((name + "{", name + " "))]
        assert found, f"there is no metric {name}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)
