"""A hash of what Triton kernels compute: their source and that of all that they call, without comments and docstrings.

Functions of Triton itself do not count, so the hash is the same with any version; files store the version separately.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Sequence
from types import FunctionType
from typing import Any


def source_hash(kernels: Sequence[Any]) -> str:
    """16 hexadecimal digits.

    Formatting, comments, docstrings and the module that a kernel lies in change nothing; a constant that it uses does.
    """
    todo, parts = list(kernels), {}
    while todo:
        kernel = todo.pop()
        function: FunctionType = kernel.fn
        name = f"{function.__module__}.{function.__qualname__}"
        if name in parts:
            continue
        constants = []
        for used in sorted(set(function.__code__.co_names)):
            value: Any = function.__globals__.get(used)
            if is_kernel(value):
                if not value.fn.__module__.startswith("triton."):
                    todo.append(value)
            elif type(value).__name__ == "constexpr" or isinstance(value, (bool, int, float, str)):
                constants.append(f"{used}={getattr(value, 'value', value)!r}")
        parts[name] = "\n".join([*constants, _code(inspect.getsource(function))])
    return hashlib.sha256("\n".join(sorted(parts.values())).encode()).hexdigest()[:16]


def is_kernel(value: Any) -> bool:
    """Whether a value is a function for the GPU: of Triton, of Gluon, or in the interpreter."""
    return isinstance(getattr(value, "fn", None), FunctionType) and type(value).__module__.startswith("triton.")


def _code(source: str) -> str:
    """The statements in one fixed format, without docstrings."""
    tree = ast.parse(textwrap.dedent(source))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)
