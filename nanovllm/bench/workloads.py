"""The loads that are measured: named, seeded, the same for every engine."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

Length = int | tuple[int, int]
"""A number of tokens, or the inclusive bounds of a uniform draw."""


@dataclass(frozen=True)
class Item:
    """One request of a workload.

    Attributes:
        prompt: token ids.
        num_output: tokens to generate; end tokens are ignored, so it is exact.
        arrival: seconds after the start at which the request comes in.
    """

    prompt: list[int]
    num_output: int
    arrival: float = 0.0


@dataclass(frozen=True)
class Workload:
    """A load by name.

    Attributes:
        input_len, output_len: tokens a request.
        shared_prefix: tokens with which every prompt of a draw begins, on top of `input_len`.
        rate: requests a second, arriving as a Poisson process whatever the engine does (open loop); None: all at once.
    """

    name: str
    num_requests: int
    input_len: Length
    output_len: Length
    shared_prefix: int = 0
    rate: float | None = None

    def __post_init__(self) -> None:
        for field in ("num_requests", "input_len", "output_len"):
            value = getattr(self, field)
            low, high = value if isinstance(value, tuple) else (value, value)
            if not 1 <= low <= high:
                raise ValueError(f"{field}={value!r}: expected at least 1, and bounds in rising order")
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"rate={self.rate!r}: expected requests a second, above 0")

    @property
    def max_len(self) -> int:
        """The longest prompt and output together, in tokens."""
        return self.shared_prefix + _high(self.input_len) + _high(self.output_len)

    @property
    def description(self) -> str:
        prefix = f"{self.shared_prefix} shared + " if self.shared_prefix else ""
        rate = f", {self.rate:g} requests/s" if self.rate else ""
        return f"{self.num_requests} x {prefix}{_show(self.input_len)} -> {_show(self.output_len)}{rate}"

    def draw(self, seed: int, vocab_size: int) -> list[Item]:
        """The requests under a seed. Prompts are random token ids, in the manner of nano-vLLM's published benchmark.

        std256 with seed 0 has the lengths and, for a vocabulary above 10,000, the tokens of that benchmark. Others
        draw by their name
        too: with the tokens of another workload a prompt would be found in the prefix cache.
        """
        rng = Random(seed if self.name == "std256" else f"{self.name} {seed}")
        top = min(10000, vocab_size - 1)

        def tokens(length: Length) -> list[int]:
            return [rng.randint(0, top) for _ in range(_draw(length, rng))]

        prefix = tokens(self.shared_prefix) if self.shared_prefix else []
        prompts = [prefix + tokens(self.input_len) for _ in range(self.num_requests)]
        outputs = [_draw(self.output_len, rng) for _ in range(self.num_requests)]
        arrival, arrivals = 0.0, []
        for _ in range(self.num_requests):
            arrivals.append(arrival)
            arrival += rng.expovariate(self.rate) if self.rate else 0.0
        return [Item(*item) for item in zip(prompts, outputs, arrivals)]


WORKLOADS = {
    w.name: w
    for w in (
        Workload("bs1", 1, 128, 512),
        Workload("bs8", 8, 128, 256),
        Workload("bs32", 32, 128, 256),
        Workload("bs128", 128, 128, 256),
        Workload("prefill", 64, 1024, 1),
        Workload("std256", 256, (100, 1024), (100, 1024)),
        Workload("shared-prefix", 256, 64, 128, shared_prefix=1024),
        Workload("long", 8, 16384, 256),
        Workload("poisson", 128, (100, 1024), (64, 256), rate=16.0),
        Workload("cpu1", 1, 32, 96),
        Workload("cpu3", 3, 32, 96),
        Workload("cpu8", 8, 32, 96),
        Workload("cpu-prefill", 1, 512, 1),
        Workload("cpu-context", 1, 2000, 64),
        Workload("tiny", 4, 32, 16),
        Workload("tiny-poisson", 6, 16, 8, rate=8.0),
    )
}
ON_GPU = ("bs1", "bs8", "bs32", "bs128", "prefill", "std256", "shared-prefix", "long", "poisson")
ON_CPU = ("cpu1", "cpu3", "cpu8", "cpu-prefill")


def select(names: Sequence[str]) -> list[Workload]:
    """Workloads by name; a ValueError names the nearest known one."""
    for name in names:
        if name not in WORKLOADS:
            near = difflib.get_close_matches(name, WORKLOADS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"workload {name!r}: {hint}expected any of {', '.join(WORKLOADS)}")
    return [WORKLOADS[name] for name in dict.fromkeys(names)]


def parse_length(text: str) -> Length:
    """ "128" -> 128, "100-1024" -> (100, 1024)."""
    low, dash, high = text.partition("-")
    try:
        return (int(low), int(high)) if dash else int(low)
    except ValueError:
        raise ValueError(f"{text!r}: expected a number of tokens, or bounds such as 100-1024") from None


def _high(length: Length) -> int:
    return length[1] if isinstance(length, tuple) else length


def _draw(length: Length, rng: Random) -> int:
    return rng.randint(*length) if isinstance(length, tuple) else length


def _show(length: Length) -> str:
    return f"{length[0]}-{length[1]}" if isinstance(length, tuple) else str(length)
