"""The decoder layers of a model as one loop, for decode steps on static and dynamic caches.

The forward of the first layer runs the loop over all layers, and those of the others return what they get. So the
model's own forward still makes masks, angles and results, and hooks on a layer switch the loop off.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from nanovllm.adapters.transformers.attention_layer import AttentionKind
from nanovllm.adapters.transformers.attn_implementation import CACHES, WINDOW, capturing, with_plan
from nanovllm.adapters.transformers.decode_steps import (
    CapturedSteps,
    Linear,
    Products,
    by_kernels,
    by_the_library,
    growing_step,
)
from nanovllm.adapters.transformers.patches import Patches, forward_slot
from nanovllm.adapters.transformers.selected import Selection, on_device

Tensor = torch.Tensor
STACK = "_nanovllm_stack"
"""Of the module that has the layers, and of each layer: their `Stack`."""
_KNOWN = (
    "attention_mask", "position_embeddings", "position_ids", "use_cache", "cache_position", *CACHES,
)  # fmt: skip
_USUAL = {
    *_KNOWN, "self", "input_ids", "inputs_embeds", "output_attentions", "output_hidden_states", "return_dict", "kwargs",
}  # fmt: skip
"""The arguments of a decoder."""


class LayerWeights(NamedTuple):
    """What the loop reads of one layer.

    Attributes:
        first, second, next: weight and eps of its norms, and of the next layer's first; None in the last layer.
        heads: weights and eps of the norms of query and key heads, or nothing.
    """

    first: tuple[Tensor, float]
    qkv: Linear
    heads: tuple[Any, ...]
    out: Linear
    second: tuple[Tensor, float]
    gate_up: Linear
    down: Linear
    next: tuple[Tensor, float] | None


class StackOps(NamedTuple):
    """The functions of the providers. They may write their results to their arguments."""

    norm: Callable[..., Tensor]
    add_norm: Callable[..., tuple[Tensor, Tensor]]
    rotate: Callable[..., tuple[Tensor, Tensor]]
    attend: Callable[..., Tensor]
    attend_dense: Callable[..., Tensor]
    activate: Callable[[Tensor], Tensor]


class Stack:
    """All decoder layers of a model.

    Args:
        config: the model's, which may be told to run fewer layers.
        layers: the modules, in order.
        slots: where the layers' caches are, in order (`layer_idx`).
        captures: whether steps are captured as CUDA graphs.

    Attributes:
        run: the forward that is under way in this thread; None: the loop is not to be used.
        captured: what graphs were captured for: (batch, length of the cache, padded).
        num_replays: decode steps so far that were replays of a graph.
    """

    def __init__(
        self, config: Any, layers: list[nn.Module], slots: list[int], kind: AttentionKind,
        weights: list[LayerWeights], ops: StackOps, selection: Selection, silu: bool, captures: bool,
    ) -> None:  # fmt: skip
        self.kind, self.weights, self.ops = kind, weights, ops
        self.hidden_size = weights[0].first[0].shape[0]
        constants = kind.constants
        self.scale: float = constants.get("scaling", kind.head_dim**-0.5)
        self.soft_cap = constants.get("softcap")
        self.captures = captures and weights[0].first[0].is_cuda
        self._config, self._layers, self.slots = config, layers, slots
        self._selection, self._silu = selection, silu
        self.captured: set[tuple[int, int, bool]] = set()
        self.num_replays = 0
        self._states: weakref.WeakKeyDictionary[Any, CapturedSteps] = weakref.WeakKeyDictionary()
        self._stream: torch.cuda.Stream | None = None
        self._local, self._lock = threading.local(), threading.Lock()

    def remember(self, owner: nn.Module, name: str) -> None:
        """What the modules are now is what the loop stands for: the layers `owner.name`, and what they contain."""
        self._list = owner._modules, name, owner._modules[name]
        parts = [module for layer in self._layers for module in layer.modules()]
        self._hooks = [hooks for m in parts for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self._children = [m._modules for m in (owner.get_submodule(name), *parts) if m._modules]
        self._children_then = [dict(children) for children in self._children]
        self._attributes, self._slots_of = [m.__dict__ for m in parts], [forward_slot(m) for m in parts]
        self._forwards = list(map(dict.get, self._attributes, self._slots_of))
        self._held = [m._parameters for m in parts if m._parameters]
        self._parameters = [p for m in parts for p in m._parameters.values()]
        self._ids = list(map(id, self._parameters))
        self._known = [p for p in self._parameters if p is not None]
        self._addresses = list(map(Tensor.data_ptr, self._known))

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model has other weights: it runs without the loop."""
        return None

    def __reduce__(self) -> Any:
        return type(None), ()

    @property
    def run(self) -> _Forward | None:
        return getattr(self._local, "run", None)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within the block a forward of the model is under way."""
        before, self._local.run = self.run, _Forward(self)
        try:
            yield
        finally:
            self._local.run = before

    def products(self, batch: int, fused: bool) -> Products:
        takes = by_kernels(self._selection, batch, self._silu) if fused else by_the_library
        return Products(self.ops.add_norm, self.ops.activate, takes)

    def step(self, x: Tensor, given: dict[str, Any]) -> Tensor | None:
        """The residual stream behind the last layer; None: the loop does not take this call.

        Args:
            given: the arguments of the first layer.
        """
        from transformers.cache_utils import DynamicCache, DynamicLayer, StaticLayer

        cache, plan, angles = given.get(self.kind.cache), given.get("attention_mask"), given.get("position_embeddings")
        if x.shape[1] != 1 or cache is None or plan is None or angles is None or plan.dim() != 4 or capturing(x):
            return None
        batch, width = x.shape[0], plan.shape[3]
        if plan.dtype != torch.int32 or plan.shape[0] != batch or x.dtype != self.weights[0].qkv[0].dtype:
            return None
        if any(v is not None and v is not False for name, v in given.items() if name not in _KNOWN):
            return None
        if torch.is_autocast_enabled(x.device.type) or self._config.num_hidden_layers != len(self._layers):
            return None
        if getattr(cache, "offloading", False) or getattr(plan, WINDOW, None) is not None or not self._unchanged():
            return None
        of_cache = getattr(cache, "layers", ())
        layers = [of_cache[slot] for slot in self.slots if slot < len(of_cache)]
        rest = plan[:, 0, 0, :1], plan[:, 0, 0, 1:] if width > 1 else None, *angles
        if layers and self._are(layers, StaticLayer) and width in (1, 1 + layers[0].max_cache_len):
            state = self._states.get(cache)
            if state is None or not state.current(layers, batch, width > 1):
                if CapturedSteps.refused(layers, x, self):
                    return None
                with torch.inference_mode(False), torch.no_grad():  # whatever later steps run in
                    state = CapturedSteps(self, layers, batch, width > 1, fresh=state is None)
                self._states[cache] = state
            return state.step(x, *rest)
        if type(cache) is DynamicCache and self._are(layers, DynamicLayer):
            if layers[0].is_initialized and width in (1, 2 + layers[0].keys.shape[2]):
                return growing_step(self, cache, x, *rest)
        return None

    def _are(self, layers: list[Any], kind: type) -> bool:
        return len(layers) == len(self.slots) and all(type(layer) is kind for layer in layers)

    def _unchanged(self) -> bool:
        """Whether modules, forwards and weights are those that the loop stands for, and no hook wants to be called."""
        return (  # without a loop in Python, since it runs in every step
            (not any(self._hooks) or only_recorders(self._hooks, idle=True))
            and not torch.nn.modules.module._has_any_global_hook()
            and self._list[0].get(self._list[1]) is self._list[2]
            and self._children == self._children_then
            and list(map(dict.get, self._attributes, self._slots_of)) == self._forwards
            and list(map(id, chain.from_iterable(map(dict.values, self._held)))) == self._ids
            and list(map(Tensor.data_ptr, self._known)) == self._addresses
        )

    def capture(self, warm_up: Callable[[], Any] | None, fn: Callable[[], None]) -> Any:
        """What `fn` launches as a CUDA graph. `warm_up` runs before it, on the stream of the
        capture; None: that was done for a call of the same shapes.

        Raises:
            RuntimeError: it cannot be captured.
        """
        graph = torch.cuda.CUDAGraph()
        with self._lock:  # the stream takes one capture at a time, and nothing else meanwhile
            if self._stream is None:
                self._stream = torch.cuda.Stream(self.weights[0].first[0].device)
            stream, before = self._stream, torch.cuda.current_stream(self._stream.device)
            stream.wait_stream(before)
            try:
                with torch.cuda.stream(stream):
                    if warm_up is not None:
                        warm_up()
                    graph.capture_begin(capture_error_mode="thread_local")  # other threads may allocate meanwhile
                    try:
                        fn()
                    finally:
                        graph.capture_end()
            finally:
                before.wait_stream(stream)
        return graph


class _Forward:
    """One forward of the model, of which a layer asks whether the loop has done its work."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._result: Tensor | None = None

    def __call__(self, layer: nn.Module, x: Tensor, given: dict[str, Any]) -> Tensor | None:
        """What the layer is to return; None: it computes it itself."""
        if self._result is None:
            if layer is not self._stack._layers[0]:
                return None
            self._result = on_device(x.device, self._stack.step)(x, given)
            return self._result
        if x is not self._result:
            raise RuntimeError(
                f"{type(layer).__name__} got something else than the result of the layer before it, which nanovllm has "
                'computed already; apply(model, exclude=["' + type(layer).__name__ + '"])'
            )
        return x


