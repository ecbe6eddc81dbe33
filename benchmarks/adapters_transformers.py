"""What the ops give in transformers: `generate` with a static cache, and prefill, before and after `apply`.

    python -m benchmarks.adapters_transformers                     # Qwen3-0.6B and 8B, random weights, on a GPU
    python -m benchmarks.adapters_transformers --models qwen3-0.6b --batches 32 --sides plain,nanovllm --no-parts

Each row is timed with the sides in turn, `--rounds` times, and shows the best round of each side; single ops and
compiled code are timed once. Sides: `plain` is
transformers; `nanovllm` is after `apply`; `liger` is Liger-Kernel, where it is installed. With `--compile`, `generate`
compiles the decode step as it does with a static cache, and prefill is compiled by torch.compile. `--parts` times one
op at a time, without torch.compile. The share of a decode step is that of the time in which the GPU could read the
weights once; that of prefill, of the time for the products of the weights at the GPU's measured rate.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from nanovllm.adapters.transformers import OPS, apply

# Few layers and a small vocabulary, to try the script on a CPU.
TINY: dict[str, Any] = dict(
    architectures=["Qwen3ForCausalLM"], vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, dtype="float32",
)  # fmt: skip


@dataclass
class Row:
    """One measurement.

    Attributes:
        seconds: of a decode step, or of a prefill.
        share: of the limit, 0 to 1; None on a CPU.
        difference: the largest difference of a logit from the plain model's, over the largest logit.
    """

    model: str
    work: str
    compiled: bool
    side: str
    seconds: float
    speedup: float
    share: float | None
    difference: float


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", default="qwen3-0.6b,qwen3-8b", help="presets, or tiny")
    p.add_argument("--batches", default="1,32")
    p.add_argument("--prompt-len", type=int, default=128)
    p.add_argument("--output-len", type=int, default=64)
    p.add_argument("--prefill", default="4x2048", help="batch x tokens; empty: none")
    p.add_argument("--sides", default="plain,nanovllm,liger")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="also with torch.compile")
    p.add_argument("--parts", action=argparse.BooleanOptionalAction, default=True, help="also one op at a time")
    p.add_argument("--ops", default="", help="ops=provider,..., instead of the usual ones, for the side nanovllm")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--json", type=Path, help="keep the rows in this file")
    return p


def made(name: str, device: str) -> Any:
    """A model of random weights; the same for the same name."""
    import transformers

    from nanovllm.models.model_presets import preset

    config = dict(TINY) if name == "tiny" else preset(name)
    dtype = getattr(torch, config.pop("dtype"))
    kind = config.pop("architectures")[0].removesuffix("ForCausalLM")
    config |= {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, f"{kind}ForCausalLM")._from_config(
            getattr(transformers, f"{kind}Config")(**config), dtype=dtype
        )
    return model.eval().requires_grad_(False)


@contextmanager
def side_of(model: Any, side: str, ops: dict[str, str] | None) -> Iterator[None]:
    """The model as a side has it. Liger-Kernel's changes stay: it comes last."""
    if side == "nanovllm":
        with apply(model, ops=ops):
            yield
    elif side.startswith("only "):
        op = side.removeprefix("only ")
        given = (ops or {}).get(op, ())
        # Some ops stand on the fused products of others, which then run their reference.
        around = {"linear_silu_and_mul": "silu_and_mul", "qk_norm_rope": "rotary_embedding"}.get(op)
        with apply(model, ops={op: given} | ({around: "native"} if around else {})):
            yield
    else:
        if side == "liger":
            from liger_kernel.transformers import _apply_liger_kernel_to_instance

            _apply_liger_kernel_to_instance(model=model)
        yield


def forget(model: Any) -> None:
    """Drop compiled code, which may have been made for another side."""
    torch._dynamo.reset()
    model.__dict__.pop("_compiled_call", None)


def timed(run: Callable[[], Any], device: str) -> float:
    """Seconds of one call."""
    sync = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    sync()
    start = time.perf_counter()
    run()
    sync()
    return time.perf_counter() - start


