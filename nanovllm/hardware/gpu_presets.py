"""What a GPU has and what it does, so that kernels can be planned for it where it is not.

Sources of the presets:
- Multiprocessors, L2, clocks, bandwidth and matmul rates (dense, float32 accumulation): NVIDIA's "A100 Tensor Core GPU
  Architecture" and "H100 Tensor Core GPU Architecture" whitepapers, the H200 and HGX B200 data sheets, and the "Ada GPU
  Architecture" whitepaper. 4th- and 5th-generation rates that a data sheet gives with sparsity are halved.
- Registers, shared memory, warps and blocks a multiprocessor: CUDA C++ Programming Guide, "Technical Specifications per
  Compute Capability".
- Latencies of A100, H100 and RTX 4090: Luo et al., "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via
  Microbenchmarking" (arXiv 2402.13499), rounded: about 270 cycles for the L2 cache, 470 (HBM) and 540 (GDDR6X) for
  device memory. B200: 150 ns in the nearer L2 partition (Chips and Cheese, "Nvidia's B200"); its device memory is
  assumed as slow as H100's.
- What is sustained: measured on an H200 (PyTorch 2.11, Triton 3.6): reading at 95 to 97 % of the bandwidth and copying
  at 89 %, bfloat16 products at 80 % of the rate (a large product runs into the power limit, which lowers the clock), an
  L2 cache of 9.0 TB/s, and 0.95 us for an empty kernel in a CUDA graph. The other GPUs are ASSUMED to sustain the
  same shares, and an L2 cache of as many bytes a cycle and multiprocessor (RTX 4090: 16, B200: 64). `measured`
  replaces assumptions by measurements.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from nanovllm.arguments import SHORT_DTYPES
from nanovllm.hardware.gpu_name import canonical_gpu_name

if TYPE_CHECKING:
    import torch

    from nanovllm.hardware.measured_rates import Rates

_KIB = 1 << 10
_MIB = 1 << 20
_SUSTAINED_BANDWIDTH = 0.92  # between reading and copying
_SUSTAINED_MATMUL = 0.80
_LAUNCH = 0.95e-6

DTYPE_BYTES: Mapping[str, float] = {
    "float32": 4, "tfloat32": 4, "float16": 2, "bfloat16": 2, "float8": 1, "int8": 1, "int4": 0.5,
}  # fmt: skip
"""Bytes an element. tfloat32 is float32 in memory, multiplied on tensor cores; float8 is e4m3 or e5m2."""
_SHORT = {
    **SHORT_DTYPES, "tf32": "tfloat32", "half": "float16", "fp8": "float8", "float8_e4m3fn": "float8",
    "float8_e5m2": "float8", "i8": "int8", "i4": "int4",
}  # fmt: skip


@dataclass(frozen=True)
class DeviceModel:
    """One GPU, in bytes, seconds and operations a second.

    Attributes:
        name: as in the file names of measured tables, such as "nvidia-h100".
        capability: the compute capability as a number: 90 for 9.0.
        registers_per_sm: 32-bit ones; registers_per_thread: the most that a thread can have.
        shared_per_sm, shared_per_block: bytes of shared memory; the hardware keeps 1 KiB of each block's.
        warps_per_sm, blocks_per_sm: resident at most.
        clock: cycles a second when nothing slows it.
        bandwidth: bytes a second of device memory, sustained; peak_bandwidth: of the data sheet.
        l2_bandwidth: bytes a second between the L2 cache and the multiprocessors.
        matmul: sustained flops a second by dtype; float32 is multiplied on the ordinary units. peak_matmul: of the
            data sheet.
        dram_latency, l2_latency: seconds from a load to its data, without load.
        launch: seconds that an empty kernel takes among others in a CUDA graph.
        memory: bytes of device memory.
        measured: which of the fields were measured on this GPU; empty for a preset.
    """

    name: str
    capability: int
    sms: int
    shared_per_sm: int
    shared_per_block: int
    l2_bytes: int
    warps_per_sm: int
    blocks_per_sm: int
    clock: float
    peak_bandwidth: float
    bandwidth: float
    l2_bandwidth: float
    dram_latency: float
    l2_latency: float
    peak_matmul: Mapping[str, float] = field(hash=False)
    matmul: Mapping[str, float] = field(hash=False)
    launch: float = _LAUNCH
    registers_per_sm: int = 65536
    registers_per_thread: int = 255
    measured: tuple[str, ...] = ()
    memory: float = math.inf

    @property
    def vector_flops(self) -> float:
        """FLOPs per second of the ordinary units: 128 lanes a multiprocessor (64 on compute capability 8.0), each with
        one multiply-add per cycle.
        """
        return 2 * self.lanes * self.clock * self.sms

    @property
    def lanes(self) -> int:
        return 64 if self.capability == 80 else 128

    @property
    def matrix_unit(self) -> str:
        """How tensor cores are fed: "wgmma" (Hopper: 4 warps, operands in shared memory), "tcgen05" (data-center
        Blackwell: accumulators in tensor memory), "mma" (others: one warp, operands in registers)."""
        return {90: "wgmma", 100: "tcgen05", 103: "tcgen05"}.get(self.capability, "mma")

    def rate(self, dtype: str) -> float:
        """Sustained flops a second of products in `dtype` (see `checked_dtype_name`).

        Raises:
            ValueError: the tensor cores of this GPU do not multiply it.
        """
        if dtype not in self.matmul:
            raise ValueError(f"dtype: {self.name} does not multiply {dtype}; it multiplies {', '.join(self.matmul)}")
        return self.matmul[dtype]

    def ridge(self, dtype: str) -> float:
        """Flops a byte from which on arithmetic, not device memory, is the limit."""
        return self.rate(dtype) / self.bandwidth


def checked_dtype_name(name: str, known: tuple[str, ...] = tuple(DTYPE_BYTES), argument: str = "dtype") -> str:
    """The full name of a dtype: "bf16" -> "bfloat16", "torch.float16" -> "float16".

    Raises:
        ValueError: it is not one of `known`; the message lists these and the nearest.
    """
    full = name.lower().removeprefix("torch.")
    full = _SHORT.get(full, full)
    if full not in known:
        named = [*known, *(short for short, long in _SHORT.items() if long in known)]
        nearest = difflib.get_close_matches(full, named, n=1, cutoff=0.5)
        hint = f"; did you mean {_SHORT.get(nearest[0], nearest[0])!r}?" if nearest else ""
        raise ValueError(f"{argument}: expected one of {', '.join(known)}, not {name!r}{hint}")
    return full


@dataclass(frozen=True)
class _DataSheet:
    """A GPU's numbers as data sheets print them.

    Attributes:
        shared: KiB a multiprocessor. l2: MiB. clock: GHz. bandwidth: TB/s. memory: GB. tensor: TFLOP/s by dtype.
        dram, l2_latency: nanoseconds from a load to its data.
        l2_width: bytes a cycle and multiprocessor.
    """

    name: str
    capability: int
    sms: int
    shared: int
    l2: float
    clock: float
    bandwidth: float
    memory: float
    tensor: Mapping[str, float]
    dram: float
    l2_latency: float
    warps: int = 64
    blocks: int = 32
    l2_width: float = 36  # 9.0 TB/s over the 132 multiprocessors of an H200 at 1.9 GHz

    def model(self, **measured: Any) -> DeviceModel:
        """The model, with what is sustained assumed, or as `measured` says by field."""
        cycle, lanes = self.clock * 1e9, 64 if self.capability == 80 else 128
        peak = {"float32": 2 * lanes * cycle * self.sms, **{dtype: rate * 1e12 for dtype, rate in self.tensor.items()}}
        assumed = {
            "bandwidth": self.bandwidth * 1e12 * _SUSTAINED_BANDWIDTH, "l2_bandwidth": self.l2_width * cycle * self.sms,
            "matmul": {d: r * (0.76 if d == "float32" else _SUSTAINED_MATMUL) for d, r in peak.items()},
        }  # fmt: skip
        return DeviceModel(
            name=self.name, capability=self.capability, sms=self.sms, shared_per_sm=self.shared * _KIB,
            shared_per_block=(self.shared - 1) * _KIB, l2_bytes=int(self.l2 * _MIB), warps_per_sm=self.warps,
            blocks_per_sm=self.blocks, clock=cycle, peak_bandwidth=self.bandwidth * 1e12,
            dram_latency=self.dram * 1e-9, l2_latency=self.l2_latency * 1e-9, peak_matmul=peak,
            memory=self.memory * 1e9, **{**assumed, **measured},
        )  # fmt: skip


_HOPPER = {"tfloat32": 494.7, "float16": 989.4, "bfloat16": 989.4, "float8": 1978.9, "int8": 1978.9}
_AMPERE = {"tfloat32": 156.0, "float16": 312.0, "bfloat16": 312.0, "int8": 624.0}
_ADA = {"tfloat32": 82.6, "float16": 165.2, "bfloat16": 165.2, "float8": 330.3, "int8": 660.6}
_BLACKWELL = {"tfloat32": 1125.0, "float16": 2250.0, "bfloat16": 2250.0, "float8": 4500.0, "int8": 4500.0}
_A100 = _DataSheet("nvidia-a100", 80, 108, 164, 40, 1.41, 2.039, 80, _AMPERE, 335, 190)
# Measured on an H200: reading and copying, the L2 cache, the products of random numbers in float32, float16 and
# bfloat16. The other products are assumed at the same share of the data sheet as bfloat16.
_H200_PRODUCTS = {
    "float32": 51.1e12, "tfloat32": 395e12, "float16": 759e12, "bfloat16": 789e12, "float8": 1578e12, "int8": 1578e12,
}  # fmt: skip

PRESETS: Mapping[str, DeviceModel] = {
    p.name: p
    for p in (
        _A100.model(),
        _DataSheet("nvidia-h100", 90, 132, 228, 50, 1.98, 3.35, 80, _HOPPER, 300, 150).model(),
        _DataSheet("nvidia-h200", 90, 132, 228, 60, 1.98, 4.8, 141, _HOPPER, 300, 150).model(
            bandwidth=4.4e12, l2_bandwidth=8.99e12, matmul=_H200_PRODUCTS
        ),
        _DataSheet("nvidia-b200", 100, 148, 228, 126, 1.965, 8.0, 180, _BLACKWELL, 300, 150, l2_width=64).model(),
        _DataSheet("nvidia-rtx-4090", 89, 128, 100, 72, 2.52, 1.008, 24, _ADA, 215, 108, 48, 24, l2_width=16).model(),
        replace(_A100, name="nvidia-a100-40gb", bandwidth=1.555, memory=40).model(),
    )
}


def device_model(name: str) -> DeviceModel:
    """The preset of a GPU.

    Args:
        name: in any form: "h100", "rtx4090", "nvidia-h200", "NVIDIA H100 80GB HBM3". An A100 whose name says 40GB is
            the slower one.

    Raises:
        ValueError: there is none; the message names all of them, the nearest first. Of another form factor, such as
            "H100 NVL", the memory or the number of multiprocessors differs: it is not taken for the chip's preset,
            which is the nearest.
    """
    if model := _known(name):
        return model
    near = sorted(PRESETS, key=lambda key: -_likeness(name, key))  # of equals, as they are listed
    known = [key.removeprefix("nvidia-") for key in near]
    hint = f"; did you mean {known[0]!r}?" if _likeness(name, near[0]) >= 0.7 else ""
    raise ValueError(f"gpu: no preset for {name!r}; known are {', '.join(known)}{hint}")


def _likeness(name: str, key: str) -> float:
    """From 0 to 1: how near a name is to a preset's; 1 if it has that, and more."""
    given, short = _plain(name), _plain(key)
    return 1.0 if short in given else difflib.SequenceMatcher(None, given, short).ratio()


