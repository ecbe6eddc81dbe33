"""Providers that tests register for a while."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from nanovllm.kernels import Provider, all_ops
from nanovllm.kernels.op.registry import temporary


@contextmanager
def registered(op: str, fn: Callable[..., Any] | str, name: str = "mine", **fields: Any) -> Iterator[Provider]:
    """Within the block `fn` is a provider of an op. What is resolved in the block keeps it."""
    with temporary():
        all_ops()[op].resolved_calls.clear()
        all_ops()[op].add(Provider(name, fn, **fields))
        yield all_ops()[op].providers[name]


@contextmanager
def references(name: str, *ops: str) -> Iterator[dict[str, list[str]]]:
    """Within the block these ops have a provider of this name, which is their reference; what makes it chosen."""
    with ExitStack() as stack:
        for op in ops:
            stack.enter_context(registered(op, all_ops()[op].native, name))
        yield {op: [name] for op in ops}
