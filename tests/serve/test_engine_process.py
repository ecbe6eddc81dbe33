"""The engine in a process of its own: the same answers, and what happens when it dies."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading

import msgspec
import pytest

from nanovllm import AsyncLLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.serve.frames import FrameReader, frame
from nanovllm.serve.options import ServeOptions
from nanovllm.serve.process_client import ProcessClient
from tests.serve.running import LONG, SIZES, SLOW_PLUGIN, RunningServer
from tests.waiting import wait_until

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("plugin")


@pytest.fixture(scope="module")
def apart(model_path, folder):
    """A server whose engine is a process, a slow one."""
    (folder / "slow.py").write_text(SLOW_PLUGIN)
    client = ProcessClient(EngineConfig(str(model_path), kernel_plugins=[str(folder / "slow.py")], **SIZES))
    with RunningServer(model_path, ServeOptions(stall_timeout=0.5, engine_restarts=True), client) as running:
        yield running


def test_frames_may_be_cut_anywhere():
    data = b"".join(frame(kind, {"x": [kind] * kind * 40}) for kind in range(5))
    for size in (1, 3, 7, 1000):
        reader = FrameReader()
        found = [f for i in range(0, len(data), size) for f in reader.feed(data[i : i + size])]
        assert [kind for kind, _ in found] == list(range(5))
        assert [msgspec.msgpack.decode(message) for _, message in found] == [{"x": [k] * k * 40} for k in range(5)]


def test_the_same_answers(apart, llm):
    body = dict(
        prompt=["hello there", "abc"], n=2, max_tokens=10, seed=7, logprobs=2, logit_bias={"9": 2.5}, stop=["zz"],
        bad_words=["hello"],
    )  # fmt: skip
    params = SamplingParams(
        n=2, max_tokens=10, seed=7, logprobs=2, logit_bias={9: 2.5}, stop=["zz"], bad_words=["hello"]
    )
    expected = llm.generate(body["prompt"], params, use_tqdm=False)
    whole = apart.post("/v1/completions", **body)
    completions = [c for o in expected for c in o.outputs]
    assert [c["text"] for c in whole["choices"]] == [c.text for c in completions]
    for choice, completion in zip(whole["choices"], completions):
        own = [row[t].logprob for row, t in zip(completion.logprobs, completion.token_ids)]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(own)
    status, error = apart.refused("/v1/completions", prompt="x", logit_bias={"5000": 1})
    assert status == 400 and "vocabulary" in error["message"]


def test_an_engine_that_dies_is_started_again(apart, folder):
    (folder / "no start").touch()
    body = {"prompt": "a", "max_tokens": 250, "ignore_eos": True, "stream": True, "n": 8}
    with apart.client.stream("POST", "/v1/completions", json=body) as answer:
        pieces = answer.iter_raw()
        next(pieces)
        first = apart.engine_client.pid
        os.kill(first, signal.SIGKILL)
        text = b"".join(pieces)
    assert b'"error":{"message":"the engine ended: its process ended with signal 9"' in text
    assert text.endswith(b"data: [DONE]\n\n")
    unhealthy = apart.client.get("/health")
    reason = "the engine is not running; it is being started again"
    assert unhealthy.status_code == 503 and unhealthy.json()["reason"] == reason
    refused = apart.client.post("/v1/completions", json=body)
    assert refused.status_code == 503 and "retry-after" in refused.headers
    assert refused.json()["error"]["message"] == reason
    assert apart.metric("nanovllm:engine_up") == 0
    (folder / "no start").unlink()
    wait_until(lambda: apart.client.get("/health").status_code == 200)
    assert apart.engine_client.pid != first
    found = apart.post("/v1/completions", prompt="x", max_tokens=3, ignore_eos=True)
    assert found["usage"]["completion_tokens"] == 3


def test_signals_do_not_end_the_engine_before_its_server(apart):
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(apart.engine_client.pid, number)
    assert apart.post("/v1/completions", prompt="x", max_tokens=2)["choices"]


def test_a_stuck_engine_is_unhealthy(apart):
    """/health tells of an engine that has work and makes no step, until it makes one."""
    found = {}
    asking = threading.Thread(target=lambda: found.update(apart.post("/v1/completions", prompt="a", max_tokens=2)))
    os.kill(apart.engine_client.pid, signal.SIGSTOP)
    try:
        asking.start()
        wait_until(lambda: apart.client.get("/health").status_code == 503)
        assert "made no step" in apart.client.get("/health/live").json()["reason"]
        assert apart.metric("nanovllm:engine_heartbeat_age_seconds") > 0.5
    finally:
        os.kill(apart.engine_client.pid, signal.SIGCONT)
    asking.join(LONG)
    assert found["choices"]
    wait_until(lambda: apart.client.get("/health").status_code == 200)


PLUGIN = """
import atexit
import pathlib

