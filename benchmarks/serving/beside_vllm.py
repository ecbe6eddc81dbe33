"""The server beside `LLM.generate` and beside vLLM's server, on one GPU: a row for each measurement, as it comes.

python -m benchmarks.serving.beside_vllm --engine-path vllm=DIR --json rows.json          # everything
python -m benchmarks.serving.beside_vllm --parts streams --model qwen3-8b --loads 1,16,64,256,8/s
python -m benchmarks.serving.beside_vllm --report rows.json                               # the tables of such a file

The parts, in this order:
  std256      a workload of bench.py through HTTP, streamed, beside `LLM.generate` in a process of its own
  structured  128 streams, of which none or 20 must write JSON, in turns
  storm       clients of `benchmarks.serving.storm`: nothing may be lost, and memory stays as it is
  streams     both servers are loaded at the same time, and take turns at each load

A preset has random weights and a tokenizer of random words, so nothing is downloaded. Both servers get the same share
of the GPU's memory, so that both fit. A server or a load that fails is a row with its reason; the other rows go on.
After --limit seconds a part ends. --json is written after each row.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PEERS = {
    "vllm": "{python} -m vllm.entrypoints.openai.api_server --model {directory} --load-format {load_format}"
    " --host 127.0.0.1 --port {port} --max-model-len {max_model_len} --gpu-memory-utilization {share}"
    " --disable-uvicorn-access-log",
    # To try this script where vLLM does not run.
    "nanovllm": "{python} -m nanovllm serve --model {model} --tokenizer {directory} --load-format {load_format}"
    " --port {port} --max-model-len {max_model_len} --gpu-memory-utilization {share}",
}


def parser() -> argparse.ArgumentParser:
    from benchmarks.serving.parts import PARTS
    from nanovllm.bench.workloads import WORKLOADS

    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--parts", default=",".join(PARTS), help=f"any of {','.join(PARTS)}")
    p.add_argument("--json", type=Path, help="the file for the rows")
    p.add_argument("--report", type=Path, help="only print the tables of such a file")
    p.add_argument("--rounds", type=int, default=2, help="times that each measurement is made")
    p.add_argument("--limit", type=float, default=120, help="seconds for a part, without starts of servers")
    p.add_argument("--start-limit", type=float, default=180, help="seconds until a server is ready")
    p.add_argument(
        "--go", type=Path, help="structured and streams: once the servers are ready, wait for this file, so that"
        " measurements of several models can start together and measure in turns",
    )  # fmt: skip
    both = p.add_argument_group("the servers")
    both.add_argument("--model", default="qwen3-0.6b", help="a preset, or a directory with weights and a tokenizer")
    both.add_argument("--max-model-len", type=int, default=2048)
    both.add_argument("--share", type=float, default=0.42, help="the share of the GPU's memory for each server")
    both.add_argument(
        "--together", action="store_true",
        help="start both at once; give each a KV cache of a fixed size: --serve-args='--num-kvcache-blocks N'"
        " --peer-args='--kv-cache-memory-bytes N'",
    )  # fmt: skip
    both.add_argument("--serve-args", default="", help="further arguments of `nanovllm serve`")
    both.add_argument("--peer", default="vllm", choices=PEERS)
    both.add_argument("--peer-command", help=f"its command in place of that of --peer: {PEERS['vllm']!r}")
    both.add_argument("--peer-args", default="", help="further arguments of the peer's command")
    both.add_argument(
        "--engine-path", action="append", default=[], metavar="ENGINE=DIR",
        help="packages of the peer, such as a venv's site-packages: vllm=DIR",
    )  # fmt: skip
    load = p.add_argument_group("the loads")
    load.add_argument("--workload", default="std256", choices=WORKLOADS, help="of the part std256")
    load.add_argument("--loads", default="1,16,64,256", help="streams at a time, or requests a second as 8/s")
    load.add_argument("--input-len", type=int, default=256, help="tokens of a prompt")
    load.add_argument("--output-len", type=int, default=256, help="tokens of an answer")
    load.add_argument("--per-stream", type=int, default=3, help="requests for each stream")
    load.add_argument("--rate-requests", type=int, default=64, help="requests at each rate")
    load.add_argument("--vocab-size", type=int, default=10_000, help="prompts are random token ids below this number")
    load.add_argument("--structured", default="128,20,512", help="requests, those that must write JSON, output tokens")
    load.add_argument("--storm", default="20,64", help="seconds of the storm, and its clients")
    return p


def check_peer(args: argparse.Namespace, chosen: Sequence[str]) -> None:
    """End the program, or raise a ValueError, if what --peer needs is not there.

    Args:
        chosen: the parts that are measured.
    """
    from benchmarks.needs import need_gpu, need_vllm
    from nanovllm.bench.command_line import engine_paths

    folder = engine_paths(args.engine_path, [args.peer]).get(args.peer)
    if "streams" not in chosen or args.peer != "vllm" or args.peer_command:
        return
    alone = "--parts std256,structured,storm measures nanovllm alone"
    if folder is None:
        need_vllm(
            f"name the folder that it is in: --engine-path vllm=DIR (such as VENV/.../site-packages); {alone}",
            gpu=False,
        )
    elif not (Path(folder) / "vllm").is_dir():
        raise ValueError(f"--engine-path vllm={folder}: there is no package vllm in this directory")
    need_gpu(alone)


def main() -> int:
    from benchmarks.serving.harness import Bench
    from benchmarks.serving.parts import PARTS, numbers, run
    from benchmarks.serving.result_file import ResultFile, tables

    args = parser().parse_args()
    if args.report is not None:
        print(tables(ResultFile.read(args.report)))
        return 0
    chosen = args.parts.split(",")
    if unknown := set(chosen) - set(PARTS):
        raise ValueError(f"--parts {args.parts}: {unknown.pop()!r} is none of {','.join(PARTS)}")
    check_peer(args, chosen)
    numbers("--structured", args.structured, 3)
    numbers("--storm", args.storm, 2)
    args.command = args.peer_command or PEERS[args.peer]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: servers are ended, and tables printed
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    shown = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    rows = ResultFile(args.json, shown)
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder), rows)
        try:
            for name in PARTS:
                if name in chosen:
                    run(bench, name)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            code = 130
        finally:
            bench.close()
    print(tables(rows))
    return code or int(any(row.get("error") for row in rows.rows))


if __name__ == "__main__":
    from nanovllm.console import run_program

    run_program("beside_vllm", main)