def _plain(name: str) -> str:
    return "".join(c for c in name.lower().removeprefix("nvidia") if c.isalnum())


def _short_names() -> dict[str, DeviceModel]:
    return {**{_plain(key): model for key, model in PRESETS.items()}, "4090": PRESETS["nvidia-rtx-4090"]}


def _known(name: str) -> DeviceModel | None:
    """The preset of a name in any form. The smaller A100 is told by its name, since its memory is slower too."""
    short, given, chip = _short_names(), _plain(name), _plain(canonical_gpu_name(name))
    if chip in ("a100", "a100pcie") and "40gb" in given:
        chip = given = "a10040gb"
    return short.get(given) or short.get(chip)


def measured(model: DeviceModel, rates: Rates) -> DeviceModel:
    """The model with what `device.rates` measured on the GPU. A dtype that was not measured keeps its preset's rate."""
    found: dict[str, Any] = {"bandwidth": (rates.read + rates.copy) / 2 if rates.copy else rates.bandwidth}
    if rates.cache_bandwidth:
        found |= {"l2_bandwidth": rates.cache_bandwidth, "l2_bytes": rates.cache_bytes}
    named = {"launch": rates.kernel_seconds, "dram_latency": rates.dram_latency, "l2_latency": rates.cache_latency}
    found |= {field: value for field, value in named.items() if value}
    products = {dtype: rate for dtype, rate in rates.matmul.items() if rate}
    matmul = {**model.matmul, **products}
    return replace(model, matmul=matmul, measured=(*found, *(f"matmul[{d}]" for d in products)), **found)


