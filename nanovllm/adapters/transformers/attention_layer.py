"""The attention of a decoder layer up to the attention function: one projection, the norms of heads, the rotation."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nanovllm.adapters.transformers.attn_implementation import CACHES, NAME, RECORD, register_attention
from nanovllm.adapters.transformers.norms import NormKind, Norms
from nanovllm.adapters.transformers.patches import Packed
from nanovllm.adapters.transformers.probe import (
    changed_linear,
    hooked,
    is_linear,
    plain_parameter,
    random,
    run,
    same,
    stand_in,
)
from nanovllm.adapters.transformers.selected import Call, differentiated

Tensor = torch.Tensor
PROJECTIONS = ("q_proj", "k_proj", "v_proj"), ("qkv_proj",)
_KEPT_ANGLES = 4
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 6e-2}


@dataclass(frozen=True)
class AttentionKind:
    """What an attention module does.

    Attributes:
        projections: of queries, keys and values, in this order; one layer stands for all.
        head_norm: of each query and key head; None: there is none.
        cache: the name of the cache among the forward's arguments.
        parameters: the names of the forward's arguments, without `self`.
        constants: what it gives to the attention function, besides what it gets.
    """

    projections: tuple[str, ...]
    head_dim: int
    sizes: tuple[int, int, int]
    head_norm: NormKind | None
    cache: str
    parameters: tuple[str, ...]
    constants: dict[str, Any]

    def layers(self, module: nn.Module) -> list[nn.Linear]:
        return [module._modules[name] for name in self.projections]  # type: ignore[misc]


class Angles:
    """The tables of the last forwards. The layers of a model get the same cos and sin, so a table is made once."""

    def __init__(self) -> None:
        self._made: list[tuple[Tensor, int, tuple[Tensor, Tensor]]] = []

    def table(self, cos: Tensor, sin: Tensor, batch: int) -> tuple[Tensor, Tensor]:
        """The row of each token in a table, and the table.

        Args:
            cos, sin: [batch or 1, tokens, head_dim], the second half of a row being the same as the first.

        Returns:
            (positions [batch * tokens] int64, cos_sin_cache [rows, head_dim] float32), as of `rotary_embedding`.
        """
        if torch.compiler.is_compiling():
            return _table(cos, sin, batch)
        for known, rows, made in self._made:
            if known is cos and rows == batch:
                return made
        made = _table(cos, sin, batch)
        self._made = [(cos, batch, made), *self._made[: _KEPT_ANGLES - 1]]
        return made


def _table(cos: Tensor, sin: Tensor, batch: int) -> tuple[Tensor, Tensor]:
    half = cos.shape[-1] // 2
    table = torch.cat((cos[..., :half], sin[..., :half]), -1).float().flatten(0, 1)
    positions = torch.arange(table.shape[0], device=table.device)
    return positions if cos.shape[0] == batch else positions.repeat(batch), table


def chooses_attention(module: nn.Module) -> bool:
    """Whether a module's forward calls an attention function of transformers' `AttentionInterface`."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "get_interface" in code.co_names


def has_frequencies(module: nn.Module) -> bool:
    """Whether it is a rotary embedding."""
    return any("inv_freq" in name for name in module._buffers)


def unsuited_rotary(model: nn.Module, head_dim: int) -> str | None:
    """Why a model's rotary embedding is not the one of the ops: pairs (i, i + head_dim / 2) turn by one angle a token.

    Its modules are those with a buffer of inverse frequencies. They are run on positions 0 to 2.
    """
    found = False
    for module in model.modules():
        if not has_frequencies(module):
            continue
        found = True
        buffers = {name: b if b is None else b.detach().cpu() for name, b in module._buffers.items()}
        x, positions = torch.zeros(1, 3, 1), torch.arange(3)[None]
        pairs, why = [], ""
        for given in (positions, positions.expand(3, 1, 3)):  # the second: in time, height and width
            try:
                pairs = _cos_and_sin(stand_in(module), module, buffers, x, given)
                break
            except Exception as error:  # code of others, with arguments that it may not have
                why = f"its rotary embedding could not be run ({type(error).__name__})"
        if not pairs:
            return why
        for values in pairs:
            half = head_dim // 2
            if values.shape != (1, 3, head_dim) or not same(values[..., :half], values[..., half:]):
                return "its rotary embedding turns only a part of a head, or other pairs"
    return None if found else "it has no rotary embedding that was recognised"


