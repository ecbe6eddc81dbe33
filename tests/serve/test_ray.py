"""`nanovllm serve --replicas` on a Ray cluster of its own, and what it says of one that cannot serve."""

import json
import shutil
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serve.ray_running import Marked, Replicas, slow_plugin
from tests.serve.running import LONG
from tests.waiting import wait_until

pytest.importorskip("ray", reason='pip install "nanovllm[ray]"')
pytestmark = pytest.mark.slow


@pytest.fixture
def marked(tmp_path):
    marked = Marked(tmp_path)
    yield marked
    marked.close()


def test_replicas_answer_share_prefixes_come_and_end(model_path, marked):
    replicas = Replicas(marked, model_path, "--replicas=2").ready()
    assert len(replicas.engines()) == 2

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

    replicas.process.send_signal(signal.SIGTERM)
    assert replicas.process.wait(LONG) == 0
    wait_until(lambda: not marked.pids())


def test_keys_logs_and_an_end_under_load(model_path, marked):
    program = "--replicas=1", "--api-key=sk-secret-1", "--log-json", "--access-log", "--drain=300"
    plugin, held = slow_plugin(marked.directory), marked.directory / "held"
    replicas = Replicas(marked, model_path, *program, f"--kernel-plugin={plugin}").ready()
    body = dict(prompt="a", max_tokens=200, ignore_eos=True, stream=True)
    assert replicas.client.post("/v1/completions", json=body).status_code == 401
    replicas.client.headers["authorization"] = "Bearer sk-secret-1"
    assert replicas.client.get("/v1/models").json()["data"][0]["id"] == model_path.name

    def stream(begun):
        with replicas.client.stream("POST", "/v1/completions", json=body, timeout=LONG) as answer:
            lines = filter(None, answer.iter_lines())
            begun.append(next(lines))
            return list(lines)[-1]

    held.touch()
    begun = []
    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(stream, begun) for _ in range(4)]
        wait_until(lambda: len(begun) == 4)
        replicas.process.send_signal(signal.SIGTERM)
        wait_until(lambda: "shutting down: running requests have up to 300 seconds" in replicas.said())
        held.unlink()
        assert [future.result() for future in streams] == ["data: [DONE]"] * 4
    assert replicas.process.wait(LONG) == 0
    wait_until(lambda: not marked.pids())

    logged = [json.loads(line) for line in replicas.said().splitlines()]  # each line is JSON
    answers = [entry["message"] for entry in logged if entry["logger"] == "nanovllm.serve.access"]
    assert sum(" 401 " in answer for answer in answers) == 1 and sum("/v1/models" in answer for answer in answers) == 1
    assert any("weights loaded in " in entry["message"] for entry in logged)  # of the engine's process
    assert f"{model_path.name}, 1 replica, at {replicas.url} (Ctrl-C ends them)" in {e["message"] for e in logged}


def test_a_model_that_cannot_be_loaded(model_path, marked):
    bad = marked.directory / "bad"
    shutil.copytree(model_path, bad)
    (weights,) = bad.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:1000])
    replicas = Replicas(marked, bad, "--replicas=2")
    assert replicas.process.wait(LONG) == 1
    said = replicas.said()
    assert f"nanovllm: the replicas cannot start: {weights} is corrupt" in said and "Traceback" not in said, said
    wait_until(lambda: not marked.pids())


def test_a_port_that_is_taken(model_path, marked):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        replicas = Replicas(marked, model_path, "--replicas=1", port=port)
        assert replicas.process.wait(LONG) == 1
    said = replicas.said()
    assert f"nanovllm: cannot listen at 127.0.0.1:{port}: Address already in use; choose another --host or" in said
    assert "Loading" not in said  # it is said before Ray starts


@pytest.mark.parametrize("at", ["bin/haproxy", "ready"])
def test_nothing_outlives_the_program(model_path, marked, at):
    replicas = Replicas(marked, model_path, "--replicas=1")
    # HAProxy has no parent that looks after it while it starts.
    wait_until(lambda: marked.pids(at), 120) if at != "ready" else replicas.ready()
    replicas.process.kill()
    replicas.process.wait()
    wait_until(lambda: not marked.pids())


def test_replicas_are_added_while_requests_wait_and_removed_later(model_path, marked):
    program = "--replicas=1", "--max-replicas=2", "--max-num-seqs=2", "--upscale-delay=1", "--downscale-delay=2"
    replicas = Replicas(marked, model_path, *program).ready()
    assert len(replicas.engines()) == 1
    # Two are computed at a time: no request waits.
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda i: replicas.complete(f"{i}", max_tokens=250), range(8)))
    assert len(replicas.engines()) == 1
    done = []
    with ThreadPoolExecutor(8) as pool:

        def ask(i):
            while not done:
                replicas.complete(f"{i}", max_tokens=250)

        asked = [pool.submit(ask, i) for i in range(8)]
        try:
            wait_until(lambda: len(replicas.engines()) == 2, 60)
        finally:
            done.append(True)
        assert [future.exception() for future in asked] == [None] * 8
    wait_until(lambda: len(replicas.engines()) == 1, 90)
    assert replicas.complete("hello")["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--device=cuda", "--replicas=2"], "the replicas need 2 GPUs, and there are 0; pass fewer --replicas"),
        (["--replicas=1", "--ray-address=127.0.0.1:1"], "start a cluster there with ray start --head"),
        (["--replicas=1", "--ray-address=here"], "--ray-address here: it is neither auto nor HOST:PORT"),
    ],
)
def test_a_cluster_that_cannot_serve(model_path, marked, arguments, said):
    replicas = Replicas(marked, model_path, *arguments)
    assert replicas.process.wait(LONG) == 1
    assert said in replicas.said()
    wait_until(lambda: not marked.pids())


def test_a_replica_sees_the_gpus_of_all_bundles_of_its_placement_group(marked):
    program = (
        "import os\nimport ray\nfrom ray.util.placement_group import placement_group\n"
        "from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy\n"
        "from nanovllm.config import EngineConfig\nfrom nanovllm.serve.ray import see_gpus_of_bundles\n"
        "from nanovllm.serve.ray_options import ReplicaOptions\n"
        "ray.init(address='local', num_cpus=2, num_gpus=4, include_dashboard=False, log_to_driver=False)\n"
        "options = ReplicaOptions().placement(EngineConfig('model', device='cuda', tensor_parallel_size=2))\n"
        "assert options['placement_group_strategy'] == 'STRICT_PACK'\n"
        "class Seen:\n"
        "    def gpus(self):\n"
        "        see_gpus_of_bundles()\n"
        "        return os.environ['CUDA_VISIBLE_DEVICES'].split(',')\n"
        "seen = []\n"
        "for _ in range(2):\n"
        "    group = placement_group(options['placement_group_bundles'], options['placement_group_strategy'])\n"
        "    strategy = PlacementGroupSchedulingStrategy(group, 0)\n"
        "    kept = ray.remote(Seen).options(**options['ray_actor_options'], scheduling_strategy=strategy).remote()\n"
        "    seen += ray.get(kept.gpus.remote())\n"
        "assert sorted(seen) == list('0123'), seen\n"
        "ray.shutdown()\n"
    )
    assert marked.start(program).wait(120) == 0
