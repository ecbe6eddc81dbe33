"""Names of devices: as the driver gives them, as the chip is called, and as files are called after them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def canonical_gpu_name(name: str) -> str:
    """The chip behind a product name.

    "NVIDIA H100 80GB HBM3" -> "nvidia-h100", "NVIDIA GeForce RTX 4090" -> "nvidia-rtx-4090". The form factor stays
    where it changes the clocks or the memory: "NVIDIA H100 PCIe" -> "nvidia-h100-pcie".
    """
    words = re.sub(r"\b(\d+\s*GB|HBM\w*|SXM\w*|GeForce|Tesla|Graphics)\b|[^\w\s]", " ", name, flags=re.IGNORECASE)
    return "-".join(words.lower().split())


def cpu_name() -> str:
    """The processor's name, "AMD EPYC"; "" where the system does not tell."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return re.sub(r"\((R|TM)\)", "", names[0]) if names else ""


def device_name(device: torch.device) -> str:
    """The full name of a GPU, such as "NVIDIA H200"; for a CPU "cpu AMD EPYC, 2 threads"."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = f"cpu {cpu_name()}".strip()
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}"


def slug(name: str) -> str:
    """A device's full name as a file's: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
