"""Measures a server under load: a number of streams at a time, or requests that come at random at a given rate."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import Any

from nanovllm.bench.serving_client import Target, Timed, ask, request_body, take_apart
from nanovllm.bench.workloads import Workload

_VOCAB_SIZE = 10_001
"""Of workloads without a `vocab_size`: std256 draws the same ids for every vocabulary of this size or more."""
_WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but not"
    " what all were we when your can said there use an each which she do how their if will up other about out many then"
    " them these so some her would make like him into time has look two more write go see number no way could people my"
).split()


@dataclass(frozen=True)
class Load:
    """What is asked, and how fast.

    Attributes:
        input_len: words (or token ids, with `vocab_size`) of a prompt.
        output_len: tokens of an answer.
        concurrency: requests at a time; None: as many as `rate` brings.
        rate: requests a second, as a Poisson process; None: the next one comes when another has ended.
        prompts: texts to use instead of random words.
        vocab_size: prompts are this many random token ids; None: random words.
        extra: further fields of every request.
    """

    num_requests: int = 64
    input_len: int = 128
    output_len: int = 128
    concurrency: int | None = 8
    rate: float | None = None
    prompts: Sequence[str] = ()
    vocab_size: int | None = None
    seed: int = 0
    timeout: float = 600.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    workload: Workload | None = None
    """One of `bench.workloads`, whose prompts are token ids below `vocab_size`: it has the numbers and the times of
    arrival instead of the fields above."""

    def __post_init__(self) -> None:
        for name in ("num_requests", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be at least 1")
        if self.concurrency is not None and self.concurrency < 1:
            raise ValueError(f"concurrency={self.concurrency!r}: must be at least 1")
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"rate={self.rate!r}: must be above 0 requests a second")

    @property
    def name(self) -> str:
        if self.workload is not None:
            return self.workload.name
        if self.rate is not None:
            return f"{self.rate:g}/s"
        return "1 stream" if self.concurrency == 1 else f"{self.concurrency} streams"

    @property
    def total(self) -> int:
        """Requests in all."""
        return self.num_requests if self.workload is None else self.workload.num_requests

    def bodies(self, target: Target) -> list[bytes]:
        """The requests, the same for every server."""
        if self.workload is not None:
            items = self.workload.draw(self.seed, self.vocab_size or _VOCAB_SIZE)
            return [request_body(target, item.prompt, item.num_output, self.extra) for item in items]
        rng = random.Random(self.seed)
        found = []
        for i in range(self.num_requests):
            prompt: str | list[int]
            if self.prompts:
                prompt = self.prompts[i % len(self.prompts)]
            elif self.vocab_size is not None:
                prompt = [rng.randrange(self.vocab_size) for _ in range(self.input_len)]
            else:
                prompt = " ".join(rng.choices(_WORDS, k=self.input_len))
            found.append(request_body(target, prompt, self.output_len, self.extra))
        return found

    def arrivals(self) -> list[float]:
        """Seconds after the start at which each request is sent, or may be once a stream is free."""
        if self.workload is not None:
            return [item.arrival for item in self.workload.draw(self.seed, _VOCAB_SIZE)]
        if self.rate is None:
            return [0.0] * self.num_requests
        rng = random.Random(self.seed + 1)
        return list(accumulate(rng.expovariate(self.rate) for _ in range(self.num_requests)))


@dataclass(frozen=True)
class Goal:
    """A request is good if it meets every limit that is set, in seconds: the first token's, the mean between two
    tokens, the whole answer's.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def met(self, request: Timed) -> bool:
        if request.error is not None:
            return False
        limits = (self.ttft, first_token(request)), (self.tpot, per_token(request)), (self.e2e, whole(request))
        return all(limit is None or (value or 0) <= limit for limit, value in limits)


def first_token(request: Timed) -> float:
    return request.times[0] - request.start


def whole(request: Timed) -> float:
    return request.times[-1] - request.start


def per_token(request: Timed) -> float | None:
    """Mean seconds a token after the first; None for a single token."""
    count = request.num_output or len(request.times)
    return (request.times[-1] - request.times[0]) / (count - 1) if count > 1 else None


