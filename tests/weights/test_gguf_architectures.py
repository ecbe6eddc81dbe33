"""GGUF files of every architecture, written as llama.cpp's converter does: greedy tokens are those of transformers."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf import quants

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.weights import gguf as ours
from nanovllm.weights.checkpoint import locate
from nanovllm.weights.gguf_file import GGUFError
from nanovllm.weights.loader import load_model
from tests import tiny
from tests.models.variants import VARIANTS
from tests.native import NATIVE
from tests.weights.gguf_files import finish, permute

PROMPT = [(i * 37 + 5) % 199 for i in range(30)]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
_KINDS = ["sliding_attention"] * 5 + ["full_attention"]
_GEMMA3 = dict(num_hidden_layers=6, layer_types=_KINDS, query_pre_attn_scalar=16)
# name: (file's architecture, variant, entries that the file cannot say, and which its readers assume)
FILES = {
    "llama": ("llama", ("mistral", dict(sliding_window=None)), {}),
    "qwen2": ("qwen2", VARIANTS["qwen2"], {}),
    "smollm3": ("smollm3", ("smollm3", dict(num_hidden_layers=4)), {}),
    "phi3": ("phi3", VARIANTS["phi3-window"], {}),
    "phi3-partial": ("phi3", VARIANTS["phi3-partial"], {}),
    "phi3-long": ("phi3", VARIANTS["phi3-long"], {}),
    "gemma2": ("gemma2", VARIANTS["gemma2"], dict(query_pre_attn_scalar=16, tie_word_embeddings=True)),
    "gemma3": ("gemma3", VARIANTS["gemma3"], _GEMMA3),
}


def converted(made, arch, quant="F32"):
    """{GGUF's name: array}, and the weights of `made` become what the file holds of them."""
    config = made.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    tensors = {}
    for name, parameter in made.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = parameter.numpy().copy()
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            weight += 1
        if arch in ("llama", "smollm3") and name.split(".")[-2] in ("q_proj", "k_proj"):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            weight = permute(weight, heads)
        if quant != "F32" and weight.ndim == 2:
            weight = quants.quantize(weight, Q[quant])
            assert arch == "phi3"  # its rows are in place
            parameter.copy_(torch.from_numpy(quants.dequantize(weight, Q[quant])))
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = weight
    return tensors


def write(path, made, arch, quant="F32"):
    config, rope = made.config, made.config.rope_parameters
    writer = gguf.GGUFWriter(path, arch)
    tensors = converted(made, arch, quant)
    head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    writer.add_block_count(config.num_hidden_layers), writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size), writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads), writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps), writer.add_key_length(head_dim)
    if arch.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "gemma3":
        writer.add_float32("gemma3.rope.freq_base_swa", rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR), writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if arch == "phi3":
        writer.add_sliding_window(config.sliding_window or 0)
        writer.add_rope_dimension_count(int(head_dim * rope["partial_rotary_factor"]))
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        for kind in ("long", "short"):
            if f"{kind}_factor" in rope:
                tensors[f"rope_factors_{kind}"] = np.array(rope[f"{kind}_factor"], np.float32)
    for name, tensor in tensors.items():
        name = name if name.endswith((".weight", ".bias")) else name + ".weight"
        writer.add_tensor(name, tensor, raw_dtype=Q[quant] if tensor.dtype == np.uint8 else None)
    finish(writer)
    return path


def served(path, **options):
    defaults = dict(kvcache_block_size=16, num_kvcache_blocks=8, max_model_len=64)
    return LLM(path, device="cpu", dtype="float32", skip_tokenizer_init=True, **defaults | options)


def tokens(llm):
    return llm.generate(PROMPT, GREEDY, use_tqdm=False)[0]["token_ids"]


@torch.no_grad()
@pytest.mark.parametrize("name", FILES)
def test_greedy_tokens(tmp_path, name):
    arch, (architecture, entries), assumed = FILES[name]
    made = tiny.model(architecture, **entries | assumed)
    path = write(tmp_path / "x.gguf", made, arch)
    assert tokens(served(path)) == tiny.greedy(made, PROMPT, GREEDY.max_tokens)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, dict(use_custom_kernels=False)], ids=["packed", "expanded"])
def test_fused_tensors_of_quantised_blocks(tmp_path, options):
    """The rows of a fused tensor are parted, and those of a head reordered, with their blocks."""
    made = tiny.model(
        "phi3", hidden_size=64, intermediate_size=96, partial_rotary_factor=0.5, max_position_embeddings=64
    )
    path = write(tmp_path / "x.gguf", made, "phi3", "Q8_0")
    assert tokens(served(path, **options)) == tiny.greedy(made, PROMPT, GREEDY.max_tokens)


def test_half_of_long_rope_is_an_error(tmp_path):
    made = tiny.model("phi3", **VARIANTS["phi3-long"][1])
    del made.config.rope_parameters["short_factor"]
    path = write(tmp_path / "x.gguf", made, "phi3")
    with pytest.raises(GGUFError, match="'rope_factors_short.weight' is missing beside 'rope_factors_long.weight'"):
        ours.read_config(path)


@torch.no_grad()
def test_fused_tensors_that_stay_packed_for_separate_ops(tmp_path):
    """As on a GPU: the layers hold the same weights as when they are expanded."""
    made = tiny.model(
        "phi3", hidden_size=64, intermediate_size=96, partial_rotary_factor=0.5, max_position_embeddings=64
    )
    path = write(tmp_path / "x.gguf", made, "phi3", "Q8_0")
    checkpoint = locate(EngineConfig(str(path)))
    packed, expanded = (
        load_model(checkpoint, NATIVE, torch.float32, torch.device("cpu"), 64, keep_packed=keep)
        for keep in (True, False)
    )
    for layer, other in zip(packed.model.layers, expanded.model.layers):
        for name in ("self_attn.qkv_proj", "mlp.gate_up_proj"):
            one, same = layer.get_submodule(name), other.get_submodule(name)
            assert not isinstance(one.weight, torch.Tensor) and isinstance(same.weight, torch.Tensor)
            x = torch.randn(3, 64)
            for a, b in zip(one(x), same(x)):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