class Kept:
    def __del__(self):
        pathlib.Path({0!r}, "destroyed").touch()

kept = Kept()
atexit.register(pathlib.Path({0!r}, "ended").touch)
"""


def test_the_process_ends_without_taking_pytorch_apart(model_path, tmp_path):
    """That takes seconds on a busy machine, for which Ctrl-C would seem to hang."""
    (tmp_path / "plugin.py").write_text(PLUGIN.format(str(tmp_path)))
    client = ProcessClient(EngineConfig(str(model_path), kernel_plugins=[str(tmp_path / "plugin.py")], **SIZES))
    process = client._process
    client.close()
    assert process.returncode == 0 and (tmp_path / "ended").exists() and not (tmp_path / "destroyed").exists()


@pytest.mark.slow
def test_what_the_engine_refuses_at_its_start_is_told(tmp_path):
    with pytest.raises(ValueError, match="holds no config.json"):
        ProcessClient(EngineConfig(str(tmp_path), device="cpu"))


@pytest.mark.slow
def test_a_process_without_restart(model_path):
    client = ProcessClient(EngineConfig(str(model_path), **SIZES), restart=False)
    engine = AsyncLLM(client=client)

    async def run():
        engine.attach()
        outputs = [o async for o in engine.generate("hello", SamplingParams(max_tokens=3, ignore_eos=True))]
        assert sum(len(o.outputs[0].token_ids) for o in outputs) == 3
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="engine"):
            async for _ in engine.generate("hello", SamplingParams(max_tokens=None, ignore_eos=True)):
                pass
        assert not engine.alive
        engine.close()  # in the loop that has read the engine's messages

    asyncio.run(run())


class Watched(ProcessClient):
    """Keeps what takes the place of an engine that has died."""

    def _another(self):
        self.other = super()._another()
        return self.other


@pytest.mark.slow
def test_a_server_that_does_not_start_its_engine_again(model_path, folder, apart):
    """`--restart never`: what ran ends with an error, and from then on the server is unhealthy."""
    config = EngineConfig(str(model_path), kernel_plugins=[str(folder / "slow.py")], **SIZES)
    with RunningServer(model_path, client=Watched(config, restart=False)) as server:
        body = {"prompt": "a", "max_tokens": 250, "ignore_eos": True}
        found = {}
        asking = threading.Thread(target=lambda: found.update(zip(("status", "error"), server.refused(PATH, **body))))
        with server.client.stream("POST", PATH, json=body | {"stream": True, "n": 8}) as answer:
            pieces = answer.iter_raw()
            next(pieces)
            asking.start()
            wait_until(lambda: server.engine.num_unfinished == 2)
            os.kill(server.engine_client.pid, signal.SIGKILL)
            text = b"".join(pieces)
        asking.join(LONG)
        assert b'"error":{"message":"the engine ended: its process ended with signal 9"' in text
        assert b'"code":"engine_dead"' in text and text.endswith(b"data: [DONE]\n\n")
        assert found["status"] == 503 and found["error"]["code"] == "engine_dead"
        wait_until(lambda: hasattr(server.engine_client, "other"))
        assert server.engine_client.other is None
        for path in ("/health", "/health/live"):
            told = server.client.get(path)
            assert told.status_code == 503 and told.json()["reason"] == "the engine is not running"
        refused = server.client.post(PATH, json=body)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_dead"
        assert server.metric("nanovllm:engine_up") == server.metric("nanovllm:requests_open") == 0
        assert server.post("/tokenize", prompt="hello")["count"], "what needs no engine works"


def test_a_kernel_plugin_that_is_missing_is_an_error_of_the_start(model_path, tmp_path):
    plugin = str(tmp_path / "my_kernels.py")
    with pytest.raises(ValueError, match=f"kernel plugin {re.escape(plugin)}: there is no such file"):
        ProcessClient(EngineConfig(str(model_path), **SIZES, kernel_plugins=[plugin]))


@pytest.mark.slow
def test_an_engine_that_is_still_loading_ends_with_its_server(model_path, tmp_path):
    plugin, begun = tmp_path / "loads.py", tmp_path / "begun"
    plugin.write_text(
        f"import os, pathlib, time\npathlib.Path({str(begun)!r}).write_text(str(os.getpid()))\ntime.sleep(150)\n"
    )
    options = ["--kernel-plugin", plugin, "--device", "cpu", "--port", "0"]
    server = subprocess.Popen([sys.executable, "-m", "nanovllm", "serve", model_path, *options])
    wait_until(lambda: begun.exists() and begun.read_text())
    server.kill()
    server.wait()
    wait_until(lambda: not os.path.exists(f"/proc/{begun.read_text()}"))
