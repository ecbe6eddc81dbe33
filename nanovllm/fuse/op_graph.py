"""The graph that fusion decides about: kernels, what each reads, writes and computes, and their order."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch.fx import Node as FxNode

from nanovllm.fuse import classify, fx_nodes
from nanovllm.fuse.classify import Kind
from nanovllm.fuse.fx_nodes import arg, fake, shape_of
from nanovllm.fuse.matrix_products import matmul_sizes
from nanovllm.fuse.module_export import trace
from nanovllm.fuse.operator_flops import declared_cost, flops_of

Key = TypeVar("Key")
_PUTS = ("index_put", "index_put_")
# They write into an argument without reading it.
_OVERWRITES = ("index_put_", "copy_", "fill_", "zero_")


@dataclass(frozen=True)
class Read:
    """One value that a kernel reads.

    Attributes:
        value: the fx node that the kernel names, perhaps a view.
        base: the fx node that computed it: another kernel, or an input of the graph.
        num_bytes: how much of it this kernel reads; of a table, the rows that it takes.
        table: it is read through an index, so it must lie in memory as a whole.
    """

    value: FxNode
    base: FxNode
    num_bytes: int
    table: bool


@dataclass(frozen=True, eq=False)
class GraphKernel:
    """A node of the graph that runs a kernel.

    Attributes:
        index: its place in program order.
        domain: the shape that it iterates over: its output's; for a reduction, its input's.
        reduced: dimensions of the domain that it combines.
        sizes: rows, columns and inner size of a matrix product.
        constant: it depends on parameters alone.
        after: kernels that must run before it though it reads no tensor of theirs: they read or write the same memory,
            or take a number to the host that it is given.
        writes: bases whose memory it writes into.
    """

    fx: FxNode
    index: int
    op: str
    kind: Kind
    domain: tuple[int, ...]
    reduced: tuple[int, ...]
    sizes: tuple[int, int, int] | None
    reads: tuple[Read, ...]
    written_bytes: int
    flops: int
    dtype: torch.dtype
    constant: bool
    after: frozenset[FxNode]
    writes: frozenset[FxNode]

    @property
    def name(self) -> str:
        return self.fx.name

    @property
    def mutates(self) -> bool:
        return bool(self.writes)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do: PyTorch launches no kernel for an empty result."""
        return not self.written_bytes and all(0 in t.shape for t in fake(self.fx)) and bool(fake(self.fx))

    @property
    def bytes(self) -> int:
        return sum(r.num_bytes for r in self.reads) + self.written_bytes


@dataclass
class OpGraph:
    """Kernels in program order, and the exported program that they come from."""

    program: torch.export.ExportedProgram
    kernels: tuple[GraphKernel, ...]
    of: Mapping[FxNode, GraphKernel] = field(repr=False)
    returned: frozenset[FxNode] = field(repr=False)
    """Bases that the graph returns."""
    lasting: frozenset[int] = field(repr=False)
    """Storages that the graph is given or returns."""

    @cached_property
    def consumers(self) -> Mapping[FxNode, Sequence[GraphKernel]]:
        """Base -> kernels that read it, directly or through views."""
        return _by_key((r.base, k) for k in self.kernels for r in k.reads)

    @cached_property
    def followers(self) -> Mapping[FxNode, Sequence[GraphKernel]]:
        """GraphKernel -> those that must run after it: they read its result, or use the same memory."""
        return _by_key((fx, k) for k in self.kernels for fx in (*(r.base for r in k.reads), *k.after))

    @cached_property
    def writers(self) -> Mapping[FxNode, Sequence[GraphKernel]]:
        """Base -> kernels that write into its memory."""
        return _by_key((base, k) for k in self.kernels for base in k.writes)

    @cached_property
    def users(self) -> Mapping[int, Sequence[GraphKernel]]:
        """Storage -> kernels that make, read or write it."""
        return _by_key(
            (s, k) for k in self.kernels for n in (k.fx, *k.fx.all_input_nodes) for s in fx_nodes.storages(n)
        )

    def __iter__(self) -> Iterator[GraphKernel]:
        return iter(self.kernels)

    def __len__(self) -> int:
        return len(self.kernels)

    @property
    def inputs(self) -> list[FxNode]:
        return [n for n in self.program.graph.nodes if n.op == "placeholder"]


def _by_key(pairs: Iterable[tuple[Key, GraphKernel]]) -> dict[Key, list[GraphKernel]]:
    found: dict[Key, list[GraphKernel]] = {}
    for key, k in dict.fromkeys(pairs):
        found.setdefault(key, []).append(k)
    return found


def build(
    target: torch.nn.Module | torch.export.ExportedProgram | Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    known: Mapping[str, torch.Tensor] | None = None,
) -> OpGraph:
    """Trace `target` and account for every kernel.

    Args:
        args, kwargs: example arguments; tensors on the meta device will do.
        known: values of integer inputs, by argument name, which decide how much work an op has (lengths of sequences).

    Raises:
        TraceError: it cannot be traced.
    """
    program = trace(target, args, kwargs)
    return _Builder(program, known or {}).graph()


