"""A group as a module of its own: its kernels as they are, or with our ops in the place of those that they replace."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, map_arg
from torch.fx import Node as FxNode
from torch.utils._pytree import tree_flatten

from nanovllm.fuse import fx_nodes
from nanovllm.fuse.grouping import KernelGroup
from nanovllm.fuse.op_graph import OpGraph
from nanovllm.fuse.op_matching import Match
from nanovllm.kernels import all_ops
from nanovllm.kernels.op.selection import default_choice

# Views that look at their second argument for its shape only: an argument that the group need not be given.
_SHAPED_AS = {"expand_as": torch.ops.aten.expand.default, "view_as": torch.ops.aten.view.default}


@dataclass(frozen=True)
class GroupModule:
    """A module that computes a group, and the nodes of the whole graph whose values are its arguments."""

    module: GraphModule
    inputs: tuple[FxNode, ...]


def extract(group: KernelGroup, matches: Sequence[Match] = (), device: torch.device | None = None) -> GroupModule:
    """The group as a module that returns what the group gives to others.

    Args:
        matches: occurrences of our ops within the group, without overlap, to be called instead.
        device: where our ops are to run; their providers are those that a plain call chooses there.
    """
    return _Writer(group, matches, device or torch.device("cpu")).write()


class _Writer:
    def __init__(self, group: KernelGroup, matches: Sequence[Match], device: torch.device) -> None:
        self.group, self.device = group, device
        self.match_of = {fx: m for m in matches for fx in m.kernels}
        self.graph = Graph()
        self.made: dict[FxNode, FxNode] = {}
        self.called: dict[Match, FxNode] = {}
        self.inputs: list[FxNode] = []

    def write(self) -> GroupModule:
        # Arguments first: a placeholder may not follow a call.
        needed = dict.fromkeys(base for k in self.group.kernels for base in self._outside(k.fx))
        for node in self.group.graph.program.graph.nodes:
            if node in needed:
                self.made[node] = self.graph.placeholder(node.name)
                self.inputs.append(node)
        for k in self.group.kernels:
            self._value(k.fx)
        self.graph.output(tuple(self._value(k.fx) for k in self.group.outputs))
        self.graph.lint()
        return GroupModule(GraphModule(torch.nn.Module(), self.graph), tuple(self.inputs))

    def _outside(self, node: FxNode) -> list[FxNode]:
        """What a node's arguments come from, past the views, where it is no kernel of the group."""
        found, todo = [], list(node.all_input_nodes)
        while todo:
            n = todo.pop()
            if n in self.group.members:
                continue
            if n.op == "call_function" and n not in self.group.graph.of:
                todo += n.all_input_nodes[:1] if fx_nodes.op_name(n) in _SHAPED_AS else n.all_input_nodes
            else:
                found.append(n)
        return found

    def _value(self, node: FxNode) -> FxNode:
        if node in self.made:
            return self.made[node]
        if node in self.match_of:
            return self._call(self.match_of[node], node)
        if node in self.group.members:
            for before in self.group.graph.of[node].after & self.group.members:
                self._value(before)
        target, args = node.target, node.args
        if fx_nodes.op_name(node) in _SHAPED_AS:
            target, args = _SHAPED_AS[fx_nodes.op_name(node)], (args[0], list(fx_nodes.fake(node)[0].shape))
        self.made[node] = self.graph.call_function(
            _out_of_place(target), map_arg(args, self._value), map_arg(node.kwargs, self._value)
        )
        return self.made[node]

    def _call(self, m: Match, wanted: FxNode) -> FxNode:
        if m not in self.called:
            declared = all_ops()[m.op]
            given = map_arg(dict(m.arguments), self._value)
            bound = declared.records.flat.bind(**given)
            function = declared.records.taking_fields(default_choice(declared, self.device)[1])
            result = self.graph.call_function(function, bound.args, bound.kwargs)
            self.called[m] = result
            several = len(m.outputs) > 1
            for i, fx in enumerate(m.outputs):
                if fx is not None:
                    of_op = self.graph.call_function(operator.getitem, (result, i)) if several else result
                    # The reference may end in views, which are none of the kernels that the call stands for.
                    shape = list(fx_nodes.fake(fx)[0].shape)
                    self.made[fx] = self.graph.call_function(torch.ops.aten.reshape.default, (of_op, shape))
        if wanted not in self.made:  # what it writes to is there already
            written = fx_nodes.mutated(wanted)
            self.made[wanted] = self._value(written[0]) if written else self.called[m]
        return self.made[wanted]


def _out_of_place(target: Any) -> Any:
    """`t` for `t_`: a view made in place would not find its argument unchanged when it is made again."""
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.inplace_view not in target.tags:
        return target
    return getattr(torch.ops.aten, target._schema.name.removeprefix("aten::").rstrip("_"), target)


def values(graph: OpGraph, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[FxNode, Any]:
    """Run the whole graph once on real tensors: the value of every node that a group may need from outside.

    Raises:
        ValueError: a tensor is on the meta device, so there is nothing to run with; or the module raises when it is
            run.
    """
    program = graph.program
    signature = program.graph_signature
    by_name = dict(zip(signature.user_inputs, tree_flatten((tuple(args), dict(kwargs)))[0]))
    by_name |= {name: value for name, value in kwargs.items() if name in signature.user_inputs}
    state = {**program.constants, **program.state_dict}
    for names in (
        signature.inputs_to_parameters, signature.inputs_to_buffers, signature.inputs_to_lifted_tensor_constants,
    ):  # fmt: skip
        by_name |= {name: state[source] for name, source in names.items()}
    given = [by_name[node.name] for node in graph.inputs]
    for node, value in zip(graph.inputs, given):
        if isinstance(value, torch.Tensor) and value.is_meta:
            raise ValueError(f"{node.name} is on the meta device: measuring needs real tensors")
    found: dict[FxNode, Any] = {}

    class ValueRecorder(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            return super().call_function(_out_of_place(target), args, kwargs)

        def run_node(self, n: FxNode) -> Any:
            found[n] = super().run_node(n)
            return found[n]

    recorder = ValueRecorder(program.graph_module)
    recorder.extra_traceback = False  # of the graph's lines, which would be part of the message
    with torch.no_grad():
        try:
            recorder.run(*(v.detach() if isinstance(v, torch.Tensor) else v for v in given))
        except Exception as e:
            said = next((line.strip() for line in str(e).splitlines() if line.strip()), "")
            raise ValueError(f"the module cannot be run: {type(e).__name__}: {said[:300]}") from e
    return found
