"""The arguments of an engine: one validated, frozen record, which everything downstream may keep a reference to."""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.arguments import full_dtype, rejects_unknown

if TYPE_CHECKING:
    from nanovllm.engine.fast.policy import FastPolicy

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
DTYPES = ("auto", "float32", "float16", "bfloat16")
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "bfloat16", "bf16", "float16", "fp16", "float32", "fp32")


@rejects_unknown(renamed={"ride_prompts": "piggyback_prefill"})
@dataclass(frozen=True)
class EngineConfig:
    """Arguments of `LLM(model, ...)`. Names follow vLLM and nano-vLLM.

    Raises:
        ValueError: a value of the wrong type or out of range; the message names the argument, the value and what is
            allowed.
        TypeError: an unknown argument; the message names the nearest known one.
    """

    model: str
    """A Hugging Face directory, a hub id, a .gguf file, or (with `load_format="dummy"`) a preset's name."""
    tokenizer: str | None = None
    """Where the tokenizer is, if not beside the model."""
    skip_tokenizer_init: bool = False
    """Serve token ids only; outputs have an empty `text`."""
    load_format: str = "auto"
    """"auto" (by what the path holds), "safetensors", "gguf", or "dummy" (random weights)."""
    dtype: str = "auto"
    """Weights and activations, "bfloat16" or "bf16" and so on.

    "auto": the checkpoint's; a quantised GGUF's is bfloat16 on a GPU, float32 on a CPU.
    """
    device: str = "auto"
    """"auto" (CUDA where there is one), "cuda", "cuda:1", "cpu"."""
    max_model_len: int = 4096
    """Longest prompt plus output, in tokens; lowered to what the model and the KV cache allow."""
    max_num_seqs: int = 512
    """Most sequences that run in one step."""
    max_num_batched_tokens: int | None = None
    """Most tokens of one step; longer prompts are split over steps. None: 16384 on a GPU, 2048 on a CPU."""
    gpu_memory_utilization: float = 0.9
    """The share of the device's memory that weights, activations and KV cache may take together."""
    kvcache_block_size: int = 256
    """Tokens a KV cache block. Small blocks share more prefixes; large blocks make shorter block tables."""
    kv_cache_dtype: str = "auto"
    """The KV cache. "auto": as `dtype`; "fp8" halves its memory and reads, at a small loss of accuracy
    (docs/attention.md). Keys and values a float32 rounding apart can be an fp8 step apart, so log-probabilities depend
    on the batch even
    with float32 weights: by up to 0.006 in trials with random tiny models on a CPU."""
    num_kvcache_blocks: int | None = None
    """Fixes the KV cache's size in blocks. None: what memory is left after a profiled forward pass."""
    enable_prefix_caching: bool = True
    """Reuse the KV of full blocks that begin alike."""
    enforce_eager: bool = False
    """Do not capture CUDA graphs."""
    capture_prefill: bool | None = None
    """Steps of up to 4,096 tokens with pieces of prompts in them are CUDA graphs too, padded to one of a few sizes.
    None: where decode steps are. True: without CUDA graphs they are padded alike, for tests."""
    piggyback_prefill: bool | None = None
    """Prompts given to `generate` are computed together with decodes, a few tokens a step, if that lets all end sooner;
    first tokens come later. None: where steps are CUDA graphs and a layer has so many weights that decodes leave room
    for it (`engine/fast/piggyback.py`). `ride_prompts` is an older name of this argument."""
    fast_policy: FastPolicy | None = None
    """Which fast paths are on, one by one, for tests and measurements (`engine/fast/policy.py`); the arguments above
    win.
    """
    max_logprobs: int = 20
    """Most `logprobs` and `prompt_logprobs` that a request may ask for, since their cost grows with them.

    -1: any number.
    """
    async_scheduling: bool | None = None
    """Launch a step before the previous step's tokens are read. None: on a GPU yes, on a CPU no."""
    tensor_parallel_size: int = 1
    """GPUs that share the model; only 1 for now."""
    use_custom_kernels: bool | None = None
    """False: the `native` (PyTorch) provider of every op. None: as the model's config.json says, else True."""
    kernel_priority: Mapping[str, Sequence[str]] | None = None
    """Providers to use for an op, best first, for example `{"rms_norm": ["triton"]}`."""
    kernel_plugins: Sequence[str] = ()
    """Python files or modules that register kernels; theirs are preferred where they can run."""
    seed: int | None = None
    """Seeds the draws of requests that bring no seed of their own, and dummy weights. None: from the system, and 0."""

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, remedy: str) -> None:
            if not ok:
                raise ValueError(f"{name}={getattr(self, name)!r}: {remedy}")

        def positive_int(value: Any) -> bool:
            return isinstance(value, int) and not isinstance(value, bool) and value > 0

        def is_path(value: Any) -> bool:
            return isinstance(value, (str, os.PathLike)) and bool(os.fspath(value))

        need(is_path(self.model), "model", "pass a model directory, a hub id, a .gguf file or a preset's name")
        need(
            self.tokenizer is None or is_path(self.tokenizer),
            "tokenizer",
            "must be a directory or a .gguf file that holds a tokenizer, or None for the model's own",
        )
        for name in ("model", "tokenizer"):
            if isinstance(getattr(self, name), os.PathLike):
                object.__setattr__(self, name, str(getattr(self, name)))
        for name, values in (("load_format", LOAD_FORMATS), ("dtype", DTYPES), ("kv_cache_dtype", KV_CACHE_DTYPES)):
            value = getattr(self, name)
            if isinstance(value, str) and name != "load_format":
                value = full_dtype(value)
            need(isinstance(value, str) and value in values, name, f"must be one of {', '.join(values)}")
            object.__setattr__(self, name, value)
        need(isinstance(self.device, str), "device", "must be a string: 'auto', 'cpu', 'cuda' or 'cuda:N'")
        for name in ("skip_tokenizer_init", "enable_prefix_caching", "enforce_eager"):
            need(isinstance(getattr(self, name), bool), name, "must be True or False")
        for name, otherwise in (
            ("capture_prefill", "to capture where decode steps are captured"),
            ("piggyback_prefill", "to decide from the device and the model"),
            ("async_scheduling", "to decide from the device"),
            ("use_custom_kernels", "for what the model's config.json says"),
        ):
            value = getattr(self, name)
            need(value is None or isinstance(value, bool), name, f"must be True or False, or None {otherwise}")
        for name in ("max_model_len", "max_num_seqs", "kvcache_block_size", "tensor_parallel_size"):
            need(positive_int(getattr(self, name)), name, "must be a positive integer")
        most = self.max_logprobs
        need(
            isinstance(most, int) and not isinstance(most, bool) and most >= -1,
            "max_logprobs",
            "must be an integer of at least 0, or -1 for any number",
        )
        for name in ("max_num_batched_tokens", "num_kvcache_blocks"):
            value = getattr(self, name)
            # nano-vLLM spells "decide for me" as -1.
            if name == "num_kvcache_blocks" and isinstance(value, int) and value == -1:
                object.__setattr__(self, name, None)
                continue
            need(
                value is None or positive_int(value),
                name,
                "must be a positive integer, or None to decide from the device",
            )
        share = self.gpu_memory_utilization
        need(
            isinstance(share, numbers.Real) and not isinstance(share, bool) and 0 < share <= 1,
            "gpu_memory_utilization",
            "must be above 0 and at most 1",
        )
        block = self.kvcache_block_size
        need(
            16 <= block <= 1024 and block & (block - 1) == 0,
            "kvcache_block_size",
            "must be a power of two from 16 to 1024",
        )
        need(
            self.tensor_parallel_size == 1,
            "tensor_parallel_size",
            "only 1 is supported for now; run one engine per GPU instead",
        )
        need(
            self.kernel_priority is None or isinstance(self.kernel_priority, Mapping),
            "kernel_priority",
            'must map ops to providers, for example {"rms_norm": ["triton"]}, or be None for the usual ones',
        )
        plugins = self.kernel_plugins
        need(
            is_path(plugins) or (isinstance(plugins, (list, tuple)) and all(map(is_path, plugins))),
            "kernel_plugins",
            'must be a list of Python files or modules, for example ["my_kernels.py"]',
        )
        need(
            self.seed is None
            or (isinstance(self.seed, int) and not isinstance(self.seed, bool) and 0 <= self.seed < 2**63),
            "seed",
            "must be an integer in [0, 2**63), or None for one from the system",
        )
