"""The simulation of replicas behind a router."""

import json
import random

import pytest

from benchmarks import ray_routing
from benchmarks.replicas import Sizes, arrivals, routers, simulate
from nanovllm.model_config import ModelConfig

NAMES = ["a", "b", "c", "d"]
SIZES = Sizes(cached_prefixes=20)


@pytest.mark.parametrize("bursty", [False, True])
def test_arrivals_have_the_given_rate(bursty):
    times = list(arrivals(200.0, 20_000, bursty, random.Random(1)))
    assert times == sorted(times) and times[-1] == pytest.approx(100, rel=0.03)
    in_bursts = sum(t % 1.0 < 0.1 for t in times) / len(times)
    assert in_bursts == pytest.approx(0.5 if bursty else 0.1, abs=0.03)


def run(label, count=4000, prefixes=40, load=0.5, sizes=SIZES):
    rng = random.Random(2)
    times = arrivals(load * len(NAMES) / sizes.request_seconds, count, False, rng)
    return simulate(routers(NAMES, 8)[label], NAMES, times, rng.choices(range(prefixes), k=count), sizes)


def test_a_prefix_router_finds_more_in_the_caches():
    # Forty prefixes of equal use, of which each cache holds a half.
    by_turns, _, most, _ = run("turns")
    assert by_turns == pytest.approx(0.5, abs=0.05) and most == pytest.approx(1)
    found, waits, most, _ = run("prefix")
    assert found > 0.85 and most < 1.5 and waits[len(waits) // 2] < 0.1


def test_without_load_a_first_token_takes_its_prefill():
    sizes = Sizes()
    hits, waits, _, _ = run("least busy", count=50, prefixes=1, load=1e-4, sizes=sizes)
    assert waits[0] == pytest.approx(sizes.suffix / sizes.prefill_rate)
    assert waits[-1] == pytest.approx((sizes.prefix + sizes.suffix) / sizes.prefill_rate)
    assert hits >= 46 / 50


def test_what_is_asked_of_a_cluster_is_asked_of_the_simulation(tmp_path):
    args = ray_routing.parser().parse_args(["--requests", "200", "--prefixes", "20"])
    chosen, prompts, times = ray_routing.requests(args, ray_routing.SIZES)
    assert len(chosen) == len(prompts) == len(times) == 200
    shared = {kind: prompt[: ray_routing.SIZES.prefix] for kind, prompt in zip(chosen, prompts)}
    assert all(prompt[: len(shared[kind])] == shared[kind] for kind, prompt in zip(chosen, prompts))
    found = {routing: ray_routing.predict(args, routing, ray_routing.SIZES) for routing in ("prefix", "balanced")}
    assert found["prefix"].hits > found["balanced"].hits + 0.1
    assert found["prefix"].row("prefix", "simulated").startswith("| prefix | simulated | 200 | ")
    ray_routing.save_model(tmp_path, ray_routing.SIZES)
    assert ModelConfig.from_dict(json.loads((tmp_path / "config.json").read_text())).vocab_size == ray_routing.VOCAB
    compile((tmp_path / "pace.py").read_text(), "pace.py", "exec")
