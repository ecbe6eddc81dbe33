"""What the commands of `nanovllm kernels` share: their options, which ops are meant, and how tables look."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from nanovllm.arguments import full_dtype
from nanovllm.console import import_torch, say, working
from nanovllm.json_output import HELP, check_target

if TYPE_CHECKING:
    import torch

    from nanovllm.kernels import Op

OpName = Annotated[
    str | None, typer.Argument(metavar="OP", help="An op, or a prefix of several (attention); by default all ops.")
]
Device = Annotated[str, typer.Option(help="The device: auto, cpu, cuda, cuda:N.")]
Json = Annotated[str | None, typer.Option("--json", metavar="FILE|-", help=HELP, callback=check_target)]
Wide = Annotated[bool, typer.Option("--wide", help="Show all columns; in a file or a pipe, each row in one line.")]
Plugins = Annotated[
    list[str] | None, typer.Option(metavar="FILE", help="A Python file or module with kernels of your own; repeatable.")
]
Providers = Annotated[
    list[str] | None, typer.Option("--provider", metavar="NAME", help="Only this provider; repeatable.")
]
Shapes = Annotated[
    list[str] | None, typer.Option("--shape", metavar="SHAPE", help="A shape such as 32x1024; repeatable.")
]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]
DTYPES = ("bfloat16", "float16", "float32")
GPUS = "a100, a100-40gb, h100, h200, b200, rtx-4090"
"""The names that --gpu takes: the presets of hardware.gpu_presets, which a help text need not import."""


def prepare(device: str, plugins: list[str] | None) -> tuple[torch.device, dict[str, Op], list[str]]:
    """(the device, the ops by name, what the plugins' providers have as their origin).

    Raises:
        ValueError: a plugin cannot be loaded, or ends the process that loads it.
    """
    import_torch()
    from nanovllm.hardware.devices import select_device
    from nanovllm.kernels import all_ops, load_plugins
    from nanovllm.kernels.op.plugin_use import NOTHING_REGISTERED, registered_by
    from nanovllm.kernels.testing.plugin_check import reject_crashing

    with working(f"loading {', '.join(plugins)} ..." if plugins else "loading the kernels ...", timed=True):
        reject_crashing(plugins or ())
        where = select_device(device)
        origins = load_plugins(plugins or ())
    for origin in origins:
        if not registered_by(origin):
            say(f"WARNING kernel plugin {origin} serves no op: {NOTHING_REGISTERED}", sys.stderr)
    return where, dict(sorted(all_ops().items())), origins


def matching(ops: dict[str, Op], name: str | None) -> list[Op]:
    if name is None:
        return list(ops.values())
    return [ops[name]] if name in ops else [o for n, o in ops.items() if n.startswith(name)] or [only(ops, name)]


def with_provider(ops: list[Op], providers: list[str] | None, origins: Iterable[str]) -> list[Op]:
    """The ops that have one of the providers.

    Args:
        origins: of the plugins that were named.

    Raises:
        ValueError: no op has a provider of that name. The message says what the plugins have in its place.
    """
    from nanovllm.arguments import did_you_mean
    from nanovllm.kernels.op.priority import unknown_provider_hint

    known = sorted({name for declared in ops for name in declared.providers})
    for name in providers or ():
        if name not in known:
            has = [_what_it_has(origin, name) for origin in origins]
            remedy = " ".join(filter(None, (did_you_mean(name, known), "; ".join(has))))
            remedy = remedy if has else unknown_provider_hint(name, known, "--kernel-plugin FILE")
            raise ValueError(f"--provider {name}: expected one of {', '.join(known)}; {remedy}")
    return [o for o in ops if not providers or set(providers) & set(o.providers)]


def _what_it_has(plugin: str, wanted: str) -> str:
    """The providers of a plugin, which has none of the name that is wanted."""
    from nanovllm.kernels.op.plugin_use import registered_by
    from nanovllm.kernels.op.provider import NATIVE

    has = ", ".join(f"{p.name!r} of {o.name}" for o, p in registered_by(plugin) if p.name != NATIVE)
    register = f"registers no provider; write @OP.provider({wanted!r}) above your function"
    return f"plugin {plugin} " + (f"has {has}" if has else register)


def nothing_done(what: str, reasons: Iterable[str], remedy: bool = True) -> ValueError:
    """The error that nothing was `what` ("timed"), and why. remedy: say which command shows what can run."""
    said = "; ".join(dict.fromkeys(reasons)) or "there are no shapes"
    return ValueError(f"nothing was {what}: {said}" + ". `nanovllm kernels list` shows what can run here" * remedy)


def only(ops: dict[str, Op], name: str) -> Op:
    from nanovllm.arguments import reject_unknown
    from nanovllm.kernels.op.priority import ALL_OPS

    try:
        reject_unknown("", [name], ops, ALL_OPS)
    except TypeError as e:
        if name.endswith(".py"):
            raise ValueError(f"unknown op {name!r}; a file of kernels is named by --kernel-plugin {name}") from None
        message = str(e).replace(" got an unknown argument", "unknown op")
        next_one = " An" if message.endswith("?") else "; an"
        raise ValueError(f"{message}{next_one} op of yours needs --kernel-plugin FILE") from None
    return ops[name]


def shape_of(declared: Op, text: str) -> tuple[int, ...]:
    """What --shape says, as the op's inputs take it; else a ValueError that shows what was given."""
    if declared.inputs is None:
        raise ValueError(f"--shape: op {declared.name!r} declares no inputs")
    try:
        shape = tuple(int(n) for n in text.lower().split("x"))
    except ValueError:
        form = f"{declared.inputs.form} for {declared.name}"
        raise ValueError(f"--shape {text}: expected numbers with x between them, {form}{_such_as(declared)}") from None
    wrong = declared.inputs.wrong_with(shape)
    if wrong:
        raise ValueError(f"--shape {text}: {declared.name} {wrong}{_such_as(declared)}")
    return shape


def _such_as(declared: Op) -> str:
    """An example of a shape that the op takes, with a comma before it."""
    from nanovllm.kernels.op.inputs import written

    inputs = declared.inputs
    shapes = [*inputs.decode, *inputs.large, *inputs.small] if inputs is not None else []
    return f", such as {written(shapes[0])}" if shapes else ""


def dtype_of(name: str) -> torch.dtype:
    import torch

    return getattr(torch, dtype_option(name))


def dtype_option(name: str) -> str:
    """The full name of what --dtype names; a ValueError if it is none of DTYPES."""
    if (full := full_dtype(name)) not in DTYPES:
        raise ValueError(f"--dtype {name}: expected one of {', '.join(DTYPES)}")
    return full


def short_device_name(where: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(where) if where.type == "cuda" else str(where)


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype's name: "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def wrapped(text: str, width: int) -> list[str]:
    """The text in lines of at most `width` characters; words are not cut."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
