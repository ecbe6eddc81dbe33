"""What configurations say about quantisation: which module is stored how."""

import json

import pytest

from nanovllm.weights.quantization import quantization_config
from nanovllm.weights.quantization.integers import AwqStorage, GptqStorage, PackedIntStorage
from nanovllm.weights.quantization.rules import ConfigSection, Rule
from tests.weights.quantised_files import compressed


def parse(**entries):
    return quantization_config.parse(ConfigSection(entries, "config.json"))


UP, DOWN, VALUE = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj", "model.layers.1.self_attn.v_proj"


def test_patterns():
    for pattern, matches in {
        UP: [UP], "model.layers.1": [DOWN, VALUE], "model.layers.1.mlp.down": [], "v_proj": [VALUE],
        "self_attn.v_proj": [VALUE], "proj": [], "re:.*layers.1": [DOWN, VALUE], "re:layers": [],
        "re:.*_proj$": [UP, DOWN, VALUE],
    }.items():  # fmt: skip
        assert [name for name in (UP, DOWN, VALUE) if Rule((pattern,), None).matches(name)] == matches, pattern


def test_modules_that_are_not_converted():
    for entry in ("modules_to_not_convert", "ignored_layers"):
        found = parse(quant_method="fp8", weight_block_size=[128, 128], **{entry: ["lm_head", "model.layers.1"]})
        assert found.storage_of(UP).block == (128, 128)
        assert found.storage_of(DOWN) is None and found.storage_of("lm_head") is None
    assert parse(quant_method="fp8").storage_of(UP).block == (0, 0)
    assert parse(quant_method="fbgemm_fp8").storage_of(UP).block == (1, 0)


def test_whether_activations_are_quantised():
    config = compressed("float-quantized", num_bits=8, type="float", strategy="channel")
    for activations, wanted in (
        (None, False), ({"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"}, True),
        ({"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}, True),
        ({"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}, False), ({"num_bits": 8}, False),
    ):  # fmt: skip
        config["config_groups"]["group_0"]["input_activations"] = activations
        assert parse(**config).storage_of(UP).quantises_activations is wanted, activations
    for scheme in ("dynamic", "static"):
        assert parse(quant_method="fp8", activation_scheme=scheme).storage_of(UP).quantises_activations
    assert parse(quant_method="fbgemm_fp8").storage_of(UP).quantises_activations


def test_dynamic_rules_of_gptq():
    """The first that matches decides; "-:" leaves a module as it is."""
    dynamic = {"-:.*v_proj": {}, r"+:.*layers\.1\.": {"bits": 8, "group_size": 32}, ".*up": {"desc_act": True}}
    found = parse(quant_method="gptq", bits=4, group_size=128, dynamic=dynamic)
    assert found.storage_of(VALUE) is None and found.storage_of("lm_head") is None
    assert found.storage_of(DOWN) == GptqStorage(8, 32)
    assert found.storage_of(UP) == GptqStorage(4, 128, desc_act=True)
    assert found.storage_of("model.layers.0.mlp.gate_proj") == GptqStorage(4, 128)
    with_head = parse(quant_method="gptq", bits=4, group_size=-1, lm_head=True, checkpoint_format="gptq_v2")
    assert with_head.storage_of("lm_head") == GptqStorage(4, 0, zeros_less_one=False)


def test_groups_and_targets_of_compressed_tensors():
    """A name or an expression goes before the class of a module, and `ignore` before both."""
    config = compressed("pack-quantized", num_bits=4, strategy="group", group_size=128)
    eight = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    config["config_groups"]["group_1"] = {"targets": ["re:.*down_proj", VALUE], "weights": eight}
    config["config_groups"]["group_2"] = {"targets": ["re:.*o_proj"], "weights": None}
    found = parse(**config | {"ignore": ["lm_head", "re:.*layers.1.self_attn.*"]})
    assert found.storage_of(UP) == PackedIntStorage(4, 128) and found.storage_of(DOWN) == PackedIntStorage(8, 0)
    assert found.storage_of(VALUE) is None and found.storage_of("model.layers.0.self_attn.o_proj") is None
    config["config_groups"]["group_0"]["format"] = "int-quantized"
    assert "int4" in parse(**config).storage_of(UP).label


def test_the_strategy_follows_from_the_size_of_groups():
    for group_size, label in ((64, "in groups of 64"), (-1, "one scale a row"), (None, "one scale a row")):
        found = parse(**compressed("pack-quantized", num_bits=4, group_size=group_size)).storage_of(UP)
        assert label in found.label and found.one_scale == (group_size is None)
    assert parse(**compressed("dense", num_bits=4, strategy="channel")).storage_of(UP) is None


def test_files_beside_config_json(tmp_path):
    """Where older versions of AutoGPTQ and AutoAWQ say it."""
    assert quantization_config.read({}, tmp_path) is None
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 64, "desc_act": True}))
    assert quantization_config.read({}, tmp_path).storage_of(UP) == GptqStorage(4, 64, desc_act=True)
    (tmp_path / "quantize_config.json").rename(tmp_path / "other.json")
    (tmp_path / "quant_config.json").write_text(json.dumps({"w_bit": 4, "q_group_size": 64, "version": "GEMM"}))
    assert quantization_config.read({}, tmp_path).storage_of(UP) == AwqStorage(4, 64)
    (tmp_path / "quant_config.json").write_text(json.dumps({"w_bit": 3, "q_group_size": 64}))
    with pytest.raises(ValueError, match="quant_config.json: bits=3 is not supported"):
        quantization_config.read({}, tmp_path)