def only_recorders(hooks: Iterable[Mapping[int, Any]], idle: bool = False) -> bool:
    """Whether all hooks are those of transformers that record outputs. It leaves them in a model whose outputs were
    wanted once.

    Args:
        idle: and no output is to be recorded now.
    """
    code: Any = sys.modules.get("transformers.utils.output_capturing")
    found = [hook for of_module in hooks if of_module for hook in of_module.values()]
    if any(code is None or getattr(hook, "__module__", None) != code.__name__ for hook in found):
        return False
    return not found or not idle or not code._active_collector.get()


def install(owner: nn.Module, name: str, stack: Stack, patches: Patches) -> None:
    """Let a model run its layers, `owner.name`, by a stack, where the stack takes the call."""
    for module in (owner, *stack._layers):
        patches.set_attribute(module, STACK, stack)
        own = module.__dict__.get(forward_slot(module))
        own = type(module).forward if own is None else own.__func__
        patches.set_forward(module, _owner_forward(own, _more(owner)) if module is owner else _layer_forward(own))
    stack.remember(owner, name)


def _more(owner: nn.Module) -> list[str]:
    """The arguments that other models do not have, such as features that Qwen3-VL adds between its layers."""
    return [name for name in inspect.signature(type(owner).forward).parameters if name not in _USUAL]


def _owner_forward(own: Callable[..., Any], more: list[str]) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return own(module, *args, **with_plan(module, args, kwargs))
        if module.training or torch.is_grad_enabled() or any(kwargs.get(name) is not None for name in more):
            return own(module, *args, **kwargs)
        stack = module.__dict__.get(STACK)
        if stack is None:
            return own(module, *args, **kwargs)
        with stack.running():
            return own(module, *args, **kwargs)

    return forward


def _layer_forward(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and len(args) == 1:
            stack = module.__dict__.get(STACK)
            run = None if stack is None else stack.run
            if run is not None:
                result = run(module, args[0], kwargs)
                if result is not None:
                    return result
        return own(module, *args, **kwargs)

    return forward
