"""May these kernels be one kernel? Rules of shape, dependence and single consumers.

A fused kernel without a matrix product gives each of its programs one *row*: the first dimensions of every member's
domain have one common product, the number of rows, and what a member reads of another lies in the same row. A pointwise
chain has rows of one element, a norm rows of a hidden vector, a rotation rows of a head.

With a matrix product the programs hold tiles of it. What computes its left operand row by row (a norm) may run before
the product in each of them, a prologue. What is pointwise in its result may run after it on the accumulators, an
epilogue. What computes its right operand (the dequantisation of a weight) must be pointwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch.fx import Node as FxNode

from nanovllm.fuse import memory_rules
from nanovllm.fuse.classify import GATHERS, PER_ELEMENT, Kind
from nanovllm.fuse.fx_nodes import argument, fake, shape_of
from nanovllm.fuse.matrix_products import CONVOLUTIONS, matmul_bias, matmul_operands, rows_in_order
from nanovllm.fuse.memory_rules import producers
from nanovllm.fuse.op_graph import GraphKernel, OpGraph, Read

# Give their elements in the order in which they are given them.
_ELEMENT_COPIES = ("clone", "contiguous", "to", "_to_copy", "copy_", "full_like", "zeros_like", "ones_like")
_COPIES_IN_ANOTHER_SHAPE = ("reshape", "flatten")
# A parameter's own arithmetic (1 + weight) is done again by every program, which must be cheap.
_MOST_CONSTANT = 65536


def why_not(graph: OpGraph, kernels: Iterable[GraphKernel]) -> str | None:
    """None if the kernels can be one, else the reason. The caller looks for cycles, which depend on other groups."""
    members = sorted(kernels, key=lambda k: k.index)
    if len(members) < 2:
        return None
    for k in members:
        if k.empty:
            return f"the result of {k.name} ({k.op}) is empty: no kernel runs"
        if k.kind is Kind.OPAQUE:
            return f"{k.name} ({k.op}) is opaque: what it does inside is not known"
    reason = memory_rules.why_not(members)
    if reason is not None:
        return reason
    products = [k for k in members if k.kind is Kind.MATMUL]
    if len(products) > 1:
        return f"{products[0].name} and {products[1].name} are two matrix products"
    if products:
        return _product(graph, members, products[0])
    return None if rows(members) is not None else "no rows in common: a program would need what another one computes"


def rows(members: list[GraphKernel]) -> int | None:
    """How many rows kernels without a product have in common, the most that are possible; None if they have none."""
    inner = {k.fx: k for k in members}
    candidates = None
    for k in members:
        if _repeated(k):
            continue
        free = min(k.reduced, default=len(k.domain))
        products = {math.prod(k.domain[:i]) for i in range(free + 1)}
        candidates = products if candidates is None else candidates & products
    if candidates is None:  # all are of parameters
        candidates = {1}
    return next((r for r in sorted(candidates, reverse=True) if _stays_in_rows(members, inner, r)), None)


def parts(members: list[GraphKernel], product: GraphKernel) -> tuple[list[GraphKernel], list[GraphKernel]]:
    """(prologue, epilogue) of a product: what it needs, and what needs it with whatever else that reads."""
    inner = {k.fx: k for k in members}
    behind = {product}  # members are in program order, so one pass finds all
    for k in members:
        if any(inner.get(r.base) in behind for r in k.reads):
            behind.add(k)
    needed = set().union(*(producers(k, inner) for k in behind - {product}))
    after = (behind | needed) - producers(product, inner) - {product}
    return [k for k in members if k not in after and k is not product], [k for k in members if k in after]


def _product(graph: OpGraph, members: list[GraphKernel], product: GraphKernel) -> str | None:
    if product.sizes is None:
        return f"{product.name}: a product of vectors"
    num_rows, columns, _ = product.sizes
    before, after = parts(members, product)
    own = {k.fx for k in members}
    left, right = matmul_operands(product.fx)
    bias = matmul_bias(product.fx)
    inner = {k.fx: k for k in before}
    by_value = {r.value: r for r in product.reads}
    if before and product.op in CONVOLUTIONS:
        return f"{before[0].name} comes before the convolution {product.name}, every window of which would do it again"
    for k in before:
        if k.mutates and not memory_rules.private(graph, k, own):
            return f"{k.name} writes memory in place, and before {product.name} every tile of it would do so again"
    for k in after:
        used = next(
            (p for p in (*before, product) if p.fx in k.after and memory_rules.written(k) & memory_rules.needed(p)),
            None,
        )
        if used is not None:
            return f"{k.name} writes memory that {used.name} reads for many tiles of {product.name}"
        if any(r.base in inner for r in k.reads):
            return f"{k.name} reads, after the product {product.name}, what is computed before it"
    # Single consumers: what only passes through the tiles need not exist in memory.
    if after and (product.fx in graph.returned or any(k.fx not in own for k in graph.consumers[product.fx])):
        return f"the product {product.name} has consumers outside of its epilogue"
    for operand in (left, right, bias):
        base = by_value[operand].base if operand in by_value else None
        if base in inner and (base in graph.returned or any(k is not product for k in graph.consumers[base])):
            return f"{base.name} has other consumers than the product {product.name}"
    for operand, name in ((right, "right operand"), (bias, "bias")):
        for k in operand_side(operand, product, inner):
            if k.kind not in PER_ELEMENT or math.prod(k.domain) != math.prod(shape_of(operand)):
                return f"{k.name} computes the {name} of {product.name} and is not pointwise"
    row_side = row_members(before, product)
    if row_side and not _stays_in_rows(row_side, {k.fx: k for k in row_side}, num_rows):
        return f"what computes the left operand of {product.name} does not stay within its {num_rows} rows"
    if row_side and not rows_in_order(product.fx):
        return f"the left operand of {product.name} has its rows in another order"
    if row_side and (left_read := by_value.get(left)) is not None and left_read.base in inner:
        if not _edge_in_row(left_read, shape_of(left), num_rows):
            return f"the left operand of {product.name} is rearranged on its way"
    return _epilogue(after, product, num_rows, columns)


def row_members(before: list[GraphKernel], product: GraphKernel) -> list[GraphKernel]:
    """The kernels before a product that work row by row: all that its right operand and its bias do not need alone."""
    inner = {k.fx: k for k in before}
    operands = (*matmul_operands(product.fx), matmul_bias(product.fx))
    left, right, bias = (operand_side(n, product, inner) for n in operands)
    return [k for k in before if k not in right and (k not in bias or k in left)]


def operand_side(operand: FxNode | None, product: GraphKernel, inner: Mapping[FxNode, GraphKernel]) -> set[GraphKernel]:
    """The kernels of `inner` that compute an operand of a product."""
    start = next((inner[r.base] for r in product.reads if r.value is operand and r.base in inner), None)
    return set() if start is None else {start} | producers(start, inner)


def _epilogue(after: list[GraphKernel], product: GraphKernel, num_rows: int, columns: int) -> str | None:
    inner = {k.fx: k for k in (*after, product)}
    widths = set()
    for k in after:
        if k.kind is Kind.REDUCTION:
            return f"{k.name} reduces over what {product.name} computes in many tiles"
        if k.kind not in PER_ELEMENT:
            return f"{k.name} ({k.op}) after {product.name} is not pointwise"
        if _repeated(k):
            continue
        size = math.prod(k.domain)
        if size % num_rows or columns % max(1, size // num_rows):
            return f"{k.name} has another shape than {product.name}"
        widths.add(size // num_rows)
        for r in k.reads:
            if r.base in inner and not inner[r.base].constant and not _edge_in_row(r, k.domain, num_rows):
                return f"{k.name} reads {product.name} in another order"
    # All of the columns, or equal shares of them (gate and up): a program then computes the same tile of each share.
    return None if len(widths) <= 1 else f"the epilogue of {product.name} mixes widths {sorted(widths)}"


def _stays_in_rows(members: list[GraphKernel], inner: dict[FxNode, GraphKernel], num_rows: int) -> bool:
    for k in members:
        if _repeated(k):
            continue
        lead = _lead(k.domain, num_rows)
        if lead is None or any(d < lead for d in k.reduced):
            return False
        for r in k.reads:
            producer = inner.get(r.base)
            if producer is None or _repeated(producer):
                continue
            if r.table or (k.kind is Kind.INJECTIVE and not _moves_in_row(k, r, lead)):
                return False
            if not _edge_in_row(r, k.domain, num_rows, k.op in (*GATHERS, *_COPIES_IN_ANOTHER_SHAPE)):
                return False
    return True


def _repeated(k: GraphKernel) -> bool:
    return k.constant and math.prod(k.domain) <= _MOST_CONSTANT


def _moves_in_row(k: GraphKernel, r: Read, lead: int) -> bool:
    """Whether an injective operator takes its elements from within the row."""
    if k.op in ("cat", "stack"):
        return argument(k.fx, "dim") % len(k.domain) >= lead
    if k.op in ("index_put", "index_put_"):
        return r.value is not k.fx.args[0]
    if k.op in _COPIES_IN_ANOTHER_SHAPE:
        return _lead(shape_of(r.value), math.prod(k.domain[:lead])) is not None
    return k.op in (*_ELEMENT_COPIES, *GATHERS)


def _edge_in_row(r: Read, domain: tuple[int, ...], num_rows: int, from_left: bool = False) -> bool:
    """Whether row i of the consumer reads of the producer's row i only."""
    if r.value is not r.base and not _view_keeps_rows(r, num_rows):
        return False
    shape = shape_of(r.value)
    if from_left:  # indices, and copies in another shape: rows are counted from the front
        return _lead(shape, num_rows) is not None
    # Broadcasting adds dimensions in front: a value [n] beside [n, n] lies along the columns, not the rows.
    lead = _lead(domain, num_rows)
    return lead is not None and math.prod(((1,) * (len(domain) - len(shape)) + shape)[:lead]) == num_rows


