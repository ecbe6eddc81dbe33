"""`nanovllm serve --replicas 2` on a Ray cluster of this machine."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.serve.running import SIZES, wait_until

pytest.importorskip("ray", reason='pip install "nanovllm[ray]"')
pytestmark = pytest.mark.slow

# The program ends with the test's process, and Ray's processes with the program.
PROGRAM = (
    "from nanovllm.distributed.processes import exit_with_parent\nexit_with_parent()\n"
    "from nanovllm.cli import main\nmain()"
)


class Replicas:
    """Processes of one `nanovllm serve`, all of which have a variable of their own."""

    def __init__(self, model, log, *arguments):
        self.mark = f"NANOVLLM_TEST_MARK={uuid.uuid4().hex}"
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
        name, _, value = self.mark.partition("=")
        environment = os.environ | {
            name: value, "OMP_NUM_THREADS": "1", "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "1",
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(log.parent), "PYTHONPATH": os.getcwd(),
        }  # fmt: skip
        self.log = log
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "serve", f"--model={model}", f"--port={port}", *sizes, *arguments],
            env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)

    def pids(self, module=""):
        """The processes that live and whose command names `module`."""
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                marked = self.mark.encode() in (directory / "environ").read_bytes()
                if marked and module.encode() in (directory / "cmdline").read_bytes():
                    found.append(int(directory.name))
            except OSError:
                pass
        return found

    def ready(self):
        def answers():
            assert self.process.poll() is None, self.log.read_text()
            return "(Ctrl-C ends them)" in self.log.read_text()

        wait_until(answers, 120)

    def complete(self, prompt, **fields):
        answer = self.client.post("/v1/completions", json=dict(prompt=prompt, max_tokens=8, ignore_eos=True) | fields)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def close(self):
        self.client.close()
        self.process.kill()
        self.process.wait()
        time.sleep(0.5)
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


@pytest.fixture
def replicas(model_path, tmp_path):
    running = Replicas(model_path, tmp_path / "log", "--replicas=2")
    try:
        running.ready()
        yield running
    finally:
        running.close()


def test_replicas_answer_share_prefixes_die_and_come_back(replicas):
    engines = set(replicas.pids("nanovllm.serve.engine_process"))
    assert len(engines) == 2

    # 100 requests at once.
    with ThreadPoolExecutor(20) as pool:
        told = list(pool.map(lambda i: replicas.complete(f"{i} says hello", seed=i), range(100)))
    assert all(answer["usage"]["completion_tokens"] == 8 for answer in told)
    assert replicas.complete("7 says hello", seed=7)["choices"][0]["text"] == told[7]["choices"][0]["text"]

    # Equal beginnings find the cache: by chance half of these eight would miss the first time.
    for i in range(8):
        shared = "".join(chr(97 + (i * 7 + j * j) % 26) for j in range(300))
        usage = [replicas.complete(shared + end, max_tokens=1)["usage"] for end in ("x", "y")]
        assert usage[1]["prompt_tokens_details"]["cached_tokens"] >= 64

    # One replica dies in the midst of a stream: an error says so, the other one answers, and a new one comes.
    events = []

    def follow():
        body = dict(prompt="a", max_tokens=250, ignore_eos=True, stream=True, n=8)
        with replicas.client.stream("POST", "/v1/completions", json=body) as stream:
            try:
                for line in stream.iter_lines():
                    events.append(line)
            except httpx.HTTPError as error:
                events.append(repr(error))

    streams = [threading.Thread(target=follow) for _ in range(6)]
    for stream in streams:
        stream.start()
    wait_until(lambda: len(events) > 20)
    os.kill(min(engines), signal.SIGKILL)
    for stream in streams:
        stream.join(60)
        assert not stream.is_alive()
    assert any("the engine" in event for event in events), events[-3:]
    wait_until(lambda: len(set(replicas.pids("nanovllm.serve.engine_process")) - {min(engines)}) == 2, 90)
    assert replicas.complete("hello")["usage"]["completion_tokens"] == 8

    replicas.process.send_signal(signal.SIGTERM)
    assert replicas.process.wait(60) == 0
    wait_until(lambda: not replicas.pids(), 20)
