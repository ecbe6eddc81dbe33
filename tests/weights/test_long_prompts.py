"""Packed weights on a CPU, prompts of more than 200 tokens: greedy tokens are those of transformers in float32.

Processors with AMX multiply 32 tokens or more in another way than few, so a short prompt does not reach it.
"""

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.cpu.build import cpu_support
from nanovllm.kernels.cpu.library import GGUF_FORMATS
from tests.weights.gguf_files import VOCAB, quantised

if (reason := cpu_support(torch.device("cpu"))) is not None:
    pytest.skip(reason, allow_module_level=True)

LENGTHS, OUTPUT = (203, 290, 32), 12


@pytest.mark.parametrize("kind", [kind for kind in GGUF_FORMATS if kind not in ("F16", "BF16")])
def test_greedy_tokens_are_those_of_transformers_on_expanded_weights(tmp_path, kind):
    transformers = pytest.importorskip("transformers")
    path = quantised(tmp_path / "x.gguf", "llama", kind, context_length=512, vocab_size=VOCAB)
    rng = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, VOCAB, (length,), generator=rng).tolist() for length in LENGTHS]
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    llm = LLM(str(path), device="cpu", dtype="float32", skip_tokenizer_init=True)
    assert llm.kernels.providers["decoder_step"] == "cpu"
    outputs = [list(output["token_ids"]) for output in llm.generate(prompts, params, use_tqdm=False)]

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    for prompt, output in zip(prompts, outputs):
        logits = theirs(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        assert output == logits.argmax(-1).tolist()
