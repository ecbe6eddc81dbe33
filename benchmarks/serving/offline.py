"""Measures `LLM.generate`, for `benchmarks.serving.beside_vllm`: a JSON line on standard output for each run.

Standard input has the job as `Job.to_json` writes it, with one workload. Its runs are those of `bench.py`: token ids in
and out, and no text is made of them.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from nanovllm import LLM
from nanovllm.bench.engines import start
from nanovllm.bench.job import Job, Repeat
from nanovllm.hardware.roofline import Work

_WARM_UP_TOKENS = 32
_WARM_UP_SEED = 999_999


def main() -> None:
    job = Job.from_json(json.load(sys.stdin))
    (workload,) = job.workloads
    engine = start(job, LLM)
    vocab_size = engine.config.vocab_size
    items = workload.draw(_WARM_UP_SEED, vocab_size)
    engine.run([dataclasses.replace(item, num_output=min(item.num_output, _WARM_UP_TOKENS)) for item in items])
    for seed in range(job.seed, job.seed + job.repeat):
        items = workload.draw(seed, vocab_size)
        found = Repeat.of(engine.run(items), sum(len(item.prompt) for item in items), Work())
        times = {
            "ttft_s": {"median": found.ttft_p50, "p99": found.ttft_p99},
            "itl_s": {"median": found.itl_p50, "p99": found.itl_p99},
        }
        print(
            json.dumps({"seed": seed, "output_tokens_per_s": found.output_rate, "seconds": found.seconds, **times}),
            flush=True,
        )


if __name__ == "__main__":
    main()
