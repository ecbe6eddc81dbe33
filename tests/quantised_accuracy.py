"""What quantised weights cost in accuracy: `python -m tests.quantised_accuracy` (SmolLM2-135M-Instruct, on a CPU, three
minutes).

The text is the one of `tests.fp8_accuracy`, and so are the measures. The reference are the weights of the model's
published Q4_1 file in float32; they are quantised as `LLM(quantization=...)` does. Rows with fp8 activations round
activations and weights to e4m3, as `LLM(prompt_activations="fp8")` does for prompts. The last rows are of the file's
own blocks, op by op and by the C++ kernels, these with float32 and int8 activations, and of the weights rounded to
bfloat16, with float32 and bfloat16 activations.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from nanovllm.config import EngineConfig
from nanovllm.kernels import all_ops, resolve_kernels
from nanovllm.kernels.cpu.build import cpu_support
from nanovllm.kernels.cpu.library import can_round
from nanovllm.weights import gguf
from nanovllm.weights.checkpoint import locate
from nanovllm.weights.demo_model import demo_model_path
from nanovllm.weights.loader import load_model
from nanovllm.weights.rounded_layers import round_layers
from nanovllm.weights.tokenizer import load_tokenizer
from tests.fp8_accuracy import NUM_TOKENS, TEXT, logits_of
from tests.providers import references

FORMS = ("fp8", "int8", "int4")
ROUNDED = ("int8", "int4")
"""Those that are measured with fp8 activations, too."""


def expand(path: Path, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    """A GGUF file's weights in a dtype, as a checkpoint of safetensors."""
    save_file({name: t.to(dtype).contiguous() for name, t in gguf.iter_tensors(path)}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(gguf.read_config(path)))
    return directory


@torch.inference_mode()
def logits(
    path: Path,
    tokens: torch.Tensor,
    form: str | None = None,
    keep_packed: bool = False,
    activations: str | None = None,
    fp8: bool = False,
) -> torch.Tensor:
    """[len(tokens), vocab_size] in float32.

    Args:
        activations: of the C++ kernels, which run if this is given.
        fp8: products are those of `prompt_activations="fp8"`, by the references in float32.
    """
    checkpoint, device = locate(EngineConfig(str(path), quantization=form)), torch.device("cpu")
    if fp8:
        priority = {name: ["native"] for name in all_ops()}
        with references("mine", "linear_fp8_dynamic") as mine:
            kernels = resolve_kernels(device, True, priority | mine)
        model = load_model(checkpoint, kernels, torch.float32, device, len(tokens), keep_packed=True)
        round_layers(model, kernels, 1)
        return logits_of(model, checkpoint.config, tokens, torch.float32)
    kernels = resolve_kernels(device, activations is not None)
    model = load_model(
        checkpoint, kernels, torch.float32, device, len(tokens), packed=activations, keep_packed=keep_packed
    )
    return logits_of(model, checkpoint.config, tokens, torch.float32)


def perplexity(of: torch.Tensor, tokens: torch.Tensor) -> float:
    return torch.nn.functional.cross_entropy(of[:-1], tokens[1:]).exp().item()


def measure(path: Path, text: str, num_tokens: int) -> dict[str, tuple[float, float, float]]:
    """form -> (perplexity, relative error of the logits, share of positions with the same most likely token)."""
    tokens = torch.tensor(load_tokenizer(str(path))(text)["input_ids"][:num_tokens])
    with tempfile.TemporaryDirectory() as folder:
        floats = expand(path, Path(folder))
        found = {"float32": logits(floats, tokens)} | {form: logits(floats, tokens, form) for form in FORMS}
        found |= {f"{form}, fp8 activations": logits(floats, tokens, form, fp8=True) for form in ROUNDED}
    found["Q4_1 blocks"] = logits(path, tokens, keep_packed=True)
    found["Q4_1 blocks, fp8 activations"] = logits(path, tokens, fp8=True)
    if cpu_support(torch.device("cpu")) is None:
        found |= {f"Q4_1, C++, {of} activations": logits(path, tokens, activations=of) for of in ("float32", "int8")}
        with tempfile.TemporaryDirectory() as folder:
            halves = expand(path, Path(folder), torch.bfloat16)
            for of in ("float32", "bfloat16")[: 1 + can_round()]:
                found[f"bfloat16, C++, {of} activations"] = logits(halves, tokens, activations=of)
    exact = found["float32"]
    spread = (exact - exact.mean(-1, keepdim=True)).norm()
    return {
        form: (
            perplexity(of, tokens),
            ((of - exact).norm() / spread).item(),
            (of.argmax(-1) == exact.argmax(-1)).float().mean().item(),
        )
        for form, of in found.items()
    }


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter).parse_args()
    print(f"| weights | perplexity of {NUM_TOKENS} tokens | relative error of the logits | same most likely token |")
    print("|---|---|---|---|")
    for form, (ppl, error, same) in measure(demo_model_path(), TEXT.read_text(encoding="utf-8"), NUM_TOKENS).items():
        print(f"| {form} | {ppl:.3f} | {error:.4f} | {100 * same:.1f} % |")


if __name__ == "__main__":
    sys.exit(main())
