"""FlashInfer-Bench's documents as records: read from JSON and checked, with errors that name the file and the field.

What is checked is what FlashInfer-Bench's own models check, and what `nanovllm` needs in addition: names of inputs and
axes that are Python identifiers.
"""

from __future__ import annotations

import ast
import json
import keyword
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

DTYPES = (
    "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float4_e2m1", "int64", "int32", "int16", "int8",
    "bool",
)  # fmt: skip
LANGUAGES = ("python", "triton", "cpp", "cuda", "tilelang")
OUR_LANGUAGES = ("python", "triton")
"""Those that can be imported."""
INPUT_KINDS = ("random", "scalar", "safetensors")


_LARGEST = (1 << 63) - 1


class DocumentError(ValueError):
    """A document is not what the schema asks for. The message names the file, the field and the value."""


@dataclass(frozen=True)
class Spec:
    """An input or output. shape: the names of axes; None: a scalar of Python."""

    shape: tuple[str, ...] | None
    dtype: str


@dataclass(frozen=True)
class Definition:
    """What is to be computed.

    Attributes:
        axes: name -> its size; None: it varies from call to call.
        reference: Python code that defines `run`, which takes the inputs and returns the outputs, in their order.
        tags: free words; `nanovllm:OP` says that an op of ours was exported.
    """

    name: str
    op_type: str
    axes: Mapping[str, int | None]
    inputs: Mapping[str, Spec]
    outputs: Mapping[str, Spec]
    reference: str
    tags: tuple[str, ...] = ()

    @property
    def variable(self) -> tuple[str, ...]:
        """The axes that vary."""
        return tuple(name for name, size in self.axes.items() if size is None)


@dataclass(frozen=True)
class DefinitionWorkload:
    """Sizes of the variable axes, and where the inputs come from: {"type": "random"}, "scalar" or "safetensors"."""

    axes: Mapping[str, int]
    inputs: Mapping[str, Mapping[str, Any]]
    uuid: str


@dataclass(frozen=True)
class Solution:
    """A kernel.

    Attributes:
        sources: relative path -> text.
        entry: (one of these paths, the function in it).
        returns: whether the function returns the outputs. Else it takes them as its last arguments.
    """

    name: str
    definition: str
    language: str
    target_hardware: tuple[str, ...]
    entry: tuple[str, str]
    returns: bool
    sources: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))


class _Reader:
    """Takes fields out of a JSON object."""

    def __init__(self, where: str, value: Any, path: str = "") -> None:
        self._where, self._path = where, path
        if not isinstance(value, dict):
            raise self.error("", f"expected an object, not {_shown(value)}")
        self.value = value

    def error(self, name: str, what: str) -> DocumentError:
        at = ".".join(filter(None, (self._path, name))) or "the document"
        return DocumentError(f"{self._where}: {at}: {what}")

    def text(self, name: str) -> str:
        value = self.value.get(name)
        if not isinstance(value, str) or not value:
            raise self.error(name, f"expected text, not {self._given(name)}")
        if any("\ud800" <= c <= "\udfff" for c in value):
            raise self.error(name, "has half of a pair of surrogates, which is no character")
        return value

    def one_of(self, name: str, known: tuple[str, ...]) -> str:
        value = self.text(name)
        if value not in known:
            raise self.error(name, f"expected one of {', '.join(known)}, not {value!r}")
        return value

    def size(self, name: str) -> int:
        value = self.value.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.error(name, f"expected a number of at least 0, not {self._given(name)}")
        if value > _LARGEST:
            raise self.error(name, f"is larger than a size can be: {_shown(value)}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self.value.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, f"expected true or false, not {_shown(value)}")
        return value

    def object(self, name: str) -> _Reader:
        if name not in self.value:
            raise self.error(name, "is missing")
        return _Reader(self._where, self.value[name], ".".join(filter(None, (self._path, name))))

    def objects(self, name: str) -> list[_Reader]:
        value = self.value.get(name)
        if not isinstance(value, list) or not value:
            raise self.error(name, f"expected a list that is not empty, not {self._given(name)}")
        return [_Reader(self._where, v, f"{self._path}{'.' if self._path else ''}{name}[{i}]")
                for i, v in enumerate(value)]  # fmt: skip

    def texts(self, name: str, default: list[str] | None = None) -> tuple[str, ...]:
        value = self.value.get(name, default)
        if not isinstance(value, list) or not all(isinstance(v, str) and v for v in value):
            raise self.error(name, f"expected a list of texts, not {self._given(name)}")
        return tuple(value)

    def _given(self, name: str) -> str:
        return _shown(self.value[name]) if name in self.value else "nothing: it is missing"


def _shown(value: Any) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:60] + "..."