def _cos_and_sin(copy: Any, module: nn.Module, buffers: dict[str, Any], x: Tensor, positions: Tensor) -> list[Tensor]:
    copy._buffers.update(buffers)
    types = {name.removesuffix("_inv_freq") for name in buffers if name.endswith("_inv_freq")} - {"original"}
    types = {t for t in types if not t.endswith("_original")}
    if not types:
        return list(run(copy, x, positions))
    return [values for t in sorted(types) for values in run(copy, x, positions, t)]


@dataclass(frozen=True)
class AttentionCalls:
    """What it is computed with: `qk_norm_rope` or else `rope` after the module's own norms."""

    rope: Call
    qk_norm_rope: Call | None
    angles: Angles

    def __call__(self, kind: AttentionKind, module: Any, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """qkv [batch, tokens, heads * head_dim] -> q, k, v [batch, heads, tokens, head_dim], normalised and rotated."""
        batch, tokens, _ = qkv.shape
        heads = qkv.view(batch * tokens, -1, kind.head_dim)
        q, k, v = heads.split(kind.sizes, 1)
        positions, table = self.angles.table(cos, sin, batch)
        norm = kind.head_norm
        if norm is not None and self.qk_norm_rope is not None and not hooked(module.q_norm, module.k_norm):
            weights = module.q_norm.weight, module.k_norm.weight
            q, k = self.qk_norm_rope(positions, q, k, *weights, norm.eps, table)
        else:
            if norm is not None:
                q, k = module.q_norm(q), module.k_norm(k)
            q, k = self.rope(positions, q, k, table)
        q, k, v = (x.view(batch, tokens, -1, kind.head_dim).transpose(1, 2) for x in (q, k, v))
        return q, k, v


def recognise_attention(module: nn.Module, norms: Norms) -> AttentionKind | str | None:
    """What an attention module does; why that is not what the ops do; None: it is no attention module."""
    known = {name: layer for name, layer in module._modules.items() if layer is not None}
    projections = next((names for names in PROJECTIONS if all(name in known for name in names)), None)
    config, head_dim = module.__dict__.get("config"), module.__dict__.get("head_dim")
    if projections is None or config is None or not isinstance(head_dim, int) or "o_proj" not in known:
        return None
    layers = [*(known[name] for name in projections), known["o_proj"]]
    if not all(is_linear(layer) or changed_linear(layer) for layer in layers):
        return None  # experts, for instance
    if not all(is_linear(layer) for layer in layers):
        return "a projection is no plain linear layer"
    code = sys.modules[type(module).__module__]
    parameters = tuple(inspect.signature(type(module).forward).parameters)[1:]
    cache = next((name for name in CACHES if name in parameters), None)
    if parameters[:1] != ("hidden_states",) or "position_embeddings" not in parameters or cache is None:
        return "its forward takes other arguments"
    if not hasattr(code, "ALL_ATTENTION_FUNCTIONS") or not hasattr(code, "eager_attention_forward"):
        return "it has no choice of attention functions"
    groups = getattr(config, "num_attention_heads", 0), getattr(config, "num_key_value_heads", None)
    sizes = groups[0], groups[1] or groups[0], groups[1] or groups[0]
    outputs = sum(module.get_submodule(name).out_features for name in projections)  # type: ignore[misc]
    if sum(sizes) * head_dim != outputs:
        return "its projections have other sizes than its heads"
    norm = None
    if "q_norm" in module._modules or "k_norm" in module._modules:
        pair: list[Any] = [module._modules.get(name) for name in ("q_norm", "k_norm")]
        norm = norms.kind(pair[0])
        if norm is None or norms.kind(pair[1]) != norm or any(len(one.weight) != head_dim for one in pair):
            return "the norms of its queries and keys are not RMS norms of a head"
    reasons = (plain_parameter(parameter) for parameter in module.parameters())
    if (reason := next(filter(None, reasons), None)) is not None:
        return reason
    kind = AttentionKind(projections, head_dim, sizes, norm, cache, parameters, {})
    return _probed(module, kind)


def _probed(module: Any, kind: AttentionKind) -> AttentionKind | str:
    """Its own forward against that of the ops' references, on three tokens, up to the attention function."""
    register_attention()
    weight = kind.layers(module)[0].weight
    config = copy.copy(module.config)
    config._attn_implementation_internal = NAME
    recorded: list[Any] = []
    own = stand_in(module, config=config, **{RECORD: recorded})
    like: dict[str, Any] = {"dtype": weight.dtype, "device": weight.device}
    x = random(2, 3, weight.shape[1], **like)
    angles = random(2, 3, kind.head_dim // 2, seed=1)
    cos, sin = (torch.cat((f(angles), f(angles)), -1).to(**like) for f in (torch.cos, torch.sin))
    extra, mask = object(), torch.ones(2, 1, 3, 3, dtype=torch.bool, device=weight.device).tril()
    try:
        out = run(own, x, position_embeddings=(cos, sin), attention_mask=mask, nanovllm_extra=extra)
    except Exception as error:  # code of others, with arguments that it may not have
        return f"its forward could not be run ({type(error).__name__})"
    if len(recorded) != 1 or not isinstance(out, tuple) or len(out) != 2:
        return "its forward gives other results"
    *got, got_mask, given = recorded[0]
    if given.pop("nanovllm_extra", None) is not extra:
        return "its forward does not pass its other arguments on"
    if got_mask is not mask:
        return "it computes with the mask"
    from nanovllm.kernels import qk_norm_rope, rotary_embedding

    rope = Call("rotary_embedding", "native", rotary_embedding.native)
    fused = (
        Call("qk_norm_rope", "native", qk_norm_rope.native) if kind.head_norm and not kind.head_norm.one_plus else None
    )
    with torch.no_grad():
        qkv = torch.cat([layer(x) for layer in kind.layers(module)], -1)
        wanted = AttentionCalls(rope, fused, Angles())(kind, module, qkv, cos, sin)
        attended = got[0].transpose(1, 2).reshape(2, 3, -1)
        results = [*zip(got, wanted), (out[0], module.o_proj(attended))]
    if not all(same(a, b, _TOLERANCE[weight.dtype]) for a, b in results):
        return "it computes its queries, keys or values in another way"
    return AttentionKind(**{**kind.__dict__, "constants": {name: v for name, v in given.items() if v is not None}})


def attention_forward(
    code: Any, kind: AttentionKind, packed: Packed, calls: AttentionCalls, original: Callable[..., Any]
) -> Callable[..., Any]:
    """A forward of the module by the ops, up to the attention function that the model's config names.

    Args:
        code: the Python module that defines the class.
    """

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        given = {**dict(zip(kind.parameters, args)), **kwargs}
        x = given["hidden_states"]
        angles = given.get("position_embeddings")
        unsuited = x.dtype != packed.weight.dtype or differentiated(module, x)
        if angles is None or unsuited or not packed.current(kind.layers(module)):
            return original(module, *args, **kwargs)
        rest = {k: v for k, v in given.items() if k not in _TAKEN and k not in CACHES}
        q, k, v = calls(kind, module, packed(x), *angles)
        cache = given.get(kind.cache, given.get("past_key_values"))
        if cache is not None:
            k, v = cache.update(k, v, module.layer_idx, kwargs=rest)
        attend = code.ALL_ATTENTION_FUNCTIONS.get_interface(
            module.config._attn_implementation, code.eager_attention_forward
        )
        out, weights = attend(module, q, k, v, given.get("attention_mask"), dropout=0.0, **{**kind.constants, **rest})
        return module.o_proj(out.reshape(*x.shape[:-1], -1).contiguous()), weights

    return forward


_TAKEN = ("hidden_states", "position_embeddings", "attention_mask")