@dataclass(frozen=True)
class Spread:
    """Seconds."""

    mean: float
    median: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        if not values:
            return None
        ordered = sorted(values)

        def at(share: float) -> float:
            return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

        return cls(sum(ordered) / len(ordered), at(0.5), at(0.9), at(0.99))


@dataclass(frozen=True)
class ServingResult:
    """What a load gave.

    Attributes:
        num_ok: requests without an error.
        num_good: those of them that meet the goal; None: there is none.
        seconds: from the first request's start to the last answer's end.
        itl: between two events of a stream, each with one or more tokens.
        tpot: mean seconds a token of each request, after its first.
        client_load: share of one processor that the measuring process itself used. Near 1, the client may be the limit.
    """

    load: str
    num_ok: int
    num_failed: int
    errors: dict[str, int]
    seconds: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_good: int | None
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    e2e: Spread | None
    client_load: float | None = None

    @property
    def output_rate(self) -> float:
        """Output tokens a second."""
        return self.num_output_tokens / self.seconds if self.seconds else 0.0

    @property
    def request_rate(self) -> float:
        return self.num_ok / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON: names with units, and the rates."""
        seconds = "ttft", "itl", "tpot", "e2e"
        named = {f"{name}_s" if name in seconds else name: value for name, value in asdict(self).items()}
        return named | {"output_tokens_per_s": self.output_rate, "requests_per_s": self.request_rate}

    @classmethod
    def of(
        cls, load: Load, requests: Sequence[Timed], goal: Goal | None, client_seconds: float | None = None
    ) -> ServingResult:
        """client_seconds: processor time of the measuring process."""
        good = [request for request in requests if request.error is None]
        errors = dict(Counter(request.error for request in requests if request.error is not None))
        gaps = [b - a for r in good for a, b in zip(r.times, r.times[1:])]
        seconds = max((r.end for r in good), default=0.0) - min((r.start for r in good), default=0.0)
        return cls(
            load=load.name, num_ok=len(good), num_failed=len(requests) - len(good), errors=errors, seconds=seconds,
            num_prompt_tokens=sum(r.num_prompt or 0 for r in good),
            num_output_tokens=sum(r.num_output or len(r.times) for r in good),
            num_good=None if goal is None else sum(map(goal.met, requests)),
            ttft=Spread.of([first_token(r) for r in good]), itl=Spread.of(gaps),
            tpot=Spread.of([t for r in good if (t := per_token(r)) is not None]),
            e2e=Spread.of([whole(r) for r in good]),
            client_load=client_seconds / seconds if client_seconds is not None and seconds else None,
        )  # fmt: skip


def measure(
    target: Target, load: Load, goal: Goal | None = None, progress: Callable[[int], None] = lambda done: None
) -> ServingResult:
    """Run a load against a server. progress: called with the number of requests that have ended."""
    bodies = load.bodies(target)
    started = time.process_time()
    requests = _loop_runner()(_run(target, load, bodies, progress))
    client_seconds = time.process_time() - started
    return ServingResult.of(load, [take_apart(*found) for found in requests], goal, client_seconds)


def _loop_runner() -> Callable[[Any], list[Any]]:
    """uvloop's where it is installed: an event costs the client two thirds of asyncio's time."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run
    return uvloop.run


async def _run(target: Target, load: Load, bodies: list[bytes], progress: Callable[[int], None]) -> list[Any]:
    found: list[Any] = [None] * len(bodies)
    limit = load.concurrency if load.workload is None else None
    slots = asyncio.Semaphore(limit or len(bodies))
    done = 0

    async def one(index: int) -> None:
        nonlocal done
        async with slots:
            found[index] = await ask(target, bodies[index], load.timeout)
        done += 1
        progress(done)

    begin, tasks = time.perf_counter(), []
    for index, due in enumerate(load.arrivals()):
        if due:
            await asyncio.sleep(max(0.0, begin + due - time.perf_counter()))
        tasks.append(asyncio.create_task(one(index)))
    await asyncio.gather(*tasks)
    return found
