"""What constrained requests cost the batch that they are in: `python -m benchmarks.structured_output --help`.

Both sides decode the same number of tokens of the same number of requests; on one side some of these must write JSON.
The sides run in turns. --host times only the masks, on one processor, with a vocabulary of 151,936 random words: what a
step's masks take one after the other, and what they would take in threads.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.serving import dummy_tokenizer
from nanovllm import LLM, SamplingParams
from nanovllm.structured.constraint import ConstraintMaker
from nanovllm.weights.demo_model import demo_model_path
from nanovllm.weights.tokenizer import load_tokenizer

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


def mask_seconds(num_constrained: int, num_steps: int) -> list[list[float]]:
    """Processor time of each mask of each step; the tokens are drawn at random from those that the masks allow."""
    vocab_size, end = 151_936, 151_645
    with tempfile.TemporaryDirectory() as folder:
        dummy_tokenizer.write(Path(folder), vocab_size, end)
        maker = ConstraintMaker(load_tokenizer(folder), vocab_size, [end])
    constraints = maker.make(SamplingParams(n=num_constrained, structured_outputs={"json": SCHEMA}))
    rng, mask, steps = random.Random(0), np.zeros(constraints[0].num_words, np.int32), []
    for _ in range(num_steps):
        steps.append([])
        for constraint in constraints:
            start = time.thread_time()
            constraint.fill(mask)
            steps[-1].append(time.thread_time() - start)
            ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            constraint.take([int(ids[rng.randrange(len(ids))])])
    return steps


def in_threads(seconds: Sequence[float], num_threads: int) -> float:
    """How long the masks take if each thread takes the next one when it has done one."""
    ends = [0.0] * num_threads
    for one in seconds:
        heapq.heapreplace(ends, ends[0] + one)
    return max(ends)


def print_host(num_constrained: int) -> None:
    steps = mask_seconds(num_constrained, 400)
    for num_threads in (1, 4, 8):
        ms = np.array([1e3 * in_threads(step, num_threads) for step in steps])
        median, p90, p99 = np.quantile(ms, (0.5, 0.9, 0.99))
        print(
            f"{num_constrained} masks, {num_threads} threads: median {median:.2f} ms, p90 {p90:.2f}, p99 {p99:.2f};"
            f" beside a step of 3.5 ms it takes {np.maximum(3.5, ms).mean():.2f} ms on average"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="a preset, which gets random weights")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--constrained", type=int, default=20, help="requests that must write JSON")
    parser.add_argument("--tokens", type=int, default=512, help="output tokens of a request")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--host", action="store_true", help="time only the masks, on the host")
    args = parser.parse_args()
    if args.host:
        return print_host(args.constrained)
    llm = LLM(
        args.model, load_format="dummy", tokenizer=demo_model_path(), max_model_len=1024, enable_prefix_caching=False
    )
    sides: dict[int, list[float]] = {0: [], args.constrained: []}
    for num_constrained in sides:  # kernels, grammar, vocabulary
        tokens_per_second(llm, args.requests, num_constrained, args.tokens)
    for _ in range(args.rounds):
        for num_constrained, rates in sides.items():
            rates.append(tokens_per_second(llm, args.requests, num_constrained, args.tokens))
    print(f"{args.model} on {llm.device_name}: {args.requests} requests x {args.tokens} tokens, {args.rounds} rounds")
    free = statistics.median(sides[0])
    for num_constrained, rates in sides.items():
        rate = statistics.median(rates)
        print(f"{num_constrained:4} constrained: {rate:9,.0f} tokens/s, {100 * (rate / free - 1):+5.1f} %")


if __name__ == "__main__":
    main()
