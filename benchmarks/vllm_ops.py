"""The plugin's ops beside vLLM's own on the same inputs: what Inductor makes of vLLM's PyTorch code, which vLLM runs by
default, vLLM's CUDA kernels, and ours.

    python -m benchmarks.vllm_ops                                # 40 s on a GPU, most of it to import vLLM and compile

Shapes are those of Qwen3-0.6B by default, bfloat16. A time is that of a call in a CUDA graph of `--calls` calls on the
same inputs, which are in the L2 cache then, as activations are in a model. Attention is a decode step of sequences of
`--context` tokens, beside FlashAttention 3 as vLLM calls it in graphs, on caches that the L2 cache does not hold.
The difference is the largest to vLLM's PyTorch code (attention: to FlashAttention), over the largest value.
On a CPU (`--device cpu`) the references run, which shows that the script works.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.needs import need_vllm
from nanovllm.models.model_presets import preset

Call = Callable[[], Any]
EPS = 1e-6


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--preset", default="qwen3-0.6b")
    p.add_argument("--tokens", default="1,32,256,8192", help="of a step; attention: up to 256 sequences")
    p.add_argument("--context", type=int, default=1024)
    p.add_argument("--calls", type=int, default=40)
    p.add_argument("--rounds", type=int, default=15)
    p.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    p.add_argument("--after", type=Path, help="wait until this file is there before anything is timed")
    p.add_argument("--json", type=Path, help="keep the rows in this file, as they come")
    return p


class Shapes:
    """The inputs of a model's ops."""

    def __init__(self, name: str, device: str) -> None:
        config, self.device = preset(name), device
        self.hidden, self.intermediate = config["hidden_size"], config["intermediate_size"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.dim = config["head_dim"]

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=self.device)


