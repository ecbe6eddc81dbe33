"""Commands that take some of their options as records."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints


def takes_records(function: Callable[..., None]) -> Callable[..., None]:
    """`function` as a command that has an option for each field of the arguments that are dataclasses, in order.

    A field is annotated as an argument of a Typer command is: `Annotated[int, typer.Option(help="...")] = 1`.
    """
    parameters: list[inspect.Parameter] = []
    records: dict[str, Any] = {}
    hints = get_type_hints(function, include_extras=True)
    for name, parameter in inspect.signature(function).parameters.items():
        record: Any = hints[name]
        if not is_dataclass(record):
            parameters.append(parameter.replace(annotation=record, kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        records[name] = record
        of_fields = get_type_hints(record, include_extras=True)
        for field in fields(record):
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(field.name, kind, default=default, annotation=of_fields[field.name]))
    signature = inspect.Signature(parameters)

    def command(**options: Any) -> None:
        options = signature.bind(**options).arguments
        for name, record in records.items():
            given = {field.name: options.pop(field.name) for field in fields(record) if field.name in options}
            options[name] = record(**given)
        function(**options)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = signature  # type: ignore[attr-defined]
    return command
