"""Which of our ops computes what a graph writes out.

Every op has a reference in PyTorch. Traced, it is a pattern. Where the pattern occurs in a graph, and nothing inside of
it is needed elsewhere, the op can take the place of those kernels. So no rule has to be written for an op, not even a
plugin's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node as FxNode

from nanovllm.fuse.fx_nodes import fake
from nanovllm.fuse.op_graph import OpGraph, build
from nanovllm.fuse.tracing import TraceError
from nanovllm.fuse.value_graph import Value, ValueGraph, uses_match
from nanovllm.kernels import Op, Tensors, all_ops


@dataclass(frozen=True, eq=False)
class Match:
    """An occurrence of an op in a graph.

    Attributes:
        op: its name.
        kernels: the fx nodes of the kernels that it replaces.
        arguments: what to call it with: fx nodes, numbers, words, None.
        outputs: the fx nodes that stand for what it returns, in its order; None for a result that nobody reads.
    """

    op: str
    kernels: frozenset[FxNode]
    arguments: Mapping[str, Any] = field(repr=False)
    outputs: tuple[FxNode | None, ...] = field(repr=False)


@dataclass(frozen=True, eq=False)
class Pattern:
    """An op's reference. `inputs`: its tensor arguments; `fixed`: the others; `roots`: where matching starts."""

    op: Op
    network: ValueGraph
    inputs: Mapping[FxNode, str]
    fixed: Mapping[str, Any]
    outputs: tuple[Value, ...]
    roots: tuple[Value, ...]
    size: int


# Arguments that an op can do with or without, and whose examples have only one of the two.
_OPTIONAL: dict[str, list[Callable[[dict[str, Any]], dict[str, Any]]]] = {
    "linear": [lambda a: _bias(a)],
    "add_rms_norm_linear": [
        lambda a: _bias(a), lambda a: {"residual": None}, lambda a: {"residual": None, **_bias(a)},
    ],
    "add_rms_norm_gate_up": [lambda a: {"residual": None}],
    "linear_add_rms_norm": [lambda a: _bias(a)],
    "linear_bias_act": [lambda a: {"bias": None}],
}  # fmt: skip


def _bias(arguments: dict[str, Any]) -> dict[str, Any]:
    weight = arguments["weight"]
    return {"bias": weight.new_empty(weight.shape[0])}


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    residual = residual + x
    return _rms_norm(residual, weight, eps), residual


# Other ways to write what an op computes.
_SPELLINGS: dict[str, list[Callable[..., Any]]] = {
    "rms_norm": [_rms_norm],
    "add_rms_norm": [_add_rms_norm],
    "silu_and_mul": [
        lambda gate_up: (lambda g, u: u * F.silu(g))(*gate_up.chunk(2, -1)),
        lambda gate_up: (lambda g, u: g * torch.sigmoid(g) * u)(*gate_up.chunk(2, -1)),
    ],
}


def find(graph: OpGraph) -> list[Match]:
    """Every occurrence of an op in a graph, larger ones first."""
    network = ValueGraph(graph)
    found: list[Match] = []
    for k in graph:
        namespace, _, name = k.op.rpartition(".")
        if namespace == "nanovllm" and name in all_ops():
            arguments = dict(zip(all_ops()[name].records.flat.parameters, k.fx.args)) | dict(k.fx.kwargs)
            found.append(Match(name, frozenset({k.fx}), arguments, (k.fx,)))
    dtypes = {t.dtype for k in graph for t in fake(k.fx)} & {torch.float32, torch.bfloat16, torch.float16}
    names = {v.name for v in network.kernels}
    for dtype in sorted(dtypes, key=str):
        for name in all_ops():
            for pattern in patterns(name, dtype):
                if {v.name for v in pattern.network.kernels} <= names:
                    found += _occurrences(pattern, network)
    unique: dict[tuple[str, frozenset[FxNode]], Match] = {}
    for m in found:
        unique.setdefault((m.op, m.kernels), m)
    return sorted(unique.values(), key=lambda m: (-len(m.kernels), m.op))


@cache
def patterns(name: str, dtype: torch.dtype) -> tuple[Pattern, ...]:
    """The patterns of an op for inputs of a dtype; none of attention and sampling, which stay ops in a graph."""
    declared = all_ops()[name]
    if declared.inputs is None or dtype not in declared.inputs.dtypes or "attention" in name or name == "sample":
        return ()
    made = []
    for variant in declared.inputs.variants:
        # No dimension of 1, which would say nothing, and as small as can be.
        known = [s for s in (*declared.inputs.small, *declared.inputs.decode) if min(s, default=0) > 0]
        shapes = [s for s in known if min(s) > 1] or known
        shape = min(shapes, key=lambda s: (sum(s), s), default=None)
        if shape is None:
            continue
        base = declared.inputs(Tensors(dtype, torch.device("cpu")), shape, variant)
        for more in (lambda a: {}, *_OPTIONAL.get(name, ())):
            arguments = {**base, **more(base)}
            for fn in (declared.native, *_SPELLINGS.get(name, ())):
                pattern = _pattern(declared, fn, arguments)
                made += [pattern] if pattern is not None else []
    return tuple(made)


