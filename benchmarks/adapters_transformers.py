"""What the ops give in transformers: `generate` with a static cache, and prefill, before and after `apply`.

    python -m benchmarks.adapters_transformers --budget 200              # Qwen3-0.6B and 8B, random weights, on a GPU
    python -m benchmarks.adapters_transformers --models qwen3-0.6b --batches 32 --sides plain,nanovllm --no-parts
    python -m benchmarks.adapters_transformers --models qwen3-0.6b --prefill "" --no-parts --rounds 5 \\
        --sides "plain,only sample,without sample,nanovllm" --sampling temperature=0.6,top_p=0.95,top_k=20

Sides: `plain` is transformers; `nanovllm` is after `apply`, and `loop` the same without CUDA graphs; `liger` is
Liger-Kernel and `kernels` the package kernels with our layers, where they are installed. The sides take turns for
`--rounds` rounds, and a row shows the best round of each. The parts (`--parts`) are `only OP`, one op put in, and `with
native OP`, all ops put in with the reference of one; the side `without OP` is all the others. `--sampling` draws the
tokens. What would start after `--budget` seconds is left out, and named. `benchmarks.adapters_compiled` measures code
of torch.compile.

The share of a decode step is that of the time in which the GPU could read the weights once; that of prefill, of the
time for the products of the weights at the GPU's measured rate. The difference is of logits after a padded prompt and
after five decode steps.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.adapters_work import limit, works
from benchmarks.needs import progress
from nanovllm.adapters.transformers import OPS, apply, kernel_mapping

# Few layers and a small vocabulary, to try the script on a CPU.
TINY: dict[str, Any] = dict(
    architectures=["Qwen3ForCausalLM"], vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=4096, dtype="float32",
)  # fmt: skip
LASTING = {"liger": "liger_kernel", "kernels": "kernels"}
"""Sides that cannot be taken back, and the packages that they are."""
_UNUSED = "gelu_and_mul", "attention_decode", "sample"  # `loop` is without the second; the last is for --sampling
PARTS = [f"only {op}" for op in OPS if op not in _UNUSED]
PARTS += [f"with native {op}" for op in OPS if op not in (*_UNUSED, "attention_dense", "rotary_embedding", "embedding")]


@dataclass
class AdapterMeasurement:
    """One measurement.

    Attributes:
        seconds: of a decode step, or of a prefill.
        share: of the limit, 0 to 1; None on a CPU.
        difference: the largest difference of a logit from the plain model's, over the largest logit.
    """

    model: str
    work: str
    side: str
    seconds: float
    speedup: float
    share: float | None
    difference: float
    logits: torch.Tensor | None = None


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--models", default="qwen3-0.6b,qwen3-8b", help="presets, or tiny")
    p.add_argument("--batches", default="1,32")
    p.add_argument("--prompt-len", type=int, default=128)
    p.add_argument("--output-len", type=int, default=32)
    p.add_argument("--start-len", type=int, default=1, help="tokens that a decode step's time is without")
    p.add_argument("--cache", default="static", choices=["static", "dynamic"], help="of generate")
    p.add_argument("--sampling", default="", help="options of generate, such as temperature=0.6,top_p=0.95,top_k=20")
    p.add_argument("--prefill", default="4x2048", help="batch x tokens; empty: none")
    p.add_argument("--sides", default="plain,nanovllm,loop,liger,kernels")
    p.add_argument("--rounds", type=int, default=2)
    p.add_argument("--budget", type=float, default=float("inf"), help="seconds after which nothing new is started")
    p.add_argument(
        "--parts", action=argparse.BooleanOptionalAction, default=True, help="also single ops, in the last batch"
    )
    p.add_argument("--ops", default="", help="ops=provider,..., instead of the usual ones, for the side nanovllm")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--json", type=Path, help="keep the rows in this file, as they come")
    return p


def made(name: str, device: str, layers: int = 0) -> Any:
    """A model of random weights; the same for the same name. layers: 0: all."""
    import transformers

    from nanovllm.models.model_presets import preset

    config = dict(TINY) if name == "tiny" else preset(name)
    dtype = getattr(torch, config.pop("dtype"))
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
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
    """The model as a side has it. The changes of those in `LASTING` stay."""
    if side in ("nanovllm", "loop"):
        with apply(model, ops=ops, cuda_graphs=side == "nanovllm"):
            yield
    elif side.startswith("without "):
        with apply(model, ops=ops, exclude=[side.removeprefix("without ")]):
            yield
    elif side.startswith("with native "):
        with apply(model, ops=dict.fromkeys(OPS, ()) | {side.removeprefix("with native "): "native"}):
            yield
    elif side.startswith("only "):
        op = side.removeprefix("only ")
        given = (ops or {}).get(op, ())
        # Some ops stand on the fused products of others, which then run their reference.
        around = {"linear_silu_and_mul": "silu_and_mul", "qk_norm_rope": "rotary_embedding"}.get(op)
        with apply(model, ops={op: given} | ({around: "native"} if around else {})):
            yield
    else:
        if side == "liger" and "forward" not in model.__dict__:
            from liger_kernel.transformers import _apply_liger_kernel_to_instance

            _apply_liger_kernel_to_instance(model=model)
        elif side == "kernels" and not any("forward" in m.__dict__ for m in model.modules()):
            from kernels import Mode, kernelize, use_kernel_mapping

            device = model.device.type
            with use_kernel_mapping(kernel_mapping((device,)), inherit_mapping=False):
                kernelize(model, device=device, mode=Mode.INFERENCE | Mode.TORCH_COMPILE)
        yield


def available(side: str) -> bool:
    """Whether a side can be measured here."""
    from transformers.utils import is_kernels_available

    if side == "kernels":
        return is_kernels_available()
    return side not in LASTING or find_spec(LASTING[side]) is not None


@torch.no_grad()
def sample_logits(model: Any, device: str) -> torch.Tensor:
    """The logits of a short padded prompt and of decode steps after it, by which sides are compared."""
    from transformers import StaticCache

    ids = torch.arange(3, 53, device=device).view(2, 25)
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    cache = StaticCache(config=model.config, max_cache_len=64)
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    logits = []
    for start, end in ((0, 20), *((t, t + 1) for t in range(20, 25))):
        out = model(ids[:, start:end], attention_mask=mask[:, :end], use_cache=True, **{name: cache})
        logits.append(out.logits[:, -1].float())
    return torch.stack(logits)


class Measuring:
    """The rows of all models and works, as far as the time goes.

    Attributes:
        failed: sides that raised an error, such as packages that are for another version of transformers.
    """

    def __init__(self, args: argparse.Namespace, sides: list[str]) -> None:
        self._args, self._sides = args, sides
        self._ops = dict(entry.split("=") for entry in args.ops.split(",") if entry) or None
        self._end = time.perf_counter() + args.budget
        self._first: dict[tuple[str, str], AdapterMeasurement] = {}
        self.rows: list[AdapterMeasurement] = []
        self.failed: set[str] = set()

    def all(self) -> None:
        """Liger-Kernel changes the module of the model's class, so it comes last."""
        phases = [[side for side in self._sides if side not in LASTING]]
        phases += [["plain", *PARTS]] * self._args.parts
        phases += [[side] for side in ("kernels", "liger") if side in self._sides]
        for sides in phases:
            for name in self._args.models.split(","):
                self._model(name, sides)

    def _model(self, name: str, sides: list[str]) -> None:
        if self._is_over(f"{name}: {', '.join(sides)}"):
            return
        progress(f"making {name} on {self._args.device}")
        model = made(name, self._args.device)
        makers = works(self._args, sampling=self._args.sampling)
        for make in makers[len(makers) - 1 - bool(self._args.prefill) :] if PARTS[0] in sides else makers:
            self._work(model, name, make, sides)

    def _work(self, model: Any, name: str, make: Callable[[Any], Any], sides: list[str]) -> None:
        """Rows of one work. They are compared with the first side's, or with the first row of this work."""
        best: dict[str, float] = {}
        differences: dict[str, torch.Tensor] = {}
        work = make(model)
        for turn in range(self._args.rounds):
            for side in sides:
                if self._is_over(f"{name}, {work.name}, {side}" if side not in best else ""):
                    continue
                if side in self.failed:
                    continue
                progress(f"{name}, {work.name}, {side}: round {turn + 1} of {self._args.rounds}")
                try:
                    with side_of(model, side, self._ops):
                        if not turn:
                            differences[side] = sample_logits(model, self._args.device)
                        work.prepare()
                        seconds = work.seconds()
                except Exception as error:  # the others are measured
                    self.failed.add(side)
                    print(f"failed: {name}, {work.name}, {side}: {type(error).__name__}: {error}", file=sys.stderr)
                    continue
                best[side] = min(best.get(side, seconds), seconds)
        least = limit(model, work, self._args.device)
        for side, seconds in best.items():
            row = AdapterMeasurement(
                name, work.name, side, seconds, 1.0, None if least is None else least / seconds, 0.0
            )
            row.logits = differences[side]
            if side == "plain":
                self._first[name, work.name] = row
            base = self._first.setdefault((name, work.name), row)
            row.speedup = base.seconds / seconds
            row.difference = float((row.logits - base.logits).abs().max() / base.logits.abs().max())
            show(row)
            self.rows.append(row)
        if self._args.json:
            rows = [{k: v for k, v in vars(row).items() if k != "logits"} for row in self.rows]
            self._args.json.write_text(json.dumps(rows, indent=1))

    def _is_over(self, what: str) -> bool:
        over = time.perf_counter() > self._end
        if over and what:
            print(f"the time is used up; left out: {what}", file=sys.stderr)
        return over


def show(row: AdapterMeasurement) -> None:
    share = "" if row.share is None else f"{row.share:.1%}"
    print(
        f"| {row.model} | {row.work} | {row.side} | {row.seconds * 1e3:.3f} ms "
        f"| {row.speedup:.2f} | {share} | {row.difference:.1e} |",
        flush=True,
    )


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    import transformers

    sides = [side for side in args.sides.split(",") if side]
    for side in [side for side in sides if not available(side)]:
        sides.remove(side)
        print(f"left out: {side}; transformers finds no {LASTING[side]} of the version that it takes", file=sys.stderr)
    gpu = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
    print(f"{gpu}, torch {torch.__version__}, transformers {transformers.__version__}\n")
    print("| model | work | side | time | speedup | of the limit | difference |")
    print("|---|---|---|---|---|---|---|")
    measuring = Measuring(args, sides)
    measuring.all()
    return 1 if measuring.failed - set(LASTING) else 0


if __name__ == "__main__":
    sys.exit(main())