def ops(shapes: Shapes, tokens: int) -> Iterator[tuple[str, dict[str, Call]]]:
    """Of each op its versions, by who wrote them."""
    from vllm import _custom_ops as theirs
    from vllm import ir
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    ours, native = torch.ops.nanovllm, {name: op.impls["native"].impl_fn for name, op in ir.op.IrOp.registry.items()}
    random, heads, kv_heads, dim = shapes.random, shapes.heads, shapes.kv_heads, shapes.dim

    def norm(x: torch.Tensor) -> dict[str, Call]:
        weight, out = random(x.shape[-1]), torch.empty_like(x)
        return {
            "PyTorch": lambda: native["rms_norm"](x, weight, EPS),
            "Inductor": lambda: compiled(native["rms_norm"])(x, weight, EPS),
            "CUDA": lambda: (theirs.rms_norm(out, x, weight, EPS), out)[1],
            "nanovllm": lambda: ours.rms_norm(x, weight, EPS),
        }

    yield "rms_norm", norm(random(tokens, shapes.hidden))
    yield "rms_norm of heads", norm(random(tokens, heads, dim))
    x, residual, weight = random(tokens, shapes.hidden), random(tokens, shapes.hidden), random(shapes.hidden)
    mine, mine_too = x.clone(), residual.clone()
    yield (
        "add_rms_norm",
        {
            "PyTorch": lambda: native["fused_add_rms_norm"](x, residual, weight, EPS),
            "Inductor": lambda: compiled(native["fused_add_rms_norm"])(x, residual, weight, EPS),
            "CUDA": lambda: theirs.fused_add_rms_norm(mine, mine_too, weight, EPS),  # in place: not compared
            "nanovllm": lambda: ours.add_rms_norm(x, residual, weight, EPS),
        },
    )
    gate_up, gated = random(tokens, 2 * shapes.intermediate), random(tokens, shapes.intermediate)
    yield (
        "silu_and_mul",
        {
            "PyTorch": lambda: SiluAndMul.forward_native(gate_up),
            "Inductor": lambda: compiled(SiluAndMul.forward_native)(gate_up),
            "CUDA": lambda: (torch.ops._C.silu_and_mul(gated, gate_up), gated)[1],
            "nanovllm": lambda: ours.silu_and_mul(gate_up),
        },
    )
    angles = torch.rand(4096, dim // 2, device=shapes.device) * 6
    table = torch.cat((angles.cos(), angles.sin()), -1).bfloat16()
    wide, positions = table.float(), torch.randint(4096, (tokens,), device=shapes.device)
    q, k = random(tokens, heads * dim), random(tokens, kv_heads * dim)
    their_q, their_k = q.clone(), k.clone()
    plain: Any = RotaryEmbedding.forward_static
    given = q, k, dim, dim, table, True
    yield (
        "rotary_embedding",
        {
            "PyTorch": lambda: plain(positions, *given),
            "Inductor": lambda: compiled(plain)(positions, *given),
            "CUDA": lambda: theirs.rotary_embedding(positions, their_q, their_k, dim, table, True),  # in place
            "nanovllm": lambda: ours.rotary_embedding(
                positions, q.view(tokens, heads, dim), k.view(tokens, kv_heads, dim), wide
            ),
        },
    )


def attention(shapes: Shapes, tokens: int, context: int) -> tuple[int, dict[str, Call]]:
    """A decode step's attention, in blocks of 16 tokens for FlashAttention, of 64 for ours: how many caches a call
    reads, and the calls.
    """
    from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_scheduler_metadata

    from nanovllm.adapters.vllm_attention import make_counters
    from nanovllm.kernels.ops import PagedKV
    from nanovllm.kernels.triton.attention.decode import attention_decode

    heads, kv_heads, dim = shapes.heads, shapes.kv_heads, shapes.dim
    room, splits = 4096, 32  # max_model_len, and vLLM's most splits in graphs
    lens = torch.full((tokens,), context, dtype=torch.int32, device="cuda")
    starts = torch.arange(tokens + 1, dtype=torch.int32, device="cuda")
    q, scale = shapes.random(tokens, heads, dim), dim**-0.5
    outs = torch.empty_like(q), torch.empty_like(q)
    num_caches = min(28, max(1, (1 << 27) // (tokens * context * kv_heads * dim * 4)))

    def views(cache: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [blocks, size, heads, dim] of memory [blocks, heads, size, 2 * dim], as vLLM 0.26 has it."""
        blocks = cache.view(-1, size, kv_heads, 2 * dim).transpose(1, 2).contiguous().transpose(1, 2)
        return blocks.split(dim, dim=-1)

    theirs, mine = [], []
    for _ in range(num_caches):
        cache = shapes.random(tokens * context, kv_heads, 2 * dim)
        theirs.append(views(cache, 16))
        mine.append(views(cache, 64))
    used = torch.randperm(tokens * context // 64, dtype=torch.int32, device="cuda").view(tokens, -1)
    coarse = torch.cat((used, used.new_zeros(tokens, (room - context) // 64)), 1).contiguous()
    fine = (4 * coarse[:, :, None] + torch.arange(4, dtype=torch.int32, device="cuda")).flatten(1).contiguous()
    metadata = get_scheduler_metadata(
        batch_size=tokens, max_seqlen_q=1, max_seqlen_k=context, num_heads_q=heads, num_heads_kv=kv_heads, headdim=dim,
        cache_seqlens=lens, qkv_dtype=torch.bfloat16, cu_seqlens_q=starts, page_size=16, causal=True,
        window_size=(-1, -1), num_splits=splits,
    )  # fmt: skip

    def flash() -> torch.Tensor:
        for keys, values in theirs:
            flash_attn_varlen_func(
                q=q, k=keys, v=values, out=outs[0], cu_seqlens_q=starts, max_seqlen_q=1, seqused_k=lens,
                max_seqlen_k=context, softmax_scale=scale, causal=True, window_size=[-1, -1], block_table=fine,
                scheduler_metadata=metadata, fa_version=3, num_splits=splits,
            )  # fmt: skip
        return outs[0]

    make_counters(torch.device("cuda", torch.cuda.current_device()))
    paged = [PagedKV(keys, values, coarse, lens, room) for keys, values in mine]

    def decode() -> torch.Tensor:
        for kv in paged:
            attention_decode(q, kv, scale, None, None, out=outs[1])
        return outs[1]

    return num_caches, {"FlashAttention": flash, "nanovllm": decode}


_compiled: dict[Any, Any] = {}


def compiled(fn: Any) -> Any:
    """`fn` by Inductor, for any number of tokens, as vLLM compiles it."""
    if fn not in _compiled:
        _compiled[fn] = torch.compile(fn, fullgraph=True, dynamic=True)
    return _compiled[fn]


class GraphedCall:
    """A call in a CUDA graph, many times.

    Args:
        per_call: what is done in a call, as often: its time is divided by it.
    """

    def __init__(self, call: Call, calls: int, per_call: int, device: str) -> None:
        self._each, self._device = calls * per_call, device
        self._call = call  # holds the inputs, which the graph reads at every replay
        for _ in range(2):
            self.result = call()

        def run() -> None:
            for _ in range(calls):  # results are dropped, so that all calls write to the same memory
                call()

        self._run: Callable[[], None] = run
        if device == "cuda":
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                run()
            self._run = graph.replay

    def seconds(self) -> float:
        if self._device != "cuda":
            started = time.perf_counter()
            self._run()
            return (time.perf_counter() - started) / self._each
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._run()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / self._each


def difference(got: Any, wanted: Any) -> float:
    if isinstance(wanted, tuple):
        return max(difference(a, b) for a, b in zip(got, wanted, strict=True))
    wanted = wanted.float()
    return float((got.float().view(wanted.shape) - wanted).abs().max() / wanted.abs().max())


class Cases:
    """What is timed, prepared one after the other."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self.failed = args, False
        self.found: list[tuple[str, int, dict[str, GraphedCall], float]] = []
        shapes = Shapes(args.preset, args.device)
        for tokens in map(int, args.tokens.split(",")):
            for name, versions in ops(shapes, tokens):
                self._add(name, tokens, versions, args.calls, 1)
            if tokens <= 256 and args.device == "cuda":
                try:
                    num_caches, versions = attention(shapes, tokens, args.context)
                    self._add("attention_decode", tokens, versions, 1, num_caches)
                except Exception:
                    self._fail("attention_decode", tokens, "")

    def _add(self, name: str, tokens: int, versions: dict[str, Call], calls: int, per_call: int) -> None:
        plain = versions.pop("PyTorch", None)
        timings: dict[str, GraphedCall] = {}
        for who, call in versions.items():
            if who == "CUDA" and self._args.device != "cuda":
                continue
            try:
                timings[who] = GraphedCall(call, calls, per_call, self._args.device)
            except Exception:
                self._fail(name, tokens, who)
        if "nanovllm" in timings and (plain is not None or "FlashAttention" in timings):
            wanted = timings["FlashAttention"].result if plain is None else plain()
            self.found.append((name, tokens, timings, difference(timings["nanovllm"].result, wanted)))

    def _fail(self, name: str, tokens: int, who: str) -> None:
        self.failed = True
        print(f"failed: {name}, {tokens}, {who}: {traceback.format_exc()[-1500:]}", file=sys.stderr, flush=True)


@torch.inference_mode()
def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    need_vllm(gpu=args.device == "cuda")
    import vllm

    import nanovllm.kernels  # noqa: F401  registers torch.ops.nanovllm

    cases = Cases(args)
    print("prepared", file=sys.stderr, flush=True)
    while args.after is not None and not args.after.exists():
        time.sleep(0.2)
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"{gpu}, vLLM {vllm.__version__}, torch {torch.__version__}, {args.preset}\n")
    print("| op | tokens | us, vLLM's default | vLLM's CUDA kernel | nanovllm | times as fast | difference |")
    print("|---|---|---|---|---|---|---|", flush=True)
    rows = []
    for name, tokens, timings, error in cases.found:
        best = dict.fromkeys(timings, float("inf"))
        for _ in range(args.rounds):
            for who, timing in timings.items():
                best[who] = min(best[who], timing.seconds() * 1e6)
        default = best.get("FlashAttention", best.get("Inductor", float("nan")))
        cuda = f"{best['CUDA']:.2f}" if "CUDA" in best else ""
        print(
            f"| {name} | {tokens} | {default:.2f} | {cuda} | {best['nanovllm']:.2f} | {default / best['nanovllm']:.2f} "
            f"| {error:.1e} |",
            flush=True,
        )
        rows.append({"op": name, "tokens": tokens, "us": best, "difference": error})
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1))
    return 1 if cases.failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
