"""GGUF files whose blocks stay packed in layers that run op by op, as on a GPU."""

import pytest
import torch

from nanovllm import LLM
from nanovllm.weights import gguf
from tests.weights.test_quantised_checkpoints import GREEDY, OPTIONS, PACKED, loaded, packed_names, prompts, weights

pytest.importorskip("gguf")
from tests.weights import gguf_files

KINDS = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


def file(path, *args, **options):
    return gguf_files.quantised(path / "m.gguf", *args, **options)


def medium(name):
    """As Q4_K_M: values and down projections of some layers, and the head, have more bits than the rest."""
    return "Q6_K" if name.startswith("output") or (".0." in name and ("attn_v" in name or "down" in name)) else "Q4_K"


def tokens(path, **options):
    llm = LLM(str(path), **OPTIONS, **options)
    return [c.token_ids for o in llm.generate(prompts(gguf_files.VOCAB), GREEDY, use_tqdm=False) for c in o.outputs]


@pytest.mark.parametrize("kind, arch", [(kind, ("llama", "qwen3")[i % 2]) for i, kind in enumerate(KINDS)])
def test_weights_are_what_the_gguf_package_reads(tmp_path, kind, arch):
    path = file(tmp_path, arch, kind)
    model = loaded(path)
    found = weights(model)
    read = dict(gguf.iter_tensors(path))
    assert len(packed_names(model)) == 4 * gguf_files.LAYERS + 1  # and the embedding, which is the head as well
    for i in range(gguf_files.LAYERS):
        prefix = f"model.layers.{i}."
        for fused, parts in {"self_attn.qkv_proj": ("q", "k", "v"), "mlp.gate_up_proj": ("gate", "up")}.items():
            names = [f"{prefix}{fused.split('.')[0]}.{part}_proj.weight" for part in parts]
            assert torch.equal(found[f"{prefix}{fused}.weight"], torch.cat([read[name] for name in names]))
        assert torch.equal(found[f"{prefix}mlp.down_proj.weight"], read[f"{prefix}mlp.down_proj.weight"])
    ids = torch.tensor([0, 5, 95, 5])
    assert torch.equal(model.model.embed_tokens(ids), read["model.embed_tokens.weight"][ids])
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("quant, arch", [("Q4_K", "qwen3"), ("Q8_0", "llama"), (medium, "llama"), (medium, "qwen3")])
def test_tokens_are_those_of_the_expanded_weights(tmp_path, quant, arch):
    path = file(tmp_path, arch, quant, tied=quant != "Q4_K")
    want = tokens(path, use_custom_kernels=False)
    assert tokens(path, **PACKED) == want == tokens(path)


def test_shards_of_several_types_are_pieces_of_one_weight(tmp_path):
    model = loaded(file(tmp_path, "llama", medium, tied=False))
    kinds = [[m.kind for m in layer.self_attn.qkv_proj.weight.matrices] for layer in model.model.layers]
    assert kinds == [["Q4_K/planes", "Q6_K/planes"], ["Q4_K/planes"]]


def test_types_without_an_op_are_expanded(tmp_path):
    model = loaded(file(tmp_path, "llama", lambda name: "Q2_K" if "attn_v" in name else "Q4_K"))
    first = model.model.layers[0].self_attn.qkv_proj.weight
    assert [type(m).__name__ for m in first.matrices] == ["GGUFMatrix", "FloatMatrix"]
    x, bias = torch.randn(3, gguf_files.HIDDEN), torch.randn(first.shape[0])
    want = torch.nn.functional.linear(x, first.dequantised(), bias)
    assert torch.allclose(first(x, bias), want, rtol=1e-5, atol=1e-3)


def test_a_scale_that_is_not_finite(tmp_path):
    from nanovllm.weights.gguf_file import GGUFFile
    from nanovllm.weights.safetensors_files import WeightError

    path = file(tmp_path, "llama", "Q4_0")
    info = GGUFFile(path).tensors["blk.1.ffn_up.weight"]
    data = bytearray(path.read_bytes())
    data[info.offset + 18 : info.offset + 20] = b"\x00\x7c"  # the second block's scale is infinite
    path.write_bytes(data)
    with pytest.raises(WeightError, match="'model.layers.1.mlp.up_proj.weight'.* holds NaN or infinity in 1 places"):
        loaded(path)
