"""Quantised checkpoints that are damaged, contradictory or not supported: errors that say what is wrong, and where."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.config import EngineConfig
from nanovllm.weights.checkpoint import locate
from tests.weights.checkpoints import configure, edit, refused
from tests.weights.quantised_files import FORMATS, compressed, write
from tests.weights.test_quantised_checkpoints import loaded, packed_names

UP = "model.layers.0.mlp.up_proj."


@pytest.fixture(scope="module")
def originals(tmp_path_factory):
    made = {}
    for name in ("fp8-block", "fp8-tensor", "awq", "gptq", "gptq-act-order", "w4a16-asymmetric", "w8a8"):
        made[name] = tmp_path_factory.mktemp(name)
        write(made[name], FORMATS[name], num_hidden_layers=1)
    return made


@pytest.fixture
def copy(originals, tmp_path):
    return lambda name: shutil.copytree(originals[name], tmp_path, dirs_exist_ok=True)


@pytest.mark.parametrize(
    "name, plane",
    [
        ("fp8-block", "weight_scale_inv"), ("awq", "qzeros"), ("awq", "scales"), ("gptq", "qweight"),
        ("gptq-act-order", "g_idx"), ("w4a16-asymmetric", "weight_zero_point"), ("w8a8", "weight_scale"),
        ("w8a8", "weight"),
    ],
)  # fmt: skip
def test_a_plane_that_is_missing(copy, name, plane):
    directory = copy(name)
    edit(directory, lambda t: t.pop(UP + plane))
    refused(directory, f"{directory}: the checkpoint lacks {UP}{plane}")


@pytest.mark.parametrize(
    "name, plane, change, said",
    [
        ("fp8-block", "weight_scale_inv", lambda t: t[:1], "shape [1, 1], expected [2, 1]"),
        ("fp8-block", "weight", lambda t: t.float(), "dtype F32, expected F8_E4M3"),
        ("fp8-tensor", "weight_scale", lambda t: t.repeat(2), "shape [2], expected [1, 1] or [1] or []"),
        ("awq", "qweight", lambda t: t[:, 1:], "shape [128, 31], expected [128, 32]"),
        ("awq", "scales", lambda t: t.T, "shape [256, 4], expected [4, 256]"),
        ("awq", "qweight", lambda t: t.to(torch.int16), "dtype int16, expected int32"),
        ("gptq", "qzeros", lambda t: t[1:], "shape [3, 32], expected [4, 32]"),
        ("w4a16-asymmetric", "weight_packed", lambda t: t[1:], "shape [255, 16], expected [256, 16]"),
        ("w8a8", "weight_scale", lambda t: t[1:], "shape [255, 1], expected [256, 1] or [256]"),
        ("w8a8", "weight", lambda t: t.to(torch.uint8), "dtype uint8, expected int8"),
    ],
)
def test_a_plane_of_another_shape_or_dtype(copy, name, plane, change, said):
    directory = copy(name)
    edit(directory, lambda t: t.update({UP + plane: change(t[UP + plane]).contiguous()}))
    refused(directory, f"{directory / 'model.safetensors'}: tensor '{UP}{plane}' of a matrix [256, 128]", said)


@pytest.mark.parametrize(
    "name, plane, spoil, said",
    [
        ("fp8-block", "weight_scale_inv", lambda t: t[-1].fill_(math.nan), "holds NaN or infinity"),
        ("awq", "scales", lambda t: t[-1].fill_(math.inf), "holds NaN or infinity"),
        ("w8a8", "weight_scale", lambda t: t[-1].fill_(math.nan), "holds NaN or infinity"),
        ("fp8-block", "weight", lambda t: t.view(torch.uint8)[3, 5].fill_(0x7F), "holds NaN or infinity in 1 places"),
        ("gptq", "g_idx", lambda t: t.copy_(t.flip(0)), "g_idx' has groups out of order, but the configuration"),
        ("gptq-act-order", "g_idx", lambda t: t[:3].fill_(0), "g_idx' does not name groups of 32 columns each"),
    ],
)
def test_values_that_cannot_be(copy, name, plane, spoil, said):
    directory = copy(name)
    edit(directory, lambda t: spoil(t[UP + plane]))
    refused(directory, f"{directory / 'model.safetensors'}: tensor '{UP}", said)


def test_an_error_beside_fused_planes_of_another_shape_names_the_file(tmp_path):
    write(tmp_path, FORMATS["gptq-act-order"], "phi3", num_hidden_layers=1)
    o_proj = "model.layers.0.self_attn.o_proj."
    edit(tmp_path, lambda t: t[o_proj + "g_idx"][:3].fill_(0))
    refused(tmp_path, f"{tmp_path / 'model.safetensors'}: tensor '{o_proj}g_idx' does not name groups of 32 columns")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"modules_to_not_convert": ["up_proj"]}, ("unexpected tensor", UP)),
        ({"group_size": 96}, ("group_size=96 does not divide its 128 columns",)),
    ],
)
def test_a_configuration_that_contradicts_the_tensors(copy, changes, words):
    directory = copy("gptq")
    configure(directory, quantization_config=FORMATS["gptq"].config | changes)
    refused(directory, *words)


def test_packed_tensors_without_a_configuration(copy):
    for name in ("fp8-block", "awq"):
        directory = copy(name)
        configure(directory, quantization_config=None)
        edit(directory, lambda t: [t.pop(key) for key in list(t) if key.endswith("_inv")])
        refused(directory, "quantization_config" if name == "fp8-block" else "unexpected tensor")


def test_modules_that_are_not_quantised_need_no_rule(copy):
    """Many configurations do not name every module that was left as it is."""
    directory = copy("awq")
    tensors = load_file(directory / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(UP)}
    save_file(kept | {UP + "weight": torch.ones(256, 128)}, directory / "model.safetensors")
    assert "model.layers.0.mlp.gate_up_proj.weight" in packed_names(loaded(directory))


@pytest.mark.parametrize(
    "config, said",
    [
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "quant_method='bitsandbytes' is not supported; supported are awq, compressed-tensors",
        ),
        ({"bits": 4}, "quant_method=None is not supported"),
        ({"quant_method": ["fp8"]}, "quant_method=['fp8'] is not supported"),
        ("fp8", "is 'fp8'; expected an object"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2' is not supported; expected 'e4m3'"),
        ({"quant_method": "fp8", "weight_block_size": [128, 64]}, "weight_block_size=[128, 64] is not supported"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "weight_block_size=128 is not supported"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "expected a list of names"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "version='gemv' is not supported"),
        ({"quant_method": "awq", "bits": 8, "group_size": 128}, "bits=8 is not supported; expected 4"),
        ({"quant_method": "awq", "bits": 4}, "group_size=None is not supported"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits=3 is not supported; expected 4 or 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size=0 is not supported"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
            "checkpoint_format='marlin' is not supported",
        ),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": "yes"}, "desc_act='yes' is not supported"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"+:[": {"bits": 8}}},
            "expected a regular expression",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"+:.*up": {"bits": 2}}},
            "dynamic['+:.*up']: bits=2 is not supported",
        ),
        (
            compressed("nvfp4-pack-quantized", num_bits=4, type="float"),
            "format='nvfp4-pack-quantized' is not supported",
        ),
        (compressed("pack-quantized", num_bits=2, strategy="group", group_size=32), "num_bits=2 is not supported"),
        (compressed("pack-quantized", num_bits=4, strategy="token"), "strategy='token' is not supported"),
        (
            compressed("int-quantized", num_bits=8, strategy="channel") | {"sparsity_config": {"format": "sparse-24"}},
            "sparsity_config={'format': 'sparse-24'} is not supported",
        ),
        ({"quant_method": "compressed-tensors"}, "config_groups is None; expected an object"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(checkpoint, config, said):
    configure(checkpoint, quantization_config=config)
    with pytest.raises(ValueError) as error:
        locate(EngineConfig(str(checkpoint)))
    assert said in str(error.value) and f"{checkpoint / 'config.json'}: quantization_config" in str(error.value)
    assert "take the model in bfloat16" in str(error.value) or "expected an object" in str(error.value)


def test_a_configuration_of_quantised_weights_beside_plain_ones_is_a_warning(checkpoint, originals, caplog):
    configure(checkpoint, quantization_config=FORMATS["awq"].config)
    loaded(checkpoint)
    assert "says quant_method='awq', but no tensor is quantised" in caplog.text
    caplog.clear()
    loaded(originals["awq"])
    assert "no tensor is quantised" not in caplog.text


def test_modelopt_says_it_in_a_file_of_its_own(tmp_path):
    write(tmp_path, FORMATS["fp8-modelopt"])
    want = packed_names(loaded(tmp_path))
    configure(tmp_path, quantization_config=None)
    foreign = tmp_path / "hf_quant_config.json"
    entries = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "*.router"]}
    foreign.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": entries}))
    assert packed_names(loaded(tmp_path)) == want
    for content, said in (
        (
            {"quantization": entries | {"quant_algo": "NVFP4"}},
            "quantization: quant_algo='NVFP4' is not supported; expec",
        ),
        ({}, "quantization is None; expected an object"),
    ):
        foreign.write_text(json.dumps(content))
        with pytest.raises(ValueError) as error:
            locate(EngineConfig(str(tmp_path)))
        assert f"{foreign}: {said}" in str(error.value)


def test_an_argument_names_the_method_of_the_checkpoint_or_contradicts_it(copy):
    directory = str(copy("awq"))
    for asked in ("awq", "awq_marlin", None):
        assert locate(EngineConfig(directory, quantization=asked)).online is None
    for asked in ("int4", "gptq", "fp8"):
        said = f"quantization='{asked}': .* is quantised already .awq.; leave the argument out"
        with pytest.raises(ValueError, match=said):
            locate(EngineConfig(directory, quantization=asked))


def test_a_method_of_a_checkpoint_that_is_not_quantised(checkpoint):
    with pytest.raises(
        ValueError, match="quantization='awq': .* is not quantised in that way; leave the argument out, or pass fp8"
    ):
        locate(EngineConfig(str(checkpoint), quantization="awq"))
    with pytest.raises(ValueError, match="quantization='int3': is not supported; pass fp8, int4, int8 or q4_k_m to"):
        EngineConfig(str(checkpoint), quantization="int3")


def test_zeros_where_a_layer_has_no_bias(copy):
    """AutoGPTQ writes them for every layer."""
    directory = copy("gptq")
    edit(directory, lambda t: t.update({UP + "bias": torch.zeros(256)}))
    assert "model.layers.0.mlp.gate_up_proj.weight" in packed_names(loaded(directory))
    edit(directory, lambda t: t.update({UP + "bias": torch.ones(256)}))
    refused(directory, repr(UP + "bias"), "is not zero, but config.json says that this layer has no bias")


def test_scales_of_a_quantised_cache_are_passed_over(copy):
    directory = copy("fp8-tensor")
    scales = [f"model.layers.0.self_attn.{name}" for name in ("k_scale", "v_scale", "k_proj.output_scale")]
    edit(directory, lambda t: t.update({name: torch.ones(1) for name in scales}))
    loaded(directory)
