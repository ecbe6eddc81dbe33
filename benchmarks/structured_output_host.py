"""The host's parts of a step with constrained requests, on a CPU: `python -m benchmarks.structured_output --host`.

A tiny model runs on the CPU. Its steps give the times of the host's parts, and each mask is timed by itself. A model of
the step's time line says what a step of a GPU takes with these.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.serving import dummy_tokenizer
from benchmarks.structured_output import (
    END,
    VOCAB_SIZE,
    Stages,
    in_threads,
    mask_seconds,
    print_stages,
    tokens_per_second,
)
from nanovllm import LLM

TINY = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": VOCAB_SIZE, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024, "rope_theta": 1e4, "tie_word_embeddings": True, "eos_token_id": END,
}  # fmt: skip


class Host(NamedTuple):
    """What the host does in a step, in ms, beside filling masks."""

    advance: float
    bans: float
    launch: float
    schedule: float
    read: float


def step_ms(
    fills: Sequence[float], host: Host, gpu: float, beside: bool, sampling: float = 0.15, masking: float = 0.03
) -> float:
    """What a step takes on average, by the time line of both.

    The device computes the logits of a step while the host fills its masks; it samples when both are there. The next
    model starts when it is launched and the tokens are there. With masks of a thread, all is launched before.

    Args:
        fills: ms that the masks of each step take.
        gpu: ms of a step without masks, of which sampling takes `sampling`.
        beside: whether a thread fills the masks, and the device waits for it.
        masking: ms of the device between the logits and sampling: a copy of 20 masks and a kernel, an estimate.
    """
    tokens = launched = 0.0  # when the tokens of the step before are there, when the model of this one is launched
    for fill in fills:
        model_end = max(tokens, launched) + gpu - sampling
        begun = max(tokens, launched) + host.advance
        sample = begun + fill + host.bans
        if beside:
            launched = begun + host.read + host.schedule + host.launch
        else:
            sample += host.launch / 2
            launched = sample + host.schedule + host.launch / 2 + host.read
        tokens = max(model_end, sample) + masking + sampling
    return tokens / len(fills)


def print_host(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        dummy_tokenizer.write(Path(folder), VOCAB_SIZE, END, args.tiktoken)
        (Path(folder) / "config.json").write_text(json.dumps(TINY))
        llm = LLM(
            folder, load_format="dummy", device="cpu", async_scheduling=True, max_num_seqs=args.requests,
            max_model_len=1024, enable_prefix_caching=False,
        )  # fmt: skip
        stages = Stages(llm)
        tokens_per_second(llm, args.requests, args.constrained, min(args.tokens, 48))
        found = stages.milliseconds()
        print(
            f"{args.requests} requests on the CPU, {args.constrained} constrained; `launch` has the model's time here"
        )
        print_stages(found)
        steps = mask_seconds(llm, args.constrained, min(args.tokens, 200))
    medians = {name: float(np.median(found[name])) for name in Host._fields}
    host = Host(*(args.slower * ms for ms in Host(**medians | {"launch": args.launch_ms})))
    print(f"by the time line, on a processor that takes {args.slower:g} times as long:")
    print(
        f"{args.constrained} masks, ms:   mean  median     p90     p99   a step of 2 / 2.7 / 5.5 / 10 ms takes; beside"
    )
    for num_threads in (1, 2, 4, 8):
        ms = [1e3 * args.slower * in_threads(step, num_threads) for step in steps]
        row = f"  {num_threads} threads    {np.mean(ms):7.2f}" + "".join(
            f" {np.quantile(ms, q):7.2f}" for q in (0.5, 0.9, 0.99)
        )
        for beside in (False, True):
            row += ";" * beside + "".join(f" {step_ms(ms, host, gpu, beside):6.2f}" for gpu in (2.0, 2.7, 5.5, 10.0))
        print(row)
