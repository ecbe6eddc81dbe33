"""A group of commands whose help shows the first sentence of each command in full."""

from __future__ import annotations

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
