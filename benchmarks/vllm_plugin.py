"""What the plugin gains in vLLM: engines with it and without, which start together on a GPU and are measured in turns.

    python -m benchmarks.vllm_plugin --variants "0 1" --rounds 12 --workloads bs1,bs32   # the least noise: two engines
    python -m benchmarks.vllm_plugin --variants "0 add_rms_norm,silu_and_mul 0"   # the second 0 shows the differences
                                                                                  # between engines that are the same

    python -m benchmarks.vllm_plugin --variants "0 1" --rounds 4 --traces 5       # also the time of the GPU alone

A variant is a value of NANOVLLM_VLLM. `bench.py --engine vllm --vllm-plugin` measures one engine after the other, each
for as long as it starts; here a round is a run of each, so that what slows the machine slows them all. Every other
round goes the other way round. Each engine has CPUs of its own, and these change places every two rounds: after four
rounds, two engines had each order with each half of the CPUs. A row has the median of the rounds, and the median and
the quartiles of the rounds' ratios to the first variant. Weights are random; temperature 0.6.

The host of vLLM decides these rates, and its speed varies. With --traces each engine is also traced in turns, with
outputs of 64 tokens: a row has the milliseconds in which the GPU computed, divided by the number of decode steps.
`benchmarks.vllm_ops` measures the ops by themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from benchmarks.needs import need_vllm
from benchmarks.turns import Peer, serve, stop_on_signals
from nanovllm.bench.engines.engine_interface import model_directory
from nanovllm.bench.job import Job
from nanovllm.bench.trace_reader import DEVICE, Kernel, busy
from nanovllm.bench.workload_cost import ModelShape
from nanovllm.bench.workloads import select
from nanovllm.model_config import ModelConfig
from nanovllm.models.model_presets import preset

NEITHER_CACHE_NOR_WEIGHTS = 3.3
"""GiB of an engine's share of the GPU: activations, graphs, and what CUDA takes."""
TRACED_TOKENS = 64
"""Output tokens of each request that is traced."""
WARM_UP = 16384
"""About the output tokens of a run that is not counted. std256's outputs are an eighth there: the prompts are whole,
and requests end one after the other, so that steps have all sizes."""


class VllmProcess:
    """vLLM in a process of its own."""

    def __init__(self, folder: str, share: float, weights: float, cpus: str, traces: str) -> None:
        """share: of the GPU's memory; weights: GiB; cpus: numbers, with commas; traces: a folder, or nothing."""
        self._folder, self._share, self._weights = folder, share, weights
        self._traces = Path(traces) if traces else None
        os.sched_setaffinity(0, map(int, cpus.split(",")))  # its processes inherit them

    def answer(self, request: dict[str, Any]) -> Any:
        """{} -> the ops that it serves; {"workload", "seed", "tokens"} -> seconds and output tokens of a run.

        "tokens": outputs are shorter, in proportion, if they have more together; null: as the workload has them.
        With "traced": true, and outputs of `TRACED_TOKENS` tokens: milliseconds of the GPU, and decode steps.
        """
        if request.pop("traced", False):
            return self._trace(**request)
        return self._run(**request) if request else self._start()

    def _start(self) -> list[str]:
        import vllm
        from vllm.platforms import current_platform

        memory = current_platform.get_device_total_memory()  # without CUDA, after which vLLM could not fork
        self._llm = vllm.LLM(
            model=self._folder, skip_tokenizer_init=True, load_format="dummy", max_model_len=4096, max_num_seqs=256,
            seed=0, gpu_memory_utilization=self._share,
            kv_cache_memory_bytes=cache_bytes(self._share * memory, self._weights), **self._tracing(),
        )  # fmt: skip
        config = self._llm.llm_engine.vllm_config
        self._vocabulary = config.model_config.hf_config.vocab_size
        return config.additional_config.get("nanovllm", {}).get("ops", [])

    def _tracing(self) -> dict[str, Any]:
        """Arguments of vLLM."""
        if self._traces is None:
            return {}
        options = {"profiler": "torch", "torch_profiler_dir": str(self._traces), "ignore_frontend": True}
        unused = ("torch_profiler_with_stack", "torch_profiler_use_gzip", "torch_profiler_dump_cuda_time_total")
        return {"profiler_config": {**options, **dict.fromkeys(unused, False)}}

    def _trace(self, workload: str, seed: int) -> tuple[float, int]:
        assert self._traces is not None
        self._llm.start_profile()
        self._run(workload, seed, length=TRACED_TOKENS)
        self._llm.stop_profile()
        return milliseconds_of_device(self._traces), TRACED_TOKENS

    def _run(self, workload: str, seed: int, tokens: int | None = None, length: int | None = None) -> tuple[float, int]:
        """length: that of every output, whatever the workload has."""
        import vllm

        items = select([workload])[0].draw(seed, self._vocabulary)
        prompts: Any = [{"prompt_token_ids": item.prompt} for item in items]
        lengths = shortened([item.num_output if length is None else length for item in items], tokens)
        params = [
            vllm.SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length, detokenize=False)
            for length in lengths
        ]
        started = time.perf_counter()
        self._llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started, sum(lengths)


