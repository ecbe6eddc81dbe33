"""What constrained requests cost the batch that they are in: `python -m benchmarks.structured_output --help`.

Both sides decode the same number of tokens of the same number of requests; on one side some of these must write JSON.
The sides run in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time

from nanovllm import LLM, SamplingParams
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b", help="a preset, which gets random weights")
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--constrained", type=int, default=20, help="requests that must write JSON")
    parser.add_argument("--tokens", type=int, default=512, help="output tokens of a request")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
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
