"""What tensor parallelism costs and gains: sums and gathers over ranks by each provider, and a model's rate on 1, 2,
... GPUs.

    python -m benchmarks.tensor_parallel      # shapes of Qwen3-8B and 32B with random weights, on 1 and 2 GPUs
    python -m benchmarks.tensor_parallel --preset qwen3-32b --ranks 2,4 --sequences 1,32 --no-collectives
    python -m benchmarks.tensor_parallel --limit 280    # ends after 280 s; what was measured by then is printed
    python -m benchmarks.tensor_parallel --preset qwen3-8b --engine-path vllm=DIR    # beside vLLM, which is in DIR; all
                                            # engines fit on a GPU of 141 GB together; Qwen3-32B only with --ranks 2
    python -m benchmarks.tensor_parallel --preset qwen3-32b --ranks 2 --sequences 128 --profile 3    # kernels of a step

Sums and gathers are timed in CUDA graphs, as decode steps have them. A model is timed in a process of its own: prompts
of 128 tokens, 256 greedy output tokens each, the best of --repeat runs. Its tokens are compared with those of the first
number of ranks. Random weights in bfloat16 have near ties, so sequences differ after a while: the table says after how
many tokens.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.needs import folder_of_vllm
from nanovllm import LLM, SamplingParams
from nanovllm.distributed.group import Group
from nanovllm.distributed.processes import Processes
from nanovllm.distributed.rendezvous import join
from nanovllm.early_exit import exit_with_parent
from nanovllm.kernels import all_ops

SECONDS = 60
PROMPT = 128
GRAPH_CALLS = 50


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--preset", default="qwen3-8b,qwen3-32b", help="shapes, separated by commas")
    p.add_argument("--ranks", default="1,2", help="numbers of GPUs, separated by commas")
    p.add_argument("--sequences", default="1,8,32,128")
    p.add_argument("--output-len", type=int, default=256)
    p.add_argument("--repeat", type=int, default=2, help="timed runs of each number of sequences")
    p.add_argument("--limit", type=float, metavar="SECONDS", help="end after this time")
    p.add_argument("--width", type=int, default=4096, help="elements of a row of the timed sums")
    p.add_argument("--columns", type=int, default=75968, help="elements of a rank's row of the timed gathers")
    p.add_argument("--device", default="cuda", help="cuda, or cpu to try the script")
    p.add_argument("--collectives", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--model", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument(
        "--engine-path",
        action="append",
        default=[],
        metavar="vllm=DIR",
        help="packages with vLLM: bench.py's workloads bs1 to bs128, in turns with it, on each number of GPUs",
    )
    p.add_argument(
        "--profile",
        type=int,
        metavar="LAYERS",
        help="only print the kernels of rank 0's decode steps, in order, for a model with this number of layers",
    )
    p.add_argument("--kernels", default="", help='JSON of kernel_priority, such as \'{"all_reduce": ["native"]}\'')
    return p


# ---------------------------------------------------------------------------------------------------- collectives


def time_collectives(
    group: Group, device: torch.device, width: int, columns: int, sequences: list[int]
) -> list[tuple[str, str, str]]:
    """(provider, rows, microseconds of a call, or why there is none) of each op; every rank calls it."""
    rows_of_table = []
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for name in ("all_reduce", "all_reduce_add_rms_norm", "all_gather_last"):
        size = columns if name == "all_gather_last" else width
        for provider in all_ops()[name].providers.values():
            reason = provider.support(device)
            for rows in sequences:
                said = reason or _measured(provider.fn, name, group, device, dtype, rows, size)
                rows_of_table.append((f"{name} of {size}: {provider.name}", str(rows), said))
                if group.rank == 0:
                    print("| {} | {} | {} |".format(*rows_of_table[-1]), flush=True)
                if reason:
                    break
    return rows_of_table


def _measured(
    fn: Callable[..., Any], name: str, group: Group, device: torch.device, dtype: torch.dtype, rows: int, width: int
) -> str:
    values = [_normal(seed, rows, width, dtype, device) for seed in range(group.size + 1)]
    x, residual = values[group.rank], values[-1]
    if name == "all_gather_last":
        length = group.size * width
        out = torch.empty(rows, length, dtype=dtype, device=device)
        if not torch.equal(fn(x, length, group, out), torch.cat(values[: group.size], -1)):
            return "wrong"
        return f"{_time(lambda: fn(x, length, group, out), device):.1f}"
    weight = torch.nn.Parameter(torch.ones(width, dtype=dtype, device=device), requires_grad=False)  # as in a model
    rest = (residual, weight, 1e-6) if name == "all_reduce_add_rms_norm" else ()
    want = sum(value.float() for value in values[: group.size]).to(dtype)
    if rest:
        want = want + residual
        got = fn(x.clone(), residual.clone(), *rest[1:], group)[1]
    else:
        got = fn(x.clone(), group)
    error = float((got.float() - want.float()).abs().max() / want.float().abs().max())
    if not error < 0.02:
        return f"wrong: relative error {error:.3g}"
    # Sums may take the place of x and grow without bounds, which costs no time.
    return f"{_time(lambda: fn(x, *rest, group), device):.1f}"


def _normal(seed: int, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def _time(call: Callable[[], Any], device: torch.device) -> float:
    """Microseconds of a call: on a GPU within a graph of many."""
    if device.type != "cuda":
        call()
        since = time.perf_counter()
        for _ in range(10):
            call()
        return (time.perf_counter() - since) * 1e5
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for _ in range(GRAPH_CALLS):
            call()
    for _ in range(3):
        graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(10):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3 / (10 * GRAPH_CALLS)


def collectives(size: int, device_type: str, width: int, columns: int, sequences: list[int]) -> None:
    processes = Processes("benchmarks.tensor_parallel", size, {}, lambda: None)
    try:
        with tempfile.TemporaryDirectory() as directory:
            processes.send((directory, size, device_type, width, columns, sequences))
            print(f"\n| op of columns: provider, {size} ranks | rows | us |\n|---|---|---|")
            group = _run_rank(directory, 0, size, device_type, width, columns, sequences)
            processes.receive("done", SECONDS, "timing collectives")
    finally:
        processes.close()
    group.process_group.abort()


def _run_rank(
    directory: str, rank: int, size: int, device_type: str, width: int, columns: int, sequences: list[int]
) -> Group:
    device = torch.device(device_type, rank if device_type == "cuda" else 0)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    group = join(Path(directory), rank, size, torch.device(device_type, device.index), SECONDS, lambda place: None)
    with torch.inference_mode():
        time_collectives(group, device, width, columns, sequences)
    return group


def serve_rank(descriptor: int, rank: int) -> None:
    """The process of a rank from 1 on."""
    exit_with_parent()
    connection = Connection(descriptor)
    directory, *arguments = connection.recv()
    try:
        group = _run_rank(directory, rank, *arguments)
        connection.send(("done", None))
        group.provider_state.clear()  # rank 0's memory
        group.process_group.abort()
        connection.recv()
    except EOFError:
        pass
    except Exception as error:
        connection.send(("failed", f"failed: {error!r}"))
        raise


# ---------------------------------------------------------------------------------------------------- a model


def time_model(args: argparse.Namespace, size: int) -> Iterator[dict[str, Any]]:
    """The seconds that one engine takes to start, in this process; then its rate and tokens for each number of
    sequences.
    """
    since = time.perf_counter()
    llm = LLM(
        args.preset, load_format="dummy", skip_tokenizer_init=True, tensor_parallel_size=size, device=args.device,
        max_model_len=1024, max_num_seqs=max(_numbers(args.sequences)), seed=0, enable_prefix_caching=False,
        **_kernels(args),
    )  # fmt: skip
    yield {"start": time.perf_counter() - since}
    for count in _numbers(args.sequences):
        generator = torch.Generator().manual_seed(count)
        prompts = torch.randint(0, 10000, (count, PROMPT), generator=generator).tolist()
        params = SamplingParams(temperature=0, max_tokens=args.output_len, ignore_eos=True)
        times = []
        for _ in range(args.repeat):
            since = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            times.append(time.perf_counter() - since)
        tokens = [output["token_ids"] for output in outputs]
        yield {"count": count, "rate": count * args.output_len / min(times), "tokens": tokens}


def _kernels(args: argparse.Namespace) -> dict[str, Any]:
    return {"kernel_priority": json.loads(args.kernels)} if args.kernels else {}


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _common(left: list[int], right: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right)) if a != b), len(left))


def models(args: argparse.Namespace, preset: str, ranks: list[int], end: float) -> None:
    """Print the rates of one shape; `end` is on the clock `time.monotonic`."""
    print(f"\n{preset}, random weights, {PROMPT} -> {args.output_len} tokens, output tokens/s")
    first: dict[int, dict[str, Any]] = {}
    for size in ranks:
        given = [*sys.argv[1:], "--preset", preset, "--ranks", f"only {size}"]
        with subprocess.Popen(
            [sys.executable, "-m", "benchmarks.tensor_parallel", *given], stdout=subprocess.PIPE, text=True
        ) as process:
            timer = threading.Timer(max(0.0, end - time.monotonic()), process.kill)
            timer.daemon = True
            timer.start()
            for line in process.stdout or ():
                _show(size, json.loads(line), first)
            timer.cancel()
        if process.returncode:
            said = "the time is up" if time.monotonic() >= end else f"failed with exit code {process.returncode}"
            print(f"{size} rank(s): {said}", flush=True)


def _show(size: int, said: dict[str, Any], first: dict[int, dict[str, Any]]) -> None:
    """Print a row. first: what was said first of each number of sequences."""
    if "start" in said:
        print(f"\n{size} rank(s), started in {said['start']:.1f} s")
        print("| sequences | tokens/s | ratio | equal tokens of each sequence, least and mean |\n|---|---|---|---|")
        return
    base = first.setdefault(said["count"], said)
    equal = [_common(a, b) for a, b in zip(base["tokens"], said["tokens"])]
    mean = sum(equal) / len(equal)
    ratio = said["rate"] / base["rate"]
    print(f"| {said['count']} | {said['rate']:,.0f} | {ratio:.2f} | {min(equal)}, {mean:.0f} |", flush=True)


def beside_vllm(args: argparse.Namespace, folder: Path, ranks: list[int], end: float) -> None:
    """Both engines on each number of GPUs. folder: of vLLM; `end` is on the clock `time.monotonic`."""
    from benchmarks.tensor_parallel_peer import Side, compare, jobs
    from nanovllm.bench.workloads import WORKLOADS
    from nanovllm.models.model_presets import preset

    loads = [f"bs{count}" for count in _numbers(args.sequences)]
    if unknown := set(loads) - set(WORKLOADS):
        sys.exit(f"--sequences {args.sequences}: bench.py has no workload {', '.join(sorted(unknown))}")
    logs = tempfile.mkdtemp(prefix="beside-vllm-")
    for name in args.preset.split(","):
        print(f"\n{name}, random weights; what the engines print: {logs}", flush=True)
        pairs: list[tuple[Side, Side]] = []
        try:
            for size in ranks:
                options = dict(device=args.device, **_kernels(args))
                ours, theirs = (
                    Side(job, f"{logs}/{name}-{job.engine}-{size}.txt", path, f"{job.engine}, {size} GPU(s)")
                    for job, path in zip(jobs(name, size, args.repeat, preset(name), **options), (None, str(folder)))
                )
                pairs.append((ours, theirs))
            compare(pairs, loads, 2, end)
        finally:
            for pair in pairs:
                for side in pair:
                    side.close()


def profiles(args: argparse.Namespace, ranks: list[int]) -> None:
    """The kernels of decode steps of each preset, in this process."""
    from benchmarks.tensor_parallel_profile import profile
    from nanovllm.models.model_presets import preset

    if args.profile < 1 or args.engine_path:
        sys.exit(f"--profile {args.profile}: expected at least one layer, and no --engine-path")
    for name in args.preset.split(","):
        for size in ranks:
            print(f"\n{name}, random weights", flush=True)
            counts = _numbers(args.sequences)
            profile(preset(name), size, args.profile, counts, device=args.device, **_kernels(args))


def main() -> None:
    if len(sys.argv) == 3 and sys.argv[1].isdecimal():
        serve_rank(int(sys.argv[1]), int(sys.argv[2]))
        return
    args = parser().parse_args()
    if args.ranks.startswith("only "):
        for said in time_model(args, int(args.ranks.removeprefix("only "))):
            print(json.dumps(said), flush=True)
        return
    end = time.monotonic() + (args.limit or threading.TIMEOUT_MAX)
    ranks = _numbers(args.ranks)
    folder = folder_of_vllm(args.engine_path) if args.engine_path else None
    if args.device == "cuda" and max(ranks) > (there := torch.cuda.device_count()):
        remedy = f"name at most {there}" if there else "use --device cpu to try the script"
        sys.exit(
            f"--ranks {args.ranks}: this machine has {there} CUDA device(s); run this on one with more, or {remedy}"
        )
    if args.profile is not None:
        profiles(args, ranks)
        return
    if folder is not None:
        beside_vllm(args, folder, ranks, end)
        return
    if args.collectives and max(ranks) > 1:
        collectives(max(ranks), args.device, args.width, args.columns, _numbers(args.sequences))
    for preset in args.preset.split(",") if args.model else ():
        models(args, preset, ranks, end)


if __name__ == "__main__":
    main()
