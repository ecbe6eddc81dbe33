"""The arguments of an engine: one validated, frozen record, which everything downstream may keep a reference to."""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.arguments import full_dtype, rejects_unknown
from nanovllm.foreign_arguments import ENGINE_ARGUMENTS

if TYPE_CHECKING:
    from nanovllm.engine.fast.policy import FastPolicy

HF_OVERRIDES = (
    "rope_scaling", "rope_parameters", "rope_theta", "max_position_embeddings", "sliding_window", "use_sliding_window",
)  # fmt: skip
"""Entries of a config.json that `hf_overrides` may replace."""
DTYPES = ("auto", "float32", "float16", "bfloat16")
ONLINE_QUANTIZATION = ("fp8", "int4", "int8", "q4_k_m")
"""How weights can be quantised while they are loaded."""
QUANTIZATION = (
    *ONLINE_QUANTIZATION, "gguf", "fbgemm_fp8", "modelopt", "awq", "awq_marlin", "gptq", "gptq_marlin",
    "compressed-tensors",
)  # fmt: skip
AUTO = -1
"""`max_model_len`: the most that the model and the KV cache allow."""
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "bfloat16", "bf16", "float16", "fp16", "float32", "fp32")


@rejects_unknown("LLM", renamed={"ride_prompts": "piggyback_prefill"}, foreign=ENGINE_ARGUMENTS)
@dataclass(frozen=True)
class EngineConfig:
    """Arguments of `LLM(model, ...)`. Names follow vLLM and nano-vLLM.

    Arguments of vLLM that have no effect here are taken, with one log line (`nanovllm/foreign_arguments.py`).

    Raises:
        ValueError: a value of the wrong type or out of range; the message names the argument, the value and what is
            allowed.
        TypeError: an unknown argument; the message names the nearest known one, or says why an argument of vLLM is not
            supported and what to do instead.
    """

    model: str
    """A Hugging Face directory, a hub id, a .gguf file, or (with `load_format="dummy"`) a preset's name."""
    tokenizer: str | None = None
    """The directory or .gguf file of the tokenizer. None: the model's own."""
    skip_tokenizer_init: bool = False
    """Serve token ids only; outputs have an empty `text`."""
    load_format: str = "auto"
    """"auto" (by what the path holds), "safetensors", "gguf", or "dummy" (random weights)."""
    dtype: str = "auto"
    """Weights and activations: "bfloat16", "bf16", "half", `torch.float32` and so on.

    "auto": the checkpoint's; a quantised GGUF's is bfloat16 on a GPU, float32 on a CPU.
    """
    quantization: str | None = None
    """Quantise a floating-point checkpoint while it is loaded: "fp8", "int4", "int8" or "q4_k_m" (docs/models.md).
    Quantised checkpoints need no argument; their own method's name is taken too, and another one is an error."""
    lm_head_quantization: str | None = None
    """Quantise the LM head while it is loaded, if the checkpoint has it in floats: "fp8" or "int8"."""
    activation_quantization: bool = True
    """On a GPU with fp8 tensor cores, steps of many tokens quantise the activations of fp8 layers too, for checkpoints
    made for it and with `quantization="fp8"` (docs/models.md). False: weights alone."""
    prompt_activations: str = "auto"
    """"fp8", on a GPU with fp8 tensor cores: steps of many tokens round activations, and weights of 4 and 8 bits, to
    8-bit floats, which is faster and less exact (docs/models.md). "auto": activations as the checkpoint has them."""
    expand_small_weights: str = "auto"
    """On a GPU, "auto": quantised weights of small layers get a copy in `dtype`, or become one, for the steps in which
    such a copy is multiplied faster, if all copies together take at most 4 % of its memory. "off": they stay packed."""
    device: str = "auto"
    """"auto" (CUDA where there is one), "cuda", "cuda:1", "cpu"."""
    hf_overrides: Mapping[str, Any] | None = None
    """Entries that replace those of config.json: `{"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
    "original_max_position_embeddings": 32768}}` extends Qwen3's context. Those of `HF_OVERRIDES` alone."""
    max_model_len: int | str = 4096
    """Longest prompt plus output, in tokens; lowered to what the model and the KV cache allow. "auto", -1 or None: the
    most that these allow; with LongRoPE the length of the original training, whose frequencies short prompts need."""
    max_num_seqs: int = 512
    """Most sequences that run in one step."""
    max_num_batched_tokens: int | None = None
    """Most tokens of one step; longer prompts are split over steps. None: 16384 on a GPU, 8192 if
    it serves `AsyncLLM` or a server, 512 on a CPU."""
    gpu_memory_utilization: float = 0.9
    """The share of the device's memory that weights, activations and KV cache may take together."""
    kvcache_block_size: int = 256
    """Tokens a KV cache block. Small blocks share more prefixes, since whole blocks alone are shared; large ones make
    shorter block tables. Hopper's decode kernel needs a multiple of 64."""
    kv_cache_dtype: str = "auto"
    """The KV cache. "auto": as `dtype`; "fp8" halves its memory and reads, at a small loss of accuracy
    (docs/attention.md). A float32 rounding of a key can become an fp8 step, so log-probabilities depend on the batch
    even with float32 weights: by up to 0.006 in trials with random tiny models on a CPU."""
    cpu_activations: str = "float32"
    """On a CPU, what weights are multiplied with. "int8", for quantised weights, and "bfloat16", for bfloat16 ones, are
    faster and less exact (docs/cpu.md)."""
    num_kvcache_blocks: int | None = None
    """Fixes the KV cache's size in blocks. None: what memory is left after a profiled forward pass."""
    enable_prefix_caching: bool = True
    """Reuse the full cache blocks of prompts that begin alike."""
    enforce_eager: bool = False
    """Do not capture CUDA graphs."""
    capture_prefill: bool | None = None
    """Steps of up to 4,096 tokens with pieces of prompts are CUDA graphs too, padded to one of a few sizes. None: if
    decode steps are. True: such steps are padded even without CUDA graphs, for tests."""
    piggyback_prefill: bool | None = None
    """Compute prompts given to `generate` together with decodes, a few tokens a step, if all requests then end sooner.
    First tokens come later. None: on if steps are CUDA graphs and the layers are so large that decode steps leave
    compute unused (`engine/fast/piggyback.py`). `ride_prompts` is an older name of this argument."""
    fast_policy: FastPolicy | None = None
    """Which fast paths are on, for tests and measurements (`engine/fast/policy.py`). The arguments above win."""
    generation_config: str = "auto"
    """Whence the parameters of calls and requests come that do not set them: "auto", generation_config.json in the
    model's directory, or the GGUF file; "vllm", nowhere; or a directory that holds such a file. As in vLLM temperature,
    top_p, top_k, min_p, repetition_penalty and max_new_tokens are taken; a call with `SamplingParams` sets them all."""
    override_generation_config: Mapping[str, Any] | None = None
    """Such parameters, which win over the file: `{"temperature": 0.5, "max_new_tokens": 512}`."""
    max_logprobs: int = 20
    """Most `logprobs` and `prompt_logprobs` that a request may ask for, since their cost grows. -1: any number."""
    async_scheduling: bool | None = None
    """Launch a step before the previous step's tokens are read. None: on a GPU yes, on a CPU no."""
    tensor_parallel_size: int = 1
    """GPUs of this machine that share the model, or processes on a CPU (docs/scaling.md)."""
    rank_timeout: float = 60.0
    """Seconds that a rank waits for the others at the start, and on a CPU in a step. The engine ends if
    its GPUs wait for each other for half of this time."""
    use_custom_kernels: bool | None = None
    """False: the `native` (PyTorch) provider of every op. None: as the model's config.json says, else True."""
    kernel_priority: Mapping[str, Sequence[str]] | None = None
    """Providers to use for an op, best first, for example `{"rms_norm": ["triton"]}`."""
    kernel_plugins: Sequence[str] = ()
    """Python files or modules that register kernels; theirs are preferred where they can run."""
    seed: int | None = None
    """Seed of requests that have none, and of dummy weights. None: a random one for requests, 0 for dummy weights."""

    def __post_init__(self) -> None:
        for name, normalise in _NORMALISE.items():
            object.__setattr__(self, name, normalise(getattr(self, name)))
        for name, (allowed, remedy) in _CHECKS.items():
            value = getattr(self, name)
            if not allowed(value):
                raise ValueError(f"{name}={value!r}: {remedy}")
        if self.prompt_activations == "fp8" and not self.activation_quantization:
            raise ValueError(
                "prompt_activations='fp8' contradicts activation_quantization=False; leave out one of them"
            )


