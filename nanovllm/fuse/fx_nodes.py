"""What a node of a traced graph is: its operator's name and arguments, its tensors and their memory, and its effects.

An effect is writing to an argument, taking a value to the host or drawing random numbers. A view has none and runs no
kernel.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node as FxNode

# Marked as random for their dropout, which inference leaves out.
_SELDOM_RANDOM = ("scaled_dot_product_attention",)
# Take a number to the host, so that no kernel can hold them and what needs the number.
_HOST_READS = ("item", "_local_scalar_dense")
_DROPOUTS = ("dropout", "native_dropout", "alpha_dropout", "feature_dropout")


def overload(node: FxNode) -> torch._ops.OpOverload | None:
    """The registered operator that a node calls; None for a function of Python."""
    return node.target if isinstance(node.target, torch._ops.OpOverload) else None


def op_name(node: FxNode) -> str:
    """ "add" for aten.add.Tensor, "nanovllm.attention_decode" for an op of ours, else the target's own name."""
    op = overload(node)
    if op is not None:
        return op._schema.name.removeprefix("aten::").replace("::", ".")
    return getattr(node.target, "__name__", str(node.target))


def arg(node: FxNode, place: int) -> Any:
    """The positional argument at a place."""
    return node.args[place]


def argument(node: FxNode, name: str) -> Any:
    """An argument of a registered operator, given by place, by name or not at all; None if it has none of this name."""
    op = overload(node)
    for place, a in enumerate(op._schema.arguments if op is not None else ()):
        if a.name == name:
            return node.args[place] if place < len(node.args) else node.kwargs.get(name, a.default_value)
    return None


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of a node's traced value, which may be a tuple."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for v in value for t in tensors_of(v)]
    return []


def fake(node: FxNode) -> list[torch.Tensor]:
    """The tensors that a node gives, as traced: shapes and dtypes without values."""
    return tensors_of(node.meta.get("val"))


def shape_of(node: Any) -> tuple[int, ...]:
    """The shape of a node's first tensor; () where there is none."""
    tensors = fake(node) if isinstance(node, FxNode) else []
    return tuple(tensors[0].shape) if tensors else ()


def storages(node: FxNode) -> set[int]:
    """Which memory a node's tensors lie in. Tracing keeps track of it: a view has the storage of what it views."""
    return {t.untyped_storage()._cdata for t in fake(node)}


def mutated(node: FxNode) -> list[FxNode]:
    """The arguments that an operator writes to."""
    op = overload(node)
    if op is None or torch.Tag.inplace_view in op.tags:
        return []  # detach_, t_ and such write a description of memory, no memory
    given = (argument(node, a.name) for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return [n for n in given if isinstance(n, FxNode)]


def is_ignored(node: FxNode) -> bool:
    """Assertions of the tracer and arithmetic on sizes: no kernel, no value."""
    return not fake(node) and not mutated(node) and not reads_to_host(node)


def reads_to_host(node: FxNode) -> bool:
    """Whether an operator takes a tensor's value to the host, as `tensor.item()` does, after all kernels before."""
    return overload(node) is not None and op_name(node) in _HOST_READS


def draws_random(node: FxNode) -> bool:
    """Whether an operator draws random numbers, so that no two calls agree."""
    op = overload(node)
    if op is None or is_view(node):
        return False
    return torch.Tag.nondeterministic_seeded in op.tags and op_name(node) not in _SELDOM_RANDOM


def is_view(node: FxNode) -> bool:
    """Whether an operator only describes memory anew: no kernel runs."""
    if node.target is operator.getitem:
        return True
    if op_name(node) in _DROPOUTS:
        return node.args[2:3] == (False,) or node.kwargs.get("train") is False
    if overload(node) is None or mutated(node) or not fake(node):
        return False
    return storages(node) <= set().union(*map(storages, node.all_input_nodes))
