"""What the plugin gains in vLLM: engines with it and without, which start together on a GPU and are measured in turns.

    python -m benchmarks.vllm_plugin --workloads bs1,bs32,std256
    python -m benchmarks.vllm_plugin --variants "0 rms_norm,add_rms_norm silu_and_mul rotary_embedding attention_decode"

A variant is a value of NANOVLLM_VLLM. `bench.py --engine vllm --vllm-plugin` measures one engine after the other, each
for as long as it starts; here a round is a run of each, so that what slows the machine slows them all. A row has the
median of the rounds, and the ratio of medians to the first variant's. Weights are random; temperature 0.6.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from nanovllm.bench.engines.common import model_directory
from nanovllm.bench.job import Job
from nanovllm.bench.workloads import select
from nanovllm.models.model_presets import preset


def serve(folder: str, memory: float) -> None:
    """One engine: a workload's name and a seed a line -> the seconds of a run, a line."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints, in a process of its own too
    import vllm

    llm = vllm.LLM(
        model=folder, skip_tokenizer_init=True, load_format="dummy", max_model_len=4096, max_num_seqs=256, seed=0,
        gpu_memory_utilization=memory, kv_cache_memory_bytes=int((memory - 0.04) * 140 * 2**30),
    )  # fmt: skip
    config = llm.llm_engine.vllm_config
    vocabulary = config.model_config.hf_config.vocab_size
    print(json.dumps(config.additional_config.get("nanovllm")), file=replies, flush=True)
    for line in sys.stdin:
        name, seed = line.split()
        items = select([name])[0].draw(int(seed), vocabulary)
        prompts = [{"prompt_token_ids": item.prompt} for item in items]
        params = [
            vllm.SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=item.num_output, detokenize=False)
            for item in items
        ]
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        print(json.dumps([seconds, sum(item.num_output for item in items)]), file=replies, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = "rms_norm,add_rms_norm,silu_and_mul,rotary_embedding"
    parser.add_argument("--variants", default=f"0 1 attention_decode {usual},attention_decode")
    parser.add_argument("--preset", default="qwen3-0.6b")
    parser.add_argument("--workloads", default="bs1,bs32,std256")
    parser.add_argument("--rounds", type=int, default=3, help="after one that is not counted")
    parser.add_argument("--budget", type=float, default=float("inf"), help="seconds after which no round is started")
    parser.add_argument("--serve", nargs=2, metavar=("MODEL", "MEMORY"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve[0], float(args.serve[1]))
        return 0
    end = time.perf_counter() + args.budget
    variants = args.variants.split()
    with tempfile.TemporaryDirectory() as folder:
        model_directory(Job("vllm", "", args.preset, (), preset(args.preset)), Path(folder))
        engines, logs = [], []
        for index, ops in enumerate(variants):
            logs.append(Path(folder) / f"log-{index}")
            command = [sys.executable, "-m", "benchmarks.vllm_plugin", "--serve", folder, str(0.94 / len(variants))]
            environment = {**os.environ, "NANOVLLM_VLLM": ops, "VLLM_CACHE_ROOT": f"{folder}/cache-{index}"}
            engine = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=logs[-1].open("w"), text=True,
                env=environment, start_new_session=True,
            )  # fmt: skip
            engines.append(engine)
        try:
            return measure(args, variants, engines, logs, end)
        finally:
            for engine in engines:
                os.killpg(engine.pid, signal.SIGKILL)  # vLLM's core, too
                engine.wait()


def measure(args: argparse.Namespace, variants: list[str], engines: list[Any], logs: list[Path], end: float) -> int:
    started = time.perf_counter()
    for ops, engine, log in zip(variants, engines, logs):
        reply = engine.stdout.readline()
        if not reply:
            print(f"{ops}: {log.read_text()[-3000:]}")
            return 1
        print(f"{ops}: serves {reply.strip()}, started after {time.perf_counter() - started:.0f} s", flush=True)
    print("| workload | NANOVLLM_VLLM | tokens/s | of the first | rounds |\n|---|---|---|---|---|")
    for name in args.workloads.split(","):
        rates: list[list[float]] = [[] for _ in variants]
        for turn in range(args.rounds + 1):
            if turn > 1 and time.perf_counter() > end:
                break
            for i, engine in enumerate(engines):
                engine.stdin.write(f"{name} {turn}\n")
                engine.stdin.flush()
                seconds, tokens = json.loads(engine.stdout.readline())
                if turn:
                    rates[i].append(tokens / seconds)
        for ops, each in zip(variants, rates):
            rounds = ", ".join(f"{rate:,.0f}" for rate in each)
            ratio = median(each) / median(rates[0])
            print(f"| {name} | {ops} | {median(each):,.0f} | {ratio:.3f} | {rounds} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
