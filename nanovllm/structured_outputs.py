"""What an output must look like: a JSON schema, a regular expression, one of some choices, a grammar."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from nanovllm.arguments import rejects_unknown
from nanovllm.foreign_arguments import STRUCTURED_OUTPUT_ARGUMENTS
from nanovllm.wording import brief

JSON_STYLE: Mapping[str, Any] = {
    "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "coerce_one_of": True,
}  # fmt: skip
"""llguidance's options of a schema. As models write JSON: a space after each separator, and no other white space."""
MAX_CHARACTERS = 2**18
"""Most characters of a schema, a regular expression, a grammar, or all choices together."""


class GrammarsBusyError(ValueError):
    """Other grammars are being compiled: a later try may succeed."""


@rejects_unknown(called="structured_outputs", foreign=STRUCTURED_OUTPUT_ARGUMENTS)
@dataclass(frozen=True)
class StructuredOutputs:
    """A constraint on an output, for `SamplingParams(structured_outputs=...)`. Exactly one kind is set.

    The names are those of vLLM's `StructuredOutputsParams`. JSON is written on one line, with a space after each comma
    and colon: free white space lets a weak model write nothing else.

    Raises:
        ValueError: no kind or several are set, or a value is of the wrong type or too long.
        TypeError: an unknown keyword.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema: a dict, its JSON text, or a pydantic model class. Kept as text."""
    json_object: bool = False
    """Any JSON object."""
    regex: str | None = None
    """A regular expression (Rust's syntax, without look-around) that the whole output matches."""
    choice: Sequence[str] | None = None
    """The output is one of these strings. Kept as a tuple."""
    grammar: str | None = None
    """A context-free grammar in Lark (llguidance's dialect) or in GBNF."""
    reasoning: Literal["open", "optional"] | None = None
    """What may come before the constrained text: "open", the rest of a `<think>` block that the prompt has opened;
    "optional", a `<think>` block; None: nothing."""
    called: str = field(default="structured_outputs", compare=False)
    """What error messages call it: the request's field that it comes from."""

    def __post_init__(self) -> None:
        set_kinds = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(set_kinds) != 1:
            given = ", ".join(set_kinds) or "none of them"
            raise ValueError(f"{self.called}: set exactly one of {', '.join(KINDS)}, not {given}")
        if not isinstance(self.json_object, bool):
            raise ValueError(f"{self.called}: json_object={brief(self.json_object)}: must be True or False")
        if self.reasoning not in (None, "open", "optional"):
            raise ValueError(f'{self.called}: reasoning={brief(self.reasoning)}: must be "open", "optional" or None')
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json, self.called))
        if self.choice is not None:
            choice = self.choice
            if not isinstance(choice, (list, tuple)) or not all(isinstance(c, str) and c for c in choice) or not choice:
                raise ValueError(f"{self.called}: choice={brief(choice)}: must be a list of strings, none empty")
            object.__setattr__(self, "choice", tuple(choice))
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ValueError(f"{self.called}: {name}={brief(value)}: must be a string that is not empty")
        value = getattr(self, set_kinds[0])
        length = sum(map(len, value)) if isinstance(value, tuple) else len(str(value))
        if length > MAX_CHARACTERS:
            raise ValueError(
                f"{self.called}: {set_kinds[0]}: {length} characters, at most {MAX_CHARACTERS} are allowed"
            )

    @classmethod
    def of_response_format(cls, response_format: Any) -> StructuredOutputs | None:
        """What OpenAI's `response_format` asks for; None: plain text.

        A "json_object" may have a "schema", as llama.cpp's server has it.

        Raises:
            ValueError: it is something else; the message says what.
        """
        kind = response_format.get("type") if isinstance(response_format, Mapping) else None
        if response_format is None:
            return None
        if not isinstance(kind, str) or kind not in _FORMAT_FIELDS:
            raise ValueError(
                f'response_format={brief(response_format)}: type must be "text", "json_object" or "json_schema"'
            )
        if unknown := set(response_format) - _FORMAT_FIELDS[kind]:
            raise ValueError(f"response_format: {min(map(str, unknown))!r} is no field of type {kind!r}; leave it out")
        if kind == "text":
            return None
        if kind == "json_object":
            if (schema := response_format.get("schema")) is not None:
                return cls(json=schema, called="response_format")
            return cls(json_object=True, called="response_format")
        named = response_format.get("json_schema")
        schema = named.get("schema") if isinstance(named, Mapping) else None
        if not isinstance(schema, Mapping):
            raise ValueError(
                'response_format: json_schema must be {"name": ..., "schema": {...}}, with a JSON schema as a dict'
            )
        if unknown := set(named) - _SCHEMA_FIELDS:  # type: ignore[arg-type]
            known = ", ".join(sorted(_SCHEMA_FIELDS))
            raise ValueError(f"response_format: json_schema has no field {min(map(str, unknown))!r}; known are {known}")
        return cls(json=schema, called="response_format")


_SCHEMA_FIELDS = {"name", "schema", "strict", "description"}
_FORMAT_FIELDS = {"text": {"type"}, "json_object": {"type", "schema"}, "json_schema": {"type", "json_schema"}}
"""type -> the fields of a `response_format`"""
KINDS = ("json", "json_object", "regex", "choice", "grammar")


def _schema_text(schema: Any, called: str) -> str:
    if hasattr(schema, "model_json_schema"):  # a pydantic model
        schema = schema.model_json_schema()
    try:
        if isinstance(schema, str) and len(schema) <= MAX_CHARACTERS:
            schema = json.loads(schema)
        if not isinstance(schema, Mapping):
            raise TypeError("it is no JSON object")
        return json.dumps(schema, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{called}: json={brief(schema)}: must be a JSON schema as a dict or as JSON text: {error}"
        ) from None
