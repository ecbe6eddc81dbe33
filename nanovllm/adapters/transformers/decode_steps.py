"""Decode steps of a `Stack`: the loop over the layers, and on a static cache the buffers of its CUDA graph."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from nanovllm.adapters.transformers.selected import Selection
from nanovllm.kernels.ops import PagedKV

if TYPE_CHECKING:
    from nanovllm.adapters.transformers.stack import Stack

logger = logging.getLogger(__name__)
Tensor = torch.Tensor
BLOCK = 64
"""Tokens of a block of the cache, where its length is a multiple: what the decode kernel for Hopper asks for."""
EAGER_STEPS = 2
"""Steps on a cache before they are captured: they compile kernels. To capture costs as much as a step, so a cache of a
shape that was captured before is captured at its first step."""
Linear = tuple[Tensor, "Tensor | None"]
"""Weight and bias."""


@dataclass(frozen=True)
class Products:
    """What a step multiplies with. None: the library's product, which costs the host least, and then the op after it.

    Attributes:
        add_rms_norm: (x, residual, weight, eps) -> the norm of the sum, the sum.
        activate: gate and up side by side -> their gated product.
        takes: (op, weight) -> the function of that op, if it is faster with this weight and batch.
    """

    add_rms_norm: Callable[..., tuple[Tensor, Tensor]]
    activate: Callable[[Tensor], Tensor]
    takes: Callable[[str, Tensor], Callable[..., object] | None]

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        fn = self.takes("linear", weight)
        return F.linear(x, weight, bias) if fn is None else fn(x, weight, bias)  # type: ignore[return-value]

    def add_norm(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """norm(residual + x W^T + b), and the sum. It may write to `residual`."""
        fn = self.takes("linear_add_rms_norm", weight)
        if fn is not None:
            return fn(x, weight, residual, norm_weight, eps, bias)  # type: ignore[return-value]
        return self.add_rms_norm(self.linear(x, weight, bias), residual, norm_weight, eps)

    def gated(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """activation(gate(x)) * up(x)."""
        fn = self.takes("linear_silu_and_mul", weight) if bias is None else None
        return self.activate(self.linear(x, weight, bias)) if fn is None else fn(x, weight)  # type: ignore[return-value]


def by_the_library(op: str, weight: Tensor) -> None:
    """`takes` of a step whose time is the host's."""
    return None


def by_kernels(selection: Selection, tokens: int, gate: bool) -> Callable[[str, Tensor], Callable[..., object] | None]:
    """`takes` of a step whose time is the GPU's.

    Args:
        gate: whether the activation is SiLU.
    """
    ops = {"linear": ["linear"], "linear_add_rms_norm": ["linear", "add_rms_norm"]}
    if gate:
        ops["linear_silu_and_mul"] = ["linear_silu_and_mul"]
    known: dict[tuple[str, torch.Size], Callable[..., object] | None] = {}

    def takes(op: str, weight: Tensor) -> Callable[..., object] | None:
        key = op, weight.shape
        if key not in known:
            usable = op in ops and all(part in selection.wanted for part in ops[op])
            known[key] = selection.function(op, weight, tokens) if usable else None
        return known[key]

    return takes


