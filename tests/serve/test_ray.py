"""`nanovllm serve --replicas` on a Ray cluster of its own, and what it says of one that cannot serve."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.serve.ray_running import Marked, Replicas
from tests.serve.running import wait_until

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
    assert replicas.process.wait(60) == 0
    wait_until(lambda: not marked.pids(), 20)


@pytest.mark.parametrize("at", ["bin/haproxy", "ready"])
def test_nothing_outlives_the_program(model_path, marked, at):
    replicas = Replicas(marked, model_path, "--replicas=1")
    # HAProxy has no parent that looks after it while it starts.
    wait_until(lambda: marked.pids(at), 120) if at != "ready" else replicas.ready()
    replicas.process.kill()
    replicas.process.wait()
    wait_until(lambda: not marked.pids(), 20)


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
    assert replicas.process.wait(60) == 1
    assert said in replicas.said()
    wait_until(lambda: not marked.pids(), 20)


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
