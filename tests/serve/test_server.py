"""How the server ends: exit codes, what it prints, and what it leaves behind."""

import asyncio
import json
import logging
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from nanovllm.serve.errors import ServerShutdown
from nanovllm.serve.options import ServeOptions
from tests.serve.running import LONG, RunningServer
from tests.waiting import wait_until


def test_a_client_that_reads_nothing_does_not_spoil_the_end(model_path, caplog):
    with RunningServer(model_path, ServeOptions(drain=0)) as server:
        body = json.dumps({"tokens": [500] * 2_500_000}).encode()  # the answer is larger than the buffers of a socket
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(b"POST /detokenize HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            assert sock.recv(12) == b"HTTP/1.1 200"
            with caplog.at_level(logging.INFO):
                server.stop()
        assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
        assert "Application shutdown complete." in caplog.messages


def test_no_request_is_started_after_the_last_ones_were_ended(model_path):
    with RunningServer(model_path) as server:
        engine = server.engine
        made = engine.maker.make("hello", incremental=True)
        engine.fail_all(ServerShutdown("the server was shut down"), for_good=True)

        async def start():
            return engine.start(made)

        with pytest.raises(ServerShutdown, match="the server was shut down"):
            asyncio.run(start())
        assert not engine.num_unfinished


SCHEMA = {"type": "array", "minItems": 99, "items": {"type": "integer"}}


def load(port, stop, index):
    """Requests of many kinds, one after the other; some leave early."""
    rng = random.Random(index)
    while not stop.is_set():
        body = {"prompt": "x" * rng.randint(1, 40), "stream": index % 3 != 2, "max_tokens": rng.choice([4, 60, 200])}
        if index % 4 == 1:
            body["structured_outputs"] = {"json": {**SCHEMA, "minItems": rng.randint(20, 5000)}}
        elif index % 4 == 2:
            body |= {"n": 4, "logprobs": 3}
        data = json.dumps(body).encode()
        try:
            with socket.create_connection(("127.0.0.1", port), 5) as sock:
                sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n")
                sock.sendall(b"content-length: %d\r\n\r\n" % len(data) + data)
                while sock.recv(1 << 16) and index % 5 != 4:
                    pass
        except OSError:
            time.sleep(0.01)


ONCE, TWICE, OFTEN = (), (0.2,), (0.02, 0.02, 0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, engine_in, pauses",
    [
        (signal.SIGTERM, "process", ONCE), (signal.SIGINT, "thread", ONCE), (signal.SIGINT, "process", TWICE),
        (signal.SIGTERM, "thread", TWICE), (signal.SIGTERM, "process", OFTEN), (signal.SIGINT, "thread", OFTEN),
    ],
)  # fmt: skip
def test_the_end_is_clean_under_load(model_path, number, engine_in, pauses):
    """Every two of signal, place of the engine and number of signals come together once."""
    arguments = ["--in-process"] * (engine_in == "thread")
    command = [sys.executable, "-m", "nanovllm", "serve", f"--model={model_path}", "--port=0", "--device=cpu"]
    command += ["--num-kvcache-blocks=256", "--max-model-len=256", "--drain=1", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    stop = threading.Event()
    try:
        ready = next(line for line in process.stderr if " (Ctrl-C ends it)" in line)
        port = int(re.search(r"127\.0\.0\.1:(\d+) ", ready)[1])
        clients = [threading.Thread(target=load, args=(port, stop, i)) for i in range(12)]
        for client in clients:
            client.start()
        time.sleep(1)
        for pause in (0, *pauses):
            time.sleep(pause)
            process.send_signal(number)
        _, said = process.communicate(timeout=LONG)
    finally:
        process.kill()
        stop.set()
    for client in clients:
        client.join()
    said = re.sub(r"\S+ \S+ WARNING nanovllm.serve.server: shutting down: \d+ running request.*\n", "", said, count=1)
    assert (process.returncode, said) == (0, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_the_server_runs_ends_it_without_a_word(model_path, number, warm_python):
    """The line that says the server is ready is printed only if the server takes requests."""
    program = f"""
import os, signal
from nanovllm import AsyncLLM
from nanovllm.frontend.engine_client import ThreadClient
from nanovllm.config import EngineConfig
from nanovllm.serve.options import ServeOptions
from nanovllm.serve.server import Listener, Server, run
from tests.serve.running import SIZES

class Early(Server):
    def take_signals(self):
        super().take_signals()
        if not self.should_exit:
            os.kill(os.getpid(), {int(number)})

engine = AsyncLLM(client=ThreadClient(EngineConfig({str(model_path)!r}, **SIZES)))
server = Early(engine, ServeOptions(), on_ready=lambda: print("ready"))
run(server, Listener(port=0).open())
"""
    done = warm_python.run("-c", program, timeout=LONG)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_server_says_that_it_is_ready_when_it_takes_requests(model_path):
    said = []

    class Watched(RunningServer):
        def __enter__(self):
            self.server._on_ready = lambda: said.append(self.server.started)
            return super().__enter__()

    with Watched(model_path):
        wait_until(lambda: said)
    assert said == [True]