class Generating:
    """`generate` of one token after another: seconds a step, without the prompt's."""

    def __init__(self, model: Any, batch: int, args: argparse.Namespace, compiled: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(3, model.config.vocab_size, (batch, args.prompt_len), generator=generator)
        self.name = f"generate {batch} x {args.prompt_len} -> {args.output_len}"
        self._model, self._ids, self._args, self._compiled = model, ids.to(args.device), args, compiled

    def _generate(self, tokens: int) -> Any:
        return self._model.generate(
            self._ids, attention_mask=torch.ones_like(self._ids), min_new_tokens=tokens, max_new_tokens=tokens,
            do_sample=False, cache_implementation="static", disable_compile=not self._compiled, pad_token_id=0,
        )  # fmt: skip

    def prepare(self) -> None:
        self._generate(self._args.output_len)
        self._generate(1)

    def seconds(self) -> float:
        whole = timed(lambda: self._generate(self._args.output_len), self._args.device)
        first = timed(lambda: self._generate(1), self._args.device)
        return (whole - first) / max(1, self._args.output_len - 1)


class Prefilling:
    """A forward of prompts, without a cache: seconds."""

    def __init__(self, model: Any, batch: int, tokens: int, args: argparse.Namespace, compiled: bool) -> None:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(3, model.config.vocab_size, (batch, tokens), generator=generator)
        self.name = f"prefill {batch} x {tokens}"
        self._ids, self._device = ids.to(args.device), args.device
        self._model, self._compiled = model, compiled

    def prepare(self) -> None:
        self._forward = torch.compile(self._model.forward, dynamic=False) if self._compiled else self._model
        for _ in range(2):
            self.logits()

    @torch.no_grad()
    def logits(self) -> torch.Tensor:
        return self._forward(self._ids, use_cache=False, logits_to_keep=1).logits

    def seconds(self) -> float:
        return timed(self.logits, self._device)


def limit(model: Any, work: Any, device: str) -> float | None:
    """The least seconds that a GPU could take: the weights read once, or their products."""
    if not device.startswith("cuda"):
        return None
    from nanovllm.hardware.roofline import copy_bandwidth, matmul_rate

    used = [p for name, p in model.named_parameters() if "embed_tokens" not in name or model.config.tie_word_embeddings]
    if isinstance(work, Generating):
        return sum(p.nbytes for p in used) / copy_bandwidth(torch.device(device))
    inner = sum(
        p.numel() for name, p in model.named_parameters() if "embed_tokens" not in name and "lm_head" not in name
    )
    return 2 * inner * work._ids.numel() / matmul_rate(torch.device(device), model.dtype)


@torch.no_grad()
def sample_logits(model: Any, device: str) -> torch.Tensor:
    """The logits of a short padded prompt, by which sides are compared."""
    ids = torch.arange(3, 43, device=device).view(2, 20)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    return model(ids, attention_mask=mask).logits[:, -1].float()


def measured(
    name: str, make: Callable[[Any], Any], sides: list[str], compiled: bool, args: argparse.Namespace
) -> list[Row]:
    """One row for each side, the sides in turn. The first side is what the others are compared with."""
    ops = dict(entry.split("=") for entry in args.ops.split(",") if entry) or None
    model = made(name, args.device)
    plain, best, differences, label, least = None, {}, {}, "", None
    rounds = 1 if compiled else args.rounds  # to compile takes minutes, and steps of one graph differ little
    for turn in range(rounds):
        for side in (s for s in sides if not turn or not s.startswith("only ")):
            with side_of(model, side, ops):
                logits = sample_logits(model, args.device)
                plain = logits if plain is None else plain
                differences[side] = float((logits - plain).abs().max() / plain.abs().max())
                work = make(model)
                if compiled:
                    forget(model)
                work.prepare()
                seconds = work.seconds()
                best[side] = min(best.get(side, seconds), seconds)
                label, least = work.name, limit(model, work, args.device)
        if "liger" in sides and turn + 1 < rounds:
            del model
            model = made(name, args.device)
    first = best[sides[0]]
    return [
        Row(name, label, compiled, s, t, first / t, None if least is None else least / t, differences[s])
        for s, t in best.items()
    ]  # fmt: skip


def show(row: Row) -> None:
    share = "" if row.share is None else f"{row.share:.1%}"
    print(
        f"| {row.model} | {row.work} | {'yes' if row.compiled else 'no'} | {row.side} | {row.seconds * 1e3:.3f} ms "
        f"| {row.speedup:.2f} | {share} | {row.difference:.1e} |",
        flush=True,
    )


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    import transformers

    sides = [side for side in args.sides.split(",") if side]
    if "liger" in sides and find_spec("liger_kernel") is None:
        sides.remove("liger")
        print("liger_kernel is not installed: that side is left out", file=sys.stderr)
    gpu = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    print(f"{gpu}, torch {torch.__version__}, transformers {transformers.__version__}\n")
    print("| model | work | compiled | side | time | speedup | of the limit | difference |")
    print("|---|---|---|---|---|---|---|---|")
    rows: list[Row] = []
    parts = [f"only {op}" for op in OPS if op != "gelu_and_mul"]
    for name in args.models.split(","):
        for compiled in (False, True) if args.compile else (False,):
            makers: list[Callable[[Any], Any]] = [
                lambda model, b=int(batch), c=compiled: Generating(model, b, args, c)
                for batch in args.batches.split(",")
            ]
            if args.prefill:
                shape = [int(n) for n in args.prefill.split("x")]
                makers.append(lambda model, s=shape, c=compiled: Prefilling(model, *s, args, c))
            for make in makers:
                given = [*sides, *(parts if args.parts and not compiled else ())]
                # Liger's changes stay in a model.
                given.sort(key=lambda side: side == "liger")
                for row in measured(name, make, given, compiled, args):
                    show(row)
                    rows.append(row)
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