def _pattern(declared: Op, fn: Callable[..., Any], arguments: dict[str, Any]) -> Pattern | None:
    tensors = {k: v for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    fixed = {k: v for k, v in arguments.items() if k not in tensors}

    def call(*given: torch.Tensor) -> Any:
        return fn(**dict(zip(tensors, given)), **fixed)

    try:
        graph = build(call, tuple(tensors.values()))
    except TraceError:
        return None
    if not len(graph):
        return None
    network = ValueGraph(graph)
    inputs = dict(zip(graph.inputs, tensors))
    (output,) = (n for n in graph.program.graph.nodes if n.op == "output")
    outputs = tuple(network.of[n] for n in output.args[0] if isinstance(n, FxNode) and n in network.of)
    signature = graph.program.graph_signature
    users = len(signature.user_outputs)
    outputs = outputs[len(outputs) - users :] if users else ()
    writers = [network.of[k.fx] for k in graph if k.mutates]
    roots = tuple(dict.fromkeys((*(v for v in outputs if v.label is not None), *writers)))
    return Pattern(declared, network, inputs, fixed, outputs, roots, len(graph))


# ------------------------------------------------------------------------------------------------------------- matching

Binding = dict[Value, "tuple[Value, FxNode]"]


def _occurrences(pattern: Pattern, network: ValueGraph) -> Iterator[Match]:
    targets = list(dict.fromkeys(network.of.values()))
    for binding in _roots(pattern.roots, {}, targets):
        match = _accept(pattern, binding, network)
        if match is not None:
            yield match


def _roots(roots: tuple[Value, ...], binding: Binding, targets: list[Value]) -> Iterator[Binding]:
    if not roots:
        yield binding
        return
    for target in targets:
        for extended in _bind(roots[0], target, target.fx, binding):
            yield from _roots(roots[1:], extended, targets)


def _bind(wanted: Value, given: Value, actual: FxNode, binding: Binding) -> Iterator[Binding]:
    """Every way to extend a binding so that the value `wanted` of a pattern is `given`."""
    if wanted in binding:
        if binding[wanted][0] is given:
            yield binding
        return
    if wanted.label is None:
        yield {**binding, wanted: (given, actual)}
        return
    if wanted.label != given.label or wanted.kernel != given.kernel or len(wanted.scalars) != len(given.scalars):
        return
    orders = itertools.permutations(range(len(given.sources))) if wanted.commutes else (range(len(given.sources)),)
    for order in orders:
        if all(uses_match(w, given.uses[i]) for w, i in zip(wanted.uses, order)):
            yield from _operands(wanted, given, list(order), {**binding, wanted: (given, actual)})


def _operands(wanted: Value, given: Value, order: list[int], binding: Binding) -> Iterator[Binding]:
    if not order:
        yield binding
        return
    place = len(wanted.sources) - len(order)
    for extended in _bind(wanted.sources[place], given.sources[order[0]], given.actual[order[0]], binding):
        yield from _operands(wanted, given, order[1:], extended)


def _accept(pattern: Pattern, binding: Binding, network: ValueGraph) -> Match | None:
    graph = network.graph
    pairs = [(w, g) for w, (g, _) in binding.items() if w.kernel]
    kernels = frozenset(g.fx for _, g in pairs)
    if len(kernels) != pattern.size or len(pairs) != pattern.size:
        return None  # two of the pattern's kernels are one here, or some of them do not matter to its results
    if not _convex(graph, kernels):
        return None
    bound: dict[str, Any] = {}
    for w, g in pairs:
        for wanted, given in zip(w.scalars, g.scalars):
            names = [n for n, v in pattern.fixed.items() if isinstance(v, float) and v == wanted]
            if names and isinstance(given, (int, float)):
                if bound.setdefault(names[0], given) != given:
                    return None
            elif wanted != given:
                return None
    arguments = {**pattern.fixed, **bound}
    for placeholder, name in pattern.inputs.items():
        value = pattern.network.of[placeholder]
        if value not in binding:
            return None
        arguments[name] = _of_rank(binding[value], fake(placeholder)[0].dim())
    # What is computed inside and needed outside must be among the results.
    outputs = tuple(binding[v][0].fx if v in binding else None for v in pattern.outputs)
    returned = {binding[v][0].fx for v in pattern.outputs if v in binding}
    for fx in kernels - returned:
        outside = any(c.fx not in kernels for c in graph.consumers.get(fx, ()))
        if (outside or fx in graph.returned) and not graph.of[fx].mutates:
            return None
    try:
        pattern.op.check({n: fake(a)[0] if isinstance(a, FxNode) else a for n, a in arguments.items()})
    except (ValueError, IndexError):
        return None
    return Match(pattern.op.name, kernels, arguments, outputs)


def _convex(graph: OpGraph, kernels: frozenset[FxNode]) -> bool:
    """Whether nothing outside needs one of the kernels and is needed by another."""
    todo = [c.fx for fx in kernels for c in graph.consumers.get(fx, ()) if c.fx not in kernels]
    seen = set(todo)
    while todo:
        for c in graph.consumers.get(todo.pop(), ()):
            if c.fx in kernels:
                return False
            if c.fx not in seen:
                seen.add(c.fx)
                todo.append(c.fx)
    return True


def _of_rank(bound: tuple[Value, FxNode], rank: int) -> FxNode:
    """The fx node of an argument: as it is named where it is used, or, if only that is reshaped, as it was before."""
    value, actual = bound
    return next((n for n in (actual, value.fx) if fake(n)[0].dim() == rank), actual)
