"""`attn_implementation="nanovllm"`: attention on the caches of transformers by the op `attention_dense`.

transformers asks for a mask once a forward, and calls the attention of every layer with it. The mask of this
implementation is a *plan*: an int32 tensor [batch, 1, 1, queries] that says how many tokens each query sees, followed
by [batch, 1, 1, length], the slots of each sequence's tokens, if there is padding. It has four dimensions because a
mask of four passes through transformers as it is.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from nanovllm.adapters.transformers.own_masks import computes_with_masks
from nanovllm.adapters.transformers.selected import Call, differentiated
from nanovllm.kernels import attention_dense
from nanovllm.kernels.extra.attention_dense import dense_mask

NAME = "nanovllm"
CACHES = "cache", "past_key_values"
CALL = "_nanovllm_attention"
"""Of an attention module of a patched model: what was `Chosen` for it."""
RECORD = "_nanovllm_record"
"""Of a stand-in of an attention module: a list that takes a call's arguments in place of computing it."""
WINDOW = "_nanovllm_window"
"""Of a plan: its window, or None. Some attention modules do not hand theirs on, and others name one of no effect."""

logger = logging.getLogger(__name__)
Tensor = torch.Tensor


def register_attention() -> None:
    """Make `attn_implementation="nanovllm"` known to transformers. `apply` does it, too."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, plan_mask)


@dataclass(frozen=True)
class Chosen:
    """The op that was selected for an attention module."""

    call: Call

    def __call__(self, *args: Any) -> Tensor:
        return self.call(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Chosen:
        return self

    def __reduce__(self) -> Any:
        """A model that is loaded from a pickle runs its own code, but its configuration names this attention."""
        return register_attention, ()


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers.

    Args:
        query: [batch, num_heads, queries, head_dim]; key, value: [batch, num_kv_heads, length, head_dim].
        attention_mask: a plan. With None, or another mask, PyTorch's attention runs.

    Returns:
        [batch, queries, num_heads, head_dim], and None for the weights.

    Raises:
        ValueError: attention sinks (`s_aux`), or a plan for other queries or keys.
    """
    if RECORD in module.__dict__:
        given = {**kwargs, "scaling": scaling, "sliding_window": sliding_window, "softcap": softcap}
        module.__dict__[RECORD].append((query, key, value, attention_mask, given))
        return query.transpose(1, 2), None
    if kwargs.get("s_aux") is not None:
        raise ValueError('attn_implementation="nanovllm" has no attention sinks (s_aux); use "eager" for this model')
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    plan = _plan_of(attention_mask, query, key)
    if plan is not None and not torch.compiler.is_compiling():
        sliding_window = getattr(attention_mask, WINDOW, sliding_window)
    reason = None if plan is None else _unsuited(query, key, value, kwargs)
    if attention_mask is not None and plan is None:
        of = f"{str(attention_mask.dtype).removeprefix('torch.')} {list(attention_mask.shape)}"
        reason = f"a mask of {of} is not one of its own"
    if reason is not None and not torch.compiler.is_compiling():
        _warn(reason)
    if plan is None or reason is not None or dropout or differentiated(module, query, key, value):
        mask = attention_mask
        if plan is not None:
            mask = dense_mask(plan[0], key.shape[2], plan[1], sliding_window)[:, None]
        rest = {**kwargs, "dropout": dropout, "scaling": scale}
        return _by_pytorch(module, query, key, value, mask, softcap, rest)
    call: Chosen | Callable[..., Tensor] = module.__dict__.get(CALL) or attention_dense
    return call(query, key, value, plan[0], scale, plan[1], sliding_window, softcap), None


