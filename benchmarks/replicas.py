"""Simulates replicas behind a router: how often prompts find their beginning cached, and when first tokens come.

    python -m benchmarks.replicas                                 # 1 to 1,000 replicas, Poisson and bursty load
    python -m benchmarks.replicas --replicas 16 --load 0.9 --prefixes 400

The router is that of `nanovllm serve --replicas` (`PrefixIndex`), beside turns (round robin) and the least busy one. It
sees the open requests as they are; on Ray they are up to half a second old. A replica computes prompts one after
another at a fixed rate, and decodes at the same time, the slower the more sequences it has. Its cache holds a number of
prefixes, and the one that was not used for the longest time goes first. Requests have one of many prefixes, whose use
falls with 1 / rank (Zipf), and an end of their own. Bursty load has the same mean: half of the requests come in a tenth
of the time.

The rates are arguments. Their defaults are those of Qwen3-8B on an H100: 30,000 tokens/s of prompts (assumed), and
steps of 5.4 ms for one sequence to 9.5 ms for 128 (docs/scaling.md).
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from nanovllm.serve.prefix_index import PrefixIndex


@dataclass(frozen=True)
class Sizes:
    """What a replica can do, and what requests are like."""

    prefill_rate: float = 30_000.0
    """Tokens a second."""
    step: float = 5.4e-3
    """Seconds of a decode step of one sequence; each further one adds `step_sequence`."""
    step_sequence: float = 3.2e-5
    cached_prefixes: int = 25
    prefix: int = 2_000
    """Tokens that requests share, at 4 characters each."""
    suffix: int = 100
    output: int = 128

    @property
    def request_seconds(self) -> float:
        """Of a replica, for a request whose prefix is cached: its prefill, and its share of steps of 128 sequences."""
        return self.suffix / self.prefill_rate + self.output * (self.step + 127 * self.step_sequence) / 128


@dataclass
class _Replica:
    free_at: float = 0.0
    open: int = 0
    cached: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def serve(self, now: float, prefix: int, sizes: Sizes) -> tuple[bool, float, float]:
        """(whether the prefix was cached, time of the first token, of the last one)"""
        hit = prefix in self.cached
        self.cached[prefix] = None
        self.cached.move_to_end(prefix)
        if len(self.cached) > sizes.cached_prefixes:
            self.cached.popitem(last=False)
        self.open += 1
        tokens = sizes.suffix + (0 if hit else sizes.prefix)
        first = self.free_at = max(now, self.free_at) + tokens / sizes.prefill_rate
        return hit, first, first + sizes.output * (sizes.step + sizes.step_sequence * (self.open - 1))


def arrivals(rate: float, count: int, bursty: bool, rng: random.Random) -> Iterator[float]:
    """Times of `count` requests, `rate` a second in the mean."""
    now = 0.0
    for _ in range(count):
        now += rng.expovariate(rate)
        second, part = divmod(now, 1.0)
        # The first half of each second's requests come in a tenth of it.
        yield second + (part / 5 if part < 0.5 else 0.1 + (part - 0.5) * 1.8) if bursty else now


Choose = Callable[[int, dict[str, float]], str]


def routers(names: list[str], slack: float) -> dict[str, Choose]:
    """What chooses a replica for a prefix, by the loads of all."""
    turns, index = itertools.cycle(names), PrefixIndex(slack)
    return {
        "turns": lambda prefix, loads: next(turns),
        "least busy": lambda prefix, loads: min(loads, key=loads.__getitem__),
        "prefix": lambda prefix, loads: index.choose(f"{prefix:08d}" * 512, loads),
    }


def simulate(
    choose: Choose, names: list[str], times: Iterator[float], prefixes: list[int], sizes: Sizes
) -> tuple[float, list[float], float, float]:
    """(share of hits, sorted seconds to first tokens, most requests of a replica by the mean, seconds of a choice)"""
    replicas = {name: _Replica() for name in names}
    loads = dict.fromkeys(names, 0.0)
    ends: list[tuple[float, str]] = []
    hits, waits, spent = 0, [], 0.0
    served = dict.fromkeys(names, 0)
    for now, prefix in zip(times, prefixes):
        while ends and ends[0][0] <= now:
            name = heapq.heappop(ends)[1]
            replicas[name].open -= 1
            loads[name] -= 1
        since = time.perf_counter()
        name = choose(prefix, loads)
        spent += time.perf_counter() - since
        hit, first, end = replicas[name].serve(now, prefix, sizes)
        loads[name] += 1
        served[name] += 1
        hits += hit
        waits.append(first - now)
        heapq.heappush(ends, (end, name))
    count = len(waits)
    return hits / count, sorted(waits), max(served.values()) * len(names) / count, spent / count


def main() -> None:
    sizes = Sizes()
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--replicas", default="1,4,16,100,1000", help="numbers of replicas, separated by commas")
    p.add_argument("--load", type=float, default=0.7, help="of what replicas can serve if all prefixes are cached")
    p.add_argument("--prefixes", type=int, default=20, help="different prefixes for each replica")
    p.add_argument("--requests", type=int, default=200, help="for each replica, but at least 4,000")
    p.add_argument("--slack", type=float, default=32.0)
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args()
    print("| replicas | load | router | hits | TTFT p50, ms | p99, ms | busiest / mean | us of a choice |")
    print("|---|---|---|---|---|---|---|---|")
    for count in map(int, args.replicas.split(",")):
        names = [f"r{i:04d}" for i in range(count)]
        rng = random.Random(args.seed)
        total = max(4_000, args.requests * count)
        kinds = range(args.prefixes * count)
        prefixes = rng.choices(kinds, [1 / (kind + 1) for kind in kinds], k=total)
        rate = args.load * count / sizes.request_seconds
        for bursty in (False, True):
            for label, choose in routers(names, args.slack).items():
                times = arrivals(rate, total, bursty, random.Random(args.seed))
                hits, waits, most, spent = simulate(choose, names, times, prefixes, sizes)
                median, slow = waits[total // 2] * 1e3, waits[total * 99 // 100] * 1e3
                load = "bursty" if bursty else "Poisson"
                print(
                    f"| {count:,} | {load} | {label} | {hits:.0%} | {median:,.1f} | {slow:,.0f} | {most:.1f} |"
                    f" {spent * 1e6:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