def load(path: Path) -> Any:
    """The JSON of a file; a DocumentError if it is none."""
    return parse(read_text(path), str(path))


def read_text(path: Path) -> str:
    """The text of a file; a DocumentError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as e:
        raise DocumentError(f"{path}: {e.strerror or e}") from None
    except UnicodeDecodeError as e:
        raise DocumentError(f"{path}: no JSON: {e}") from None


def parse(text: str, where: str) -> Any:
    """The value that JSON stands for. where: the file, for errors."""
    try:
        return json.loads(text, parse_constant=_finite, parse_float=_finite)
    except RecursionError:
        raise DocumentError(f"{where}: no JSON: it is nested too deeply") from None
    except ValueError as e:
        raise DocumentError(f"{where}: no JSON: {e}") from None


def _finite(word: str) -> float:
    if not math.isfinite(float(word)):
        raise ValueError(f"{word} is no finite number")
    return float(word)


def definition(value: Any, where: str) -> Definition:
    """A Definition from its JSON. where: the file, for errors."""
    whole = _Reader(where, value)
    axes: dict[str, int | None] = {}
    of_axes = whole.object("axes")
    for name in of_axes.value:
        _identifier(of_axes, name)
        one = of_axes.object(name)
        axes[name] = one.size("value") if one.one_of("type", ("const", "var")) == "const" else None
    inputs, outputs = (_specs(whole.object(kind), axes) for kind in ("inputs", "outputs"))
    if not outputs:
        raise whole.error("outputs", "expected at least one output")
    if both := sorted(set(inputs) & set(outputs)):
        raise whole.error("outputs", f"{both[0]!r} is an input too")
    bound = {axis for spec in inputs.values() for axis in spec.shape or ()}
    for output, spec in outputs.items():
        for axis in spec.shape or ():
            if axes[axis] is None and axis not in bound:
                raise whole.error(
                    f"outputs.{output}.shape", f"no input has the variable axis {axis!r}, so its size is open"
                )
    reference = whole.text("reference")
    statements = _parsed(whole, "reference")
    if not any(isinstance(s, ast.FunctionDef) and s.name == "run" for s in statements):
        raise whole.error("reference", "defines no function run at its top level")
    tags = whole.texts("tags", []) if whole.value.get("tags") is not None else ()
    return Definition(whole.text("name"), whole.text("op_type"), axes, inputs, outputs, reference, tags)


def _parsed(reader: _Reader, name: str) -> list[ast.stmt]:
    """The statements of a field that is Python."""
    try:
        return ast.parse(reader.text(name)).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise reader.error(name, f"is not Python: {e or 'it is nested too deeply'}") from None


def _inside(file: str, folder: str) -> bool:
    return PurePosixPath(folder) in PurePosixPath(file).parents


def _identifier(reader: _Reader, name: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise reader.error(name, "expected a name as Python has them: letters, digits and _")


def _specs(reader: _Reader, axes: Mapping[str, int | None]) -> dict[str, Spec]:
    found = {}
    for name in reader.value:
        _identifier(reader, name)
        one = reader.object(name)
        dtype = one.one_of("dtype", DTYPES)
        if "shape" not in one.value:
            raise one.error("shape", "is missing; null says that it is a scalar")
        shape = None if one.value["shape"] is None else one.texts("shape")
        for axis in shape or ():
            if axis not in axes:
                raise one.error("shape", f"axis {axis!r} is not among the axes {', '.join(axes)}")
        found[name] = Spec(shape, dtype)
    return found


def solution(value: Any, where: str) -> Solution:
    """A Solution from its JSON. where: the file, for errors."""
    whole = _Reader(where, value)
    spec = whole.object("spec")
    sources: dict[str, str] = {}
    for one in whole.objects("sources"):
        path = one.text("path")
        if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts or "\\" in path:
            raise one.error("path", f"expected a relative path without '..', not {path!r}")
        if not PurePosixPath(path).name or not path.isprintable():
            raise one.error("path", f"expected the name of a file, not {path!r}")
        if path in sources:
            raise one.error("path", f"{path!r} is there twice")
        if other := next((p for p in sources if _inside(p, path) or _inside(path, p)), None):
            raise one.error("path", f"of {path!r} and {other!r} one is a file and the other's folder")
        sources[path] = one.text("content")
        if path.endswith(".py"):
            _parsed(one, "content")
    entry = spec.text("entry_point")
    file, separator, function = entry.partition("::")
    if not separator or "::" in function or not function.isidentifier():
        raise spec.error("entry_point", f"expected FILE::FUNCTION, not {entry!r}")
    if file not in sources:
        raise spec.error("entry_point", f"{file!r} is not among the sources {', '.join(sources)}")
    if spec.one_of("language", LANGUAGES) in OUR_LANGUAGES and not file.endswith(".py"):
        raise spec.error("entry_point", f"expected a file whose name ends in .py, not {file!r}")
    if not spec.texts("target_hardware"):
        raise spec.error("target_hardware", "expected at least one kind of hardware")
    return Solution(
        whole.text("name"), whole.text("definition"), spec.one_of("language", LANGUAGES),
        spec.texts("target_hardware"), (file, function), not spec.flag("destination_passing_style", True), sources,
    )  # fmt: skip


def workloads(lines: list[Any], of: Definition, where: str) -> list[DefinitionWorkload]:
    """The workloads of a Definition from the lines of its JSONL file. where: the file, for errors."""
    found = []
    for number, line in enumerate(lines, 1):
        if line is None:
            continue  # an empty one
        trace = _Reader(f"{where}, line {number}", line)
        if trace.text("definition") != of.name or trace.value.get("solution") is not None:
            continue
        one = trace.object("workload")
        sizes = one.object("axes")
        inputs = one.object("inputs")
        if unknown := next((a for a in sizes.value if a not in of.axes), None):
            raise sizes.error(unknown, f"is no axis of {of.name}, which has {', '.join(of.axes)}")
        for axis in of.variable:
            sizes.size(axis)
        for name, spec in of.inputs.items():
            _check_given(inputs.object(name), spec)
        found.append(DefinitionWorkload({a: sizes.size(a) for a in of.variable}, inputs.value, one.text("uuid")))
    return found


def _check_given(given: _Reader, spec: Spec) -> None:
    """Check where a workload's input comes from."""
    kind = given.one_of("type", INPUT_KINDS)
    if kind == "safetensors":
        path = PurePosixPath(given.text("path"))
        given.text("tensor_key")
        if not path.is_absolute() and ".." in path.parts:
            raise given.error("path", f"expected a path without '..', not {str(path)!r}")
    if kind == "scalar":
        value = given.value.get("value")
        if not isinstance(value, (int, float)):
            raise given.error("value", f"expected a number, not {_shown(value)}")
        if isinstance(value, int) and abs(value) > _LARGEST:
            raise given.error("value", f"is too large for {spec.dtype}: {_shown(value)}")
    if (kind == "scalar") != (spec.shape is None):
        wanted = "scalar" if spec.shape is None else "random or safetensors"
        raise given.error("type", f"expected {wanted}, as the Definition has the input, not {kind!r}")