def weight_gib(config: dict[str, Any]) -> float:
    """GiB of a model's weights in 16 bits."""
    return 2 * ModelShape.of(ModelConfig.from_dict(config), weight_bytes=2).parameters / 2**30


def cache_bytes(share: float, weights: float) -> int:
    """Of an engine that may take `share` bytes, with `weights` GiB of weights.

    Raises:
        ValueError: nothing is left for the cache.
    """
    left = int(share - (weights + NEITHER_CACHE_NOR_WEIGHTS) * 2**30)
    if left <= 0:
        raise ValueError(
            f"{share / 2**30:.1f} GiB of the GPU for an engine, and its weights are {weights:.1f}: nothing is left for "
            "the KV cache; name fewer variants, or a smaller preset"
        )
    return left


def milliseconds_of_device(folder: Path) -> float:
    """In which the GPU computed, by the only trace of PyTorch's profiler in a folder, which is removed."""
    files = list(folder.glob("*.json"))
    if len(files) != 1:
        raise RuntimeError(f"{folder}: {len(files)} traces; expected the one that vLLM's profiler has just written")
    events = json.loads(files[0].read_text())["traceEvents"]
    files[0].unlink()
    kernels = [Kernel(e["name"], e["ts"], e["dur"]) for e in events if e.get("ph") == "X" and e.get("cat") in DEVICE]
    if not kernels:
        raise RuntimeError("the trace of vLLM's profiler has no kernels")
    return busy(kernels) / 1000


