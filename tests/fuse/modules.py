"""Devices, modules and checks that the tests of fusion share."""

import torch
import torch.nn.functional as F

from nanovllm.fuse.cpu_model import CpuModel
from nanovllm.fuse.group_module import extract, values
from nanovllm.fuse.grouping import Grower
from nanovllm.fuse.op_graph import build
from nanovllm.hardware.gpu_presets import device_model

# A device on which times are easily worked out by hand.
PLAIN = CpuModel("plain", 1e12, 0, 1e12, 1e-6, 1e13, {"float32": 1e14})
H100 = device_model("h100")


def meta(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def norm(x, w):
    return w * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


def mlp(x, w, up, down):
    return x + F.linear(F.gelu(F.linear(norm(x, w), up)), down)


def groups_of(fn, *args):
    """The operators of every group."""
    return [[k.op for k in g.kernels] for g in Grower(build(fn, args)).groups()]


def run_in_order(graph, groups, args):
    """Every group as a module, one after the other, each on what those before have made: the graph's own results."""
    found = values(graph, [a.clone() for a in args], {})
    outside = {n: found[n] for n in graph.program.graph.nodes if n.op in ("placeholder", "get_attr")}
    fresh = dict(zip((n for n in graph.inputs if n.name in graph.program.graph_signature.user_inputs), args))
    made = {n: fresh[n].clone() if n in fresh else v.clone() for n, v in outside.items()}
    for group in groups:
        part = extract(group)
        assert set(part.inputs) <= set(made), "a group needs what comes later: a cycle"
        results = part.module(*(made[n] for n in part.inputs))
        made.update(zip((k.fx for k in group.outputs), results))
    for base in graph.returned:
        torch.testing.assert_close(made[base], found[base], rtol=1e-5, atol=1e-5)
