"""What the plugin gains in vLLM: engines with it and without, which start together on a GPU and are measured in turns.

    python -m benchmarks.vllm_plugin --variants "0 1" --rounds 12 --workloads bs1,bs32   # the least noise: two engines
    python -m benchmarks.vllm_plugin --variants "0 add_rms_norm,silu_and_mul 0"   # the second 0 shows the differences
                                                                                  # between engines that are the same

A variant is a value of NANOVLLM_VLLM. `bench.py --engine vllm --vllm-plugin` measures one engine after the other, each
for as long as it starts; here a round is a run of each, so that what slows the machine slows them all. Every other
round goes the other way round, and each engine has CPUs of its own. A row has the median of the rounds, and the median
and the quartiles of the rounds' ratios to the first variant. Weights are random; temperature 0.6.
`benchmarks.vllm_ops` measures the ops by themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.turns import Peer, serve, stop_on_signals
from nanovllm.bench.engines.common import model_directory
from nanovllm.bench.job import Job
from nanovllm.bench.workloads import select
from nanovllm.models.model_presets import preset

NOT_CACHE = 4.5
"""GiB of an engine's share of the GPU that are not its cache: weights, activations, graphs, and what CUDA takes."""


class Engine:
    """vLLM in a process of its own."""

    def __init__(self, folder: str, share: float, cpus: str) -> None:
        self._folder, self._share = folder, share
        os.sched_setaffinity(0, map(int, cpus.split(",")))  # its processes inherit them

    def answer(self, request: dict[str, Any]) -> Any:
        """{} -> the ops that it serves; {"workload", "seed"} -> seconds and output tokens of a run."""
        return self._run(**request) if request else self._start()

    def _start(self) -> list[str]:
        import vllm
        from vllm.platforms import current_platform

        memory = current_platform.get_device_total_memory()  # without CUDA, after which vLLM could not fork
        self._llm = vllm.LLM(
            model=self._folder, skip_tokenizer_init=True, load_format="dummy", max_model_len=4096, max_num_seqs=256,
            seed=0, gpu_memory_utilization=self._share,
            kv_cache_memory_bytes=int(self._share * memory - NOT_CACHE * 2**30),
        )  # fmt: skip
        config = self._llm.llm_engine.vllm_config
        self._vocabulary = config.model_config.hf_config.vocab_size
        return config.additional_config.get("nanovllm", {}).get("ops", [])

    def _run(self, workload: str, seed: int) -> tuple[float, int]:
        import vllm

        items = select([workload])[0].draw(seed, self._vocabulary)
        prompts: Any = [{"prompt_token_ids": item.prompt} for item in items]
        params = [
            vllm.SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=item.num_output, detokenize=False)
            for item in items
        ]
        started = time.perf_counter()
        self._llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started, sum(item.num_output for item in items)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = "rms_norm,add_rms_norm,silu_and_mul,rotary_embedding"
    p.add_argument("--variants", default=f"0 1 attention_decode {usual},attention_decode")
    p.add_argument("--preset", default="qwen3-0.6b")
    p.add_argument("--workloads", default="bs1,bs32,std256")
    p.add_argument("--rounds", type=int, default=3, help="after one that is not counted")
    p.add_argument("--budget", type=float, default=3600, help="seconds after which no round is started")
    p.add_argument("--share", type=float, default=0.96, help="of the GPU's memory, of all engines together")
    p.add_argument("--json", type=Path, help="keep the rows in this file, as they come")
    p.add_argument("--serve", nargs=3, metavar=("MODEL", "SHARE", "CPUS"), help=argparse.SUPPRESS)
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.serve:
        serve(Engine(args.serve[0], float(args.serve[1]), args.serve[2]).answer)
        return 0
    end = time.perf_counter() + args.budget
    variants = args.variants.split()
    stop_on_signals()
    with tempfile.TemporaryDirectory() as folder:
        model_directory(Job("vllm", "", args.preset, (), preset(args.preset)), Path(folder))
        peers = []
        try:
            for index, ops in enumerate(variants):
                command = ["-m", "benchmarks.vllm_plugin", "--serve", folder, str(args.share / len(variants))]
                command.append(",".join(map(str, cpus_of(index, len(variants)))))
                environment = {"NANOVLLM_VLLM": ops, "VLLM_CACHE_ROOT": f"{folder}/cache-{index}"}
                peers.append(Peer(ops, command, environment, Path(folder) / f"log-{index}"))
                peers[-1].ask({})
            return measure(args, peers, end)
        finally:
            for peer in peers:
                peer.stop()


def cpus_of(index: int, count: int) -> list[int]:
    """The CPUs of one of several engines: as many for each, neighbours; all, if there are not enough."""
    cpus = sorted(os.sched_getaffinity(0))
    each = len(cpus) // count
    return cpus[index * each : (index + 1) * each] or cpus


def measure(args: argparse.Namespace, peers: list[Peer], end: float) -> int:
    """The rows. Engines that fail are left out."""
    started = time.perf_counter()
    for peer in peers:
        served = peer.reply(end)
        if served is not None:
            after = time.perf_counter() - started
            print(f"{peer.label}: serves {', '.join(served) or 'nothing'}, ready after {after:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    print("| workload | NANOVLLM_VLLM | tokens/s | of the first | quartiles | rounds |")
    print("|---|---|---|---|---|---|", flush=True)
    for name in args.workloads.split(","):
        running = [peer for peer in peers if peer.failure is None]
        rates: dict[Peer, list[float]] = {peer: [] for peer in running}
        for turn in range(args.rounds + 1):
            if turn > 1 and time.perf_counter() > end:
                break
            for peer in running if turn % 2 else running[::-1]:
                peer.ask({"workload": name, "seed": turn})
                reply = peer.reply(time.perf_counter() + 120)
                if turn and reply is not None:
                    seconds, tokens = reply
                    rates[peer].append(tokens / seconds)
        for peer, each in rates.items():
            if each:
                ratios = [a / b for a, b in zip(each, rates[running[0]])]
                low, _, high = quantiles(ratios) if len(ratios) > 1 else ratios * 3
                row = {
                    "workload": name, "variant": peer.label, "rate": median(each), "ratio": median(ratios),
                    "quartiles": [low, high], "rounds": each,
                }  # fmt: skip
                rows.append(row)
                shown = f"{row['rate']:,.0f} | {row['ratio']:.3f} | {low:.3f}-{high:.3f}"
                rounds = ", ".join(f"{rate:,.0f}" for rate in each)
                print(f"| {name} | {peer.label} | {shown} | {rounds} |", flush=True)
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))
    return 1 if not rows or any(peer.failure for peer in peers) else 0


if __name__ == "__main__":
    sys.exit(main())
