"""A plugin of vLLM that puts kernels of this package in the place of vLLM's own.

vLLM finds it by the entry point `vllm.general_plugins` and calls `register` in each of its processes. It does nothing
unless it is asked to:

    NANOVLLM_VLLM=1 vllm serve MODEL
    NANOVLLM_VLLM=rms_norm,silu_and_mul vllm serve MODEL          # these ops only
    NANOVLLM_VLLM=all_sizes vllm serve MODEL                      # the usual ops, in steps of all sizes
    vllm serve MODEL --additional-config '{"nanovllm": {"ops": ["rms_norm"]}}'

The interfaces are those of vLLM 0.24 and 0.26. Norms are implementations of vLLM's IR ops (`vllm_ir.py`). They come
first in the priorities that the platform has by default; `--kernel-config` goes before these. The gated activation and
the rotation are out-of-tree versions of vLLM's layers; `-silu_and_mul` and `-rotary_embedding` in `custom_ops` switch
them off. `attention_decode` is a part of vLLM's backend FLASH_ATTN (`vllm_attention.py`).

Norms and activations run in compiled steps that CUDA graphs capture. Larger steps are launched by the host. That takes
longer for an op of ours than for Inductor's code, so they keep vLLM's own, unless `all_sizes` is named
(`vllm_passes.py`).
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from nanovllm.adapters.vllm_platform import hook, unhook

logger = logging.getLogger("vllm.plugins.nanovllm")  # a child of vLLM's logger, so that it is shown

VARIABLE = "NANOVLLM_VLLM"
USUAL_OPS = ("add_rms_norm", "silu_and_mul")
"""The ops that "1" stands for: those that shorten a step. The others are served if they are named."""
ALL_OPS = ("rms_norm", "add_rms_norm", "silu_and_mul", "rotary_embedding", "attention_decode")
ALL_SIZES = "all_sizes"
"""Named beside the ops, or alone for the usual ones: steps that no CUDA graph captures are served, too."""
CONFIG_KEY = "nanovllm"
_IR_OPS = {"rms_norm": "rms_norm", "add_rms_norm": "fused_add_rms_norm"}
"""Our op -> vLLM's."""
_BY_SIZE = (*_IR_OPS, "silu_and_mul")
"""The ops that are served in captured steps alone."""
PASS_MANAGER = "vllm.compilation.passes.pass_manager.PostGradPassManager"
OUR_PASS_MANAGER = "nanovllm.adapters.vllm_passes.PassManager"
_ATTENTION = "nanovllm.adapters.vllm_attention.Backend"
_OFF, _ON = ("", "0", "false", "off"), ("1", "true", "on")


def register() -> None:
    """What vLLM calls. It may be called several times, and raises nothing: vLLM starts without it then."""
    try:
        said = os.environ.get(VARIABLE, "")
        ops = ops_asked_for(said, VARIABLE)
        if said and not ops:
            return  # switched off, whatever the configuration says
        reason = unsupported()
        if reason is not None:
            if ops:
                logger.warning("%s is set, but nanovllm serves nothing: %s", VARIABLE, reason)
            return
        if ops:
            serve(ops)
        else:
            _ask_the_config_later()
    except Exception as e:  # whatever another version of vLLM raises
        logger.warning("nanovllm serves nothing: %s: %s", type(e).__name__, e)


def ops_asked_for(value: Any, who: str) -> tuple[str, ...]:
    """The ops that a value names: "1" or True for the usual ones, a list or names with commas between them.

    `ALL_SIZES` is the last of them if it is named.

    Raises:
        ValueError: it names something else.
    """
    if isinstance(value, dict):
        return ops_asked_for(value.get("ops", True), f"{who}.ops")
    if isinstance(value, str) and value.lower() in (*_OFF, *_ON):
        value = value.lower() in _ON
    if isinstance(value, bool) or value is None:
        return USUAL_OPS if value else ()
    names = [n.strip() for n in value.split(",")] if isinstance(value, str) else value
    wrong = names if not isinstance(names, list) else [n for n in names if n not in (*ALL_OPS, ALL_SIZES)]
    if wrong:
        raise ValueError(f"{who}={json.dumps(value)}: expected 0, 1, or any of {', '.join((*ALL_OPS, ALL_SIZES))}")
    if names == [ALL_SIZES]:
        return (*USUAL_OPS, ALL_SIZES)
    return tuple(op for op in (*ALL_OPS, ALL_SIZES) if op in names)