def _view_keeps_rows(r: Read, num_rows: int) -> bool:
    """Whether row i of a view lies within row i of the value that it is a view of, by their places in memory."""
    (view, *_), bases = fake(r.value), fake(r.base)
    memory = view.untyped_storage()._cdata
    base = next((t for t in bases if t.untyped_storage()._cdata == memory), bases[0])
    offset = view.storage_offset() - base.storage_offset()
    if (view.shape, view.stride(), offset) == (base.shape, base.stride(), 0):
        return True
    leads = _lead(tuple(base.shape), num_rows), _lead(tuple(view.shape), num_rows)
    if None in leads:
        return False
    (rows, inside), (view_rows, view_inside) = (_steps(t, lead) for t, lead in zip((base, view), leads))
    length = sum((n - 1) * stride for n, stride in inside)
    apart = all(stride > length for _, stride in rows)  # no row lies between the elements of another
    within = 0 <= offset and offset + sum((n - 1) * stride for n, stride in view_inside) <= length
    return apart and within and rows == view_rows


def _steps(t: torch.Tensor, lead: int | None) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(size, stride) of the dimensions that are the rows, and of those within a row; neighbours are merged."""
    found: tuple[list[tuple[int, int]], ...] = ([], [])
    for d, (n, stride) in enumerate(zip(t.shape, t.stride())):
        steps = found[d >= (lead or 0)]
        if n != 1 and steps and steps[-1][1] == n * stride:
            steps[-1] = (steps[-1][0] * n, stride)
        elif n != 1:
            steps.append((n, stride))
    return found[0], found[1]


def _lead(shape: tuple[int, ...], num_rows: int) -> int | None:
    """How many first dimensions make up the rows; None if they cannot."""
    product = 1
    for i in range(len(shape) + 1):
        if product == num_rows:
            return i
        product *= shape[i] if i < len(shape) else 1
    return None
