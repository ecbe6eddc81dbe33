"""What products of 8-bit floats and the quantisation of activations compile to at the shapes of Qwen3-8B."""

import re

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under TRITON_INTERPRET", allow_module_level=True)

from nanovllm.kernels.triton.gemm import fp8_activations
from nanovllm.kernels.triton.gemm.fp8_product import Fp8Plan, fp8_product, plan_fp8_product
from tests.kernels.triton.compiled import compiled, launches_of, resources, wide

TOKENS, SIZE = 2048, 4096
SMALL = Fp8Plan(tokens=64, warps=4, stages=3)
FP8 = torch.float8_e4m3fn


DECODING = Fp8Plan(tokens=128, outputs=64, stages=4, programs=2, splits=2)
FEW = Fp8Plan(tokens=64, outputs=64, warps=4, stages=4, programs=3, splits=4)
FEWER, WHOLE = (plan_fp8_product(32, outputs, SIZE, 132, False) for outputs in (6144, 24576))


def call(outputs, by_block, plan):
    groups, rows = (SIZE // 128, outputs // 128) if by_block else (1, outputs)
    codes, weight = torch.empty(TOKENS, SIZE, dtype=FP8), torch.empty(outputs, SIZE, dtype=FP8)
    scales, scale = torch.empty(groups, TOKENS).t(), torch.empty(rows, groups)
    return lambda: fp8_product(codes, scales, weight, scale, None, torch.empty(TOKENS, outputs).bfloat16(), plan)


@pytest.mark.parametrize(
    "capability, by_block, plan",
    [
        (90, True, None), (90, False, None), (90, True, DECODING), (90, True, FEW), (90, False, FEWER),
        (90, False, WHOLE), (100, False, FEWER),
        (100, True, None), (120, True, SMALL),
    ],
)  # fmt: skip
def test_products_keep_their_sums_in_registers(capability, by_block, plan, tmp_path):
    (_, kernel, args, options), *_ = launches_of([("product", call(6144, by_block, plan))])
    binary = compiled(kernel, args, {k: options[k] for k in ("num_warps", "num_stages")}, capability)
    registers, stack, local = resources(binary, tmp_path)
    assert local == stack == 0, f"{registers} registers, {stack} stack, {local} local"
    ptx = binary.asm["ptx"]
    assert "cp.async.bulk.tensor" in ptx
    assert re.search({90: r"wgmma.*e4m3\.e4m3", 100: r"tcgen05\.mma", 120: r"mma\.sync.*e4m3\.e4m3"}[capability], ptx)
    assert binary.metadata.shared * (plan or SMALL).programs <= (99 << 10 if capability == 120 else 227 << 10)


def quantise(kind, size, columns):
    if kind == "normed":
        x, weight = torch.empty(TOKENS, size, dtype=torch.bfloat16), torch.empty(size, dtype=torch.bfloat16)
        return fp8_activations.normed_and_quantised(x, torch.empty_like(x), weight, 1e-6, columns)
    gated = kind == "gated"
    return fp8_activations.quantised(torch.empty(TOKENS, size * (1 + gated)).bfloat16(), columns, gated)


@pytest.mark.parametrize(
    "size, columns, kind",
    [
        *((4096, *of) for of in ((128, "gated"), (4096, "gated"), (128, "normed"), (4096, "normed"))),
        (12288, 12288, "plain"), (25600, 128, "plain"),
    ],
)  # fmt: skip
def test_quantisation_loads_wide_and_rounds_by_an_instruction(size, columns, kind, tmp_path, monkeypatch):
    monkeypatch.setattr(fp8_activations, "converts_to_fp8", lambda device: True)
    ((_, kernel, args, options),) = launches_of([("quantise", lambda: quantise(kind, size, columns))])
    binary = compiled(kernel, args, {"num_warps": options["num_warps"]}, 90)
    assert resources(binary, tmp_path)[1:] == (0, 0)
    ptx = binary.asm["ptx"]
    assert wide(ptx, "ld") and re.search(r"cvt\.rn\.satfinite\.e4m3x2\.f32", ptx)
    assert re.search(r"st\.global\S*\.(v2|v4)\.b32", ptx)


@pytest.mark.parametrize("tokens, late", [(32, True), (33, False)])
@pytest.mark.parametrize("normed", [False, True])
def test_the_next_product_starts_after_the_sums_in_front_with_few_tokens(normed, tokens, late, monkeypatch):
    monkeypatch.setattr(fp8_activations, "can_launch_early", lambda x: True)
    x = torch.empty(tokens, 256, dtype=torch.bfloat16)
    weight = torch.nn.Parameter(torch.empty(256, dtype=torch.bfloat16))

    def call():
        if normed:
            fp8_activations.normed_and_quantised(x, x, weight, 1e-6, 256)
        else:
            fp8_activations.quantised(x, 256)

    ((_, kernel, args, options),) = launches_of([("quantise", call)])
    ptx = compiled(kernel, args, {"num_warps": options["num_warps"]}, 90).asm["ptx"]
    assert (ptx.index("griddepcontrol.wait") < ptx.index("griddepcontrol.launch_dependents")) == late
