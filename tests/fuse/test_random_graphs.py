"""Groups of random graphs: run one after the other they give what the graph gives, and no row reaches another one."""

import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanovllm.fuse import legality
from nanovllm.fuse.group_module import values
from nanovllm.fuse.grouping import Grower
from nanovllm.fuse.op_graph import build
from tests.fuse.modules import run_in_order

ROWS, SIZE = 4, 6


# Each takes two values and gives a new one, or fails or gives None if they do not fit.
OPS = [
    torch.add, torch.mul, lambda a, b: torch.maximum(a, b) - b,
    lambda a, b: torch.tanh(a), lambda a, b: F.gelu(a), lambda a, b: a * 0.5 + 1,
    lambda a, b: a.double().mean(-1, keepdim=True).float(),
    lambda a, b: a.sum(0) if a.dim() > 1 else None,
    lambda a, b: a.sum(0, keepdim=True), lambda a, b: a.amax(-1),
    lambda a, b: torch.softmax(a, -1), lambda a, b: torch.softmax(a, 0),
    lambda a, b: F.layer_norm(a, a.shape[-1:]), lambda a, b: torch.cumsum(a, 0),
    lambda a, b: a.t() if a.dim() == 2 else None,
    lambda a, b: a.reshape(-1),
    lambda a, b: a.reshape(a.shape[0], -1, 2) if a.shape[-1] % 2 == 0 and a.dim() == 2 else None,
    lambda a, b: a.flatten(0, 1) if a.dim() == 3 else None,
    lambda a, b: a.transpose(0, 1) if a.dim() == 3 else None,
    lambda a, b: a[..., : a.shape[-1] // 2] if a.shape[-1] > 1 else None,
    lambda a, b: a[1:] if a.shape[0] > 1 else None,
    lambda a, b: a.unsqueeze(1), lambda a, b: a.chunk(2, -1)[1] if a.shape[-1] % 2 == 0 else None,
    lambda a, b: torch.cat((a, b), -1) if a.shape[:-1] == b.shape[:-1] and a.dim() == b.dim() else None,
    lambda a, b: torch.cat((a, b), 0) if a.shape[1:] == b.shape[1:] and a.dim() == b.dim() else None,
    lambda a, b: a.index_put((torch.arange(a.shape[0]).flip(0),), b) if a.shape == b.shape else None,
    lambda a, b: a.clone().index_put_((torch.arange(a.shape[0] - 1),), b[1:]) if a.shape == b.shape else None,
    lambda a, b: torch.roll(a, 1, -1), lambda a, b: torch.flip(a, (0,)),
    lambda a, b: a.repeat(2, *([1] * (a.dim() - 1))), lambda a, b: a.index_select(0, torch.arange(a.shape[0]).flip(0)),
    lambda a, b: F.linear(a, b) if b.dim() == 2 and a.dim() > 1 and a.shape[-1] == b.shape[-1] else None,
    lambda a, b: a @ b if a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0] else None,
    lambda a, b: a.mul_(1.5) if a.dim() == 1 else a.clone().add_(1),
    lambda a, b: a.add_(b) if a.shape == b.shape else None,
    lambda a, b: a.tanh_(), lambda a, b: a.sub_(a.mean(-1, keepdim=True)),
    lambda a, b: a.add_(b.t()) if b.dim() == 2 else None,
    lambda a, b: a.swapdims(0, 1) if a.dim() > 1 else None, lambda a, b: a.tensor_split(2)[0] if a.dim() else None,
    lambda a, b: a.expand(3, *a.shape).contiguous(),
]  # fmt: skip


