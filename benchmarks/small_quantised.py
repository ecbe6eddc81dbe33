"""Small models quantised and in bfloat16, in turn on one device: whether a form is anywhere slower than bfloat16.

    python -m benchmarks.small_quantised --presets qwen3-0.6b,qwen3-1.7b --forms bf16,fp8,int4 --json rows.json

Weights are random. A row is the best of a few runs, with its ratio to bfloat16 in the same process: above 1 is faster.
"decode 8" is 8 prompts of 128 tokens that get `--output` tokens each, in output tokens a second, prompts included.
"prompts 64x1024" is 64 prompts of 1,024 tokens that get one token each, in prompts a second.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import random
import re
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.needs import progress
from nanovllm import LLM, SamplingParams
from nanovllm.config import ONLINE_QUANTIZATION
from nanovllm.garbage_collector import collector_off
from nanovllm.hardware.devices import select_device
from nanovllm.hardware.gpu_name import cpu_name
from nanovllm.hardware.versions import provenance

FORMS = ("bf16", *ONLINE_QUANTIZATION)
_ROOT = Path(__file__).resolve().parents[1]
PROMPT = 128
"""Tokens of a prompt in front of a decode."""


@dataclass(frozen=True)
class Load:
    """Requests of equal lengths."""

    name: str
    num_requests: int
    prompt: int
    output: int

    @property
    def work(self) -> int:
        """What is counted a second: output tokens; of a load with one output token each, prompts."""
        return self.num_requests * self.output

    @property
    def unit(self) -> str:
        return "prompts/s" if self.output == 1 else "tok/s"


@dataclass(frozen=True)
class Row:
    """A load with a form of weights. ratio: to bfloat16; None: that was not measured."""

    preset: str
    form: str
    load: str
    value: float
    unit: str
    ratio: float | None

    def __str__(self) -> str:
        ratio = "" if self.ratio is None or self.form == "bf16" else f"  {self.ratio:.3f} of bf16"
        return f"{self.preset:12} {self.form:6} {self.load:18} {self.value:10,.1f} {self.unit}{ratio}"


def loads(decodes: str, prompts: str, output: int) -> list[Load]:
    """The loads that the options name.

    Raises:
        ValueError: an entry has another form.
    """
    found = []
    for entry in decodes.split(",") if decodes else ():
        if not re.fullmatch("[1-9][0-9]*", entry):
            raise ValueError(f"--decode: {entry!r}: expected numbers of sequences, separated by commas, such as 1,8")
        found.append(Load(f"decode {entry}", int(entry), PROMPT, output))
    for entry in prompts.split(",") if prompts else ():
        match = re.fullmatch("(?:([1-9][0-9]*)x)?([1-9][0-9]*)", entry)
        if match is None:
            raise ValueError(f"--prompts: {entry!r}: expected tokens, or NUMBERxTOKENS, such as 1024,64x1024")
        num_requests, tokens = int(match[1] or 1), int(match[2])
        found.append(Load(f"prompts {num_requests}x{tokens}", num_requests, tokens, 1))
    return found


def measure(llm: LLM, load: Load, repeat: int) -> float:
    """What is done a second in the fastest of `repeat` runs after a first one."""
    draw, vocab = random.Random(0), llm.engine.runner.model.config.vocab_size
    params = SamplingParams(temperature=0.6, max_tokens=load.output, ignore_eos=True)
    seconds = []
    for _ in range(repeat + 1):
        prompts = [[draw.randrange(vocab) for _ in range(load.prompt)] for _ in range(load.num_requests)]
        with collector_off(gc.collect):  # a collection within a run would count
            started = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            seconds.append(time.perf_counter() - started)
    return load.work / min(seconds[1:])


def rows(
    preset: str, forms: Sequence[str], asked: Sequence[Load], repeat: int, expand: str, device: str
) -> Iterator[Row]:
    """Each form in turn, bfloat16 first if it is among them."""
    base: dict[str, float] = {}
    for form in sorted(forms, key=lambda form: form != "bf16"):
        progress(f"loading {preset} in {form}")
        llm = LLM(
            preset, load_format="dummy", dtype="bfloat16", quantization=None if form == "bf16" else form,
            expand_small_weights=expand, device=device, skip_tokenizer_init=True, enable_prefix_caching=False,
            max_num_seqs=max(load.num_requests for load in asked),
            max_model_len=max(load.prompt + load.output for load in asked),
        )  # fmt: skip
        for load in asked:
            progress(f"measuring {preset} in {form}: {load.name}")
            value = measure(llm, load, repeat)
            if form == "bf16":
                base[load.name] = value
            ratio = value / base[load.name] if load.name in base else None
            yield Row(preset, form, load.name, value, load.unit, ratio)
        del llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m benchmarks.small_quantised", description=__doc__.splitlines()[0])
    p.add_argument("--presets", default="qwen3-0.6b,qwen3-1.7b", help="names of presets, or directories (%(default)s)")
    p.add_argument("--forms", default="bf16,fp8,int4", help=f"any of {','.join(FORMS)} (%(default)s)")
    p.add_argument("--decode", default="1,8,16,24,32,64,128,256", help="numbers of sequences (%(default)s)")
    p.add_argument("--prompts", default="256,1024,4096,64x1024", help="tokens, or NUMBERxTOKENS (%(default)s)")
    p.add_argument("--output", type=int, default=128, help="tokens that a decode adds to each sequence (%(default)s)")
    p.add_argument("--repeat", type=int, default=2, help="timed runs of each row, after a first one (%(default)s)")
    p.add_argument("--expand-small-weights", choices=("auto", "off"), default="auto", help="as of LLM (%(default)s)")
    p.add_argument("--device", default="auto", help="auto, cuda, cuda:1, cpu (%(default)s)")
    p.add_argument("--json", type=Path, metavar="FILE", help="keep the rows here")
    given = p.parse_args(arguments)
    forms = given.forms.split(",")
    if unknown := [form for form in forms if form not in FORMS]:
        p.error(f"--forms: {unknown[0]!r}: expected some of {','.join(FORMS)}")
    if given.output < 2 or given.repeat < 1:
        p.error(f"--output {given.output}, --repeat {given.repeat}: expected at least 2, and at least 1")
    try:
        asked = loads(given.decode, given.prompts, given.output)
        device = select_device(given.device)
    except ValueError as error:
        p.error(str(error))
    if not asked:
        p.error("--decode and --prompts are empty: name a load, such as --decode 8")
    logging.basicConfig(format="%(message)s", stream=sys.stderr)
    logging.getLogger("nanovllm.weights.expanded_layers").setLevel(logging.INFO)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()
    head = {**vars(provenance(_ROOT)), "device": name, "arguments": vars(given) | {"json": None}}
    made: list[Row] = []
    for preset in given.presets.split(","):
        for row in rows(preset, forms, asked, given.repeat, given.expand_small_weights, given.device):
            print(row, flush=True)
            made.append(row)
            if given.json is not None:  # at once: a run may be ended
                given.json.write_text(json.dumps(head | {"rows": [asdict(row) for row in made]}, indent=1) + "\n")
    slower = [row for row in made if row.ratio is not None and row.ratio < 0.99]
    print(f"{len(slower)} rows of {len(made)} are more than 1 % slower than bf16", *slower, sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
