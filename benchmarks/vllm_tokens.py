"""Whether vLLM with the plugin gives the greedy tokens that it gives without it, on a small random model on a GPU.

    python -m benchmarks.vllm_tokens --ops attention_decode

Both run at the same time, in a process each. The texts are prompts of 1 to 1,500 tokens that are decoded together, a
prompt that is computed in chunks while others decode, and prompts whose first blocks are in the prefix cache. Logits of
16 bits may be so close that another token is as right: one that differs is among the best two, or an error.
Texts are compared up to there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.needs import need_vllm

CLOSE = {"bfloat16": 0.15, "float16": 0.05}
"""Difference of log-probabilities of two tokens that are as right: bfloat16 logits of about 16 are 1/16 apart."""
CONFIG: dict[str, Any] = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=2048, hidden_size=512, intermediate_size=1024,
    num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=128, max_position_embeddings=4096,
    rms_norm_eps=1e-6, rope_theta=1e6, hidden_act="silu", tie_word_embeddings=False, attention_bias=False,
    eos_token_id=None, bos_token_id=None, pad_token_id=0,
)  # fmt: skip


def write_model(folder: Path, dtype: str) -> None:
    """A checkpoint of random weights, whose logits are far apart."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    (folder / "config.json").write_text(json.dumps({**CONFIG, "dtype": dtype}))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 1.5 * parameter.shape[1] ** -0.5)
    model.save_pretrained(folder)


def run(folder: str, out: str) -> None:
    """One process: the tokens of all texts, and the log-probabilities of the two best at each."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that calls of the kernel can be counted
    from vllm import LLM, SamplingParams

    calls = counted() if os.environ["NANOVLLM_VLLM"] != "0" else [0]
    llm = LLM(
        model=folder, skip_tokenizer_init=True, max_model_len=2048, max_num_seqs=16, max_num_batched_tokens=512,
        kv_cache_memory_bytes=2 << 30, gpu_memory_utilization=0.2, seed=0,
    )  # fmt: skip
    draw = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [draw.randrange(1, CONFIG["vocab_size"]) for _ in range(length)]

    shared = prompt(300)
    batches = {
        "decode": [prompt(n) for n in (1, 2, 17, 63, 64, 65, 128, 300)],
        "one": [prompt(40)],
        "chunks": [prompt(n) for n in (20, 1500, 700, 90)],
        "prefix": [shared + prompt(n) for n in (1, 20, 64)],
        "prefix hits": [shared + prompt(n) for n in (5, 33, 70)],
    }
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, detokenize=False, logprobs=2)
    found = {}
    for name, prompts in batches.items():
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        best = [[{t: x.logprob for t, x in step.items()} for step in o.outputs[0].logprobs] for o in outputs]
        found[name] = [(list(o.outputs[0].token_ids), b) for o, b in zip(outputs, best)]
    config = llm.llm_engine.vllm_config
    about = {
        "ops": config.additional_config.get("nanovllm"),
        "block": config.cache_config.block_size,
        "calls": calls[0],
    }
    Path(out).write_text(json.dumps({"about": about, "found": found}))


def counted() -> list[int]:
    """Calls of the attention kernel, of which most are put into graphs."""
    from nanovllm.adapters import vllm_attention

    calls, own = [0], vllm_attention.attention_decode

    def attention_decode(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return own(*args, **kwargs)

    vllm_attention.attention_decode = attention_decode
    return calls


def compare(got: list[Any], wanted: list[Any], close: float) -> tuple[int, int, int]:
    """(tokens that are equal, tokens, texts that differ where no other token is as right)."""
    equal = total = wrong = 0
    for (tokens, _), (right, best) in zip(got, wanted, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(tokens, right)) if a != b), len(right))
        equal, total = equal + same, total + len(right)
        if same < len(right):
            choices = best[same]
            behind = max(choices.values()) - choices.get(str(tokens[same]), float("-inf"))
            wrong += behind > close
    return equal, total, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="attention_decode", help="of the plugin, as NANOVLLM_VLLM takes them")
    parser.add_argument("--dtype", default="bfloat16", choices=list(CLOSE))
    parser.add_argument("--run", nargs=2, metavar=("MODEL", "OUT"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        run(*args.run)
        return 0
    need_vllm()
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.dtype)
        started = []
        for ops in ("0", args.ops):
            log = (Path(folder) / f"log-{ops}").open("w+")
            out = Path(folder) / f"out-{ops}.json"
            command = [sys.executable, "-m", "benchmarks.vllm_tokens", "--run", folder, str(out)]
            process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "NANOVLLM_VLLM": ops})
            started.append((process, log, out))
        results = []
        for process, log, out in started:
            code = process.wait()
            log.seek(0)
            printed = log.read()
            print("\n".join(line[:200] for line in printed.splitlines() if "nanovllm" in line), flush=True)
            if code:
                print(printed[-4000:])
                return 1
            results.append(json.loads(out.read_text()))
    plain, ours = results
    print(f"without the plugin: {plain['about']}; with it: {ours['about']}")
    failed = 0
    for name, wanted in plain["found"].items():
        equal, total, wrong = compare(ours["found"][name], wanted, CLOSE[args.dtype])
        print(f"{name}: {equal} of {total} tokens equal, {wrong} of {len(wanted)} texts differ where they must not")
        failed += wrong
    return int(failed > 0 or ("attention_decode" in args.ops and not ours["about"]["calls"]))


if __name__ == "__main__":
    sys.exit(main())