def unsupported() -> str | None:
    """Why no kernel can run in this vLLM; None: they can. Does not start CUDA, which would forbid vLLM to fork."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return "its kernels need an NVIDIA GPU, and vLLM found none"
    if not current_platform.has_device_capability(80):
        return f"its kernels need compute capability 8.0, this GPU has {current_platform.get_device_capability()}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install triton"
    return None


def serve(ops: Sequence[str] = USUAL_OPS) -> list[str]:
    """Register kernels for these ops; the names of those that this vLLM takes.

    An op whose interface is another one in this version of vLLM is left out, with a warning. With `ALL_SIZES` among
    the names, steps that no CUDA graph captures are served as well.
    """
    served = []
    for op in ops:
        if op == ALL_SIZES:
            continue
        try:
            _SERVE[op]()
            served.append(op)
        except (ImportError, AttributeError, KeyError, TypeError, ValueError, AssertionError) as e:
            logger.warning("nanovllm does not serve %s in this vLLM: %s: %s", op, type(e).__name__, e)
    if served:
        unhook()
        by_size = any(op in _BY_SIZE for op in served)
        captured_only = by_size and ALL_SIZES not in ops and _heed_captured_sizes()
        _prefer(served if captured_only or not by_size else [*served, ALL_SIZES])
        logger.info("nanovllm serves %s", ", ".join(served))
    return served


def take_back() -> None:
    """Undo `serve` and `register` in this process, for what vLLM makes afterwards."""
    from vllm.model_executor.custom_op import op_registry_oot

    from nanovllm.adapters.vllm_ir import remove_providers

    remove_providers()
    for name, layer in list(op_registry_oot.items()):
        if layer.__module__ == __name__:
            del op_registry_oot[name]
    with suppress(ImportError):
        from vllm.v1.attention.backends.registry import AttentionBackendEnum

        if AttentionBackendEnum.FLASH_ATTN.get_path() == _ATTENTION:
            AttentionBackendEnum.FLASH_ATTN.clear_override()
    unhook()


def _serve_rms_norm() -> None:
    from nanovllm.adapters.vllm_ir import provide_rms_norm

    provide_rms_norm()


def _serve_add_rms_norm() -> None:
    from nanovllm.adapters.vllm_ir import provide_add_rms_norm

    provide_add_rms_norm()


def _serve_silu_and_mul() -> None:
    from vllm.model_executor.layers.activation import SiluAndMul

    from nanovllm.adapters.vllm_ir import silu_and_mul_op

    op = silu_and_mul_op()  # vLLM lowers it in each compile range by itself, as it does its norms

    def forward_cuda(self: Any, x: Any) -> Any:
        return op(x)

    _replace_layer(SiluAndMul, {"forward_cuda": forward_cuda})


def _serve_rotary_embedding() -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
    from vllm.model_executor.layers.rotary_embedding.llama3_rope import Llama3RotaryEmbedding
    from vllm.model_executor.layers.rotary_embedding.yarn_scaling_rope import YaRNScalingRotaryEmbedding

    import nanovllm.kernels  # noqa: F401  registers torch.ops.nanovllm

    for layer in (RotaryEmbedding, Llama3RotaryEmbedding, YaRNScalingRotaryEmbedding):
        _replace_layer(layer, {"__init__": _with_wide_cache(layer), "forward_cuda": _rotated(layer)})


def _with_wide_cache(layer: Any) -> Callable[..., None]:
    """A constructor that keeps the table of cosines and sines in float32 too, as our op wants it.

    Its values are those of vLLM's table, which are rounded to the model's dtype.
    """

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        layer.__init__(self, *args, **kwargs)
        whole = self.is_neox_style and self.rotary_dim == self.head_size and hasattr(self, "cos_sin_cache")
        wide = self.cos_sin_cache.float() if whole else None
        self.register_buffer("cos_sin_cache_float32", wide, persistent=False)

    return init


def _rotated(layer: Any) -> Callable[..., Any]:
    def forward_cuda(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        import torch

        if self.cos_sin_cache_float32 is None or key is None or positions.dim() != 1 or query.dtype != key.dtype:
            return layer.forward_cuda(self, positions, query, key)
        q, k = query.view(*positions.shape, -1, self.head_size), key.view(*positions.shape, -1, self.head_size)
        q, k = torch.ops.nanovllm.rotary_embedding(positions, q, k, self.cos_sin_cache_float32)
        return q.view(query.shape), k.view(key.shape)

    return forward_cuda


def _serve_attention_decode() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    flash = AttentionBackendEnum.FLASH_ATTN
    if flash.is_overridden() and flash.get_path() != _ATTENTION:
        raise ValueError(f"FLASH_ATTN is replaced already, by {flash.get_path()}")
    from nanovllm.adapters.vllm_attention import Backend  # which fails where vLLM's interfaces are others

    if len(Backend.get_kv_cache_shape(1, 64, 1, 64)) != 4:
        raise ValueError("its cache keeps the values of a block apart from its keys; vLLM 0.26 does not")
    register_backend(flash, _ATTENTION)


def _replace_layer(layer: Any, methods: dict[str, Any]) -> None:
    """Let vLLM make our version of a layer in the place of its own."""
    from vllm.config import get_cached_compilation_config
    from vllm.model_executor.custom_op import op_registry_oot

    name = layer.name  # the one of `custom_ops`, which the registration below replaces
    known = op_registry_oot.get(layer.__name__)
    if known is not None:
        if known.__module__ == __name__:
            return
        raise ValueError(f"{layer.__name__} is replaced already, by {known.__module__}")

    def enabled(cls: Any) -> bool:
        # With Inductor vLLM switches off all layers of this kind by default, and compiles their PyTorch code.
        return f"-{name}" not in get_cached_compilation_config().custom_ops

    ours = type(
        f"Nanovllm{layer.__name__}", (layer,), {**methods, "enabled": classmethod(enabled), "__module__": __name__}
    )
    layer.register_oot(ours)
    ours.name = name  # type: ignore[attr-defined]


def _prefer(served: Sequence[str]) -> None:
    """Put our implementations first in the platform's default priorities, and what is served into the configuration,
    whose hash is a part of the names under which vLLM keeps compiled code.
    """
    from nanovllm.adapters.vllm_ir import PROVIDER

    def preferred(priority: Any, vllm_config: Any) -> Any:
        _remember(vllm_config, {"ops": list(served)})
        for op in (_IR_OPS[op] for op in served if op in _IR_OPS):
            order = getattr(priority, op)
            if PROVIDER not in order:
                setattr(priority, op, [PROVIDER, *order])
        return priority

    hook("get_default_ir_op_priority", preferred)


def _remember(vllm_config: Any, served: dict[str, Any]) -> None:
    """Keep what is served in the configuration, unless vLLM was given an object with a hash of its own there."""
    if isinstance(vllm_config.additional_config, dict):
        vllm_config.additional_config = {**vllm_config.additional_config, CONFIG_KEY: served}


def _heed_captured_sizes() -> bool:
    """Let vLLM compile steps that CUDA graphs capture apart from larger ones, with its own ops in these.

    False, with a warning: this version of vLLM cannot.
    """
    from vllm.platforms import current_platform

    try:
        from vllm.compilation.passes.inductor_pass import get_pass_context  # noqa: F401  as `vllm_passes.py` does

        if (found := current_platform.get_pass_manager_cls()) != PASS_MANAGER:
            raise ValueError(f"the platform's pass manager is {found}")
    except (ImportError, AttributeError, TypeError, ValueError) as e:
        logger.warning("nanovllm serves steps of all sizes in this vLLM: %s: %s", type(e).__name__, e)
        return False

    def split(nothing: Any, vllm_config: Any) -> Any:
        # vLLM has just decided the sizes that it captures, and decides the compile ranges next.
        compilation = vllm_config.compilation_config
        largest = compilation.max_cudagraph_capture_size or 0
        ends = compilation.compile_ranges_endpoints or []
        if largest and largest not in ends:
            compilation.compile_ranges_endpoints = [*ends, largest]
        config = vllm_config.additional_config
        if isinstance(config, dict):
            _remember(vllm_config, {**config.get(CONFIG_KEY, {}), "largest": largest})
        logger.info("nanovllm serves compiled steps of up to %d tokens, those in CUDA graphs", largest)
        return nothing

    hook("check_and_update_config", split)
    hook("get_pass_manager_cls", lambda theirs: OUR_PASS_MANAGER)
    return True


def _ask_the_config_later() -> None:
    """When vLLM makes a configuration, look for our part of `additional_config`."""

    def ops_from_config(priority: Any, vllm_config: Any) -> Any:
        config = vllm_config.additional_config
        value = config.get(CONFIG_KEY) if isinstance(config, dict) else None
        ops = ops_asked_for(value, f"additional_config: {CONFIG_KEY}")
        if not ops:
            return priority
        # vLLM's other processes start with this environment, and load the plugin before they have the configuration.
        os.environ[VARIABLE] = ",".join(ops)
        serve(ops)
        from vllm.platforms import current_platform

        return current_platform.get_default_ir_op_priority(vllm_config)

    unhook()
    hook("get_default_ir_op_priority", ops_from_config)


_SERVE: dict[str, Callable[[], None]] = {
    "rms_norm": _serve_rms_norm,
    "add_rms_norm": _serve_add_rms_norm,
    "silu_and_mul": _serve_silu_and_mul,
    "rotary_embedding": _serve_rotary_embedding,
    "attention_decode": _serve_attention_decode,
}
