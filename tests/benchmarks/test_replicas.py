"""The simulation of replicas behind a router."""

import random

import pytest

from benchmarks.replicas import Sizes, arrivals, routers, simulate

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
