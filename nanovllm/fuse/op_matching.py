"""Which of our ops computes what a graph writes out.

Every op has a reference in PyTorch. Traced, it is a pattern. Where the pattern occurs in a graph, and nothing inside of
it is needed elsewhere, the op can take the place of those kernels. So no rule has to be written for an op, not even a
plugin's.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Node as FxNode

from nanovllm.fuse.fx_nodes import fake
from nanovllm.fuse.module_export import TraceError
from nanovllm.fuse.op_graph import OpGraph, build
from nanovllm.fuse.value_graph import Value, ValueGraph
from nanovllm.kernels import Op, Tensors, all_ops


@dataclass(frozen=True, eq=False)
class Match:
    """An occurrence of an op in a graph.

    Attributes:
        op: its name.
        kernels: the fx nodes of the kernels that it replaces.
        arguments: what to call it with: fx nodes, numbers, words, None.
        outputs: the fx nodes that stand for what it returns, in its order; None for a result that is not used.
    """

    op: str
    kernels: frozenset[FxNode]
    arguments: Mapping[str, Any] = field(repr=False)
    outputs: tuple[FxNode | None, ...] = field(repr=False)


@dataclass(frozen=True, eq=False)
class OpPattern:
    """An op's reference. `inputs`: its tensor arguments; `fixed`: the others; `roots`: where matching starts."""

    op: Op
    values: ValueGraph
    inputs: Mapping[FxNode, str]
    fixed: Mapping[str, Any]
    outputs: tuple[Value, ...]
    roots: tuple[Value, ...]

    @property
    def names(self) -> set[str]:
        """The operators in it."""
        return {v.name for v in self.values.kernels}


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


def find(graph: OpGraph, progress: Callable[[str], None] = lambda text: None) -> list[Match]:
    """Every occurrence of an op in a graph, larger ones first.

    Args:
        progress: called with a line for each op. The first call for a dtype traces the references: some ten seconds.
    """
    values, found = ValueGraph(graph), []
    for k in graph:
        namespace, _, name = k.op.rpartition(".")
        if namespace == "nanovllm" and name in all_ops():
            arguments = dict(zip(all_ops()[name].records.flat.parameters, k.fx.args)) | dict(k.fx.kwargs)
            found.append(Match(name, frozenset({k.fx}), arguments, (k.fx,)))
    present = {t.dtype for node in graph.program.graph.nodes for t in fake(node)}
    dtypes = {t.dtype for k in graph for t in fake(k.fx)} & {torch.float32, torch.bfloat16, torch.float16}
    names, targets = {v.name for v in values.kernels}, list(dict.fromkeys(values.of.values()))
    for dtype, name in itertools.product(sorted(dtypes, key=str), all_ops()):
        if not packed_dtypes(name, dtype) <= present:
            continue
        progress(f"looking for {name} in {dtype}")
        for pattern in patterns(name, dtype):
            if pattern.names <= names:
                bindings = _bind_roots(pattern.roots, targets, {})
                found += [m for binding in bindings if (m := _accept(pattern, binding, graph)) is not None]
    unique: dict[tuple[str, frozenset[FxNode]], Match] = {}
    for m in found:
        unique.setdefault((m.op, m.kernels), m)
    return sorted(unique.values(), key=lambda m: (-len(m.kernels), m.op))


_PACKED = {torch.uint8, torch.int8, torch.float8_e4m3fn}
"""What packed weights are stored in: an op that takes one cannot occur in a graph that has none."""


@cache
def packed_dtypes(name: str, dtype: torch.dtype) -> frozenset[torch.dtype]:
    """The dtypes of packed weights that every example of an op has."""
    found = [{v.dtype for v in given.values() if isinstance(v, torch.Tensor)} for given in _examples(name, dtype)]
    return frozenset(_PACKED.intersection(*found)) if found else frozenset()


@cache
def patterns(name: str, dtype: torch.dtype) -> tuple[OpPattern, ...]:
    """The patterns of an op for inputs of a dtype; none where values decide what is computed: those stay ops."""
    declared, made = all_ops()[name], []
    for base in _examples(name, dtype):
        for more, fn in itertools.product(
            (lambda a: {}, *_OPTIONAL.get(name, ())), (declared.native, *_SPELLINGS.get(name, ()))
        ):
            made.append(_pattern(declared, fn, {**base, **more(base)}))
    return tuple(pattern for pattern in made if pattern is not None)