Config = EngineConfig
"""nano-vLLM's name of the class."""


def _normal_dtype(value: Any) -> Any:
    """A dtype by its full name; `torch.float32` says "torch.float32" of itself."""
    if not isinstance(value, str) and type(value).__module__ == "torch":
        value = str(value)
    return full_dtype(value.removeprefix("torch.")) if isinstance(value, str) else value


def _normal_path(value: Any) -> Any:
    return str(value) if isinstance(value, os.PathLike) else value


_NORMALISE: dict[str, Callable[[Any], Any]] = {
    "model": _normal_path,
    "tokenizer": _normal_path,
    "generation_config": lambda value: "auto" if value is None else _normal_path(value),
    "dtype": _normal_dtype,
    "kv_cache_dtype": _normal_dtype,
    "quantization": lambda value: value.lower() if isinstance(value, str) else value,  # GGUF writes Q4_K_M
    # None is what vLLM's scripts pass where the engine decides.
    "max_model_len": lambda value: AUTO if value is None or (isinstance(value, str) and value == "auto") else value,
    "max_num_seqs": lambda value: EngineConfig.max_num_seqs if value is None else value,
    "enable_prefix_caching": lambda value: EngineConfig.enable_prefix_caching if value is None else value,
    # nano-vLLM spells "decide for me" as -1.
    "num_kvcache_blocks": lambda value: None if isinstance(value, int) and value == -1 else value,
}


