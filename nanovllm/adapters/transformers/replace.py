"""Goes through the modules of a model, and replaces the forward of those that the ops compute."""

from __future__ import annotations

import sys
from collections.abc import Callable, Container
from itertools import chain
from typing import Any

import torch
from torch import nn

from nanovllm.adapters.transformers.attention_layer import (
    Angles,
    AttentionCalls,
    AttentionKind,
    attention_forward,
    chooses_attention,
    has_frequencies,
    recognise_attention,
    unsuited_rotary,
)
from nanovllm.adapters.transformers.attn_implementation import CALL, Chosen
from nanovllm.adapters.transformers.decoder_layer import layer_forward, recognise_layer
from nanovllm.adapters.transformers.find_stack import layer_lists, stack_of
from nanovllm.adapters.transformers.mlp import MLPCalls, MLPKind, MLPs, mlp_forward
from nanovllm.adapters.transformers.norms import Norms, norm_forward, unsuited_norm
from nanovllm.adapters.transformers.own_masks import computes_with_masks
from nanovllm.adapters.transformers.patches import Packed, Patches, foreign_forward
from nanovllm.adapters.transformers.probe import changed_linear, hooked, is_linear, plain_parameter
from nanovllm.adapters.transformers.report import Outcomes
from nanovllm.adapters.transformers.selected import Call, Selection, differentiated
from nanovllm.adapters.transformers.stack import Stack, install
from nanovllm.wording import counted

_SOFT_CAP = "attn_logit_softcapping"
"""In a configuration: the soft cap of scores, of attention whose forward is not known."""


