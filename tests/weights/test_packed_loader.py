"""Models with packed weights on a CPU: the same tokens as with the reference on the expanded weights."""

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.cpu.build import cpu_support
from nanovllm.models.packed_decoder import PackedDecoderForCausalLM, why_not_packed
from nanovllm.weights.safetensors_files import WeightError
from tests import tiny

if (reason := cpu_support(torch.device("cpu"))) is not None:
    pytest.skip(reason, allow_module_level=True)
gguf = pytest.importorskip("gguf")

from tests.weights import gguf_files
from tests.weights.gguf_files import quantised

QUANTS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "IQ4_NL")
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
OPTIONS = dict(device="cpu", skip_tokenizer_init=True, kvcache_block_size=16, num_kvcache_blocks=60, max_model_len=100)


def prompts(vocab, lengths=(1, 7, 40, 16, 3, 25)):
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocab, n).tolist() for n in lengths]


def tokens(llm, vocab, params=GREEDY):
    return [c.token_ids for o in llm.generate(prompts(vocab), params, use_tqdm=False) for c in o.outputs]


def is_packed(llm):
    return isinstance(llm.engine.runner.model, PackedDecoderForCausalLM)


@pytest.mark.parametrize("quant, arch", [(quant, ("llama", "qwen3")[i % 2]) for i, quant in enumerate(QUANTS)])
def test_tokens_are_those_of_the_expanded_weights(tmp_path, quant, arch):
    path = quantised(tmp_path / "m.gguf", arch, quant, tied=quant != "Q5_1")
    llm = LLM(path, dtype="float32", **OPTIONS)
    reference = LLM(path, dtype="float32", use_custom_kernels=False, **OPTIONS)
    assert is_packed(llm) and not is_packed(reference)
    assert tokens(llm, gguf_files.VOCAB) == tokens(reference, gguf_files.VOCAB)


def test_16_bits_stay_16_bits(tmp_path):
    sizes = []
    for kind in ("F16", "BF16", "F32"):
        path = quantised(tmp_path / f"{kind}.gguf", "llama", kind)
        sizes.append(LLM(path, dtype="float32", **OPTIONS).engine.runner.model.nbytes)
    assert max(sizes[:2]) < 0.6 * sizes[2]


MODES = {
    "chunked": dict(max_num_batched_tokens=11), "preempted": dict(num_kvcache_blocks=7), "alone": dict(max_num_seqs=1),
    "synchronous": dict(async_scheduling=False), "no prefix cache": dict(enable_prefix_caching=False),
}  # fmt: skip


def test_every_mode_gives_the_same_tokens(tmp_path):
    path = quantised(tmp_path / "m.gguf", "qwen3", "Q4_1")
    kinds = GREEDY, SamplingParams(seed=3, max_tokens=12, n=2, ignore_eos=True)
    reference = LLM(path, dtype="float32", use_custom_kernels=False, **OPTIONS)
    expected = [tokens(reference, 96, params) for params in kinds]
    for name, mode in MODES.items():
        llm = LLM(path, dtype="float32", **OPTIONS | mode)
        assert [tokens(llm, 96, params) for params in kinds] == expected, name


@pytest.mark.parametrize(
    "architecture, overrides", [("qwen3", {}), ("llama", dict(attention_bias=True, tie_word_embeddings=True))]
)
def test_safetensors(tmp_path, architecture, overrides):
    tiny.save(tmp_path, architecture, **overrides)
    llm = LLM(tmp_path, **OPTIONS)
    reference = LLM(tmp_path, use_custom_kernels=False, **OPTIONS)
    assert is_packed(llm) and tokens(llm, 199) == tokens(reference, 199)


def test_one_thread_and_many_give_the_same_tokens(tmp_path, monkeypatch):
    path, found = quantised(tmp_path / "m.gguf", "llama", "Q8_0"), []
    for count in ("1", "2", "5"):
        monkeypatch.setenv("NANOVLLM_CPU_THREADS", count)
        found.append(tokens(LLM(path, **OPTIONS), 96))
    assert found[0] == found[1] == found[2]
    monkeypatch.setenv("NANOVLLM_CPU_THREADS", "0")
    with pytest.raises(ValueError, match="NANOVLLM_CPU_THREADS='0': expected a positive integer"):
        LLM(path, **OPTIONS)


def test_random_weights_are_those_of_the_reference(tmp_path):
    tiny.save(tmp_path, tie_word_embeddings=True)
    options = OPTIONS | dict(load_format="dummy", seed=5, dtype="float32")
    packed, reference = (LLM(tmp_path, use_custom_kernels=on, **options) for on in (True, False))
    assert is_packed(packed) and tokens(packed, 199) == tokens(reference, 199)


@pytest.mark.parametrize("arguments", [
    dict(use_custom_kernels=False), dict(kernel_priority={"rms_norm": ["native"]}), dict(kv_cache_dtype="fp8"),
], ids=str)  # fmt: skip
def test_who_names_a_part_gets_the_separate_ops(tmp_path, arguments):
    tiny.save(tmp_path)
    assert not is_packed(LLM(tmp_path, **OPTIONS | arguments))


def test_a_head_size_that_the_kernels_do_not_take(tmp_path):
    tiny.save(tmp_path, head_dim=24)
    llm = LLM(tmp_path, **OPTIONS)
    config = llm.engine.runner.model.config
    assert why_not_packed(config, llm.kernels, torch.float32, torch.float32) == "head_dim=24: expected a multiple of 16"
    assert not is_packed(llm) and tokens(llm, 199)


def test_what_is_not_finite_is_named(tmp_path):
    weights = gguf_files.to_gguf("llama", gguf_files.hf_weights("llama"))
    weights["blk.1.ffn_up.weight"][3, 5] = np.nan
    path = gguf_files.write(tmp_path / "m.gguf", "llama", weights)
    with pytest.raises(WeightError, match=r"tensor 'model\.layers\.1\.mlp\.up_proj\.weight' holds NaN or infinity"):
        LLM(path, **OPTIONS)


def test_a_stored_head_that_differs_from_its_embedding(tmp_path):
    from safetensors.torch import load_file, save_file

    tiny.save(tmp_path, tie_word_embeddings=True)
    (file,) = tmp_path.glob("*.safetensors")
    weights = load_file(file)
    for change, fails in ((0.0, False), (1.0, True)):
        save_file(weights | {"lm_head.weight": weights["model.embed_tokens.weight"] + change}, file)
        if not fails:
            assert is_packed(LLM(tmp_path, **OPTIONS))
            continue
        with pytest.raises(WeightError, match="'lm_head.weight' differs from 'model.embed_tokens.weight'"):
            LLM(tmp_path, **OPTIONS)
