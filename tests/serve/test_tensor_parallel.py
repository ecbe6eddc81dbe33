"""`nanovllm serve --tensor-parallel-size 2`: the tokens of one rank, and what clients see when a rank dies."""

import os
import signal

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.serve.process_client import ProcessClient
from tests.serve.running import SIZES, SLOW_PLUGIN, RunningServer
from tests.waiting import wait_until

ARGUMENTS = SIZES | dict(dtype="float32", use_custom_kernels=False)


def ranks(client):
    """The processes that the engine's process has started."""
    with open(f"/proc/{client.pid}/task/{client.pid}/children") as children:
        return [int(pid) for pid in children.read().split()]


@pytest.mark.slow
def test_a_rank_that_dies_is_started_again_with_its_engine(model_path, tmp_path):
    """While nothing runs, and then while requests run."""
    plugin = tmp_path / "slow.py"
    plugin.write_text(SLOW_PLUGIN)
    arguments = ARGUMENTS | dict(kernel_plugins=[str(plugin)], tensor_parallel_size=2)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    want = LLM(model_path, **ARGUMENTS).generate("hello there", params, use_tqdm=False)[0]["text"]
    client = ProcessClient(EngineConfig(str(model_path), **arguments))
    with RunningServer(model_path, client=client) as server:

        def answer():
            body = dict(prompt="hello there", max_tokens=12, temperature=0, ignore_eos=True)
            return server.post("/v1/completions", **body)["choices"][0]["text"]

        def started():
            """The processes of an engine that answers."""
            assert answer() == want
            found = [client.pid, *ranks(client)]
            assert len(found) == 2
            return found

        engines = [started()]
        for busy in (False, True):
            (tmp_path / "no start").touch()
            if busy:
                body = dict(prompt="a", max_tokens=250, ignore_eos=True, stream=True, n=8)
                with server.client.stream("POST", "/v1/completions", json=body) as stream:
                    pieces = stream.iter_raw()
                    next(pieces)
                    os.kill(engines[-1][1], signal.SIGKILL)
                    text = b"".join(pieces)
                assert b'"error":{"message":"the engine ' in text and text.endswith(b"data: [DONE]\n\n")
            else:
                os.kill(engines[-1][1], signal.SIGKILL)
            wait_until(lambda: server.client.get("/health").status_code == 503)
            (tmp_path / "no start").unlink()
            wait_until(lambda: server.client.get("/health").status_code == 200)
            engines.append(started())
        pids = [pid for engine in engines for pid in engine]
        assert len(set(pids)) == 6
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
