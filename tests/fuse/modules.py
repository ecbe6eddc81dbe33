"""Devices and modules that the tests of fusion share."""

import torch
import torch.nn.functional as F

from nanovllm.fuse.cpu_model import CpuModel
from nanovllm.hardware.gpu_presets import device_model

# A device on which times are easily worked out by hand.
PLAIN = CpuModel("plain", 1e12, 0, 1e12, 1e-6, 1e13, {"float32": 1e14})
H100 = device_model("h100")


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def norm(x, w):
    return w * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


def mlp(x, w, up, down):
    return x + F.linear(F.gelu(F.linear(norm(x, w), up)), down)