class Replacing:
    """One run of `apply`."""

    def __init__(
        self, model: nn.Module, selection: Selection, patches: Patches, outcomes: Outcomes, excluded: set[nn.Module]
    ) -> None:
        self._model, self._selection, self._patches, self._outcomes = model, selection, patches, outcomes
        self._excluded = excluded
        self._norms, self._mlps, self._angles = Norms(), MLPs(), Angles()
        self._scopes = [(m, set(m.modules())) for m in model.modules() if any(map(has_frequencies, m.children()))]
        self._rotary: dict[tuple[nn.Module, int], str | None] = {}
        self._attention: list[nn.Module] = []
        self._parts: dict[nn.Module, Any] = {}  # what was put in: the arguments of its forward
        self.caps_scores = False

    def modules(self) -> None:
        """Replace what can be replaced. Attention modules are recognised before anything within them is changed."""
        modules = [m for m in self._model.modules() if m not in self._excluded]
        attention = {m: recognise_attention(m, self._norms) for m in modules if "layer_idx" in m.__dict__}
        self.caps_scores = any(
            "softcap" in k.constants if isinstance(k, AttentionKind) else getattr(m.config, _SOFT_CAP, None) is not None
            for m, k in attention.items() if k is not None
        )  # fmt: skip
        self._attention = [m for m, kind in attention.items() if kind is not None]
        for module, kind in attention.items():
            if kind is not None:
                self._rope(module, kind)
        for module in modules:
            if self._norms.kind(module) is not None:
                self._norm(module)
            elif (mlp := self._mlps.kind(module)) is not None:
                self._mlp(module, mlp)
            elif type(module) is nn.Embedding and module.max_norm is None:
                self._embedding(module)
            elif isinstance(module, nn.Embedding):
                self._outcomes.left(module, "embedding", "it computes more than rows of a table")
            elif _has_experts(module):
                why = "products of several experts, for which there is no op here"
                self._outcomes.left(module, "silu_and_mul", why)
            elif attention.get(module) is None and chooses_attention(module):
                if "attention_dense" in self._selection.wanted:
                    self._outcomes.left(module, "attention_dense", "it is not built as in Llama's decoder layers")
            else:
                self._layer(module)
        packed = {layer for m, kind in attention.items() if isinstance(kind, AttentionKind) for layer in kind.layers(m)}
        for module in modules:
            mlp = self._mlps.kind(module)
            packed.update(mlp.linears(module) if mlp is not None else ())
        for module in modules:
            if is_linear(module) and module not in packed:
                self._linear(module)
            elif "linear" in self._selection.wanted and (reason := changed_linear(module)) is not None:
                self._outcomes.left(module, "linear", reason)

    def stacks(self, captures: bool) -> None:
        """Let each list of decoder layers that can be one loop be one. The attention functions have been chosen."""
        wanted = self._selection.wanted
        missing = [op for op in ("rms_norm", "add_rms_norm", "attention_dense") if op not in wanted]
        if "attention_decode" in wanted and missing:
            return self._outcomes.left(self._model, "attention_decode", f"it needs {', '.join(missing)}, too")
        for owner, name, layers in layer_lists(self._model, self._parts):
            made: Stack | str = "a part of its layers is excluded"
            if not any(m in self._excluded for m in (owner, *(m for layer in layers for m in layer.modules()))):
                made = stack_of(owner, name, layers, self._parts, self._selection, captures)
            if isinstance(made, Stack) and any(CALL not in m.__dict__ for m in self._attention):
                made = "attention_dense is not its attention function"
            if isinstance(made, str):
                self._outcomes.left(owner, "attention_decode", made)
                continue
            install(owner, name, made, self._patches)
            how = ", on a static cache as a CUDA graph" if made.captures else ""
            provider = self._selection.kernels(next(layers[0].parameters()).device).provider("attention_decode")
            why = f"decode steps: all {counted(len(layers), 'layer')} in one loop{how}"
            self._outcomes.replaced(owner, "attention_decode", provider.name, why)

    def attention_modules(self) -> list[tuple[Any, Call | str]]:
        """The attention modules, and what computes the attention of each, or why it is left alone."""
        return [(m, self._attention_call(m)) for m in self._attention]

    def _attention_call(self, module: Any) -> Call | str:
        if computes_with_masks(module.config):
            return "attention of its model computes with masks"
        # Projections that are quantised may have no parameter.
        weight = next(chain(module.parameters(), self._model.parameters()))
        if weight.dtype == torch.float64:
            return str(plain_parameter(weight))
        return self._call("attention_dense", weight)

    def choose(self, module: nn.Module, call: Call) -> None:
        """Let a module's attention function run this provider."""
        self._patches.set_attribute(module, CALL, Chosen(call))

    def _call(self, op: str, weight: torch.Tensor) -> Call | str:
        return "its weights are elsewhere (offloaded)" if weight.is_meta else self._selection.call(op, weight.device)

    def _put(self, module: nn.Module, op: str, call: Call, forward: Any, why: str = "") -> None:
        if not self._selection.explicit:
            forward = own_code_if_compiled(forward, type(module).forward)
        self._patches.set_forward(module, forward)
        self._outcomes.replaced(module, op, call.provider, why)

    def _norm(self, module: Any) -> None:
        kind = self._norms.kind(module)
        call = foreign_forward(module) or unsuited_norm(module) or self._call("rms_norm", module.weight)
        if isinstance(call, str) or kind is None:
            return self._outcomes.left(module, "rms_norm", str(call))
        why = "of x and 1 + weight in float32" if not kind.fuses(module.weight.dtype) else ""
        self._put(module, "rms_norm", call, norm_forward(kind, call, type(module).forward), why)
        self._parts[module] = kind

    def _mlp(self, module: nn.Module, kind: MLPKind) -> None:
        layers = kind.linears(module)
        op = "silu_and_mul" if kind.activation == "silu" else "gelu_and_mul"
        call = foreign_forward(module) or Packed.refused(layers) or self._call(op, layers[0].weight)
        if isinstance(call, str):
            return self._outcomes.left(module, op, call)
        packed = Packed(layers, self._patches)
        small = self._call("linear_silu_and_mul", packed.weight) if op == "silu_and_mul" and packed.bias is None else ""
        calls, counts = MLPCalls(call), None
        if isinstance(small, Call):
            counts = self._selection.token_counts("linear_silu_and_mul", packed.weight)
            calls = MLPCalls(call, small, counts)
            self._outcomes.replaced(module, small.name, small.provider, "for few tokens" if counts is not None else "")
        self._put(module, op, call, mlp_forward(kind, packed, calls, type(module).forward), "one product for both")
        self._parts[module] = kind, packed, call

    def _rope(self, module: Any, kind: AttentionKind | str) -> None:
        op = "rotary_embedding"
        if isinstance(kind, str):
            return self._outcomes.left(module, op, kind)
        layers = kind.layers(module)
        scope = next((m for m, within in reversed(self._scopes) if module in within), self._model)
        if (scope, kind.head_dim) not in self._rotary:
            self._rotary[scope, kind.head_dim] = unsuited_rotary(scope, kind.head_dim)
        reason = foreign_forward(module) or self._rotary[scope, kind.head_dim] or Packed.refused(layers)
        norm = kind.head_norm
        fused: Call | str = "no head norms"
        if norm is not None and not norm.one_plus:
            fused = self._call("qk_norm_rope", layers[0].weight)
            fused = "its head norms have hooks" if hooked(module.q_norm, module.k_norm) else fused
        call = reason or self._call(op, layers[0].weight)
        if isinstance(call, str):
            return self._outcomes.left(module, op, call)
        calls = AttentionCalls(call, fused if isinstance(fused, Call) else None, self._angles)
        code = sys.modules[type(module).__module__]
        packed = Packed(layers, self._patches)
        forward = attention_forward(code, kind, packed, calls, type(module).forward)
        used = fused if isinstance(fused, Call) else call
        self._put(module, used.name, used, forward, "one product for queries, keys and values")
        self._parts[module] = kind, packed

    def _embedding(self, module: Any) -> None:
        call = foreign_forward(module) or plain_parameter(module.weight) or self._call("embedding", module.weight)
        if isinstance(call, str):
            return self._outcomes.left(module, "embedding", call)
        self._put(module, "embedding", call, embedding_forward(call, type(module).forward))

    def _linear(self, module: Any) -> None:
        call = foreign_forward(module) or plain_parameter(module.weight) or self._call("linear", module.weight)
        if isinstance(call, str):
            return self._outcomes.left(module, "linear", call)
        counts = self._selection.token_counts("linear", module.weight)
        if counts is not None and not any(n in counts for n in (1, 2, 4, 8, 16, 32, 64)):
            why = f"{call.provider} is not used with this weight: PyTorch's product is as fast or faster"
            return self._outcomes.left(module, "linear", why)
        why = "for few tokens" if counts is not None else ""
        self._put(module, "linear", call, linear_forward(call, counts, type(module).forward), why)

    def _layer(self, module: nn.Module) -> None:
        kind = recognise_layer(module, self._norms)
        if kind is None:
            return
        second: Any = module._modules[kind.second]
        norm = self._norms.kind(second)
        reason = foreign_forward(module) or unsuited_norm(second) or foreign_forward(second)
        if norm is None or not norm.fuses(second.weight.dtype):
            reason = "its norms compute with float32 weights"
        call = reason or self._call("add_rms_norm", second.weight)
        if isinstance(call, str) or norm is None:
            return self._outcomes.left(module, "add_rms_norm", str(call))
        self._put(module, "add_rms_norm", call, layer_forward(kind, norm, call, type(module).forward))
        self._parts[module] = kind


