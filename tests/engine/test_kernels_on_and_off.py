"""Greedy tokens with custom kernels are those without, on tiny random models in float32.

The kernels run on a GPU, else in Triton's interpreter.
"""

import pytest
import torch

triton = pytest.importorskip("triton")
INTERPRETED = triton.knobs.runtime.interpret
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

from nanovllm import LLM, SamplingParams
from nanovllm.kernels import all_ops
from tests import tiny
from tests.models.variants import VARIANTS

pytestmark = [pytest.mark.triton, pytest.mark.slow]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
# Norms of heads; biases and windows; layers without rotation; part of a head rotated; soft caps; norms after; experts.
MODELS = {"qwen3": ("qwen3", {})} | {
    name: VARIANTS[name] for name in ("qwen2-windows", "smollm3-windows", "phi3-partial", "gemma2", "gemma3", "experts")
}


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens(name, tmp_path):
    architecture, entries = MODELS[name]
    tiny.save(tmp_path, architecture, **entries)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 199, (n,), generator=generator).tolist() for n in (1, 10, 22)]
    prompts[1][:] = prompts[2][:10]  # of the same block, until the answers part them

    def tokens(**kernels):
        llm = LLM(
            tmp_path, dtype="float32", device=DEVICE, skip_tokenizer_init=True, kvcache_block_size=16,
            num_kvcache_blocks=12,
            max_num_seqs=4, max_model_len=64, max_num_batched_tokens=32, **kernels,
        )  # fmt: skip
        return llm.kernels.providers, [o["token_ids"] for o in llm.generate(prompts, GREEDY, use_tqdm=False)]

    off, without = tokens(use_custom_kernels=False)
    on, custom = tokens(kernel_priority={"*": ["triton"]})
    without_triton = {name for name, declared in all_ops().items() if "triton" not in declared.providers}
    assert set(off.values()) == {"native"} and {name for name, by in on.items() if by != "triton"} == without_triton
    assert custom == without and len({t for answer in without for t in answer}) > 4
