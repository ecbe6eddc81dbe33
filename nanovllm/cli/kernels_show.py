"""`nanovllm kernels show`: an op's declaration, its reference, and its providers."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm.cli import kernels_common as common
from nanovllm.console import WIDTH, Column, TablePrinter
from nanovllm.json_output import STDOUT, write_json

if TYPE_CHECKING:
    from nanovllm.kernels import Op, Provider

_MOST_SHAPES = 8
_WORDS = {
    "small": "`verify` runs these everywhere: ",
    "decode": "few rows; `bench` times these, `verify` runs them on a GPU: ",
    "large": "many rows; `bench` times these, `verify` runs them on a GPU: ",
}
"""What kinds of shapes are for."""


def show(
    op: Annotated[str, typer.Argument(metavar="OP", help="The name of an op; `nanovllm kernels list` shows all.")],
    kernel_plugin: common.Plugins = None,
    json_file: common.Json = None,
) -> None:
    """An op's signature, what it declares, its reference, and where its providers are."""
    _, ops, _ = common.prepare("cpu", kernel_plugin)
    declared = common.only(ops, op)
    facts = {name: value for name, value in _facts(declared).items() if value}
    providers = [{"provider": p.name, "GPUs": p.architectures, "function": _target(p, declared)}
                 for p in declared.providers.values()]  # fmt: skip
    document = {"op": op, "doc": inspect.getdoc(declared), **facts, "providers": providers}
    write_json(json_file, document | {"reference": _source(declared)})
    if json_file == STDOUT:
        return
    print(f"{_signature(declared)}\n\n{_folded_doc(inspect.getdoc(declared) or '')}\n")
    table = TablePrinter(Column("declared", 12), Column("", 67))
    for name, value in facts.items():
        value = _WORDS.get(name, "") + value
        apart = re.sub(r"(?<=[A-Z])x(?=[A-Z])", "x\n", value)  # a long form of a shape may go on after an x
        for i, line in enumerate(common.wrapped(apart, 67)):
            table.add(name if i == 0 else "", line.replace("x ", "x") if name == "shape is" else line)
    table.end()
    print(f"\nThe reference, {_place(declared)}:\n\n{_source(declared, with_doc=False)}")
    table = TablePrinter(Column("provider", 12), Column("GPUs", 7), Column("where it is", 59))
    for row in providers:
        table.add(row["provider"], row["GPUs"], row["function"].removesuffix(f":{op}"))
    table.end()
    print(f"\n`nanovllm kernels why {op}` says which one runs here.")


def _signature(declared: Op) -> str:
    """As Python writes it, without the modules of our types; a line for each parameter if 80 columns are too few."""
    short = re.sub(r"\bnanovllm(\.\w+)+\.(\w+)", r"\2", f"{declared.name}{declared.signature}")
    short = re.sub(r"(?<=: |> )'([^']*)'", r"\1", short)  # annotations that are kept as text
    if len(short) <= WIDTH:
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
        "tolerance": ", ".join(f"{common.dtype_name(d)} {t:g}" for d, t in declared.tolerance.items()),
        "cancels": "a result may be near 0 where arguments are large: in rows of fewer than 8 elements, "
        "errors are compared with the size of the arguments"
        if declared.cancels
        else "",
        "magnitude": f"{declared.magnitude:g}, of intermediate results" if declared.magnitude else "",
        "compare": "a function judges the results" if declared.compare else "",
    }
    if declared.inputs is not None:
        from nanovllm.kernels.op.inputs import written

        facts["shape is"] = declared.inputs.form
        for kind in ("small", "decode", "large"):
            shapes = [written(shape) for shape in getattr(declared.inputs, kind)]
            facts[kind] = ", ".join(shapes[:_MOST_SHAPES]) + (", ..." if len(shapes) > _MOST_SHAPES else "")
    return facts


def _target(provider: Provider, declared: Op) -> str:
    """Where a provider's function is: module:name, or file:name if it comes from a plugin that is a file."""
    if isinstance(provider.target, str):
        return provider.target
    function: Any = inspect.unwrap(provider.target)
    place = function.__module__
    origin = provider.origin or declared.origin or ""
    if origin.endswith(".py"):  # the module has a name that no user has given
        path = Path(inspect.getsourcefile(function) or origin)
        place = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{place}:{function.__qualname__}"


def _folded_doc(doc: str) -> str:
    """A docstring in lines of 80 characters. A line that continues the one before, which was full, is joined to it."""
    lines: list[str] = []
    before = ""
    for line in doc.split("\n"):
        words = line.split()
        begins = re.match(r"\s*[\w, ]+: ", line)  # the text of an argument
        if words and before and not begins and len(before) + 1 + len(words[0]) > _DOC_WIDTH:
            lines[-1] += " " + line.strip()
        else:
            lines.append(line)
        before = line
    return "\n".join(
        textwrap.fill(
            line, WIDTH, subsequent_indent=" " * (len(line) - len(line.lstrip()) + 4 * line.startswith(" ")),
            break_long_words=False, break_on_hyphens=False,
        )
        for line in lines
    )  # fmt: skip


_DOC_WIDTH = 116
"""Characters of a full line of a docstring: the package's limit, less the indentation that is taken away."""


def _place(declared: Op) -> str:
    """Where the reference is: file:line."""
    code = declared.native.__code__
    path = re.sub(r".*/(nanovllm/)", r"\1", code.co_filename)
    return f"{path}:{code.co_firstlineno}"


def _source(declared: Op, with_doc: bool = True) -> str:
    """The text of the reference, and before it of the functions of its module that it calls.

    Lines longer than the terminal stay whole: broken by us, they would not be Python.

    Args:
        with_doc: with the reference's own docstring.
    """
    native = declared.native
    called = (native.__globals__.get(name) for name in native.__code__.co_names)
    functions: list[Any] = [f for f in called if inspect.isfunction(f) and f.__module__ == native.__module__]
    try:
        texts = [inspect.getsource(f) for f in (*functions, native)]
    except (OSError, TypeError):  # typed into an interpreter
        return "(its text is not kept in a file)\n"
    return "\n\n".join(texts if with_doc else [*texts[:-1], _without_doc(texts[-1])])


def _without_doc(text: str) -> str:
    """The text of a function without its docstring. What is no whole `def`, such as a lambda, stays as it is."""
    try:
        (function,) = ast.parse(textwrap.dedent(text)).body
    except SyntaxError:
        return text
    if not isinstance(function, ast.FunctionDef):
        return text
    doc = function.body[0]
    if ast.get_docstring(function) is None or len(function.body) == 1:
        return text
    lines = text.split("\n")
    return "\n".join(lines[: doc.lineno - 1] + lines[doc.end_lineno :])