class _Builder:
    def __init__(self, program: torch.export.ExportedProgram, known: Mapping[str, torch.Tensor]) -> None:
        self.program = program
        inputs = program.graph_signature.inputs_to_parameters | program.graph_signature.inputs_to_buffers
        self.parameters = {n for n in program.graph.nodes if n.op == "placeholder" and n.name in inputs}
        self.known: dict[FxNode, torch.Tensor] = {n: known[n.name] for n in program.graph.nodes if n.name in known}
        self.views: dict[FxNode, tuple[FxNode, ...]] = {}  # value -> views from its base
        self.base: dict[FxNode, FxNode] = {}
        self.kernels: dict[FxNode, GraphKernel] = {}
        self.hosts: dict[FxNode, frozenset[FxNode]] = {}  # node -> reads to the host that it has numbers from
        self.writers: dict[int, list[FxNode]] = {}  # storage -> kernels that wrote it, latest last
        self.readers: dict[int, list[FxNode]] = {}

    def graph(self) -> OpGraph:
        returned: set[FxNode] = set()
        lasting: set[int] = set()
        for node in self.program.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self.base[node], self.views[node] = node, ()
                lasting |= fx_nodes.storages(node)
                if node.op == "get_attr":
                    self.parameters.add(node)
            elif node.op == "output":
                returned = {self.base[n] for n in node.all_input_nodes}
                lasting.update(s for n in node.all_input_nodes for s in fx_nodes.storages(n))
            elif fx_nodes.is_ignored(node):
                self.hosts[node] = self._hosts(node)  # arithmetic on numbers
            elif fx_nodes.is_view(node):
                self._view(node)
            else:
                self._kernel(node)
        return OpGraph(
            self.program, tuple(self.kernels.values()), self.kernels, frozenset(returned), frozenset(lasting)
        )

    def _view(self, node: FxNode) -> None:
        source = node.all_input_nodes[0]
        self.base[node] = self.base[source]
        self.views[node] = (*self.views[source], node)
        self.hosts[node] = self._hosts(node)
        if callable(node.target) and all(n in self.known for n in node.all_input_nodes):
            self.known[node] = node.target(*torch.fx.node.map_arg(node.args, self.known.__getitem__), **node.kwargs)

    def _kernel(self, node: FxNode) -> None:
        kind, name, written = classify.kind_of(node), fx_nodes.op_name(node), fx_nodes.mutated(node)
        operands = [n for n in node.all_input_nodes if fake(n)]
        domain = shape_of(node)
        reduced: tuple[int, ...] = ()
        if name in _PUTS:  # works on the values that it puts
            domain = shape_of(arg(node, 2)) or domain
        elif kind is Kind.REDUCTION:
            domain, reduced = shape_of(arg(node, 0)), classify.reduced_dims(node) or ()
        reads = tuple(self._read(node, n, name) for n in operands if not (n in written and name in _OVERWRITES))
        output_bytes = _written_bytes(node, name, written)
        declared = declared_cost(node, self.known) if kind is Kind.OPAQUE else None
        if declared is not None:  # what the op declares is truer than the size of its operands
            scale = max(0, declared[0] - output_bytes) / max(1, sum(r.num_bytes for r in reads))
            reads = tuple(Read(r.value, r.base, int(r.num_bytes * scale), True) for r in reads)
        hosts = self._hosts(node)
        bases = [self.base[n] for n in operands]
        fixed = all(b in self.parameters or (b in self.kernels and self.kernels[b].constant) for b in bases)
        self.kernels[node] = GraphKernel(
            node, len(self.kernels), name, kind, domain, reduced, matmul_sizes(node) if kind is Kind.MATMUL else None,
            reads, output_bytes, flops_of(node, kind, self.known), fake(node)[0].dtype if fake(node) else torch.float32,
            fixed and not written and not hosts, self._order(node, written, operands) | hosts,
            frozenset(self.base[n] for n in written),
        )  # fmt: skip
        if fx_nodes.reads_to_host(node):
            self.hosts[node] = frozenset({node})
        # What writes into memory gives that memory back: its result is a value of its own all the same.
        self.base[node], self.views[node] = node, ()

    def _hosts(self, node: FxNode) -> frozenset[FxNode]:
        """The reads to the host whose numbers an operator is given, also through views that such numbers describe."""
        through = (v for n in node.all_input_nodes for v in (n, *self.views.get(n, ())))
        return frozenset().union(*(self.hosts.get(n, ()) for n in through))

    def _read(self, node: FxNode, operand: FxNode, name: str) -> Read:
        stored = _stored_bytes(operand)
        first = operand is node.args[0]
        table = first and name in classify.GATHERS and name not in _PUTS
        if table:
            stored = min(stored, sum(t.numel() * t.element_size() for t in fake(node)))
        if first and name in ("nll_loss_nd", "nll_loss"):  # one element of each row
            stored = min(stored, math.prod(shape_of(arg(node, 1))) * fake(operand)[0].element_size())
        return Read(operand, self.base[operand], stored, table)

    def _order(self, node: FxNode, written: list[FxNode], operands: list[FxNode]) -> frozenset[FxNode]:
        """Kernels that this one must follow: those that wrote what it reads or writes, or read what it writes."""
        after: set[FxNode] = set()
        for storage in (s for n in operands for s in fx_nodes.storages(n)):
            after.update(self.writers.get(storage, ()))
            self.readers.setdefault(storage, []).append(node)
        for storage in (s for n in written for s in fx_nodes.storages(n)):
            after.update(self.readers.get(storage, ()))
            self.writers.setdefault(storage, []).append(node)
        after.update({self.base[n] for n in written} & self.kernels.keys())
        return frozenset(after - {node})


def _stored_bytes(node: FxNode) -> int:
    """Bytes of memory behind a value: a dimension that is only expanded counts once."""
    return sum(
        math.prod(n for n, stride in zip(t.shape, t.stride()) if stride or n == 0) * t.element_size()
        for t in fake(node)
    )


def _written_bytes(node: FxNode, name: str, written: list[FxNode]) -> int:
    if name in _PUTS and written:  # only the rows that are put
        table = arg(node, 0)
        return min(_stored_bytes(table), math.prod(shape_of(arg(node, 2))) * fake(table)[0].element_size())
    if written and not any(fx_nodes.storages(node) & fx_nodes.storages(n) for n in written):
        return sum(_stored_bytes(n) for n in (node, *written))
    return _stored_bytes(node)
