"""Device models: presets against data sheets, names, and what is replaced by measurements."""

import pytest
import torch

from nanovllm.hardware.gpu_presets import PRESETS, checked_dtype_name, device_model, measured, model_of, this_device
from nanovllm.hardware.measured_rates import Rates


@pytest.mark.parametrize("model", PRESETS.values(), ids=PRESETS)
def test_presets_are_consistent(model):
    assert model.shared_per_block == model.shared_per_sm - 1024  # what the hardware keeps of a block's
    assert model.registers_per_sm == 65536 and model.registers_per_thread == 255
    assert 0.75 * model.peak_bandwidth < model.bandwidth < model.peak_bandwidth < model.l2_bandwidth
    assert model.l2_latency < model.dram_latency and not model.measured
    for dtype, rate in model.matmul.items():
        assert 0.7 * model.peak_matmul[dtype] < rate < model.peak_matmul[dtype]
    # flops a cycle and multiprocessor behind the data sheet: 2 x 128 lanes, and what the tensor cores of each
    # generation do
    lanes = pytest.approx(2 * model.lanes * model.clock * model.sms)
    assert model.peak_matmul["float32"] == lanes == model.vector_flops
    # The clock of the tensor cores behind the data sheet's rates may be below the highest.
    per_cycle = {80: 2048, 89: 512, 90: 4096, 100: 8192}[model.capability]
    assert 1.2e9 < model.peak_matmul["float16"] / (per_cycle * model.sms) <= 1.01 * model.clock < 2.6e9


def test_numbers_from_data_sheets():
    h100, a100, b200 = (device_model(n) for n in ("h100", "a100", "b200"))
    assert (h100.sms, h100.shared_per_block, h100.peak_bandwidth, h100.l2_bytes) == (132, 227 << 10, 3.35e12, 50 << 20)
    of_a100 = a100.sms, a100.shared_per_block, a100.warps_per_sm, a100.peak_matmul["float16"]
    assert of_a100 == (108, 163 << 10, 64, 312e12) and b200.peak_bandwidth == 8e12
    assert device_model("h200").ridge("bfloat16") == 789e12 / 4.4e12
    assert [m.matrix_unit for m in (b200, h100, a100)] == ["tcgen05", "wgmma", "mma"]
    ada = device_model("rtx-4090")
    assert (ada.warps_per_sm, ada.blocks_per_sm, ada.shared_per_block) == (48, 24, 99 << 10)


@pytest.mark.parametrize(
    "name, expected",
    [
        ("h100", "nvidia-h100"), ("H100", "nvidia-h100"), ("NVIDIA H100 80GB HBM3", "nvidia-h100"),
        ("nvidia-h200", "nvidia-h200"),
        ("NVIDIA H200", "nvidia-h200"), ("rtx4090", "nvidia-rtx-4090"), ("rtx-4090", "nvidia-rtx-4090"),
        ("4090", "nvidia-rtx-4090"),
        ("NVIDIA GeForce RTX 4090", "nvidia-rtx-4090"), ("NVIDIA A100-SXM4-80GB", "nvidia-a100"),
        ("B200", "nvidia-b200"),
        ("NVIDIA A100-SXM4-40GB", "nvidia-a100-40gb"), ("NVIDIA A100-PCIE-40GB", "nvidia-a100-40gb"),
        ("a100-40gb", "nvidia-a100-40gb"),
    ],
)  # fmt: skip
def test_names(name, expected):
    assert device_model(name).name == expected


def test_an_unknown_gpu():
    with pytest.raises(
        ValueError, match=r"^gpu: no preset for 'h300'; known are h100, h200, .*rtx-4090.*; did you mean 'h100'\?$"
    ):
        device_model("h300")
    with pytest.raises(ValueError, match="^device: expected a CUDA device, not cpu; name a preset instead"):
        this_device(torch.device("cpu"))
    with pytest.raises(ValueError, match="no preset for ''; known are a100, h100, h200, b200, rtx-4090, a100-40gb$"):
        device_model("")


@pytest.mark.parametrize(
    "name, nearest",
    [
        ("NVIDIA H100 NVL", "h100"), ("NVIDIA H100 PCIe", "h100"), ("NVIDIA A100 80GB PCIe", "a100"),
        ("NVIDIA H200 NVL", "h200"),
        ("GeForce RTX 4090 D", "rtx-4090"), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "h100"), ("A800", "a100"),
    ],
)  # fmt: skip
def test_another_form_factor_is_not_the_preset(name, nearest):
    """Its memory or its number of multiprocessors differs; the message has the nearest first, and then."""
    with pytest.raises(ValueError) as error:
        device_model(name)
    words = str(error.value)
    assert words.startswith(f"gpu: no preset for {name!r}; known are {nearest}, ") and words.endswith(
        f"did you mean {nearest!r}?"
    )
    assert all(key.removeprefix("nvidia-") in words for key in PRESETS)


