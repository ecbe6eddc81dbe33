"""Throughput of `LLM.generate`, sampling included, on named and seeded workloads.

    python bench.py                                    # Qwen3-0.6B's shape with random weights on a GPU; a small load on a CPU
    python bench.py --workload bs1,std256 --repeat 3
    python bench.py --no-use-custom-kernels            # the reference of every op, for comparison

A workload is (prompts, input tokens, output tokens); std256 is nano-vLLM's published benchmark. Each repeat draws new
prompts, so nothing comes from the prefix cache. The first repeat may compile kernels; it is shown but not counted.
"""

import argparse
import statistics
import sys
import time
from random import Random

from nanovllm import LLM, SamplingParams

WORKLOADS = {
    "bs1": (1, 128, 512),
    "bs8": (8, 128, 256),
    "bs32": (32, 128, 256),
    "bs128": (128, 128, 256),
    "prefill": (64, 1024, 1),
    "std256": (256, (100, 1024), (100, 1024)),
    "tiny": (4, 32, 16),
}


def draw(workload: str, rng: Random) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of random token ids, and the parameters of each."""
    num_prompts, input_len, output_len = WORKLOADS[workload]
    length = lambda n: rng.randint(*n) if isinstance(n, tuple) else n  # noqa: E731
    prompts = [[rng.randint(0, 10000) for _ in range(length(input_len))] for _ in range(num_prompts)]
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length(output_len)) for _ in range(num_prompts)]
    return prompts, params


def measure(llm: LLM, workload: str, repeat: int) -> tuple[list[float], list[float]]:
    """(output tokens a second, seconds) of each repeat, the warm-up among them."""
    rates, times = [], []
    for i in range(repeat + 1):
        prompts, params = draw(workload, Random(i))
        started = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        times.append(time.perf_counter() - started)
        assert [len(o["token_ids"]) for o in outputs] == [p.max_tokens for p in params]
        rates.append(sum(p.max_tokens for p in params) / times[-1])
    return rates, times


def main() -> None:
    import torch

    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-0.6b" if on_gpu else "smollm2-135m", help="a preset, or a model's path")
    parser.add_argument("--workload", default="bs1,bs8,bs32,bs128,prefill,std256" if on_gpu else "tiny")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--use-custom-kernels", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    args = parser.parse_args()
    unknown = [w for w in args.workload.split(",") if w not in WORKLOADS]
    if unknown or args.repeat < 1:
        sys.exit(f"bench.py: --workload is any of {', '.join(WORKLOADS)}, --repeat at least 1")

    from nanovllm.models.presets import PRESETS

    load_format = "dummy" if args.model in PRESETS else "auto"
    started = time.perf_counter()
    llm = LLM(
        args.model,
        load_format=load_format,
        skip_tokenizer_init=True,
        use_custom_kernels=args.use_custom_kernels,
        enforce_eager=args.enforce_eager,
    )
    print(f"{args.model}, {llm.device_name}, torch {torch.__version__}, kernels: {llm.kernels.summary()}")
    print(f"ready after {time.perf_counter() - started:.1f} s")
    print(f"{'workload':10} {'tok/s':>9} {'seconds':>9}   each repeat's tok/s, the warm-up first")
    for workload in args.workload.split(","):
        rates, times = measure(llm, workload, args.repeat)
        each = " ".join(f"{r:.0f}" for r in rates)
        print(f"{workload:10} {statistics.median(rates[1:]):9.0f} {statistics.median(times[1:]):9.3f}   {each}", flush=True)


if __name__ == "__main__":
    main()
