"""A group of commands: its help shows the first sentence of each command in full, and errors name options."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from typer.core import TyperGroup


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
        except (ValueError, FileNotFoundError) as e:
            command = self.get_command(ctx, ctx.invoked_subcommand or "")
            if command is not None and len(e.args) == 1 and isinstance(e.args[0], str):
                e.args = (with_option(e.args[0], command.params),)
            raise


def with_option(message: str, parameters: Iterable[Any]) -> str:
    """A message that begins with "name:" or "name=" of an option in Python, as the command line has the option's name.

    "max_model_len=0: must be ..." becomes "--max-model-len=0: must be ...". Python's None is no value of an option: "or
    None for X" becomes "leave it out for X" where None is the option's default, and is dropped elsewhere.
    """
    begin = re.match(r"([a-z]\w*)(?=[:=])", message)
    for parameter in parameters if begin else ():
        long = [name for name in parameter.opts if name.startswith("--")]
        if begin and parameter.name == begin[1] and long:
            rest, comma, otherwise = message[begin.end() :].partition(", or None ")
            left_out = f"; leave it out {otherwise}" if comma and parameter.default is None else ""
            return long[0] + rest + left_out
    return message
