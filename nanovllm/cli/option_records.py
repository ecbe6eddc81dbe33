"""Commands that take their options as records."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, get_type_hints


def takes_records(function: Callable[..., None]) -> Callable[..., None]:
    """`function`, whose arguments are dataclasses, as a command with an option for each of their fields, in order.

    A field is annotated as an argument of a Typer command is: `Annotated[int, typer.Option(help="...")] = 1`.
    """
    records = {name: record for name, record in get_type_hints(function).items() if name != "return"}
    parameters = []
    for record in records.values():
        hints = get_type_hints(record, include_extras=True)
        for field in fields(record):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(field.name, kind, default=default, annotation=hints[field.name]))
    signature = inspect.Signature(parameters)

    def command(**options: Any) -> None:
        options = signature.bind(**options).arguments
        given = {
            name: {field.name: options[field.name] for field in fields(record) if field.name in options}
            for name, record in records.items()
        }
        function(**{name: record(**given[name]) for name, record in records.items()})

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = signature  # type: ignore[attr-defined]
    return command