def test_dtype_names():
    names = "bf16", "torch.float16", "HALF", "tf32", "fp8", "float8_e4m3fn", "int4"
    assert [checked_dtype_name(name) for name in names] == [
        "bfloat16", "float16", "float16", "tfloat32", "float8", "float8", "int4",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="^dtype: expected one of .* not 'bfloat61'; did you mean 'bfloat16'"):
        checked_dtype_name("bfloat61")
    with pytest.raises(ValueError, match="^weight: expected one of int4, int8, not 'bf16'"):
        checked_dtype_name("bf16", ("int4", "int8"), "weight")


def test_measured_values_replace_assumptions():
    h100 = device_model("h100")
    rates = Rates("NVIDIA H100", 3.1e12, 3.1e12, 2.9e12, {"bfloat16": 7e14}, 50 << 20, 6e12, 8e-7, 5e-7, 2e-7)
    found = measured(h100, rates)
    assert (found.bandwidth, found.l2_bandwidth, found.launch) == (3.0e12, 6e12, 8e-7)
    assert (found.dram_latency, found.l2_latency) == (5e-7, 2e-7)
    assert found.matmul["bfloat16"] == 7e14 and found.matmul["float16"] == h100.matmul["float16"]
    assert set(found.measured) == {
        "bandwidth", "l2_bandwidth", "l2_bytes", "launch", "dram_latency", "l2_latency", "matmul[bfloat16]",
    }  # fmt: skip
    partly = measured(h100, Rates("x", 3e12, 3e12, 0.0, {}))
    assert partly.bandwidth == 3e12 and partly.dram_latency == h100.dram_latency and partly.measured == ("bandwidth",)


class Properties:
    name, major, minor = "NVIDIA H100 PCIe", 9, 0
    multi_processor_count, L2_cache_size = 114, 50 << 20
    shared_memory_per_multiprocessor, shared_memory_per_block_optin = 228 << 10, 227 << 10
    regs_per_multiprocessor, max_threads_per_multi_processor = 65536, 2048
    total_memory = 80 * 10**9


def test_a_gpu_without_a_preset_takes_the_nearest():
    asked = []

    def rates(dtypes):
        asked.append(dtypes)
        return Rates(Properties.name, 1.9e12, 1.9e12, 1.7e12, {"bfloat16": 5e14, "float32": 4e13, "int8": 0.0})

    found = model_of(Properties, rates)
    assert asked == [("float32", "tfloat32", "float16", "bfloat16", "float8", "int8")]
    assert found.matmul["int8"] > 1e15
    assert {m for m in found.measured if "matmul" in m} == {"matmul[bfloat16]", "matmul[float32]"}
    assert (found.name, found.sms, found.bandwidth, found.matmul["bfloat16"]) == ("nvidia-h100-pcie", 114, 1.8e12, 5e14)
    base = max((m for m in PRESETS.values() if m.capability <= 90), key=lambda m: m.capability)
    assert found.peak_matmul["float16"] == pytest.approx(base.peak_matmul["float16"] * 114 / 132)
    a100 = type("A100", (Properties,), {"major": 8, "name": "NVIDIA A100-SXM4-80GB"})
    model_of(a100, rates)
    assert "float8" not in asked[1] and "int8" in asked[1]
    small = type("A100", (a100,), {"name": "NVIDIA A100-SXM4-40GB", "total_memory": 40 * 10**9})
    smaller = model_of(small, rates)
    assert (smaller.peak_bandwidth, smaller.memory, smaller.name) == (1.555e12, 40e9, "nvidia-a100")
    with pytest.raises(ValueError, match="compute capability 7.0; expected 8.0 or later"):
        model_of(type("Old", (Properties,), {"major": 7, "name": "Tesla V100"}), rates)


def test_a_ring_visits_every_line_once():
    pytest.importorskip("triton")
    from nanovllm.hardware.probe_kernels import ring

    links, order = ring(128 * 1000, torch.device("cpu"))
    at, seen = int(order[0]), []
    for _ in range(1000):
        seen.append(at)
        at = int(links[at])
    assert at == int(order[0]) and sorted(seen) == list(range(0, 32000, 32)) and seen == order.tolist()
    with pytest.raises(ValueError, match="num_bytes: expected at least 256"):
        ring(128, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.alone
def test_measured_on_a_gpu(measured_gpu):
    found, shared = measured_gpu
    assert {"bandwidth", "dram_latency", "l2_latency", "launch"} <= set(found.measured)
    narrow = {"matmul[float8]", "matmul[int8]"}  # PyTorch may lack these
    assert {f"matmul[{dtype}]" for dtype in found.matmul} - narrow <= set(found.measured)
    assert found.sms == torch.cuda.get_device_properties(0).multi_processor_count
    assert found.name not in PRESETS or device_model(found.name).name == found.name
    assert 0 < found.l2_latency < 1e-4 and 0 < found.dram_latency < 1e-4
    if shared:
        pytest.skip("another program uses the GPU, so its latencies say nothing")
    assert 5e-8 < found.l2_latency < found.dram_latency < 2e-6


def test_the_names_in_help_texts_are_the_presets():
    from nanovllm.cli.kernels_common import GPUS

    assert sorted(GPUS.split(", ")) == sorted(name.removeprefix("nvidia-") for name in PRESETS)
