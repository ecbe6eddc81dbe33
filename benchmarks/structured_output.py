"""What constrained requests cost the batch that they are in: `python -m benchmarks.structured_output --help`.

Both sides decode the same number of tokens of the same number of requests; on one side some of these must write JSON.
The sides run in turns. Two rates are printed for each, and what constrained requests cost by either: `whole` is all
tokens by the time from the call to its end, with prompts, grammars and the first masks, which matchers learn from;
`steady` is that of the steps in which every request gets a token, without the first eight of them and the last one, in
which a request ends. Then it prints where the host's time goes in a step. --model qwen3-8b has steps of a larger model.

--host needs no GPU: `structured_output_host.py` says what it measures.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.serving import dummy_tokenizer
from nanovllm import LLM, SamplingParams
from nanovllm.engine.fast.mask_thread import StartedMasks
from nanovllm.engine.requests.request import Request
from nanovllm.structured.constraint_maker import ConstraintMaker
from nanovllm.structured.mask_filler import THREADS, Filling
from nanovllm.weights.demo_model import demo_model_path

# Long enough that no output ends before --tokens.
SCHEMA = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 5, "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "kind": {"enum": ["first", "second", "third"]},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    },
}
VOCAB_SIZE, END = 151_936, 151_645


def tokens_per_second(llm: LLM, num_requests: int, num_constrained: int, num_tokens: int) -> float:
    common = dict(max_tokens=num_tokens, temperature=0.6)
    free = SamplingParams(**common, ignore_eos=True)
    constrained = SamplingParams(**common, structured_outputs={"json": SCHEMA})
    params = [constrained] * num_constrained + [free] * (num_requests - num_constrained)
    prompts = [[1 + (i * 7919 + j) % 40_000 for j in range(128)] for i in range(num_requests)]
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - start
    assert all(len(output["token_ids"]) == num_tokens for output in outputs), "an output ended early"
    return num_requests * num_tokens / seconds


class RoundRates(NamedTuple):
    """Tokens a second of a round."""

    whole: float
    """From the call to its end."""
    steady: float
    """`Stages.steady_rate`"""


def print_rates(sides: dict[int, list[RoundRates]], num_requests: int) -> None:
    """Medians of the rounds. sides: by the number of constrained requests, first that of none."""
    for name in RoundRates._fields:
        free = statistics.median(getattr(rates, name) for rates in sides[0])
        for num_constrained, rounds in sides.items():
            rate = statistics.median(getattr(rates, name) for rates in rounds)
            print(
                f"{name:6} {num_constrained:4} constrained: {rate:9,.0f} tokens/s, {100 * (rate / free - 1):+5.1f} %,"
                f" {1e3 * num_requests / rate:.2f} ms a step"
            )


_THERE = 0.03
"""ms that looking at tokens takes which are there already."""
_ENDS = 4
"""Steps at the beginning and at the end that are not counted: prompts, ends of sequences."""
_SETTLING = 8
"""The first steps in which all requests get a token: not counted as steady."""
_FEWEST_STEPS = _SETTLING + 3
"""Steps in which all requests get a token that a steady rate needs: two ends, and the step in which a request ends."""
_LEARNING = 20
"""Masks of a new matcher that take longer, since it learns its grammar's states."""


