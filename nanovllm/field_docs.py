"""The strings below a dataclass's fields, as a part of its docstring: so `help()` shows what each field means."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any


class DocWithFields:
    """A class's `__doc__`, made when it is first read, with a section "Args" from the strings below its fields."""

    def __init__(self, doc: str) -> None:
        self._doc = doc
        self._whole: str | None = None

    def __get__(self, instance: Any, owner: type) -> str:
        if self._whole is None:
            found = _described_fields(owner)
            lines = [f"\nArgs:\n{textwrap.indent(found, '    ')}"] if found else []
            self._whole = "\n".join([inspect.cleandoc(self._doc), *lines])
        return self._whole


def _described_fields(cls: type) -> str:
    """A line "name: type = default", and its string indented, for each field; empty where there is no source."""
    try:
        body: list[ast.stmt] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body  # type: ignore[attr-defined]
    except (OSError, TypeError, SyntaxError):
        return ""
    texts = []
    for field, below in zip(body, body[1:]):
        if not isinstance(field, ast.AnnAssign) or not isinstance(below, ast.Expr):
            continue
        if isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            words = textwrap.fill(inspect.cleandoc(below.value.value).replace("\n", " "), 76)
            default = (
                "" if field.value is None or isinstance(field.value, ast.Call) else f" = {ast.unparse(field.value)}"
            )
            name = f"{ast.unparse(field.target)}: {ast.unparse(field.annotation)}{default}"
            texts.append(f"{name}\n{textwrap.indent(words, '    ')}")
    return "\n".join(texts)
