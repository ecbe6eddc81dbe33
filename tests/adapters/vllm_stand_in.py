"""The interfaces of vLLM 0.26 that the plugin uses, as thin stand-ins, for machines without vLLM."""

import inspect
import sys
from contextlib import contextmanager
from enum import Enum
from types import ModuleType, SimpleNamespace

import torch
import torch.nn.functional as F


class IrOp:
    """`vllm.ir.op.IrOp`: implementations by provider, each with the schema of the native one."""

    registry: dict = {}

    def __init__(self, name, native):
        self.impls = {"native": SimpleNamespace(impl_fn=native)}
        self._schema = torch.library.infer_schema(native, mutates_args=[])
        self._parameters = list(inspect.signature(native).parameters.values())
        self.priority = []
        IrOp.registry[name] = self

    def __call__(self, *args):
        return self.impls[self.lowered_to(*args)].impl_fn(*args)

    def lowered_to(self, *args):
        """The provider that takes these arguments."""
        return next(p for p in self.priority or ["native"] if p == "native" or self.impls[p].supports_args(*args))

    def get_priority(self):
        return list(self.priority)

    def set_default(self, priority):
        assert all(p in self.impls for p in priority)
        self.priority = list(priority)

    @contextmanager
    def set_priority(self, priority):
        before = self.priority
        self.set_default(priority)
        yield
        self.priority = before

    def register_impl(self, provider, *, supported=True, supports_args=None, inplace=False):
        def register(function):
            assert provider not in self.impls
            assert torch.library.infer_schema(function, mutates_args=[]) == self._schema
            taken = list(inspect.signature(supports_args).parameters.values())
            assert [(p.name, p.default) for p in taken] == [(p.name, p.default) for p in self._parameters]
            self.impls[provider] = SimpleNamespace(impl_fn=function, supports_args=supports_args)

        return register


def register_op(*, name):
    return lambda native: IrOp(name, native)


class PostGradPassManager:
    """`vllm.compilation.passes.pass_manager.PostGradPassManager`: lowers a graph, here the arguments by op."""

    def configure(self, config):
        self.configured = True

    def __call__(self, graph):
        self.lowered = {name: IrOp.registry[name].lowered_to(*args) for name, args in graph.items()}

    def uuid(self):
        return "vLLM's passes"


RANGE: list = []
"""The compile range that vLLM is at."""


class CustomOp(torch.nn.Module):
    """`vllm.model_executor.custom_op.CustomOp`: makes an out-of-tree version of a class where there is one."""

    registry: dict = {}
    custom_ops: list = ["none"]

    def __new__(cls, *args, **kwargs):
        return super().__new__(CustomOp.registry.get(cls.__name__, cls))

    def __init__(self):
        super().__init__()
        self._forward_method = self.forward_cuda if self.enabled() else self.forward_native

    def forward(self, *args):
        return self._forward_method(*args)

    @classmethod
    def enabled(cls):
        return f"+{cls.name}" in CustomOp.custom_ops

    @classmethod
    def register_oot(cls, layer):
        assert cls.__name__ not in CustomOp.registry
        layer.name = cls.__name__
        CustomOp.registry[cls.__name__] = layer
        return layer


class SiluAndMul(CustomOp):
    name = "silu_and_mul"

    def forward_native(self, x):
        half = x.shape[-1] // 2
        return F.silu(x[..., :half]) * x[..., half:]

    def forward_cuda(self, x):
        raise AssertionError("vLLM's kernel")


class RotaryEmbedding(CustomOp):
    name = "rotary_embedding"

    def __init__(self, head_size, rotary_dim, max_position_embeddings, base, is_neox_style, dtype):
        super().__init__()
        self.head_size, self.rotary_dim, self.is_neox_style = head_size, rotary_dim, is_neox_style
        frequencies = base ** (-torch.arange(0, rotary_dim, 2).float() / rotary_dim)
        angles = torch.outer(torch.arange(max_position_embeddings).float(), frequencies)
        self.register_buffer("cos_sin_cache", torch.cat((angles.cos(), angles.sin()), -1).to(dtype))

    def forward_native(self, positions, query, key=None):
        cos, sin = self.cos_sin_cache[positions][:, None].chunk(2, dim=-1)

        def rotated(x):
            one, two = x.view(len(positions), -1, self.head_size).chunk(2, dim=-1)
            return torch.cat((one * cos - two * sin, two * cos + one * sin), -1).view(x.shape)

        return rotated(query), None if key is None else rotated(key)

    def forward_cuda(self, positions, query, key=None):
        return "vLLM's kernel"


class Llama3RotaryEmbedding(RotaryEmbedding):
    pass


class YaRNScalingRotaryEmbedding(RotaryEmbedding):
    pass


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, epsilon)


def _fused_add_rms_norm(
    x: torch.Tensor, x_residual: torch.Tensor, weight: torch.Tensor | None, epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return F.rms_norm(x + x_residual, (x.shape[-1],), weight, epsilon), x + x_residual


class FlashAttentionBackend:
    @classmethod
    def get_preferred_block_size(cls, default):
        return default

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size):
        return num_blocks, num_kv_heads, block_size, 2 * head_size


