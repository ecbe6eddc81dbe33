"""What a node of a traced graph is: its operator's name and arguments, its tensors and their memory, and what it does besides computing:
writing to an argument, taking a value to the host, drawing random numbers, or nothing, as a view.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node as FxNode

# Marked as random for their dropout, which inference leaves out.
_SELDOM_RANDOM = ("scaled_dot_product_attention",)
# Take a number to the host, so that no kernel can hold them and what needs the number.
HOST_READS = ("item", "_local_scalar_dense")


def op_name(node: FxNode) -> str:
    """ "add" for aten.add.Tensor, "nanovllm.attention_decode" for an op of ours, else the target's own name."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        packet = target._schema.name
        return packet.removeprefix("aten::").replace("::", ".")
    if target is operator.getitem:
        return "getitem"
    return getattr(target, "__name__", str(target))


def argument(node: FxNode, name: str) -> Any:
    """An argument of an operator, given by place, by name or not at all."""
    arguments = node.target._schema.arguments
    place = next(i for i, a in enumerate(arguments) if a.name == name)
    return node.args[place] if place < len(node.args) else node.kwargs.get(name, arguments[place].default_value)


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


def storages(node: FxNode) -> set[int]:
    """Which memory a node's tensors lie in. Tracing keeps track of it: a view has the storage of what it views."""
    return {t.untyped_storage()._cdata for t in fake(node)}


def mutated(node: FxNode) -> list[FxNode]:
    """The arguments that an operator writes to."""
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.inplace_view in node.target.tags:
        return []  # detach_, t_ and such write a description of memory, no memory
    written = []
    for i, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = node.args[i] if i < len(node.args) else node.kwargs.get(argument.name)
            written += [given] if isinstance(given, FxNode) else []
    return written


def is_ignored(node: FxNode) -> bool:
    """Assertions of the tracer and arithmetic on sizes: no kernel, no value."""
    return not fake(node) and not mutated(node) and not reads_to_host(node)


def reads_to_host(node: FxNode) -> bool:
    """Whether an operator takes a tensor's value to the host, as `tensor.item()` does: work waits for all kernels before it."""
    return isinstance(node.target, torch._ops.OpOverload) and op_name(node) in HOST_READS


def draws_random(node: FxNode) -> bool:
    """Whether an operator draws random numbers, so that no two calls agree."""
    if not isinstance(node.target, torch._ops.OpOverload) or is_view(node):
        return False
    return torch.Tag.nondeterministic_seeded in node.target.tags and op_name(node) not in _SELDOM_RANDOM


def is_view(node: FxNode) -> bool:
    """Whether an operator only describes memory anew: no kernel runs."""
    if node.target is operator.getitem:
        return True
    if op_name(node) in ("dropout", "native_dropout", "alpha_dropout", "feature_dropout"):
        return node.args[2:3] == (False,) or node.kwargs.get("train") is False
    if mutated(node) or not isinstance(node.target, torch._ops.OpOverload) or not fake(node):
        return False
    inputs = set().union(*(storages(n) for n in node.all_input_nodes)) if node.all_input_nodes else set()
    return storages(node) <= inputs
