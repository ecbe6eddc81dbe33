"""What the formats' own libraries read from a packed weight is what we read, to the bit."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import tiny
from tests.weights.checkpoints import configure
from tests.weights.quantised_files import FORMATS, SHAPE, compressed, write
from tests.weights.test_quantised_checkpoints import loaded, weights

SCHEMES = {
    "w4-group": dict(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True),
    "w4-group-asymmetric": dict(num_bits=4, type="int", strategy="group", group_size=32, symmetric=False),
    "w4-channel": dict(num_bits=4, type="int", strategy="channel", symmetric=True),
    "w8-group": dict(num_bits=8, type="int", strategy="group", group_size=64, symmetric=True),
    "w8a8": dict(num_bits=8, type="int", strategy="channel", symmetric=True),
    "fp8-channel": dict(num_bits=8, type="float", strategy="channel", symmetric=True),
    "fp8-tensor": dict(num_bits=8, type="float", strategy="tensor", symmetric=True),
    "fp8-block": dict(num_bits=8, type="float", strategy="block", symmetric=True, block_structure=[128, 128]),
}


@pytest.mark.parametrize(
    "name, dtype", [(name, (torch.float32, torch.bfloat16)[i % 2]) for i, name in enumerate(SCHEMES)]
)
def test_compressed_tensors(tmp_path, name, dtype):
    """A checkpoint that compressed-tensors has compressed, and what it decompresses."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    arguments = SCHEMES[name]
    format = "pack-quantized" if name.startswith("w4") or name == "w8-group" else "int-quantized"
    format = "float-quantized" if arguments["type"] == "float" else format
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))
    compressor = BaseCompressor.get_value_from_registry(format)
    made = tiny.save(tmp_path, "qwen3", **SHAPE)
    stored, expected = {}, {}
    for key, weight in made.state_dict().items():
        if "layers." not in key or weight.dim() != 2:
            stored[key] = weight.to(dtype)
            continue
        scale, zero = calibrated(weight, arguments, dtype)
        state = {"weight": weight.to(dtype), "weight_scale": scale, "weight_zero_point": zero}
        packed = compressor.compress(state, scheme)
        expected[key] = compressor.decompress(dict(packed), scheme)["weight"]
        prefix = key.removesuffix("weight")
        stored |= {prefix + plane: tensor.contiguous() for plane, tensor in packed.items() if tensor is not None}
    save_file(stored, tmp_path / "model.safetensors")
    configure(tmp_path, quantization_config=compressed(format, **arguments))
    found = weights(loaded(tmp_path))
    for module, shards in {
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj": ("mlp.down_proj",),
    }.items():  # fmt: skip
        want = torch.cat([expected[f"model.layers.1.{shard}.weight"] for shard in shards])
        assert torch.equal(found[f"model.layers.1.{module}.weight"].to(want.dtype), want), module


def calibrated(weight, arguments, dtype):
    """The scale and zero point of each group, channel, block or matrix, as compressed-tensors takes them."""
    rows, columns = weight.shape
    height, width = {
        "group": (1, arguments.get("group_size")), "channel": (1, columns), "tensor": (rows, columns),
        "block": (128, 128),
    }[arguments["strategy"]]  # fmt: skip
    padded = torch.nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
    blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))
    low, high = blocks.amin((1, 3)).clamp(max=0), blocks.amax((1, 3)).clamp(min=0)
    top = 448 if arguments["type"] == "float" else 2 ** arguments["num_bits"] // 2 - 1
    if arguments["symmetric"]:
        scale = (torch.maximum(-low, high) / top).to(dtype)
        zero = torch.zeros_like(scale, dtype=torch.int8)
        return (scale.reshape(1), zero.reshape(1)) if arguments["strategy"] == "tensor" else (scale, zero)
    scale = ((high - low) / (2 * top + 1)).to(dtype)
    return scale, (-low / scale.float() - top - 1).round().clamp(-top - 1, top).to(torch.int8)


@pytest.mark.parametrize("name", ["fp8-block", "fp8-block-f32"])
def test_transformers_reads_the_same_numbers_from_fp8_blocks(tmp_path, name):
    """Without a GPU it dequantises blocks when it loads them. Its shapes must be multiples of the blocks."""
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    shape = dict(num_attention_heads=4, num_key_value_heads=4)
    write(tmp_path, FORMATS[name], **shape)
    if name == "fp8-block-f32":
        kept = ["lm_head", *(f"model.layers.1.mlp.{part}_proj" for part in ("gate", "up", "down"))]
        configure(tmp_path, quantization_config=FORMATS[name].config | {"modules_to_not_convert": kept})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    ours = weights(loaded(tmp_path))
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.layers.0.mlp.up_proj.weight"].dtype == torch.float8_e4m3fn
    for layer in (0, 1):
        for module in ("mlp.down_proj", "self_attn.o_proj"):
            key = f"model.layers.{layer}.{module}.weight"
            assert torch.equal(theirs[key].to(torch.bfloat16), ours[key].to(torch.bfloat16)), key