class FlashAttentionMetadataBuilder:
    """`build` returns what it was given, and whether it made no schedule."""

    use_full_cuda_graph, max_cudagraph_size = True, 32
    num_heads_q, num_heads_kv, headdim, kv_cache_dtype, block_size = 4, 2, 64, torch.float16, 64

    def build(self, common_prefix_len, given, fast_build=False):
        rest = {"use_cascade": common_prefix_len > 0, "unscheduled": fast_build}
        return SimpleNamespace(**vars(given), **rest)


class FlashAttentionImpl:
    def __init__(self, num_heads, head_size, scale, num_kv_heads, sliding_window=(-1, -1), logits_soft_cap=0):
        self.head_size, self.scale, self.num_kv_heads = head_size, scale, num_kv_heads
        self.attn_type, self.alibi_slopes, self.sinks, self.sliding_window = "decoder", None, None, sliding_window
        self.logits_soft_cap, self.batch_invariant_enabled, self.dcp_world_size = logits_soft_cap, False, 1

    def forward(self, *args):
        return "FlashAttention"


class AttentionBackendEnum(Enum):
    FLASH_ATTN = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"

    def get_path(self):
        return OVERRIDES.get(self, self.value)

    def is_overridden(self):
        return self in OVERRIDES

    def clear_override(self):
        OVERRIDES.pop(self, None)


OVERRIDES: dict = {}


class Platform:
    """`vllm.platforms.current_platform` on a machine with a GPU; `gpu` and `capability` are what it says."""

    gpu, capability = True, 90

    def is_cuda(self):
        return self.gpu

    def has_device_capability(self, least):
        return self.capability >= least

    def get_device_capability(self):
        return f"{self.capability // 10}.{self.capability % 10}"

    @classmethod
    def get_default_ir_op_priority(cls, vllm_config):
        return SimpleNamespace(rms_norm=["native"], fused_add_rms_norm=["native"])

    @classmethod
    def check_and_update_config(cls, vllm_config):
        vllm_config.checked = True

    @classmethod
    def get_pass_manager_cls(cls):
        return "vllm.compilation.passes.pass_manager.PostGradPassManager"


def install(monkeypatch):
    """Put the stand-ins into `sys.modules`; the platform."""
    IrOp.registry, CustomOp.registry, CustomOp.custom_ops = {}, {}, ["none"]
    OVERRIDES.clear()
    platform = type("CudaPlatform", (Platform,), {})()
    ops = SimpleNamespace(
        rms_norm=IrOp("rms_norm", _rms_norm), fused_add_rms_norm=IrOp("fused_add_rms_norm", _fused_add_rms_norm)
    )
    rope, attention = "vllm.model_executor.layers.rotary_embedding", "vllm.v1.attention"
    flash = FlashAttentionBackend, FlashAttentionImpl, FlashAttentionMetadataBuilder
    modules = {
        "vllm": {"ir": SimpleNamespace(ops=ops)},
        "vllm.ir": {"ops": ops},
        "vllm.ir.op": {"IrOp": IrOp, "register_op": register_op},
        "vllm.compilation": {},
        "vllm.compilation.passes": {},
        "vllm.compilation.passes.inductor_pass": {
            "get_pass_context": lambda: SimpleNamespace(compile_range=SimpleNamespace(start=RANGE[-2], end=RANGE[-1]))
        },
        "vllm.compilation.passes.pass_manager": {"PostGradPassManager": PostGradPassManager},
        "vllm.platforms": {"current_platform": platform},
        "vllm.config": {"get_cached_compilation_config": lambda: CustomOp},
        "vllm.model_executor": {},
        "vllm.model_executor.custom_op": {"CustomOp": CustomOp, "op_registry_oot": CustomOp.registry},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.activation": {"SiluAndMul": SiluAndMul},
        rope: {},
        f"{rope}.base": {"RotaryEmbedding": RotaryEmbedding},
        f"{rope}.llama3_rope": {"Llama3RotaryEmbedding": Llama3RotaryEmbedding},
        f"{rope}.yarn_scaling_rope": {"YaRNScalingRotaryEmbedding": YaRNScalingRotaryEmbedding},
        "vllm.v1": {},
        attention: {},
        f"{attention}.backend": {
            "AttentionCGSupport": SimpleNamespace(UNIFORM_BATCH="uniform"),
            "AttentionType": SimpleNamespace(DECODER="decoder"),
        },
        f"{attention}.backends": {},
        f"{attention}.backends.flash_attn": {layer.__name__: layer for layer in flash},
        f"{attention}.backends.registry": {
            "AttentionBackendEnum": AttentionBackendEnum,
            "register_backend": lambda backend, path: OVERRIDES.update({backend: path}),
        },
    }
    for name, contents in modules.items():
        module = ModuleType(name)
        module.__path__ = []  # a package
        module.__dict__.update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    return platform