def _plan_of(mask: Tensor | None, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """`visible` and `tokens` of `attention_dense`; None: the mask is not a plan."""
    if mask is None or mask.dtype != torch.int32:
        return None
    batch, queries, length = query.shape[0], query.shape[2], key.shape[2]
    width = mask.shape[3]
    if mask.shape[0] != batch or width not in (queries, queries + length):
        raise ValueError(
            f"attention_mask: this plan of nanovllm is for {mask.shape[0]} sequences and {width} numbers each, not for "
            f"{batch} sequences, {queries} queries and {length} keys"
        )
    split = _split.__wrapped__ if torch.compiler.is_compiling() or capturing(mask) else _split
    return split(mask, queries)


@functools.lru_cache(maxsize=4)  # every layer of a model has the same plan; tensors are compared by identity
def _split(plan: Tensor, queries: int) -> tuple[Tensor, Tensor | None]:
    visible, tokens = plan[:, 0, 0, :queries].contiguous(), plan[:, 0, 0, queries:].contiguous()
    return visible, tokens if tokens.shape[1] else None


def capturing(tensor: Tensor) -> bool:
    """Whether a CUDA graph is being captured, which may be replayed with other values in the plan."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _unsuited(query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> str | None:
    """Why the op does not take a call, or None."""
    if kwargs.get("position_bias") is not None:
        return "scores with a position bias"
    if kwargs.get("output_attentions"):
        return "attention weights are wanted (output_attentions), which it does not compute"
    if value.shape[-1] != query.shape[-1]:
        return f"values of {value.shape[-1]} elements a head, where keys have {query.shape[-1]}"
    if not query.dtype == key.dtype == value.dtype or query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"queries, keys and values of {query.dtype}, {key.dtype} and {value.dtype}".replace("torch.", "")
    return None


def _by_pytorch(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    soft_cap: float | None,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    """What transformers does with `attn_implementation="sdpa"`, and with a soft cap, which sdpa does not have."""
    if soft_cap is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        out, _ = sdpa_attention_forward(module, query, key, value, mask, **kwargs)
        return out, None
    group = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    scores = soft_cap * torch.tanh((query @ key.mT) * kwargs["scaling"] / soft_cap)
    queries, length = scores.shape[-2:]
    causal = kwargs.get("is_causal")
    if mask is None and (getattr(module, "is_causal", True) if causal is None else causal):
        mask = torch.ones(queries, length, dtype=torch.bool, device=scores.device).tril(length - queries)
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, kwargs["dropout"], module.training)
    return (weights @ value).transpose(1, 2).contiguous(), None


@functools.cache
def _warn(reason: str) -> None:
    logger.warning('attn_implementation="nanovllm" leaves attention to PyTorch: %s', reason)


def plan_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """A mask function of transformers: a plan, or the mask that `sdpa` takes, for what is not causal and for own masks.

    Args:
        q_offset, kv_offset: positions of the first query and of the first key.
        mask_function: which pairs of positions see each other; one of transformers' own.
        attention_mask: [batch, tokens] bool, False where there is padding.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    # Not by `or`: torch.compile of PyTorch 2.11 breaks the graph where it asks a function for its truth.
    function = causal_mask_function if mask_function is None else mask_function

    def as_sdpa() -> Tensor | None:
        given: dict[str, Any] = {"mask_function": function, **kwargs}
        given |= {"q_offset": q_offset, "kv_offset": kv_offset, "attention_mask": attention_mask, "device": device}
        return sdpa_mask(batch_size, q_length, kv_length, **given)

    windowed = function is not causal_mask_function
    if computes_with_masks(config):
        return as_sdpa()
    if windowed and (torch.compiler.is_compiling() or not is_sliding_window(function)):
        return as_sdpa()
    reaches_all = not isinstance(q_offset, Tensor) and q_offset + q_length <= (kwargs.get("local_size") or 0)
    if windowed and not (attention_mask is None or reaches_all or _holes_are_in_front(attention_mask)):
        return as_sdpa()  # a window counts padding that lies within it
    # Where each query stands among the keys: [queries] or, if the cache's length is on the device, a tensor too.
    places = torch.arange(q_length, device=device, dtype=torch.int32) + (q_offset - kv_offset)
    plan = _plan(places, batch_size, kv_length, kv_offset, attention_mask)
    if not torch.compiler.is_compiling() and ("local_size" in kwargs or not windowed):
        setattr(plan, WINDOW, kwargs["local_size"] if windowed else None)
    return plan


def _plan(places: Tensor, batch_size: int, kv_length: int, kv_offset: int, attention_mask: Tensor | None) -> Tensor:
    """The plan of queries that stand at these places among the keys."""
    q_length = len(places)
    if attention_mask is None or _is_full(attention_mask):
        return (places + 1).to(torch.int32).expand(batch_size, q_length)[:, None, None]
    real = F.pad(attention_mask, (0, max(0, kv_offset + kv_length - attention_mask.shape[1])))
    real = real[:, kv_offset : kv_offset + kv_length]
    at = places.long().clamp(0, kv_length - 1)
    visible = real.cumsum(1)[:, at]  # at padding on the right all tokens, as PyTorch's attention
    tokens = torch.argsort(~real, dim=1, stable=True)
    return torch.cat((visible, tokens), 1).to(torch.int32)[:, None, None]


def with_plan(module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a model's forward under torch.compile: with a plan, if there are no padding, positions and cache.

    Code that is compiled cannot ask positions whether several sequences are packed into one. So transformers assumes
    it, and makes a mask that is no plan. Where the caller gives no positions nothing is packed. A model whose
    configuration says that tokens see later ones (`is_causal`) gets no plan.
    """
    tokens = args[0] if args else given.get("input_ids")
    unknown = "attention_mask", "position_ids", "inputs_embeds", *CACHES
    if tokens is None or len(args) > 1 or "attention_mask" not in given:
        return given
    config = module.config
    if config._attn_implementation != NAME or not getattr(config, "is_causal", True):
        return given
    if any(given.get(name) is not None for name in unknown):
        return given
    batch, length = tokens.shape
    return given | {"attention_mask": plan_mask(batch, length, length, device=tokens.device)}


def _is_full(mask: Tensor) -> bool:
    """Whether nothing is padding. A compiled graph cannot ask, so there padding is assumed."""
    return not torch.compiler.is_compiling() and bool(mask.all())


def _holes_are_in_front(mask: Tensor) -> bool:
    """Whether every query's window is as wide in tokens as in slots: padding lies before them."""
    return bool((mask[:, :-1] <= mask[:, 1:]).all())


def is_sliding_window(mask_function: Any) -> bool:
    """Whether it is what transformers' `sliding_window_causal_mask_function` returns, and nothing is laid over it."""
    from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

    model = sliding_window_causal_mask_function(1)
    parts, wanted = _parts(mask_function), _parts(model)
    if parts is None or wanted is None or mask_function.__code__ is not model.__code__ or len(parts) != len(wanted):
        return False
    overlay = next(f for f in wanted if f is not causal_mask_function)
    return causal_mask_function in parts and any(getattr(f, "__code__", None) is overlay.__code__ for f in parts)


def _parts(mask_function: Any) -> tuple[Any, ...] | None:
    """The functions that a mask function combines, if it does."""
    cells = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    return next((cell for cell in cells if isinstance(cell, tuple)), None)
