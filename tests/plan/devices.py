"""The GPUs that the tests of the planner share."""

from dataclasses import replace

from nanovllm.hardware.gpu_presets import PRESETS, device_model

H100, A100, H200 = (device_model(name) for name in ("h100", "a100", "h200"))
SOME = [PRESETS[f"nvidia-{name}"] for name in ("a100", "h200", "b200", "rtx-4090")]
# A GPU with round numbers: 10 multiprocessors, 1 GHz, 1 TB/s, 100 TFLOP/s, latencies of 1 and 0.5 us.
ROUND = replace(
    H100, name="round", sms=10, clock=1e9, bandwidth=1e12, l2_bandwidth=1e13, dram_latency=1e-6, l2_latency=0.5e-6,
    launch=1e-6,
    matmul={"bfloat16": 1e14, "float32": 1e13}, peak_matmul={"bfloat16": 1e14, "float16": 1e14, "float32": 1e13},
)  # fmt: skip