def _has_experts(module: nn.Module) -> bool:
    """Whether a module has weights [experts, outputs, inputs]."""
    sizes = [p.shape[0] for p in module._parameters.values() if p is not None and p.dim() == 3]
    return len(sizes) > 1 and min(sizes) > 1 and len(set(sizes)) == 1


def own_code_if_compiled(put_in: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward of the module by its own code under torch.compile, which fuses it with its neighbours."""

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        return (original if torch.compiler.is_compiling() else put_in)(module, *args, **kwargs)

    return forward


def linear_forward(call: Call, counts: Container[int] | None, original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward of the module by the op `linear`, for the numbers of tokens in `counts`; else by its own code."""

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return original(module, *args, **kwargs)
        x, weight = args[0], module.weight
        if counts is not None and x.numel() // x.shape[-1] not in counts:
            return original(module, x)
        if x.dtype != weight.dtype or differentiated(module, x):
            return original(module, x)
        return call(x, weight, module.bias)

    return forward


def embedding_forward(call: Call, original: Callable[..., Any]) -> Callable[..., Any]:
    """A forward of the module by the op `embedding`."""

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or args[0].dtype != torch.int64 or differentiated(module):
            return original(module, *args, **kwargs)
        ids, weight = args[0], module.weight
        return call(ids.reshape(-1), weight).view(*ids.shape, weight.shape[1])

    return forward
