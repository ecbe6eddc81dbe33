"""Tiny quantised checkpoints, and the same model in float32, made by packers that share no code with the loader."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests import tiny

SHAPE = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, vocab_size=199,
)  # fmt: skip
Packed = tuple[dict[str, torch.Tensor], torch.Tensor]
"""(tensors by the last part of their names, the weight that they stand for in float32)."""


@dataclass(frozen=True)
class Format:
    """A form of storage: how to pack a weight, and what config.json says of it."""

    pack: Callable[[torch.Tensor, int], Packed]
    config: dict[str, Any]
    keeps: tuple[str, ...] = ()
    """Parts of names of modules that stay as they are."""
    shape: dict[str, Any] = field(default_factory=dict)


def write(directory: Path, form: Format, architecture: str = "qwen3", **overrides: Any) -> Any:
    """Write such a checkpoint to `directory`, and return transformers' model with the weights that it stands for."""
    made = tiny.save(directory, architecture, **{**SHAPE, **form.shape, **overrides})
    tensors, reference = {}, load_file(directory / "model.safetensors")
    for i, (name, weight) in enumerate(list(reference.items())):
        module, _, leaf = name.rpartition(".")
        packed = "layers." in name and leaf == "weight" and weight.dim() == 2
        if not packed or any(part in module for part in form.keeps):
            tensors[name] = weight.clone()
            continue
        planes, stands_for = form.pack(weight.clone(), i)
        tensors |= {f"{module}.{plane}": tensor.contiguous() for plane, tensor in planes.items()}
        reference[name] = stands_for
    save_file(reference, directory / "model.safetensors")
    stands_for_all = type(made).from_pretrained(directory, dtype=torch.float32).requires_grad_(False)
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text()) | {"quantization_config": form.config}
    (directory / "config.json").write_text(json.dumps(config))
    return stands_for_all