def _is_int(value: Any, low: int = 1, high: int = 2**63) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value < high


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_path(value: Any) -> bool:
    return isinstance(value, (str, os.PathLike)) and bool(os.fspath(value))


def _or_none(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


def _one_of(*values: str) -> tuple[Callable[[Any], bool], str]:
    return lambda value: isinstance(value, str) and value in values, f"must be one of {', '.join(values)}"


def _flag(otherwise: str) -> tuple[Callable[[Any], bool], str]:
    return _or_none(_is_bool), f"must be True or False, or None {otherwise}"


_SWITCH = _is_bool, "must be True or False"
_COUNT = _is_int, "must be a positive integer"
_COUNT_OR_NONE = _or_none(_is_int), "must be a positive integer, or None to decide from the device"

_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "model": (_is_path, "pass a model directory, a hub id, a .gguf file or a preset's name"),
    "tokenizer": (
        _or_none(_is_path), "must be a directory or a .gguf file that holds a tokenizer, or None for the model's own",
    ),
    "load_format": _one_of("auto", "safetensors", "gguf", "dummy"),
    "dtype": _one_of(*DTYPES),
    "quantization": (
        _or_none(_one_of(*QUANTIZATION)[0]),
        f"is not supported; pass {', '.join(ONLINE_QUANTIZATION[:-1])} or {ONLINE_QUANTIZATION[-1]} to quantise while"
        " loading, or leave it out for the checkpoint's own",
    ),
    "lm_head_quantization": (
        _or_none(_one_of("fp8", "int8")[0]), "must be fp8 or int8, or None for what the checkpoint has",
    ),
    "kv_cache_dtype": _one_of(*KV_CACHE_DTYPES),
    "cpu_activations": _one_of("float32", "int8", "bfloat16"),
    "device": (lambda value: isinstance(value, str), "must be a string: 'auto', 'cpu', 'cuda' or 'cuda:N'"),
    "activation_quantization": _SWITCH,
    "prompt_activations": _one_of("auto", "fp8"),
    "expand_small_weights": _one_of("auto", "off"),
    "skip_tokenizer_init": _SWITCH,
    "enable_prefix_caching": _SWITCH,
    "enforce_eager": _SWITCH,
    "capture_prefill": _flag("to capture where decode steps are captured"),
    "piggyback_prefill": _flag("to decide from the device and the model"),
    "async_scheduling": _flag("to decide from the device"),
    "use_custom_kernels": _flag("for what the model's config.json says"),
    "max_model_len": (
        lambda value: _is_int(value) or _is_int(value, AUTO, AUTO + 1),
        "must be a positive integer, which is lowered to what the model and the memory allow, or 'auto' for the most",
    ),
    "max_num_seqs": _COUNT,
    "max_num_batched_tokens": _COUNT_OR_NONE,
    "num_kvcache_blocks": _COUNT_OR_NONE,
    "max_logprobs": (lambda value: _is_int(value, -1), "must be an integer of at least 0, or -1 for any number"),
    "gpu_memory_utilization": (
        lambda value: isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 < float(value) <= 1,
        "must be above 0 and at most 1",
    ),
    "kvcache_block_size": (
        lambda value: _is_int(value, 16, 1025) and value & (value - 1) == 0, "must be a power of two from 16 to 1024",
    ),
    "tensor_parallel_size": (lambda value: _is_int(value, 1, 65), "must be an integer from 1 to 64"),
    "rank_timeout": (
        lambda value: isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 < float(value) <= 86400,
        "must be seconds, above 0 and at most 86400",
    ),
    "kernel_priority": (
        _or_none(lambda value: isinstance(value, Mapping)),
        'must map ops to providers, for example {"rms_norm": ["triton"]}, or be None for the usual ones',
    ),
    "hf_overrides": (
        _or_none(lambda value: isinstance(value, Mapping) and value.keys() <= set(HF_OVERRIDES)),
        f"must be a dict with some of {', '.join(HF_OVERRIDES)}, or None for what config.json says",
    ),
    "generation_config": (_is_path, "must be auto, vllm (no defaults), or a directory with generation_config.json"),
    "override_generation_config": (
        _or_none(lambda value: isinstance(value, Mapping)), 'must be a dict such as {"temperature": 0.5}, or None',
    ),
    "kernel_plugins": (
        lambda value: _is_path(value) or (isinstance(value, (list, tuple)) and all(map(_is_path, value))),
        'must be a list of Python files or modules, for example ["my_kernels.py"]',
    ),
    "seed": (
        _or_none(lambda value: _is_int(value, 0)), "must be an integer in [0, 2**63), or None for one from the system",
    ),
}  # fmt: skip
"""For each argument: whether a value is allowed, and what is."""