class Steps(torch.nn.Module):
    """Applies ops to an ever longer list of values; the last ones are returned."""

    def __init__(self, steps, keep, args):
        super().__init__()
        self.keep = keep
        self.weight = torch.nn.Parameter(torch.randn(SIZE), requires_grad=False)
        self.matrix = torch.nn.Parameter(torch.randn(SIZE, SIZE), requires_grad=False)
        self.steps = []
        found = self.first(*(a.clone() for a in args))
        for op, a, b in steps:
            # Mostly of the latest, so that chains grow.
            step = op, (len(found) - 1 - a) % len(found), (len(found) - 1 - b) % len(found)
            try:
                made = self.apply_step(step, found)
            except (RuntimeError, IndexError):
                continue
            if made is not None and 0 < made.numel() <= 2048:
                self.steps.append(step)
                found.append(made)

    def first(self, x, y):
        return [x * 1.0, y, self.weight * 1.0, self.matrix * 1.0]

    @staticmethod
    def apply_step(step, found):
        op, a, b = step
        return OPS[op](found[a], found[b])

    def forward(self, x, y):
        found = self.first(x, y)
        for step in self.steps:
            found.append(self.apply_step(step, found))
        return tuple(found[-self.keep :])


_steps = st.lists(
    st.tuples(st.integers(0, len(OPS) - 1), st.sampled_from([0, 0, 0, 1, 2, 4]), st.integers(0, 6)),
    min_size=3,
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(_steps, st.integers(1, 2), st.integers(0, 1000))
@example([(0, 0, 0), (19, 4, 0), (27, 0, 0), (34, 0, 0)], 1, 0)  # 12 elements expanded to 12 rows of 3: other rows
def test_random_graphs(steps, keep, seed):
    torch.manual_seed(seed)
    args = torch.randn(ROWS, SIZE), torch.randn(ROWS, SIZE)
    module = Steps(steps, keep, args)
    graph = build(module, args)
    groups = Grower(graph).groups()
    assert sorted(k.index for g in groups for k in g.kernels) == list(range(len(graph)))
    run_in_order(graph, groups, args)
    for group in groups:
        reason = legality.why_not(graph, group.kernels)
        assert reason is None, reason
        if len(group.kernels) > 1 and not any(k.mutates for k in group.kernels):
            _stays_where_it_belongs(graph, group, args)


def _stays_where_it_belongs(graph, group, args):
    """Change one row (with a product: one element of it) of a member's result: no member may change in another one."""
    members = list(group.kernels)
    product = group.product
    if product is None:
        count = legality.rows(members)
        changed, later = members, members
    else:
        count = product.sizes[0]
        before, after = legality.parts(members, product)
        changed, later = [k for k in before if k.fx not in _weights(product, before)] + [product], [product, *after]
    row = count - 1
    for k in changed:
        if k.constant or k.fx.meta["val"].numel() % count:
            continue

        def run(poke, k=k):
            seen = {}

            class Poked(torch.fx.Interpreter):
                def run_node(self, n):
                    out = super().run_node(n)
                    if poke and n is k.fx:
                        out = out.clone()
                        flat = out.reshape(count, -1)
                        flat[row, -1] += 3.0
                        out = flat.reshape(out.shape)
                    seen[n] = out.clone() if isinstance(out, torch.Tensor) else out  # it may be written to later
                    return out

            inputs = values(graph, [a.clone() for a in args], {})
            with torch.no_grad():
                Poked(graph.program.graph_module).run(*(inputs[n].clone() for n in graph.inputs))
            return seen

        plain, poked = run(False), run(True)
        # Only changes that reach a member through members count: what leaves the group comes back in a later one.
        reached = {k.fx}
        for other in members:
            if any(r.base in reached for r in other.reads):
                reached.add(other.fx)
        for other in later:
            if other.fx not in reached or other is k or other.constant or other.op == "index_put_":
                continue
            differs = (plain[other.fx] != poked[other.fx]).reshape(count, -1).any(-1)
            assert not differs[:row].any(), f"row {row} of {k.name} reaches other rows of {other.name} in {group.name}"


def _weights(product, before):
    right = legality.matmul_operands(product.fx)[1]
    found = legality.operand_side(right, product, {k.fx: k for k in before})
    return {k.fx for k in found}