def fp8(block: tuple[int, int], scale_name: str, dtype: torch.dtype = torch.float32, flat: bool = False, **more: Any):
    """block: rows and columns that share a scale; 0: all."""

    def pack(weight: torch.Tensor, _: int) -> Packed:
        rows, columns = weight.shape
        height, width = block[0] or rows, block[1] or columns
        scales = torch.zeros(-(-rows // height), -(-columns // width))
        quantised, stands_for = torch.zeros_like(weight).to(torch.float8_e4m3fn), torch.zeros_like(weight)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                at = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
                scales[i, j] = (weight[at].abs().max() / 448).to(dtype).float()
                values = (weight[at] / scales[i, j]).clamp(-448, 448).to(torch.float8_e4m3fn)
                quantised.view(torch.uint8)[at] = values.view(torch.uint8)
                stands_for[at] = values.float() * scales[i, j]
        stored = scales.to(dtype).reshape(()) if flat else scales.to(dtype)
        planes = {"weight": quantised, scale_name: stored}
        return planes | {name: value.clone() for name, value in more.items()}, stands_for

    return pack


def integers(weight: torch.Tensor, bits: int, group: int, symmetric: bool, dtype: torch.dtype, order=None):
    """(q [rows, columns], scale and zero point of each group [rows, groups], the weight that these stand for).

    order: the columns of the first group, then those of the second and so on; None: as they are.
    """
    rows, columns = weight.shape
    order = torch.arange(columns) if order is None else order
    size, top = group or columns, 2**bits - 1
    q = torch.zeros(rows, columns, dtype=torch.int64)
    scale, zero = torch.zeros(rows, columns // size, dtype=dtype), torch.zeros(rows, columns // size, dtype=torch.int64)
    stands_for = torch.zeros_like(weight)
    for g in range(columns // size):
        at = order[g * size : (g + 1) * size]
        part = weight[:, at]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        if symmetric:
            s = (part.abs().amax(1) / (top // 2)).to(dtype)
            z = torch.full((rows,), (top + 1) // 2)
        else:
            s = ((high - low) / top).to(dtype)
            z = (-low / s.float()).round().clamp(0, top).long()
        values = ((part / s.float()[:, None]).round() + z[:, None]).clamp(0, top)
        q[:, at], scale[:, g], zero[:, g] = values.long(), s, z
        stands_for[:, at] = (values - z[:, None]) * s.float()[:, None]
    return q, scale, zero, stands_for


def words(values: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """[rows, columns] of small integers -> int32 [rows, columns * bits / 32]; order[i]: the column of slot i."""
    n = 32 // bits
    order = order or tuple(range(n))
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % n))
    result = torch.zeros(len(values), padded.shape[1] // n, dtype=torch.int64)
    for slot, column in enumerate(order):
        result |= padded[:, column::n] << bits * slot
    return torch.where(result >= 2**31, result - 2**32, result).to(torch.int32)


def awq(group: int = 32, zero_point: bool = True):
    def pack(weight: torch.Tensor, _: int) -> Packed:
        q, scale, zero, stands_for = integers(weight, 4, group, not zero_point, torch.float16)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        planes = {"qweight": words(q.T, 4, order), "scales": scale.T}
        return planes | ({"qzeros": words(zero.T, 4, order)} if zero_point else {}), stands_for

    return pack


def gptq(bits: int = 4, group: int = 32, symmetric: bool = True, act_order: bool = False, v2: bool = False):
    def pack(weight: torch.Tensor, seed: int) -> Packed:
        columns = weight.shape[1]
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed)) if act_order else None
        q, scale, zero, stands_for = integers(weight, bits, group, symmetric, torch.float16, order)
        zero = zero if v2 else zero.clamp(min=1) - 1
        g_idx = torch.arange(columns) // (group or columns)
        if order is not None:
            g_idx = g_idx[order.argsort()]
        return {
            "qweight": words(q, bits).T, "qzeros": words(zero.T, bits), "scales": scale.T,
            "g_idx": g_idx.to(torch.int32),
        }, stands_for  # fmt: skip

    return pack


def pack_quantized(bits: int = 4, group: int = 32, symmetric: bool = True, act_order: bool = False):
    def pack(weight: torch.Tensor, seed: int) -> Packed:
        columns = weight.shape[1]
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed)) if act_order else None
        q, scale, zero, stands_for = integers(weight, bits, group, symmetric, torch.bfloat16, order)
        planes = {
            "weight_packed": words(q, bits), "weight_scale": scale, "weight_shape": torch.tensor(weight.shape),
        }  # fmt: skip
        if not symmetric:
            planes["weight_zero_point"] = words(zero.T, bits).T
        if order is not None:
            planes["weight_g_idx"] = (torch.arange(columns) // group)[order.argsort()].to(torch.int32)
        return planes, stands_for

    return pack


def int8(symmetric: bool = True):
    def pack(weight: torch.Tensor, _: int) -> Packed:
        q, scale, zero, stands_for = integers(weight, 8, 0, symmetric, torch.bfloat16)
        planes = {"weight": (q - 128).to(torch.int8), "weight_scale": scale}
        return planes | ({} if symmetric else {"weight_zero_point": (zero - 128).to(torch.int8)}), stands_for

    return pack


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    entries = {"symmetric": True, "dynamic": False, "type": "int"} | weights
    group = {"targets": ["Linear"], "weights": entries, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": group}, "kv_cache_scheme": None,
    }  # fmt: skip


_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
_ONE = torch.tensor(0.5)
FORMATS = {
    "fp8-block": Format(fp8((128, 128), "weight_scale_inv", torch.bfloat16), _FP8 | {"weight_block_size": [128, 128]}),
    "fp8-block-f32": Format(
        fp8((128, 128), "weight_scale_inv"), _FP8 | {"weight_block_size": [128, 128]}, ("layers.1.mlp",),
    ),
    "fp8-tensor": Format(
        fp8((0, 0), "weight_scale", flat=True, input_scale=_ONE), _FP8 | {"activation_scheme": "static"},
    ),
    "fp8-ue8m0": Format(
        fp8((128, 128), "weight_scale_inv", torch.float8_e8m0fnu),
        _FP8 | {"weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    ),
    "fp8-modelopt": Format(
        fp8((0, 0), "weight_scale", flat=True, input_scale=_ONE),
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "kv_cache_scheme": {"num_bits": 8}},
    ),
    "fp8-channel": Format(
        fp8((1, 0), "weight_scale", torch.bfloat16),
        compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
    ),
    "fp8-compressed-tensor": Format(
        fp8((0, 0), "weight_scale", flat=True),
        compressed("float-quantized", num_bits=8, type="float", strategy="tensor"),
    ),
    "fp8-compressed-block": Format(
        fp8((128, 128), "weight_scale"),
        compressed("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
    ),
    "awq": Format(
        awq(), {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 32, "zero_point": True},
    ),
    "awq-symmetric": Format(
        awq(128, False), {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "zero_point": False},
    ),
    "gptq": Format(gptq(), _GPTQ),
    "gptq-8": Format(gptq(8), _GPTQ | {"bits": 8}),
    "gptq-asymmetric": Format(gptq(symmetric=False, v2=True), _GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}),
    "gptq-act-order": Format(gptq(act_order=True), _GPTQ | {"desc_act": True}),
    "gptq-whole-columns": Format(gptq(group=0), _GPTQ | {"group_size": -1}),
    "w4a16": Format(
        pack_quantized(), compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
    ),
    "w4a16-asymmetric": Format(
        pack_quantized(symmetric=False),
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
    ),
    "w4a16-act-order": Format(
        pack_quantized(act_order=True),
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, actorder="group"),
    ),
    "w8a16": Format(pack_quantized(8, 0), compressed("pack-quantized", num_bits=8, strategy="channel")),
    "w8a8": Format(int8(), compressed("int-quantized", num_bits=8, strategy="channel")),
    "w8a8-asymmetric": Format(
        int8(False), compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False)
    ),
    # One shard of a fused layer is stored in another way than the others.
    "mixed": Format(
        gptq(), _GPTQ | {"dynamic": {"-:.*v_proj": {}, r"-:model\.layers\.1\.mlp\.up_proj": {}}},
        ("v_proj", "layers.1.mlp.up_proj"),
    ),
}  # fmt: skip