def this_device(device: torch.device, refresh: bool = False) -> DeviceModel:
    """The model of the CUDA device that is here: what the driver says, what was measured, and for the rest its preset.

    Measuring takes a few seconds; results are cached (see `device.rates`). Products are measured in every dtype that
    GPUs of its compute capability multiply. A GPU without a preset takes the latencies and the shares of that of its
    compute capability, or the nearest below.

    Raises:
        ValueError: `device` is not a CUDA device, or one older than compute capability 8.0.
    """
    import torch

    from nanovllm.hardware.measured_rates import rates

    if device.type != "cuda":
        raise ValueError(f"device: expected a CUDA device, not {device}; name a preset instead: {', '.join(PRESETS)}")
    return model_of(torch.cuda.get_device_properties(device), lambda dtypes: rates(device, dtypes, refresh))


def model_of(properties: Any, rates_of: Callable[[tuple[str, ...]], Rates]) -> DeviceModel:
    """`this_device`, of what the driver says (as `torch.cuda.get_device_properties`) and what is measured by dtypes."""
    p = properties
    capability = 10 * p.major + p.minor
    older = [m for m in PRESETS.values() if m.capability <= capability]
    if not older:
        raise ValueError(f"device: {p.name} has compute capability {p.major}.{p.minor}; expected 8.0 or later")
    name = canonical_gpu_name(p.name)
    known = _known(p.name)
    base = known or max(older, key=lambda m: m.capability)
    scale = 1.0 if known else p.multi_processor_count / base.sms
    model = replace(
        base, name=name, capability=capability, sms=p.multi_processor_count, l2_bytes=p.L2_cache_size,
        shared_per_sm=p.shared_memory_per_multiprocessor, shared_per_block=p.shared_memory_per_block_optin,
        registers_per_sm=p.regs_per_multiprocessor, warps_per_sm=p.max_threads_per_multi_processor // 32,
        memory=p.total_memory,
        l2_bandwidth=base.l2_bandwidth * scale, matmul={d: r * scale for d, r in base.matmul.items()},
        peak_matmul={d: r * scale for d, r in base.peak_matmul.items()},
    )  # fmt: skip
    return measured(model, rates_of(tuple(model.matmul)))
