"""Names of devices: as the driver gives them, as the chip is called, and as files are called after them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.wording import counted

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
    """The processor's name, "Intel Xeon Gold 6430"; "" where the system does not tell.

    Virtual machines may hide its number, and processors that differ are then told apart by the family and the model:
    "AMD EPYC family 25 model 17".
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    fields: dict[str, str] = {}  # of the first processor
    for line in lines:
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = re.sub(r"\((R|TM)\)", "", fields.get("model name", ""))
    if name and not re.search(r"\d", name) and {"cpu family", "model"} <= fields.keys():
        name += f" family {fields['cpu family']} model {fields['model']}"
    return name


def device_name(device: torch.device) -> str:
    """The full name of a GPU, such as "NVIDIA H200"; for a CPU "cpu AMD EPYC, 2 threads"."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = f"cpu {cpu_name()}".strip()
    threads = torch.get_num_threads()
    return f"{name}, {counted(threads, 'thread')}"


def slug(name: str) -> str:
    """A device's full name as a file's: "NVIDIA H200" -> "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