def _examples(name: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """An op's arguments in each variant, as small as can be. None of attention, experts and sampling, which cannot be
    traced.
    """
    declared = all_ops()[name]
    untraced = "attention" in name or name in ("sample", "moe_experts", "moe_experts_fp8")
    if declared.inputs is None or dtype not in declared.inputs.dtypes or untraced:
        return []
    # No dimension of 1, which would say nothing.
    known = [s for s in (*declared.inputs.small, *declared.inputs.decode) if min(s, default=0) > 0]
    shapes = [s for s in known if min(s) > 1] or known
    if not shapes:
        return []
    shape = min(shapes, key=lambda s: (sum(s), s))
    return [declared.inputs(Tensors(dtype, torch.device("cpu")), shape, v) for v in declared.inputs.variants]


def _pattern(declared: Op, fn: Callable[..., Any], arguments: dict[str, Any]) -> OpPattern | None:
    tensors = {k: v for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    fixed = {k: v for k, v in arguments.items() if k not in tensors}
    try:
        graph = build(lambda *given: fn(**dict(zip(tensors, given)), **fixed), tuple(tensors.values()))
    except TraceError:
        return None
    if not len(graph):
        return None
    values = ValueGraph(graph)
    (output,) = (n for n in graph.program.graph.nodes if n.op == "output")
    results = tuple(values.of[n] for n in output.args[0] if isinstance(n, FxNode) and n in values.of)
    users = len(graph.program.graph_signature.user_outputs)
    outputs = results[len(results) - users :] if users else ()
    writers = [values.of[k.fx] for k in graph if k.mutates]
    roots = tuple(dict.fromkeys((*(v for v in outputs if v.label is not None), *writers)))
    return OpPattern(declared, values, dict(zip(graph.inputs, tensors)), fixed, outputs, roots)


# ------------------------------------------------------------------------------------------------------------- matching

Binding = dict[Value, tuple[Value, FxNode]]
"""Value of the pattern -> the value of the graph, and the fx node by which it is named."""


def _bind_roots(roots: Sequence[Value], targets: Sequence[Value], binding: Binding) -> Iterator[Binding]:
    if not roots:
        yield binding
        return
    for target in targets:
        for extended in _bind([(roots[0], target, target.fx)], binding):
            yield from _bind_roots(roots[1:], targets, extended)


def _bind(pairs: list[tuple[Value, Value, FxNode]], binding: Binding) -> Iterator[Binding]:
    """Every way to extend a binding so that each first value, of a pattern, is the second one."""
    if not pairs:
        yield binding
        return
    (wanted, given, node), *rest = pairs
    if wanted in binding:
        if binding[wanted][0] is given:
            yield from _bind(rest, binding)
        return
    extended = {**binding, wanted: (given, node)}
    if wanted.label is None:
        yield from _bind(rest, extended)
        return
    if wanted.label != given.label or wanted.kernel != given.kernel or len(wanted.scalars) != len(given.scalars):
        return
    orders = itertools.permutations(given.operands) if wanted.commutes else (given.operands,)
    for order in orders:
        if all(g.enters_like(w) for w, g in zip(wanted.operands, order)):
            below = [(w.source, g.source, g.node) for w, g in zip(wanted.operands, order)]
            yield from _bind([*below, *rest], extended)


def _accept(pattern: OpPattern, binding: Binding, graph: OpGraph) -> Match | None:
    """The match of a binding, if the op can take the place of the kernels."""
    pairs = [(w, g) for w, (g, _) in binding.items() if w.kernel]
    kernels = frozenset(g.fx for _, g in pairs)
    if not len(kernels) == len(pairs) == len(pattern.values.graph):
        return None  # two of the pattern's kernels are one here, or some of them do not matter to its results
    arguments = _arguments(pattern, binding, pairs)
    # What is computed inside and needed outside must be among the results.
    outputs = tuple(binding[v][0].fx if v in binding else None for v in pattern.outputs)
    inner = [fx for fx in kernels - set(outputs) if not graph.of[fx].mutates]
    readers = {fx: [c.fx for c in graph.consumers.get(fx, ()) if c.fx not in kernels] for fx in kernels}
    if arguments is None or any(readers[fx] or fx in graph.returned for fx in inner):
        return None
    # Nothing outside may need one of the kernels and be needed by another.
    todo = [fx for outside in readers.values() for fx in outside]
    seen = set(todo)
    while todo:
        later = {c.fx for c in graph.consumers.get(todo.pop(), ())}
        if later & kernels:
            return None
        todo += later - seen
        seen |= later
    try:
        pattern.op.check({n: fake(a)[0] if isinstance(a, FxNode) else a for n, a in arguments.items()})
    except (ValueError, IndexError):
        return None
    return Match(pattern.op.name, kernels, arguments, outputs)


def _arguments(pattern: OpPattern, binding: Binding, pairs: list[tuple[Value, Value]]) -> dict[str, Any] | None:
    """What to call the op with; None if the graph's numbers are not those of the op."""
    bound: dict[str, Any] = {}
    for wanted, given in ((a, b) for w, g in pairs for a, b in zip(w.scalars, g.scalars)):
        names = [n for n, v in pattern.fixed.items() if isinstance(v, float) and v == wanted]
        if names and isinstance(given, (int, float)):
            if bound.setdefault(names[0], given) != given:
                return None
        elif wanted != given:
            return None
    for placeholder, name in pattern.inputs.items():
        if pattern.values.of[placeholder] not in binding:
            return None
        value, node = binding[pattern.values.of[placeholder]]
        # As it is named where it is used, or, if only that is reshaped, as it was before.
        rank = fake(placeholder)[0].dim()
        bound[name] = next((n for n in (node, value.fx) if fake(n)[0].dim() == rank), node)
    return {**pattern.fixed, **bound}
