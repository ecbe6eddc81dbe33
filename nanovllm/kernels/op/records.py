"""Arguments that belong together, as one parameter of an op: `kv: PagedKV` in place of seven tensors and numbers.

The functions of an op take the record, a frozen dataclass. Everything that an op declares names the record's fields
instead, as if each were a parameter of its own: argument patterns, inputs, cost, what the op writes to, and the schema
in `torch.ops.nanovllm`. `Records` converts between the two forms, called grouped and flat here.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any


class Records:
    """The parameters of a function that are records.

    Attributes:
        flat: the function's signature with each record's fields in place of the record. Arguments that have a default
            come last, those of the function itself before those of its records.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        grouped = inspect.signature(function)
        types = _types(function)
        self._of: dict[str, type] = {name: types[name] for name in grouped.parameters if _is_record(types.get(name))}
        self._fields = {name: [f.name for f in dataclasses.fields(record)] for name, record in self._of.items()}
        own, of_records = [], []
        for name, parameter in grouped.parameters.items():
            if name in self._of:
                fields = _parameters(self._of[name])
                own += [p for p in fields if p.default is p.empty]
                of_records += [p for p in fields if p.default is not p.empty]
            else:
                own.append(parameter)
        required = [p for p in own if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
        if not self._of:
            self.flat = grouped
        else:
            self.flat = grouped.replace(parameters=[*required, *(p for p in own if p not in required), *of_records])

    def type_of(self, parameter: str) -> type | None:
        """The record that a parameter takes; None: the parameter is none of those that take one."""
        return self._of.get(parameter)

    def fields_of(self, parameter: str) -> list[str]:
        """The names of the fields of a parameter that takes a record."""
        return list(self._fields[parameter])

    def flatten(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by parameter name, with each record's fields in its place."""
        given: dict[str, Any] = {}
        for name, value in arguments.items():
            if name in self._of and isinstance(value, self._of[name]):
                for field in self._fields[name]:
                    given[field] = getattr(value, field)
            else:
                given[name] = value
        return given

    def group(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The inverse of `flatten`: arguments as the function takes them. Records that are there already stay as
        they are.
        """
        given = dict(arguments)
        for name, record in self._of.items():
            if name not in given:
                given[name] = record(**{field: given.pop(field) for field in self._fields[name] if field in given})
        return given

    def taking_fields(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of the op that takes records, as one that takes their fields: with the signature `flat`."""
        if not self._of:
            return function
        names = tuple(self.flat.parameters)

        def flat(*args: Any, **kwargs: Any) -> Any:
            return function(**self.group(dict(zip(names, args), **kwargs)))

        flat.__signature__ = self.flat  # type: ignore[attr-defined]  # what `inspect.signature` reads
        return flat


def _types(function: Callable[..., Any]) -> dict[str, Any]:
    """The types of a function's parameters; none where an annotation names what is not there when the program runs."""
    try:
        return typing.get_type_hints(function)
    except (NameError, AttributeError, TypeError):
        return {}


def _is_record(annotation: Any) -> bool:
    return isinstance(annotation, type) and dataclasses.is_dataclass(annotation)


def _parameters(record: type) -> list[inspect.Parameter]:
    types = typing.get_type_hints(record)
    return [p.replace(annotation=types[p.name]) for p in inspect.signature(record).parameters.values()]