class CapturedSteps:
    """The decode steps of a batch on one cache.

    What a step gets is copied into buffers, and all else stays where it is, so that a CUDA graph can be replayed. The
    state serves as long as the cache has these tensors.

    Args:
        layers: of the cache, in the order of the model's layers.
        padded: whether steps name the slots of each sequence's tokens.
        fresh: whether the cache had no state before. One whose tensors are replaced at every step, as beams do it,
            would be captured at every step.
    """

    def __init__(self, stack: Stack, layers: list[Any], batch: int, padded: bool, fresh: bool) -> None:
        self._stack = weakref.proxy(stack)  # which has the states: after `undo` no cycle holds their memory
        self.padded, self._fresh = padded, fresh
        self._tensors = [(layer.keys, layer.values) for layer in layers]
        first = layers[0].keys
        device, length, head_dim = first.device, first.shape[2], first.shape[3]
        blocks = length // BLOCK if length % BLOCK == 0 and not padded else length
        between = first.shape[1] * blocks  # blocks from one sequence to the next
        self._starts = torch.arange(0, batch * between, between, dtype=torch.int32, device=device)[:, None]
        self._table = self._starts + torch.arange(blocks, dtype=torch.int32, device=device)
        self._lens = torch.zeros(batch, dtype=torch.int32, device=device)
        self._angles = torch.empty(batch, head_dim, dtype=torch.float32, device=device)
        self._rows = torch.arange(batch, device=device)
        self._x = torch.empty(batch, stack.hidden_size, dtype=first.dtype, device=device)
        self._lengths = [layer.cumulative_length for layer in layers]
        self._places = [x.view(1) for x in self._lengths]
        self._kv = [
            PagedKV(_paged(k, blocks), _paged(v, blocks), self._table, self._lens, length) for k, v in self._tensors
        ]
        self._products = stack.products(batch, fused=False)
        self._shape = batch, length, padded
        self._steps = 0
        self._graph: Any = None
        self._out: Tensor | None = None

    @staticmethod
    def refused(layers: list[Any], x: Tensor, stack: Stack) -> bool:
        """Whether the layers of a cache have other tensors than the loop reads."""
        shape = x.shape[0], stack.kind.sizes[1], layers[0].max_cache_len, stack.kind.head_dim
        return any(
            not layer.is_initialized or not isinstance(getattr(layer, "cumulative_length", None), Tensor)
            or t.shape != shape or t.dtype != x.dtype or t.device != x.device or not t.is_contiguous()
            for layer in layers
            for t in (layer.keys, layer.values)
        )  # fmt: skip

    def current(self, layers: list[Any], batch: int, padded: bool) -> bool:
        """Whether the cache still has the tensors that this state was made for."""
        return (
            padded == self.padded
            and batch == len(self._rows)
            and all(
                layer.keys is k and layer.values is v and layer.cumulative_length is n
                for layer, (k, v), n in zip(layers, self._tensors, self._lengths)
            )
        )

    def step(self, x: Tensor, visible: Tensor, tokens: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
        """The residual stream after the last layer. The new keys and values are stored, and the cache is advanced.

        Args:
            x: [batch, 1, hidden size]; cos, sin: [batch or 1, 1, head_dim].
            visible: [batch, 1] int32; tokens: [batch, length] int32; as of `attention_dense`.
        """
        half = self._angles.shape[1] // 2
        self._lens.copy_(visible[:, 0])
        self._angles[:, :half].copy_(cos[:, 0, :half])
        self._angles[:, half:].copy_(sin[:, 0, :half])
        if tokens is not None:
            torch.add(tokens, self._starts, out=self._table)
        self._x.copy_(x[:, 0])
        self._steps += 1
        seen = self._fresh and self._shape in self._stack.captured
        if self._graph is None and self._stack.captures and (seen or self._steps > EAGER_STEPS):
            self._capture(seen)
        if self._graph is None:
            return self._advance(self._products)[:, None]
        self._graph.replay()
        self._stack.num_replays += 1
        assert self._out is not None
        return self._out[:, None].clone()

    def _capture(self, seen: bool) -> None:
        products = self._stack.products(len(self._rows), fused=True)

        def advance() -> None:
            self._out = self._advance(products)

        # Keys and values of the first run are stored again by the replay: the cache is not advanced yet.
        try:
            self._graph = self._stack.capture(None if seen else lambda: self._through_layers(products), advance)
            self._stack.captured.add(self._shape)
        except RuntimeError as error:
            self._stack.captures = False
            logger.warning("decode steps are not captured as a CUDA graph: %s", error)

    def _advance(self, products: Products) -> Tensor:
        out = self._through_layers(products)
        torch._foreach_add_(self._lengths, 1)
        return out

    def _through_layers(self, products: Products) -> Tensor:
        return through_layers(self._stack, self._x, self._rows, self._angles, products, self._attend)

    def _attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for cached, new in zip(self._tensors[layer], (k, v)):
            cached.index_copy_(2, self._places[layer], new.unsqueeze(2))
        return self._stack.ops.attend(q, self._kv[layer], self._stack.scale, None, self._stack.soft_cap)


def growing_step(
    stack: Stack, cache: Any, x: Tensor, visible: Tensor, tokens: Tensor | None, cos: Tensor, sin: Tensor
) -> Tensor:
    """As `CapturedSteps.step`, on a cache whose tensors grow."""
    batch, half = x.shape[0], cos.shape[-1] // 2
    angles = torch.cat((cos[:, 0, :half], sin[:, 0, :half]), -1).float()
    rows = torch.arange(batch, device=x.device) if len(angles) == batch else visible.new_zeros(batch, dtype=torch.int64)
    visible, tokens = visible.contiguous(), None if tokens is None else tokens.contiguous()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = cache.update(k.unsqueeze(2), v.unsqueeze(2), stack.slots[layer])
        return stack.ops.attend_dense(
            q.unsqueeze(2), keys, values, visible, stack.scale, tokens, None, stack.soft_cap
        )  # fmt: skip

    return through_layers(stack, x[:, 0], rows, angles, stack.products(batch, fused=False), attend)[:, None]


def through_layers(
    stack: Stack, x: Tensor, rows: Tensor, angles: Tensor, products: Products, attend: Callable[..., Tensor]
) -> Tensor:
    """The residual stream after the last layer.

    Args:
        x: [batch, hidden size].
        rows: [batch] int64: of the table `angles`, as `rotary_embedding` takes them.
        attend: (layer, q [batch, num_heads, head_dim], new k, new v) -> attention in any shape of q's elements.
    """
    batch, kind, ops, weights = x.shape[0], stack.kind, stack.ops, stack.weights
    # Some kernels write their results to their arguments, so the first residual is a copy.
    residual = x.clone()
    y = ops.norm(residual, *weights[0].first)
    for layer, w in enumerate(weights):
        q, k, v = products.linear(y, *w.qkv).view(batch, -1, kind.head_dim).split(kind.sizes, 1)
        q, k = ops.rotate(rows, q, k, *w.heads, angles)
        y = attend(layer, q, k, v).view(batch, -1)
        y, residual = products.add_norm(y, *w.out, residual, *w.second)
        y = products.gated(y, *w.gate_up)
        if w.next is not None:
            y, residual = products.add_norm(y, *w.down, residual, *w.next)
    return residual + products.linear(y, *weights[-1].down)


def _paged(x: Tensor, blocks: int) -> Tensor:
    """[batch, heads, length, head_dim] as blocks, of which each sequence has `blocks`, and then those of other heads:
    [num_blocks, block_size, heads, head_dim], in place.
    """
    batch, heads, length, head_dim = x.shape
    size = length // blocks
    count = (batch - 1) * heads * blocks + blocks
    return x.as_strided((count, size, heads, head_dim), (size * head_dim, head_dim, length * head_dim, 1))