def shortened(lengths: list[int], tokens: int | None) -> list[int]:
    """Lengths of outputs divided by the same number, none below 1, so that they are about `tokens` together."""
    by = max(1, round(sum(lengths) / tokens)) if tokens else 1
    return [max(1, length // by) for length in lengths]


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--variants", default="0 1 attention_decode add_rms_norm,silu_and_mul,attention_decode")
    p.add_argument("--preset", default="qwen3-0.6b")
    p.add_argument("--workloads", default="bs1,bs32,std256")
    p.add_argument("--rounds", type=int, default=3, help="after one that is not counted")
    p.add_argument("--traces", type=int, default=0, metavar="N", help="traces of each engine and workload (default: 0)")
    p.add_argument("--budget", type=float, default=3600, help="seconds after which it has ended")
    p.add_argument("--share", type=float, default=0.96, help="of the GPU's memory, of all engines together")
    p.add_argument("--json", type=Path, help="keep the rows in this file, anew after each round")
    p.add_argument("--serve", nargs=5, metavar=("MODEL", "SHARE", "WEIGHTS", "CPUS", "TRACES"), help=argparse.SUPPRESS)
    return p


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.serve:
        folder, share, weights, cpus, traces = args.serve
        serve(VllmProcess(folder, float(share), float(weights), cpus, traces).answer)
        return 0
    need_vllm()
    end = time.perf_counter() + args.budget
    variants = args.variants.split()
    stop_on_signals()
    with tempfile.TemporaryDirectory() as folder:
        config = preset(args.preset)
        model_directory(Job("vllm", "", args.preset, (), config), Path(folder))
        weights = str(weight_gib(config))
        peers = []
        try:
            for index, ops in enumerate(variants):
                command = ["-m", "benchmarks.vllm_plugin", "--serve", folder, str(args.share / len(variants)), weights]
                traces = f"{folder}/traces-{index}" if args.traces else ""
                command += [",".join(map(str, cpus_of(index, len(variants)))), traces]
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
    """The rounds as they come, then the rows. Engines that fail are left out."""
    started = time.perf_counter()
    for peer in peers:
        served = peer.reply(end)
        if served is not None:
            after = time.perf_counter() - started
            print(f"{peer.label}: serves {', '.join(served) or 'nothing'}, ready after {after:.0f} s", flush=True)
    rows: dict[str, list[dict[str, Any]]] = {}
    try:
        for name in args.workloads.split(","):
            for rates in rounds_of(name, args.rounds, peers, end):
                rows[name] = rows_of(name, rates)
                if args.json:
                    args.json.write_text(json.dumps(sum(rows.values(), []), indent=1))
            if max((len(row["rounds"]) for row in rows.get(name, [])), default=0) < args.rounds:
                break  # the budget is used up, or no engine is left
        for name in args.workloads.split(",") if args.traces else ():
            rows[f"{name}, GPU"] = gpu_rows_of(name, traces_of(name, args.traces, peers, end))
            if args.json:
                args.json.write_text(json.dumps(sum(rows.values(), []), indent=1))
    finally:  # those of a run that is stopped, too
        show([row for row in sum(rows.values(), []) if "rate" in row])
        show_gpu([row for row in sum(rows.values(), []) if "gpu_ms" in row])
    return 1 if not rows or any(peer.failure for peer in peers) else 0


def rounds_of(name: str, rounds: int, peers: list[Peer], end: float) -> Iterator[dict[Peer, list[float]]]:
    """After each round, tokens a second of all rounds so far. No round is started that would not end in time."""
    whole = sum(item.num_output for item in select([name])[0].draw(0, 1 << 16))
    running = [peer for peer in peers if peer.failure is None]
    rates: dict[Peer, list[float]] = {peer: [] for peer in running}
    needed = 0.0  # seconds of a round
    for turn in range(rounds + 1):
        if time.perf_counter() + needed > end:
            print(f"{name}: {max(0, turn - 1)} of {rounds} rounds, as the budget allows", flush=True)
            return
        for index, peer in enumerate(running):
            peer.pin(cpus_of((index + max(0, turn - 1) // 2) % len(running), len(running)))
        needed, said = 0.0, []
        for peer in running if turn % 2 else running[::-1]:
            peer.ask({"workload": name, "seed": turn, "tokens": None if turn else WARM_UP})
            reply = peer.reply(min(end, time.perf_counter() + 120))
            if reply is not None:
                seconds, tokens = reply
                needed += 1.1 * seconds * whole / tokens
                if turn:
                    rates[peer].append(tokens / seconds)
                    said.append(f"{peer.label}: {tokens / seconds:,.0f}")
        if said:
            print(f"{name}, round {turn}: {', '.join(said)}", flush=True)
            yield rates


def rows_of(name: str, rates: dict[Peer, list[float]]) -> list[dict[str, Any]]:
    """A row for each engine. Ratios are to the first."""
    rows = []
    first = next(iter(rates.values()))
    for peer, each in rates.items():
        ratios = [a / b for a, b in zip(each, first)]
        if ratios:
            low, _, high = quantiles(ratios) if len(ratios) > 1 else ratios * 3
            rows.append({
                "workload": name, "variant": peer.label, "rate": median(each), "ratio": median(ratios),
                "quartiles": [low, high], "rounds": each.copy(),
            })  # fmt: skip
    return rows


def traces_of(name: str, count: int, peers: list[Peer], end: float) -> dict[Peer, list[float]]:
    """Milliseconds of the GPU a decode step, of each trace. The first one of each engine is left out."""
    found: dict[Peer, list[float]] = {peer: [] for peer in peers if peer.failure is None}
    for turn in range(count + 1):
        for peer in list(found) if turn % 2 else list(found)[::-1]:
            if peer.failure is None and time.perf_counter() < end:
                peer.ask({"workload": name, "seed": turn, "traced": True})
                reply = peer.reply(min(end, time.perf_counter() + 120))
                if reply is not None and turn:
                    found[peer].append(reply[0] / reply[1])
    return found


def gpu_rows_of(name: str, found: dict[Peer, list[float]]) -> list[dict[str, Any]]:
    """A row for each engine that has traces. "ratio": how many times as fast as the first one."""
    each = {peer.label: times for peer, times in found.items() if times}
    first = median(next(iter(each.values()))) if each else 0.0
    return [
        {"workload": name, "variant": label, "gpu_ms": median(times), "ratio": first / median(times), "traces": times}
        for label, times in each.items()
    ]


def show_gpu(rows: list[dict[str, Any]]) -> None:
    if rows:
        print("\n| workload | NANOVLLM_VLLM | GPU, ms a step | times as fast | traces |\n|---|---|---|---|---|")
    for row in rows:
        traces = ", ".join(f"{ms:.3f}" for ms in row["traces"])
        print(f"| {row['workload']} | {row['variant']} | {row['gpu_ms']:.3f} | {row['ratio']:.3f} | {traces} |")
    sys.stdout.flush()


def show(rows: list[dict[str, Any]]) -> None:
    if not rows:
        return
    print("| workload | NANOVLLM_VLLM | tokens/s | of the first | quartiles | rounds |\n|---|---|---|---|---|---|")
    for row in rows:
        low, high = row["quartiles"]
        shown = f"{row['rate']:,.0f} | {row['ratio']:.3f} | {low:.3f}-{high:.3f}"
        print(f"| {row['workload']} | {row['variant']} | {shown} | {', '.join(f'{r:,.0f}' for r in row['rounds'])} |")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
