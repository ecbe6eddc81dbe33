"""Which fast paths an engine has: what its policy asks for, as far as the device and the kernels can do it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from nanovllm.engine.fast.policy import FastPolicy
from nanovllm.kernels import Kernels
from nanovllm.kernels.ops.checks import values_checked

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EnabledPaths:
    """The policy's switches, decided."""

    device_state: bool
    decode_graphs: bool
    prefill_graphs: bool
    decode_padding: bool
    prefill_padding: bool
    prefix_groups: bool
    piggyback_prefill: bool
    warm_up: bool


def enabled_paths(
    policy: FastPolicy, kernels: Kernels, device: torch.device, layer_bytes: int, prefix_caching: bool
) -> EnabledPaths:
    """Decide the switches that the policy leaves open, and turn off what cannot be done, with a warning if it was asked
    for.

    Args:
        layer_bytes: bytes of a layer's weights.
        prefix_caching: whether sequences may share blocks.
    """
    on_gpu = device.type == "cuda"
    # NANOVLLM_CHECK=1 looks at values, which a captured graph cannot.
    checked = on_gpu and values_checked(device)
    capturing = policy.cuda_graphs and policy.padding is not False and not checked
    capturing = capturing and (on_gpu or policy.graph_backend is not None) and can_capture(kernels)
    prefill_graphs = capturing and policy.prefill_graphs is not False
    if prefill_graphs:
        level = logging.WARNING if policy.prefill_graphs else logging.INFO
        prefill_graphs = can_capture(kernels, "attention_prefill", level)
    # Without graphs padding is but work: only tests ask for it.
    tested = bool(policy.prefill_graphs) and (not on_gpu or not policy.cuda_graphs or checked)
    prefill_padding = prefill_graphs or bool(policy.padding) or (tested and policy.padding is None)
    decode_graphs = capturing and policy.device_state
    return EnabledPaths(
        device_state=policy.device_state,
        decode_graphs=decode_graphs,
        prefill_graphs=prefill_graphs,
        decode_padding=decode_graphs or (on_gpu if policy.padding is None else policy.padding),
        prefill_padding=prefill_padding,
        prefix_groups=policy.prefix_groups and policy.device_state and prefix_caching and shares_prefixes(kernels),
        piggyback_prefill=_piggybacks(policy, kernels, decode_graphs, layer_bytes),
        warm_up=on_gpu if policy.warm_up is None else policy.warm_up,
    )


def _piggybacks(policy: FastPolicy, kernels: Kernels, decode_graphs: bool, layer_bytes: int) -> bool:
    wanted = policy.piggyback_prefill
    if wanted is False or not policy.device_state:
        return False
    # Their graphs are captured when first wanted: too late to find out that they cannot be.
    if decode_graphs and not can_capture(kernels, "attention_prefill", logging.DEBUG):
        if wanted:
            logger.warning(
                "prompts are not piggybacked on decodes: these are CUDA graphs, and the attention of prompts cannot"
                " be captured"
            )
        return False
    worth_it = decode_graphs and not by_context(kernels) and layer_bytes >= policy.piggyback.min_layer_bytes
    return bool(wanted) or worth_it


def by_context(kernels: Kernels) -> bool:
    """Whether the attention of decodes costs what the bound on the context length says: that of the reference does."""
    return kernels.providers["attention_decode"] == "native"


def shares_prefixes(kernels: Kernels) -> bool:
    """Whether a kernel was chosen that attends to shared prefixes once; the references ignore shared blocks."""
    names = ("attention_decode_shared", "qk_norm_rope_attention_shared")
    return any(kernels.providers.get(name, "native") != "native" for name in names)


def can_capture(kernels: Kernels, name: str = "attention_decode", level: int = logging.WARNING) -> bool:
    """Whether a CUDA graph can hold a step with this attention.

    If not, since the host plans each step, it is logged.
    """
    provider = kernels.provider(name)
    if not provider.capturable:
        steps = "decode steps" if name == "attention_decode" else "steps with prompts"
        logger.log(level, "%s by %s cannot be captured: %s run without CUDA graphs", name, provider.name, steps)
    return provider.capturable


def samples_in_graphs(kernels: Kernels) -> bool:
    """Whether decode graphs sample as well: where sampling is compiled, which is faster than PyTorch's argmax, too, and
    a graph can hold it.
    """
    provider = kernels.provider("sample")
    return provider.name != "native" and provider.capturable
