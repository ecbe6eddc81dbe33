"""The pass, its report, and how it is switched on."""

from __future__ import annotations

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import Match, PatternMatcherPass, fwd_only, register_replacement

from nanovllm.adapters.inductor.patterns import Pattern, misfit, patterns_of
from nanovllm.kernels import all_ops
from nanovllm.kernels.op.provider import NATIVE
from nanovllm.kernels.op.selection import default_choice

logger = logging.getLogger(__name__)

FUSED = ("add_rms_norm", "rms_norm", "silu_and_mul", "fused_add_gelu")
"""What is replaced by default, in this order: a larger pattern before one that is a part of it."""
OPS = (*FUSED, "element_wise_mul_add")


@dataclass(frozen=True)
class PassReport:
    """What a pass did.

    Attributes:
        replaced: op -> how many of its patterns were replaced.
        left: (op, why its pattern was left as it is) -> how many.
        graphs: the graphs that it was given. Inductor does not compile again what its cache has, and gives no such
            graph to the pass.
    """

    replaced: dict[str, int]
    left: dict[tuple[str, str], int]
    graphs: int

    def __str__(self) -> str:
        lines = [f"{op}: {count} replaced" for op, count in self.replaced.items()]
        lines += [f"{op}: {count} left: {reason}" for (op, reason), count in self.left.items()]
        if not self.graphs:
            return "graphs compiled: 0 (a graph from Inductor's cache is not compiled again, and not counted)"
        return "\n".join([f"graphs compiled: {self.graphs}", *(lines or ["no pattern was found"])])


class FusedOps(CustomGraphPass):
    """The pass, for `torch.compile(model, options=FusedOps().options())`.

    Args:
        ops: names out of `OPS`; None: those of `FUSED`. Inductor writes `element_wise_mul_add` into the kernels of its
            neighbours, so it is replaced only where it is named.
        reference_too: replace also where no kernel but the reference would run, as on a CPU: to test.

    Raises:
        ValueError: an unknown op.
    """

    def __init__(self, ops: Sequence[str] | None = None, reference_too: bool = False) -> None:
        if isinstance(ops, str):
            ops = [ops]
        for name in ops or ():
            if name not in OPS:
                raise ValueError(f"ops: {name!r} has no pattern; expected any of {', '.join(OPS)}")
        self._ops = tuple(name for name in OPS if name in (FUSED if ops is None else ops))
        self._reference_too = reference_too
        self._replaced: Counter[str] = Counter()
        self._left: set[tuple[str, str, int, str]] = set()
        self._graphs = 0
        self._traced: dict[str, PatternMatcherPass] = {}

    def options(self) -> dict[str, Any]:
        """For the argument `options` of `torch.compile`: holds for everything that the compiled model compiles."""
        return {"post_grad_custom_pre_pass": self}

    def report(self) -> PassReport:
        """What was replaced in the graphs that were compiled until now."""
        left = Counter((op, reason) for op, reason, _, _ in self._left)
        return PassReport({op: n for op in self._ops if (n := self._replaced[op])}, dict(left), self._graphs)

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Replace the patterns of a graph."""
        self._graphs += 1
        for name in self._ops:
            self._replaced[name] += self._patterns(name).apply(graph)
        logger.info("graph %d: %s", self._graphs, dict(self._replaced))

    def uuid(self) -> Any:
        """For Inductor's cache: graphs are compiled again if this code, the ops or what runs them is another."""
        devices = [torch.device("cpu")]
        devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        kernels = [(name, str(d), _only_reference(name, d)) for name in self._ops for d in devices]
        known = (Path(__file__).read_bytes(), self._ops, self._reference_too, kernels)
        return hashlib.sha256(repr(known).encode()).hexdigest()

    def _patterns(self, name: str) -> PatternMatcherPass:
        """The patterns of an op, traced when they are needed first."""
        if name in self._traced:
            return self._traced[name]
        self._traced[name] = found = PatternMatcherPass(f"nanovllm_{name}")
        with torch.no_grad():
            for p in patterns_of(name):
                register_replacement(
                    p.search, p.replace, p.examples, fwd_only, [found], extra_check=partial(self._may_replace, name, p),
                    scalar_workaround=p.scalars, skip_duplicates=True,
                )  # fmt: skip
        return found

    def _may_replace(self, name: str, pattern: Pattern, match: Match) -> bool:
        tensors = _tensors_of(match, pattern, list(all_ops()[name].signature.parameters))
        reason = tensors if isinstance(tensors, str) else misfit(name, tensors)
        if not isinstance(tensors, str) and not self._reference_too and _only_reference(name, tensors[0].device):
            reason = reason or f"only the reference runs on {tensors[0].device}"
        # Another spelling of the pattern, with its arguments in another order, may have been tried at this place.
        place = self._graphs, match.nodes[-1].name
        self._left = {known for known in self._left if known[2:] != place}
        if reason is not None:
            self._left.add((name, reason, *place))
        return reason is None


@contextmanager
def replacing(ops: Sequence[str] | None = None, reference_too: bool = False) -> Iterator[FusedOps]:
    """Within the block, every model that torch.compile compiles gets the pass, after one that is configured already.

    A compiled model compiles at its first call, and again for other shapes: what happens after the block has no pass.

    Args:
        ops, reference_too: as in `FusedOps`.
    """
    before = config.post_grad_custom_pre_pass  # a list in later versions of PyTorch
    earlier = before if isinstance(before, (list, tuple)) else [] if before is None else [before]
    fused = FusedOps(ops, reference_too)
    with config.patch(post_grad_custom_pre_pass=InTurn(*earlier, fused) if earlier else fused):
        yield fused


class InTurn(CustomGraphPass):
    """Several passes as one. Nothing is cached if one of them has no `uuid`."""

    def __init__(self, *passes: Callable[..., Any]) -> None:
        self._passes = passes

    def __call__(self, graph: torch.fx.Graph) -> None:
        for one in self._passes:
            one(graph)

    def uuid(self) -> Any:
        found = [p.uuid() if isinstance(p, CustomGraphPass) else None for p in self._passes]
        return None if None in found else tuple(found)


def _tensors_of(match: Match, pattern: Pattern, parameters: list[str]) -> list[torch.Tensor] | str:
    """The tensors of a match, without data, in the order of the op's parameters; why it is no call of the op."""
    if any(node.kwargs.get("alpha", 1) != 1 for node in match.nodes):  # which the pattern does not look at
        return "a sum with a factor (alpha)"
    tensors = []
    for name in (p for p in parameters if p in match.kwargs):
        value = match.kwargs[name]
        value = value.meta["val"] if isinstance(value, torch.fx.Node) else value
        if name in pattern.scalars:
            if not isinstance(value, (int, float)):
                # dynamic=True makes inputs of the graph of a model's numbers.
                return f"{name} is no constant of the graph; set torch._dynamo.config.specialize_float = True before"
        elif isinstance(value, torch.Tensor):
            tensors.append(value)
        else:
            return "a number in the place of a tensor"
    return tensors


def _only_reference(name: str, device: torch.device) -> bool:
    """Whether a call of an op on a device runs the reference."""
    return default_choice(all_ops()[name], device)[0].name == NATIVE
