"""What a float8 KV cache costs in accuracy: `python -m tests.fp8_accuracy` (SmolLM2-135M-Instruct, on the CPU, a
minute).

The text is the beginning of Charles Darwin's "On the Origin of Species" (1859, public domain), kept beside the tests so
that it stays what it is; the figures of docs/attention.md are of its first 1,024 tokens. It goes through the same
float32 model with caches of different dtypes, in pieces of 256 tokens that attend to all before them. Stated: the error
of the logits relative to those with a float32 cache, and the perplexity.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from nanovllm.config import EngineConfig
from nanovllm.engine import kv_cache
from nanovllm.kernels import resolve_kernels
from nanovllm.layers.attention import AttentionMetadata
from nanovllm.weights.checkpoint import locate
from nanovllm.weights.demo_model import demo_model_path
from nanovllm.weights.loader import load_model
from nanovllm.weights.tokenizer import load_tokenizer

BLOCK_SIZE, PIECE = 64, 256
TEXT = Path(__file__).parent / "data" / "origin_of_species.txt"
NUM_TOKENS = 1024


def logits_of(model, config, tokens: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[len(tokens), vocab_size] with a cache of `dtype`, `PIECE` tokens at a time."""
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    caches = kv_cache.allocate(config, num_blocks, BLOCK_SIZE, dtype, tokens.device, config.num_kv_heads)
    table = torch.arange(num_blocks, dtype=torch.int32)[None]
    out = []
    for start in range(0, len(tokens), PIECE):
        positions = torch.arange(start, min(start + PIECE, len(tokens)))
        end = int(positions[-1]) + 1
        metadata = AttentionMetadata(
            num_decodes=0,
            slot_mapping=positions,
            block_table=table,
            context_lens=torch.tensor([end], dtype=torch.int32),
            max_context_len=0,
            cu_seqlens_q=torch.tensor([0, len(positions)], dtype=torch.int32),
            max_query_len=len(positions),
        )
        out.append(model.lm_head(model(tokens[positions], positions, caches, metadata)))
    return torch.cat(out)


@torch.inference_mode()
def measure(
    path: str, text: str, num_tokens: int, dtypes: list[torch.dtype]
) -> dict[torch.dtype, tuple[float, float, float]]:
    """dtype -> (perplexity, relative error of the logits, share of positions with the same most likely token)."""
    checkpoint = locate(EngineConfig(model=path))
    device = torch.device("cpu")
    model = load_model(checkpoint, resolve_kernels(device, False), torch.float32, device, num_tokens, seed=0)
    tokens = torch.tensor(load_tokenizer(path)(text)["input_ids"][:num_tokens])
    if len(tokens) < num_tokens:
        raise ValueError(f"text: expected at least {num_tokens} tokens, got {len(tokens)}")
    exact = logits_of(model, checkpoint.config, tokens, torch.float32)
    result = {}
    for dtype in dtypes:
        logits = exact if dtype == torch.float32 else logits_of(model, checkpoint.config, tokens, dtype)
        nll = torch.nn.functional.cross_entropy(logits[:-1], tokens[1:])
        centered, error = exact - exact.mean(-1, keepdim=True), logits - exact
        result[dtype] = (
            nll.exp().item(),
            (error.norm() / centered.norm()).item(),
            (logits.argmax(-1) == exact.argmax(-1)).float().mean().item(),
        )
    return result


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    text = TEXT.read_text(encoding="utf-8")
    dtypes = [torch.float32, torch.bfloat16, torch.float8_e4m3fn]
    for dtype, (perplexity, error, same) in measure(str(demo_model_path()), text, NUM_TOKENS, dtypes).items():
        row = f"{str(dtype)[6:]:14} perplexity {perplexity:8.4f}   logits error {error:.2e}"
        print(f"{row}   same most likely token {same:.1%}")


if __name__ == "__main__":
    sys.exit(main())
