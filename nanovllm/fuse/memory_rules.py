"""Writing in place: when kernels that use the same memory may be one kernel, and which memory exists within it only.

The programs of a fused kernel run at the same time, and none waits for another. So only the program that writes an
element may use it, in the same order as before. Work that several programs repeat (a prologue, for every tile of
columns) must not write memory, unless only this kernel sees that memory: then it is registers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch.fx import Node as FxNode

from nanovllm.fuse.classify import Kind
from nanovllm.fuse.fx_nodes import fake, mutated, shape_of, storages
from nanovllm.fuse.op_graph import GraphKernel, OpGraph

_SCATTERS = ("index_put", "index_put_")
_COPIES = ("clone", "copy_", "fill_", "zero_")


def why_not(members: Iterable[GraphKernel]) -> str | None:
    """None if a program may do all that it does to memory on its own, else the reason."""
    inner = {k.fx: k for k in members}
    for k in inner.values():
        before = k.after & inner.keys()
        if not before:
            continue
        behind = producers(k, inner)
        for p in (inner[fx] for fx in before):
            if p not in behind:
                return f"{k.name} and {p.name} use the same memory in an order that a fused kernel does not keep"
            reason = _apart(p, k)
            if reason is not None:
                return reason
    scattered = {k.fx for k in inner.values() if k.op in _SCATTERS}
    for k in inner.values():
        if any(r.base in scattered for r in k.reads):
            return f"{k.name} reads memory that other programs of the same kernel write"
    return None


def needed(k: GraphKernel) -> set[int]:
    """The memory that must be as it is while a kernel runs: what it reads, and what it writes in place."""
    return written(k).union(*(storages(r.value) for r in k.reads))


def written(k: GraphKernel) -> set[int]:
    """The memory that a kernel writes in place."""
    return set().union(*map(storages, mutated(k.fx)))


def private(graph: OpGraph, k: GraphKernel, own: Iterable[FxNode]) -> bool:
    """Whether only kernels of `own` make, write and read what `k` writes in place: it need not exist in memory then."""
    own = set(own)
    made = set().union(*(_new_memory(fx) for fx in own))
    return all(
        s in made and s not in graph.lasting and all(user.fx in own for user in graph.users.get(s, ()))
        for s in written(k)
    )


def place(k: GraphKernel) -> tuple[object, ...]:
    """The part of memory that a kernel writes: equal for two that write the same elements."""
    return tuple((frozenset(storages(n)), *_geometry(n)) for n in mutated(k.fx) or [k.fx])


def overwritten(k: GraphKernel, later: Iterable[GraphKernel]) -> bool:
    """Whether one of the kernels that come later in a group writes all that `k` writes."""
    return any(c.mutates and place(c) == place(k) for c in later)


def _new_memory(fx: FxNode) -> set[int]:
    """The memory that a kernel's result lies in, if it is new."""
    return storages(fx) - set().union(*map(storages, fx.all_input_nodes))


def producers(k: GraphKernel, inner: Mapping[FxNode, GraphKernel]) -> set[GraphKernel]:
    """The kernels of `inner` whose results reach `k`."""
    found: set[GraphKernel] = set()
    todo = [k]
    while todo:
        for r in todo.pop().reads:
            if r.base in inner and inner[r.base] not in found:
                found.add(inner[r.base])
                todo.append(inner[r.base])
    return found


def _apart(p: GraphKernel, k: GraphKernel) -> str | None:
    """None if `k`, which comes later, uses of the memory of `p` element by element what `p` uses, else why not.

    What it reads of p's result itself is a matter of rows, as for any other result.
    """
    through = {r.value for r in k.reads if r.base is p.fx}
    for a, a_writes in _uses(p):
        for b, b_writes in _uses(k):
            if not (a_writes or b_writes) or not storages(a) & storages(b) or (a_writes and b in through):
                continue
            if p.kind is Kind.MATMUL and not a_writes:
                return f"{k.name} writes memory that {p.name} reads in many tiles"
            if _geometry(a) != _geometry(b):
                return f"{p.name} and {k.name} use the same memory through different views"
            if p.op in _SCATTERS or k.op in _SCATTERS or not (a is p.fx or _in_place(p, a)) or not _in_place(k, b):
                return f"{k.name} uses memory that other programs of the same kernel use as {p.name}"
    return None


def _uses(k: GraphKernel) -> list[tuple[FxNode, bool]]:
    """The values whose memory a kernel uses, and whether it writes them."""
    written = mutated(k.fx)
    return [(r.value, False) for r in k.reads if r.value not in written] + [(n, True) for n in written or [k.fx]]


def _in_place(k: GraphKernel, value: FxNode) -> bool:
    """Whether a kernel uses each element of a value where it iterates."""
    if k.kind is Kind.INJECTIVE and k.op not in _COPIES or k.kind is Kind.OPAQUE:
        return False
    return shape_of(value) == k.domain


def _geometry(n: FxNode) -> list[tuple[object, ...]]:
    return [(tuple(t.shape), tuple(t.stride()), t.storage_offset(), t.dtype) for t in fake(n)]
