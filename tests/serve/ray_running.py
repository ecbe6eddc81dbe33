"""`nanovllm serve --replicas` for tests: on a Ray cluster of its own, or on one of several nodes of this machine."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import httpx

from tests.serve.running import LONG, SIZES
from tests.waiting import wait_until

# A program ends with the test's process, and Ray's processes with the program.
_PROGRAM = "from nanovllm.early_exit import exit_with_parent\nexit_with_parent()\n"
_SERVE = _PROGRAM + "from nanovllm.cli import main\nmain()"
_NODES = _PROGRAM + "from tests.serve.ray_running import run_nodes\nrun_nodes()"
ENGINE = "nanovllm.serve.engine_process"
REPLICA = "ray::ServeReplica:nanovllm:nanovllm"


def free_port() -> int:
    """A port that is free, and that the system gives to nobody meanwhile who asks for any: below those."""
    given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = random.SystemRandom().randrange(given * 3 // 4, given)
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return port


class Marked:
    """Processes that share a variable, by which all of them are found, and ended with this object."""

    def __init__(self, directory: Path) -> None:
        self._mark = uuid.uuid4().hex
        self.directory = directory
        self.environment = os.environ | {
            "NANOVLLM_TEST_MARK": self._mark, "OMP_NUM_THREADS": "1",
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1", "RAY_raylet_start_wait_time_s": str(int(LONG)),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(directory),
            "PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)]),
        }  # fmt: skip

    def pids(self, command: str = "") -> list[int]:
        """The processes that live and whose command names `command`."""
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                marked = f"NANOVLLM_TEST_MARK={self._mark}".encode() in (directory / "environ").read_bytes()
                if marked and command.encode() in (directory / "cmdline").read_bytes():
                    found.append(int(directory.name))
            except OSError:
                pass
        return sorted(found)

    def start(self, program: str, *arguments: str, **options: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen([sys.executable, "-c", program, *arguments], env=self.environment, **options)

    def close(self) -> None:
        for _ in range(2):
            for pid in self.pids():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            time.sleep(0.2)


SLOW = """
import os
import time
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.kernels import embedding
step = LLMEngine.step
def slow_step(engine):
    time.sleep(0.4 if os.path.exists({held!r}) else 0.01)
    return step(engine)
LLMEngine.step = slow_step
@embedding.provider("slow")
def slow(token_ids, weight):
    return embedding.native(token_ids, weight)
"""


def slow_plugin(directory: Path) -> Path:
    """A plugin. While the file `held` is in the directory, steps are so slow that no stream of 200 tokens ends before
    anything is killed, however busy the machine.
    """
    plugin = directory / "slow.py"
    plugin.write_text(SLOW.format(held=str(directory / "held")))
    return plugin


class Replicas:
    """A server of a tiny model, started by `nanovllm serve`."""

    def __init__(self, marked: Marked, model: Path, *arguments: str, port: int = 0) -> None:
        self._marked = marked
        self.directory = marked.directory
        self._log = marked.directory / "log"
        sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
        # The kernels need not be compiled: other tests are about them.
        arguments = (f"--model={model}", f"--port={port}", "--no-use-custom-kernels", *sizes, *arguments)
        with self._log.open("w") as log, (marked.directory / "output").open("w") as output:
            self.process = marked.start(
                _SERVE, "serve", *arguments, stdout=output, stderr=log, stdin=subprocess.DEVNULL
            )

    def ready(self) -> Replicas:
        def answers() -> bool:
            assert self.process.poll() is None, self.said()
            return "(Ctrl-C ends them)" in self.said()

        try:
            wait_until(answers)
        except AssertionError:
            print(self.said())
            raise
        self.url = re.findall(r"http://[\w.]+:\d+(?= \(Ctrl-C ends them)", self.said())[0].replace(
            "0.0.0.0", "127.0.0.1"
        )
        self.client = httpx.Client(base_url=self.url, timeout=LONG, trust_env=False)
        return self

    def said(self) -> str:
        return self._log.read_text()

    def engines(self) -> list[int]:
        """The process ids of the replicas' engines."""
        return self._marked.pids(ENGINE)

    def complete(self, prompt: str, **fields: Any) -> Any:
        answer = self.client.post("/v1/completions", json=dict(prompt=prompt, max_tokens=8, ignore_eos=True) | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()


class Nodes:
    """A Ray cluster whose nodes are processes of this machine, each with one CPU of Ray's count. It runs Ray Serve."""

    def __init__(self, marked: Marked, count: int) -> None:
        self.port = free_port()
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with (marked.directory / "nodes").open("w") as log:
            self._process = marked.start(_NODES, str(count), str(self.port), stderr=log, **pipes)
        self.address: str = self._answer()["address"]

    def remove(self) -> None:
        """Kill the processes of one node, which is not the head."""
        self._ask("remove")

    def add(self) -> None:
        self._ask("add")

    def _ask(self, command: str) -> None:
        print(command, file=self._process.stdin, flush=True)
        self._answer()

    def _answer(self) -> Any:
        for line in self._process.stdout or ():
            if line.startswith("{"):
                return json.loads(line)
        raise AssertionError("the cluster has ended")


def run_nodes() -> None:
    """The process of `Nodes`."""
    from nanovllm.serve.ray import ray, serve  # sets Ray's variables before it imports Ray

    from ray.cluster_utils import Cluster  # isort: skip

    count, port = map(int, sys.argv[1:])
    cluster = Cluster()
    nodes = [cluster.add_node(num_cpus=1, include_dashboard=False) for _ in range(count)]
    ray.init(cluster.address, log_to_driver=False)
    # All nodes have one address, so that only one of them can have a proxy.
    serve.start(proxy_location="HeadOnly", http_options={"host": "0.0.0.0", "port": port})
    print(json.dumps({"address": cluster.address}), flush=True)
    for line in sys.stdin:
        if line.strip() == "remove":
            cluster.remove_node(nodes.pop(), allow_graceful=False)
        else:
            nodes.append(cluster.add_node(num_cpus=1))
        print(json.dumps({"nodes": len(nodes)}), flush=True)
