"""Measures how prompts find their beginning cached on a Ray cluster, by each routing, beside the simulation.

    python -m benchmarks.ray_routing                        # 3 replicas on this machine's CPUs, about 5 minutes
    python -m benchmarks.ray_routing --rate 3 --requests 100 --routing prefix

`nanovllm serve --replicas` runs as it is: HAProxy, the router, the scheduler and the prefix cache. Only the time of a
step is not that of the model, which is tiny: a kernel of the op `embedding` sleeps for as long as a model of the given
rates would compute. So replicas do not slow each other down on a machine with few cores, and the simulation
(`benchmarks.replicas`) can be asked about the same rates and the same requests. Ray's routing, `balanced`, is compared
with the simulation's least busy replica.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.replicas import Sizes, arrivals, routers, simulate
from nanovllm.bench.serving_client import Target, Timed, ask, request_body, take_apart

BLOCK = 16
VOCAB = 500
SIZES = Sizes(2_000.0, 0.01, 0.0, cached_prefixes=6, prefix=1_008, suffix=48, output=16)
SIMULATED = {"prefix": "prefix", "balanced": "least busy"}
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": VOCAB,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "tie_word_embeddings": True,
    "torch_dtype": "float32",
}  # fmt: skip
PLUGIN = """
import time
from nanovllm.kernels import embedding

@embedding.provider("paced")
def paced(token_ids, weight):
    time.sleep({step} + token_ids.numel() / {prefill_rate})
    return embedding.native(token_ids, weight)
"""


@dataclass(frozen=True)
class RoutingResult:
    """hits: share of requests that found their prefix; seconds to first tokens, sorted."""

    hits: float
    ttft: list[float]

    def row(self, routing: str, where: str) -> str:
        count = len(self.ttft)
        median, slow = self.ttft[count // 2] * 1e3, self.ttft[count * 9 // 10] * 1e3
        return f"| {routing} | {where} | {count} | {self.hits:.0%} | {median:,.0f} | {slow:,.0f} |"


def save_model(directory: Path, sizes: Sizes) -> None:
    """A model without weights, its tokenizer, and the kernel that sets its pace."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "pace.py").write_text(PLUGIN.format(step=sizes.step, prefill_rate=sizes.prefill_rate))


def start(directory: Path, replicas: int, routing: str, port: int, sizes: Sizes) -> subprocess.Popen[str]:
    """A server that is ready."""
    # Besides the prefixes, the cache holds what requests that run add to them.
    blocks = sizes.cached_prefixes * -(-sizes.prefix // BLOCK) + 8 * -(-(sizes.suffix + sizes.output) // BLOCK)
    options = {
        "model": directory, "load-format": "dummy", "kernel-plugin": directory / "pace.py", "device": "cpu",
        "port": port, "replicas": replicas, "routing": routing, "kvcache-block-size": BLOCK,
        "num-kvcache-blocks": blocks, "served-model-name": "paced", "max-num-seqs": 64,
    }  # fmt: skip
    command = [sys.executable, "-m", "nanovllm", "serve", *(f"--{name}={value}" for name, value in options.items())]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    said = []
    for line in process.stderr or ():
        said.append(line)
        if "(Ctrl-C ends them)" in line:
            return process
    raise SystemExit("the server did not start:\n" + "".join(said[-20:]))


def requests(args: argparse.Namespace, sizes: Sizes) -> tuple[list[int], list[list[int]], list[float]]:
    """The prefix of each request, its prompt, and when it comes."""
    rng = random.Random(args.seed)
    kinds = range(args.prefixes)
    chosen = rng.choices(kinds, [1 / (kind + 1) for kind in kinds], k=args.requests)
    prefixes = [[rng.randrange(VOCAB) for _ in range(sizes.prefix)] for _ in kinds]
    prompts = [prefixes[kind] + [rng.randrange(VOCAB) for _ in range(sizes.suffix)] for kind in chosen]
    return chosen, prompts, list(arrivals(args.rate, args.requests, False, random.Random(args.seed)))


async def load(target: Target, prompts: list[list[int]], times: list[float], sizes: Sizes) -> list[Timed]:
    since = time.perf_counter()

    async def one(prompt: list[int], when: float) -> Timed:
        await asyncio.sleep(since + when - time.perf_counter())
        body = request_body(target, prompt, sizes.output, {"ignore_eos": True})
        return take_apart(*await ask(target, body, 300.0))

    return await asyncio.gather(*map(one, prompts, times))


def measure(args: argparse.Namespace, routing: str, sizes: Sizes, directory: Path) -> RoutingResult:
    _, prompts, times = requests(args, sizes)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    target = Target(f"http://127.0.0.1:{port}", "completions", "paced")
    process = start(directory, args.replicas, routing, port, sizes)
    try:
        timed = asyncio.run(load(target, prompts, times, sizes))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    if errors := {request.error for request in timed if request.error}:
        raise SystemExit(f"requests failed: {errors}")
    hits = sum((request.num_cached or 0) > sizes.prefix / 2 for request in timed)
    return RoutingResult(hits / len(timed), sorted(request.times[0] - request.start for request in timed))


def predict(args: argparse.Namespace, routing: str, sizes: Sizes) -> RoutingResult:
    chosen, _, times = requests(args, sizes)
    names = [f"r{i}" for i in range(args.replicas)]
    choose = routers(names, args.slack)[SIMULATED[routing]]
    hits, ttft, _, _ = simulate(choose, names, iter(times), chosen, sizes)
    return RoutingResult(hits, ttft)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--routing", default="balanced,prefix", help="any of prefix and balanced, separated by a comma")
    p.add_argument("--replicas", type=int, default=3)
    p.add_argument("--rate", type=float, default=5.0, help="requests a second")
    p.add_argument("--requests", type=int, default=300)
    p.add_argument("--prefixes", type=int, default=15, help="different prefixes")
    p.add_argument("--cached", type=int, default=SIZES.cached_prefixes, help="prefixes that a replica's cache holds")
    p.add_argument("--slack", type=float, default=32.0, help="of the simulation; the server has its default, 32")
    p.add_argument("--seed", type=int, default=0)
    return p


def main() -> None:
    args = parser().parse_args()
    sizes = replace(SIZES, cached_prefixes=args.cached)
    print("| routing | | requests | hits | TTFT p50, ms | p90, ms |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        save_model(Path(directory), sizes)
        for routing in args.routing.split(","):
            print(predict(args, routing, sizes).row(routing, "simulated"), flush=True)
            print(measure(args, routing, sizes, Path(directory)).row(routing, "measured"), flush=True)


if __name__ == "__main__":
    main()
