"""A group of commands: its help shows the first sentence of each command in full, and errors name options."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from nanovllm.arguments import name_options
from nanovllm.console import say

UsageError: Any = typer.BadParameter.__base__
"""Unknown options and commands, missing and wrong values; typer has no public name for it."""

_EXPECTED = {
    "int_parsing": "an integer", "float_parsing": "a number",
    "greater_than_equal": "at least {ge}", "less_than_equal": "at most {le}",
}  # fmt: skip
"""What pydantic's types of errors ask for."""


@contextmanager
def errors_of_usage_folded() -> Iterator[None]:
    """Errors of usage that the block raises end the program; on a terminal their lines end between words."""
    try:
        yield
    except UsageError as e:
        text = io.StringIO()
        e.show(text)
        say(text.getvalue().rstrip("\n"), sys.stderr)
        raise typer.Exit(e.exit_code) from None


class CommandGroup(TyperGroup):
    """Lists its commands in the order in which they were added; long descriptions go on in the next line."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, c.get_short_help_str(limit=200)) for name, c in commands if c is not None and not c.hidden]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def invoke(self, ctx: Any) -> Any:
        """Run a command. Errors that begin with the name of an argument in Python then have the option's."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as e:
            e.message = _what_was_expected(e)
            raise
        except (ValueError, FileNotFoundError) as e:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            taken = command.params if command is not None else []
            options = {p.name: name for p in taken for name in reversed(p.opts) if name.startswith("--")}
            if "kernels" in options:  # it has another name in Python
                options["kernel_priority"] = options["kernels"]
            name_options(e, options, without_default=[p.name for p in taken if p.default is None])
            raise


def _what_was_expected(error: typer.BadParameter) -> str:
    """The message of a value that could not be read, with the value; of a missing argument, what it is for."""
    # typer reads values with pydantic
    invalid: list[dict[str, Any]] = getattr(error.__cause__, "errors", list)()
    if invalid and invalid[0]["type"] in _EXPECTED:
        expected = _EXPECTED[invalid[0]["type"]].format(**invalid[0].get("ctx", {}))
        return f"{str(invalid[0]['input'])!r}: expected {expected}"
    return error.message or getattr(error.param, "help", None) or ""
