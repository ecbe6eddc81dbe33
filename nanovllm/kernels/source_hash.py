"""A hash of what Triton kernels compute: their source and that of all that they call, without comments and docstrings.

What belongs to Triton itself does not count: its version stands beside the hash, which is the same with any.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import textwrap
import tokenize
from collections.abc import Sequence
from types import FunctionType
from typing import Any

_LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
_MARKS = {tokenize.NEWLINE: "\n", tokenize.INDENT: "{", tokenize.DEDENT: "}"}
_BETWEEN_STATEMENTS = set(_MARKS)


def source_hash(kernels: Sequence[Any]) -> str:
    """16 hexadecimal digits. Reformatting a kernel, or its comments, changes nothing; a constant that it uses does."""
    todo, parts = list(kernels), {}
    while todo:
        kernel = todo.pop()
        function: FunctionType = kernel.fn
        name = f"{function.__module__}.{function.__qualname__}"
        if name in parts:
            continue
        constants = []
        for used in sorted(set(function.__code__.co_names)):
            value = function.__globals__.get(used)
            if is_kernel(value):
                if not value.fn.__module__.startswith("triton."):
                    todo.append(value)
            elif type(value).__name__ == "constexpr" or isinstance(value, (bool, int, float, str)):
                constants.append(f"{used}={getattr(value, 'value', value)!r}")
        parts[name] = "\n".join([*constants, _code(inspect.getsource(function))])
    text = "\n".join(f"{name}\n{parts[name]}" for name in sorted(parts))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_kernel(value: Any) -> bool:
    """Whether a value is a function for the GPU: of Triton, of Gluon, or in the interpreter."""
    return isinstance(getattr(value, "fn", None), FunctionType) and type(value).__module__.startswith("triton.")


def _code(source: str) -> str:
    """The tokens that mean something, one statement a line."""
    tokens = [
        t for t in tokenize.generate_tokens(io.StringIO(textwrap.dedent(source)).readline) if t.type not in _LAYOUT
    ]
    words: list[str] = []
    before = tokenize.NEWLINE
    in_docstring = False
    for token, after in zip(tokens, [*tokens[1:], None]):
        starts = token.type == tokenize.STRING and before in _BETWEEN_STATEMENTS
        if starts and after is not None and after.type == tokenize.NEWLINE:
            in_docstring = True
        elif in_docstring:
            in_docstring = False  # its end of line
        else:
            words.append(_MARKS.get(token.type, token.string))
            before = token.type
    return "".join(f" {word}" for word in words)
