"""`nanovllm kernels show`: an op's declaration, its reference, and its providers."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm.cli import kernels_common as common
from nanovllm.console import Column, Rows
from nanovllm.json_output import STDOUT, write_json

if TYPE_CHECKING:
    from nanovllm.kernels import Op, Provider

_MOST_SHAPES = 8


def show(
    op: Annotated[str, typer.Argument(help="An op.")],
    kernel_plugin: common.Plugins = None,
    json_file: common.Json = None,
) -> None:
    """An op's signature, what it declares, its reference, and where its providers are."""
    _, ops, _ = common.prepare("cpu", kernel_plugin)
    declared = common.only(ops, op)
    facts = {name: value for name, value in _facts(declared).items() if value}
    providers = [{"provider": p.name, "GPUs": p.architectures, "function": _target(p)}
                 for p in declared.providers.values()]  # fmt: skip
    document = {"op": op, "doc": inspect.getdoc(declared), **facts, "providers": providers}
    write_json(json_file, document | {"reference": _source(declared)})
    if json_file == STDOUT:
        return
    print(f"{_signature(declared)}\n\n{inspect.getdoc(declared)}\n")
    table = Rows(Column("declared", 12), Column("", 67))
    for name, value in facts.items():
        for i, line in enumerate(common.wrapped(value, 67)):
            table.add(name if i == 0 else "", line)
    table.end()
    print(f"\nThe reference:\n\n{_source(declared)}")
    table = Rows(Column("provider", 12), Column("GPUs", 7), Column("function", 59))
    for row in providers:
        table.add(row["provider"], row["GPUs"], row["function"])
    table.end()
    print(f"\n`nanovllm kernels why {op}` says which one runs here.")


def _signature(declared: Op) -> str:
    """As Python writes it, without the modules of our types; a line for each parameter if 80 columns are too few."""
    short = re.sub(r"\bnanovllm(\.\w+)+\.(\w+)", r"\2", f"{declared.name}{declared.signature}")
    if len(short) <= 80:
        return short
    name, _, rest = short.partition("(")
    parameters, _, result = rest.rpartition(")")
    lines = re.split(r", (?=\w+:)", parameters)
    return f"{name}(\n    " + ",\n    ".join(lines) + f",\n){result}"


def _facts(declared: Op) -> dict[str, str]:
    """What the op declares, as text; empty for what it does not."""
    facts = {
        "arguments": ", ".join(f"{name} {pattern}" for name, pattern in declared.arguments.items()),
        "mutates": ", ".join(declared.mutates),
        "reuses": ", ".join(declared.reuses),
        "fuses": ", ".join(declared.fuses),
        "tolerance": ", ".join(f"{common.plain(d)} {t:g}" for d, t in declared.tolerance.items()),
    }
    if declared.inputs is not None:
        from nanovllm.kernels.op.declaration import written

        facts["shape is"] = declared.inputs.form
        for kind in ("small", "decode", "large"):
            shapes = [written(shape) for shape in getattr(declared.inputs, kind)]
            facts[kind] = ", ".join(shapes[:_MOST_SHAPES]) + (", ..." if len(shapes) > _MOST_SHAPES else "")
    return facts


def _target(provider: Provider) -> str:
    """Where a provider's function is: module:name."""
    if isinstance(provider.target, str):
        return provider.target
    function: Any = inspect.unwrap(provider.target)
    return f"{function.__module__}:{function.__qualname__}"


def _source(declared: Op) -> str:
    """The text of the reference, and before it of the functions of its module that it calls."""
    native = declared.native
    called = (native.__globals__.get(name) for name in native.__code__.co_names)
    functions: list[Any] = [f for f in called if inspect.isfunction(f) and f.__module__ == native.__module__]
    try:
        return "\n\n".join(inspect.getsource(f) for f in (*functions, native))
    except (OSError, TypeError):  # typed into an interpreter
        return "(its text is not kept in a file)\n"
