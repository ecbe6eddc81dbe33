"""Models whose plain weights are prepacked: the same tokens, and no dense tensor is kept."""

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.kernels.cpu import build
from nanovllm.kernels.external import onednn
from nanovllm.layers.packed_weight import PackedWeight, bytes_and_weights
from nanovllm.layers.prepacked_matrix import PrepackedMatrix
from nanovllm.layers.stored_matrices import FloatMatrix
from tests import tiny
from tests.providers import registered
from tests.weights.quantised_files import FORMATS, write

if (reason := onednn.support(torch.device("cpu"))) is not None:
    pytest.skip(reason, allow_module_level=True)

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
OPTIONS = dict(device="cpu", skip_tokenizer_init=True, kvcache_block_size=16, num_kvcache_blocks=60, max_model_len=100)
OP_BY_OP = {"decoder_step": ["native"]}
PROMPTS = [[5], list(range(7, 30)), [3, 1, 4, 1, 5, 9, 2, 6], list(range(90, 20, -1))]


def llm(path, **options):
    return LLM(path, **OPTIONS | dict(kernel_priority=OP_BY_OP) | options)


def tokens(made):
    return [o.outputs[0].token_ids for o in made.generate(PROMPTS, GREEDY, use_tqdm=False)]


def prepacked(made):
    """The names of the modules whose weight is prepacked."""
    packed = [(n, m.weight) for n, m in made.engine.runner.model.named_modules() if hasattr(m, "weight")]
    return {n for n, w in packed if isinstance(w, PackedWeight) and isinstance(w.matrices[0], PrepackedMatrix)}


def layers(count, *more):
    names = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    return {f"model.layers.{i}.{name}" for i in range(count) for name in names} | {"lm_head", *more}


@pytest.mark.parametrize(
    "architecture, tied, overrides",
    [
        ("llama", True, dict(attention_bias=True, mlp_bias=True)), ("qwen3", False, {}), ("gemma3", True, {}),
        ("phi3", False, {}),
    ],
)  # fmt: skip
def test_tokens_and_memory(tmp_path, architecture, tied, overrides):
    tiny.save(tmp_path, architecture, tie_word_embeddings=tied, **overrides)
    made, reference = llm(tmp_path), llm(tmp_path, use_custom_kernels=False, kernel_priority=None)
    assert made.kernels.providers["linear"] == "onednn" and not prepacked(reference)
    assert tokens(made) == tokens(reference)
    model, dense = made.engine.runner.model, reference.engine.runner.model
    embedding = ["model.embed_tokens"] if tied else []
    assert prepacked(made) == layers(2, *embedding)
    kept = {name.rpartition(".")[0] for name, p in model.named_parameters() if p.dim() == 2}
    assert kept == (set() if tied else {"model.embed_tokens"})
    assert bytes_and_weights(model)[1] == bytes_and_weights(dense)[1]
    assert bytes_and_weights(model)[0] >= bytes_and_weights(dense)[0]
    assert model.dtype == torch.float32 and model.layer_sizes[0] == dense.layer_sizes[0]
    for name in prepacked(made):
        weight = model.get_submodule(name).weight
        assert torch.equal(weight.dequantised(), dense.get_submodule(name).weight)


def test_quantised_and_random_weights(tmp_path):
    """What a CPU expands is prepacked as well."""
    write(tmp_path, FORMATS["awq"])
    made, reference = llm(tmp_path), llm(tmp_path, use_custom_kernels=False, kernel_priority=None)
    assert "model.layers.0.mlp.down_proj" in prepacked(made) and tokens(made) == tokens(reference)
    tiny.save(tmp_path / "dummy", "qwen3")
    assert prepacked(llm(tmp_path / "dummy", load_format="dummy")) == layers(2)


def test_ops_that_read_dense_weights_keep_them(tmp_path):
    tiny.save(tmp_path, "qwen3", tie_word_embeddings=True)

    def fused(*args):
        raise AssertionError("loaded, not run")

    with registered("linear_silu_and_mul", fused):
        assert not prepacked(llm(tmp_path, kernel_priority=OP_BY_OP | {"linear_silu_and_mul": ["mine"]}))
    with registered("embedding", lambda ids, weight: weight[ids] * 1):
        made = llm(tmp_path, kernel_priority=OP_BY_OP | {"embedding": ["mine"]})
        assert prepacked(made) == layers(2) - {"lm_head"}
        assert tokens(made) == tokens(llm(tmp_path))
    assert not prepacked(llm(tmp_path, kernel_priority=OP_BY_OP | {"linear": ["native"]}))


def test_parts_of_a_prepacked_matrix_are_those_of_the_dense_one():
    dense = FloatMatrix(torch.randn(70, 40))
    matrix = PrepackedMatrix(onednn.prepack_linear(dense.weight, readable=True))
    assert matrix.shape == dense.shape and matrix.nbytes >= dense.nbytes
    for cut in (
        lambda m: m, lambda m: m.rows(3, 9), lambda m: m.columns(8, 16), lambda m: m.padded(75),
        lambda m: m.take_rows(torch.tensor([69, 0])), lambda m: m.joined([m]),
    ):  # fmt: skip
        assert torch.equal(cut(matrix).dequantised(), cut(dense).dequantised())
    assert matrix.not_finite() == 0
    broken = torch.full((4, 4), float("nan"))
    assert PrepackedMatrix(onednn.prepack_linear(broken)).not_finite() == 16


def test_without_compiled_kernels_a_warning_says_why(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("CXX", "/nowhere/c++")
    cached = build.compiler, build.cpu_support
    for one in cached:
        one.cache_clear()
    try:
        tiny.save(tmp_path)
        LLM(tmp_path, **OPTIONS)
        assert "the layers run op by op in PyTorch, which is several times slower: CXX='/nowhere/c++'" in caplog.text
        with pytest.raises(ValueError, match="='int8': needs packed weights, but CXX='/nowhere"):
            LLM(tmp_path, cpu_activations="int8", **OPTIONS)
        caplog.clear()
        LLM(tmp_path, use_custom_kernels=False, **OPTIONS)  # nothing that was wanted is missing
        assert not [record for record in caplog.records if record.levelname == "WARNING"]
    finally:
        monkeypatch.undo()
        for one in cached:
            one.cache_clear()
