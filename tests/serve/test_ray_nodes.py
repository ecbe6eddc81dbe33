"""Three replicas on a Ray cluster of three nodes, of which replicas and nodes are taken away while they answer."""

import asyncio
import json
import os
import signal

import httpx
import pytest

from tests.serve.ray_running import REPLICA, Marked, Nodes, Replicas, slow_plugin
from tests.serve.running import LONG
from tests.waiting import wait_until

pytest.importorskip("ray", reason='pip install "nanovllm[ray]"')
pytestmark = pytest.mark.slow

CLOSED = "the connection was closed"


@pytest.fixture(scope="module")
def marked(tmp_path_factory):
    marked = Marked(tmp_path_factory.mktemp("ray"))
    yield marked
    marked.close()


@pytest.fixture(scope="module")
def nodes(marked):
    return Nodes(marked, 3)


@pytest.fixture(scope="module")
def replicas(model_path, marked, nodes):
    plugin = slow_plugin(marked.directory)
    sizes = "--max-num-seqs=64", "--num-kvcache-blocks=2000"  # all streams of a test run at the same time
    arguments = "--replicas=3", f"--ray-address={nodes.address}", "--host=0.0.0.0", f"--kernel-plugin={plugin}", *sizes
    return Replicas(marked, model_path, *arguments, port=nodes.port).ready()


def storm(replicas, streams, requests, disturb):
    """(how each stream ended, the tokens of each request). `disturb` is called once all streams have begun, and before
    any of them ends.
    """
    begun, ends, held = [0], [], replicas.directory / "held"

    async def stream(client, i):
        body = dict(prompt=f"{i} tells", max_tokens=200, ignore_eos=True, stream=True)
        last = None
        try:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                assert answer.status_code == 200, await answer.aread()
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        begun[0] += last is None
                        event = line.removeprefix("data: ")
                        last = json.loads(event)["error"]["message"] if '"error"' in event else last or "tokens"
                        if event == "[DONE]" and last == "tokens":
                            last = "done"
        except httpx.HTTPError:
            last = CLOSED
        ends.append(last)

    async def request(client, i):
        body = dict(prompt=f"{i} asks", max_tokens=8, ignore_eos=True)
        answer = await client.post("/v1/completions", json=body)
        return answer.json()["usage"]["completion_tokens"] if answer.status_code == 200 else answer.text

    async def all_of_them():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=replicas.url, timeout=LONG, limits=limits, trust_env=False) as client:
            held.touch()
            opened = [asyncio.create_task(stream(client, i)) for i in range(streams)]
            while begun[0] < streams and not ends:
                await asyncio.sleep(0.01)
            asked = [asyncio.create_task(request(client, i)) for i in range(requests)]
            await asyncio.sleep(0.3)
            assert not ends
            await asyncio.to_thread(disturb)
            held.unlink()
            return await asyncio.gather(*asked), await asyncio.gather(*opened)

    try:
        return ends, asyncio.run(asyncio.wait_for(all_of_them(), 2 * LONG))[0]
    finally:
        held.unlink(missing_ok=True)


def all_answer(replicas, streams, requests):
    ends, told = storm(replicas, streams, requests, lambda: None)
    assert ends == ["done"] * streams and told == [8] * requests


def test_500_requests_at_once(replicas):
    all_answer(replicas, 50, 450)


def test_a_replica_whose_engine_is_killed(replicas):
    before = replicas.engines()
    ends, told = storm(replicas, 45, 300, lambda: os.kill(before[0], signal.SIGKILL))
    assert told == [8] * 300  # the others answer
    broken = [end for end in ends if end != "done"]
    assert 0 < len(broken) < 45 and set(broken) == {"the engine ended: its process ended with signal 9"}
    wait_until(lambda: len(set(replicas.engines()) - {before[0]}) == 3)
    all_answer(replicas, 9, 30)


def test_a_replica_that_is_killed(replicas, marked):
    before, engines = marked.pids(REPLICA), replicas.engines()
    assert len(before) == 3
    ends, told = storm(replicas, 45, 300, lambda: os.kill(before[0], signal.SIGKILL))
    assert told == [8] * 300
    broken = [end for end in ends if end != "done"]
    assert 0 < len(broken) < 45 and set(broken) == {CLOSED}
    wait_until(lambda: len(replicas.engines()) == 3 != len(set(replicas.engines()) & set(engines)))
    all_answer(replicas, 9, 30)


def test_a_node_that_is_removed(replicas, nodes):
    before = replicas.engines()
    ends, told = storm(replicas, 45, 300, nodes.remove)
    assert told == [8] * 300
    broken = [end for end in ends if end != "done"]
    assert 0 < len(broken) < 45 and set(broken) == {CLOSED}
    wait_until(lambda: len(replicas.engines()) == 2)
    nodes.add()
    wait_until(lambda: len(set(replicas.engines()) - set(before)) == 1)
    all_answer(replicas, 9, 30)