class Stages:
    """Times the parts of an engine's steps, from now on."""

    def __init__(self, llm: LLM) -> None:
        self._seconds: dict[str, list[float]] = {"schedule": [], "execute": [], "step": []}
        engine = llm.engine
        self._masks: list[dict[str, float]] = []
        """Seconds of each step with masks, by `MASK_PARTS`."""
        self._time_masks(engine.runner.sampler.masks)
        self._in_thread = engine.runner.fast.enabled.mask_thread
        self._ends: list[tuple[float, int]] = []
        """Of each step: when it ended, how many requests got tokens."""
        engine.scheduler.schedule = self._timed("schedule", engine.scheduler.schedule)  # type: ignore[method-assign]
        engine.runner.execute = self._timed("execute", engine.runner.execute)  # type: ignore[method-assign]
        engine.step = self._noted(self._timed("step", engine.step))  # type: ignore[method-assign]

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        seconds = self._seconds[name]

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = call(*args)
            seconds.append(time.perf_counter() - start)
            return result

        return timed

    def _time_masks(self, masks: Any) -> None:
        """masks: the engine's `ThreadedMaskBuilder`."""
        prepare, start = masks.filler.prepare, masks.start

        def adding(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
            times = self._masks[-1]

            def timed(*args: Any) -> Any:
                begin = time.perf_counter()
                try:
                    return call(*args)
                finally:
                    times[part] += time.perf_counter() - begin

            return timed

        def timed_prepare(*args: Any) -> Filling:
            *others, before, after, end = args
            times = dict.fromkeys(MASK_PARTS, 0.0)
            self._masks.append(times)
            job = before.__self__
            job.wait_for_tokens = adding("tokens", job.wait_for_tokens)
            job.advance_grammars = adding("advance", job.advance_grammars)
            apply_bans = adding("bans", after)

            def timed_before() -> None:
                before()
                times["fill"] = -time.perf_counter()

            def timed_after() -> None:
                times["fill"] += time.perf_counter()
                apply_bans()

            filling: Filling = prepare(*others, timed_before, timed_after, end)
            return filling

        def timed_start(*args: Any, **options: Any) -> StartedMasks:
            started: StartedMasks = start(*args, **options)
            for wait in ("wait_until_filled", "wait_until_filling"):
                setattr(started.filling, wait, adding("main_wait", getattr(started.filling, wait)))
            return started

        masks.filler.prepare, masks.start = timed_prepare, timed_start

    def _noted(self, step: Callable[[], list[Request]]) -> Callable[[], list[Request]]:
        def noted() -> list[Request]:
            grown = step()
            self._ends.append((time.perf_counter(), len(grown)))
            return grown

        return noted

    def steady_rate(self, num_requests: int) -> float:
        """Tokens a second while all of `num_requests` decode: requests of one completion that were given together.

        Raises:
            ValueError: there were too few such steps.
        """
        ends = [end for end, grown in self._ends if grown == num_requests]
        if len(ends) < _FEWEST_STEPS:
            raise ValueError(
                f"all {num_requests} requests got a token in {len(ends)} steps; the steady rate needs at least "
                f"{_FEWEST_STEPS} such steps"
            )
        ends = ends[_SETTLING:-1]
        return (len(ends) - 1) * num_requests / (ends[-1] - ends[0])

    def clear(self) -> None:
        self._masks.clear()
        self._ends.clear()
        for seconds in self._seconds.values():
            seconds.clear()

    def milliseconds(self) -> dict[str, np.ndarray]:
        """Of each decode step with masks. `launch` is the rest of `execute`, `read` the rest of the step.

        All requests begin and end together, so the last calls of `execute` are those with masks.
        """
        masks = {part: 1e3 * np.array([times[part] for times in self._masks]) for part in MASK_PARTS}
        end, count = len(self._seconds["execute"]), len(self._masks)
        whole = {name: 1e3 * np.array(times[end - count : end]) for name, times in self._seconds.items()}
        inside = masks["main_wait"]
        if not self._in_thread:
            inside = inside + sum(masks[part] for part in MASK_PARTS[:-1])
        found = masks | {
            "launch": whole["execute"] - inside, "schedule": whole["schedule"],
            "read": whole["step"] - whole["execute"] - whole["schedule"], "step": whole["step"],
        }  # fmt: skip
        return {name: ms[_ENDS:-_ENDS] for name, ms in found.items()}


MASK_PARTS = ("tokens", "advance", "fill", "bans", "main_wait")
"""The parts of a step's masks: all but the last are the work of whoever makes them."""
SAID = {
    "tokens": "masks: waiting for the tokens of the step before, the GPU is behind",
    "advance": "masks: moving the grammars on",
    "fill": "masks: filling them",
    "bans": "masks: banning other tokens",
    "main_wait": "waits for a thread that makes the masks, until the grammars have moved on",
    "launch": "launches the model, masking and sampling",
    "schedule": "schedules",
    "read": "reads the step before, tells the requests",
    "step": "the whole step",
}


def print_stages(stages: dict[str, np.ndarray]) -> None:
    print("the host in a step, ms:     mean  median     p90     p99")
    for name, said in SAID.items():
        ms = stages[name]
        parts = [ms.mean(), *(np.quantile(ms, q) for q in (0.5, 0.9, 0.99))]
        print(f"  {name:20} " + " ".join(f"{part:7.3f}" for part in parts) + f"  {said}")


def mask_seconds(llm: LLM, num_constrained: int, num_steps: int) -> list[list[float]]:
    """Processor time of each mask of each step, one after the other, with the engine's vocabulary. The tokens are drawn
    at random from those that the masks allow. Steps in which the matchers learn their grammar come first, and are not
    counted."""
    engine = llm.engine
    maker = ConstraintMaker(engine.tokenizer, engine.model_config.vocab_size, engine.eos_token_ids)
    constraints = maker.make(SamplingParams(n=num_constrained, structured_outputs={"json": SCHEMA}))
    rng, mask, steps = random.Random(0), np.zeros(constraints[0].num_words, np.int32), []
    for _ in range(_LEARNING + num_steps):
        steps.append([])
        for constraint in constraints:
            start = time.thread_time()
            constraint.fill(mask)
            if not constraint.is_plain:
                constraint.restrict([], mask)
            steps[-1].append(time.thread_time() - start)
            ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            constraint.take([int(ids[rng.randrange(len(ids))])])
    return steps[_LEARNING:]


def print_masks(steps: Sequence[Sequence[float]]) -> None:
    """steps: seconds of each mask of each step, from `mask_seconds`."""
    single, slowest = 1e3 * np.array(steps).ravel(), 1e3 * np.array(steps).max(1)
    rows = {"one mask": single, f"slowest of {len(steps[0])}": slowest, "all, one thread": 1e3 * np.array(steps).sum(1)}
    for num_threads in (2, 4, 8):
        rows[f"{num_threads} threads, if parallel"] = 1e3 * np.array([in_threads(one, num_threads) for one in steps])
    print("masks on this processor, ms:  mean  median     p90     p99")
    for name, ms in rows.items():
        parts = [ms.mean(), *(np.quantile(ms, q) for q in (0.5, 0.9, 0.99))]
        print(f"  {name:22} " + " ".join(f"{part:7.3f}" for part in parts))


def in_threads(seconds: Sequence[float], num_threads: int) -> float:
    """How long the masks take if each thread takes the next one when it has done one."""
    ends = [0.0] * num_threads
    for one in seconds:
        heapq.heapreplace(ends, ends[0] + one)
    return max(ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="a preset, which gets random weights")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--constrained", type=int, default=20, help="requests that must write JSON")
    parser.add_argument("--tokens", type=int, default=512, help="output tokens of a request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiktoken", type=Path, help="a vocabulary, such as qwen.tiktoken of the package dashscope")
    parser.add_argument("--host", action="store_true", help="time only the host's parts of a step, without a GPU")
    parser.add_argument("--launch-ms", type=float, default=0.2, help="with --host: launching a step's kernels on a GPU")
    parser.add_argument("--slower", type=float, default=1.0, help="with --host: for a processor this much slower")
    args = parser.parse_args()
    if args.host:
        from benchmarks.structured_output_host import print_host

        return print_host(args)
    if args.tokens < _FEWEST_STEPS:
        parser.error(f"--tokens {args.tokens}: the steady rate needs at least {_FEWEST_STEPS}")
    if args.tiktoken is not None and not args.tiktoken.is_file():
        parser.error(f"--tiktoken {args.tiktoken}: there is no such file; qwen.tiktoken is in dashscope/resources")
    with tempfile.TemporaryDirectory() as folder:
        if args.tiktoken is None:
            tokenizer = str(demo_model_path())
        else:
            tokenizer = folder
            dummy_tokenizer.write(Path(folder), VOCAB_SIZE, END, args.tiktoken)
        llm = LLM(args.model, load_format="dummy", tokenizer=tokenizer, max_model_len=1024, enable_prefix_caching=False)
    stages = Stages(llm)
    sides: dict[int, list[RoundRates]] = {0: [], args.constrained: []}
    for num_constrained in sides:  # kernels, grammar, vocabulary
        tokens_per_second(llm, args.requests, num_constrained, args.tokens)
    for _ in range(args.rounds):
        for num_constrained, rates in sides.items():
            stages.clear()
            whole = tokens_per_second(llm, args.requests, num_constrained, args.tokens)
            try:
                rates.append(RoundRates(whole, stages.steady_rate(args.requests)))
            except ValueError as e:
                parser.error(f"--tokens {args.tokens}: {e}")
    print(f"{args.model} on {llm.device_name}: {args.requests} requests x {args.tokens} tokens, {args.rounds} rounds")
    print_rates(sides, args.requests)
    found = stages.milliseconds()
    print_stages(found)
    late = 100 * (found["wait"] < _THERE).mean()
    print(f"  in {late:.0f} % of the steps the tokens were there before the thread asked for them")
    print(f"  {THREADS} threads fill masks")
    if args.constrained:
        print_masks(mask_seconds(llm, args.constrained, 100))


if __name__ == "__main__":
    main()
