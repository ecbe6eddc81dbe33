"""Finds Definitions and Solutions on disk, and writes them as a plugin: one Python file that declares them."""

from __future__ import annotations

import pprint
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanovllm.adapters.flashinfer_bench import documents
from nanovllm.adapters.flashinfer_bench.definition_inputs import check_sizes
from nanovllm.adapters.flashinfer_bench.documents import OUR_LANGUAGES, DocumentError, load
from nanovllm.adapters.flashinfer_bench.plugin import op_name
from nanovllm.kernels import all_ops


@dataclass
class Found:
    """A Definition with its Solutions and workloads, as JSON.

    Attributes:
        op: the name of the op that it becomes.
        dtype: of its first output.
        root: the folder to which the paths of its files of tensors are relative.
    """

    op: str
    definition: Mapping[str, Any]
    root: Path
    solutions: list[Mapping[str, Any]] = field(default_factory=list)
    workloads: list[Any] = field(default_factory=list)

    @property
    def dtype(self) -> str:
        return next(iter(self.definition["outputs"].values()))["dtype"]


def find(path: Path, definition: Path | None = None, only: Sequence[str] = ()) -> list[Found]:
    """The Definitions that have Solutions: of a Solution's file, or of all files of a directory.

    Args:
        path: a Solution's JSON file, or a directory. FlashInfer-Bench's have the folders `definitions`, `solutions`
            and `workloads`; in others every JSON file is looked at.
        definition: the Definition's file. Left out: the one of the name that the Solution says, in the directory, or
            in the nearest folder above that has `definitions`.
        only: names of Solutions or Definitions; the others are left out.

    Raises:
        DocumentError: a file is not what the schema asks for, or a Solution's Definition is not there.
    """
    if not path.exists():
        raise DocumentError(f"{path}: no such file or directory")
    root = path if path.is_dir() else _root_above(path)
    definitions = _definitions([definition] if definition is not None else _json_files(root, "definitions"))
    if not definitions and (_root_above(path) / "definitions").is_dir():  # a folder within such a directory
        root = _root_above(path)
        definitions = _definitions(_json_files(root, "definitions"))
    files = _json_files(path, "solutions") if path.is_dir() else [path]
    found: dict[str, Found] = {}
    for file in files:
        value = load(file)
        if path.is_dir() and not (isinstance(value, dict) and "spec" in value):
            continue
        solution = documents.solution(value, str(file))
        if only and not {solution.name, solution.definition} & set(only):
            continue
        if solution.language not in OUR_LANGUAGES:
            raise DocumentError(
                f"{file}: spec.language: {solution.language!r} cannot be imported; {' and '.join(OUR_LANGUAGES)} can. "
                "Name the Solutions to import with --only"
            )
        if solution.definition not in definitions:
            known = ", ".join(sorted(definitions)[:8]) or "none"
            raise DocumentError(
                f"{file}: definition: {solution.definition!r} is not among the Definitions found ({known}); name its "
                "file with --definition"
            )
        of = definitions[solution.definition]
        one = found.setdefault(solution.definition, Found(op_name(solution.definition), of, root))
        one.solutions.append(value)
    if not found:
        raise DocumentError(f"{path}: no Solution{f' or Definition named {only[0]}' if only else ''} is there")
    for name, one in found.items():
        if (taken := all_ops().get(one.op)) is not None:
            raise DocumentError(f"Definition {name}: name: there is an op {taken.name} already")
        if other := next((n for n, o in found.items() if n != name and o.op == one.op), None):
            raise DocumentError(f"Definition {name}: name: as an op it has the name of {other!r}, {one.op}")
        one.workloads = _workloads(root, documents.definition(one.definition, name))
    return list(found.values())


def _root_above(file: Path) -> Path:
    return next((p for p in file.resolve().parents if (p / "definitions").is_dir()), file.resolve().parent)


def _json_files(root: Path, folder: str) -> list[Path]:
    return sorted((root / folder if (root / folder).is_dir() else root).rglob("*.json"))


def _definitions(files: Sequence[Path]) -> dict[str, Mapping[str, Any]]:
    found: dict[str, Mapping[str, Any]] = {}
    for file in files:
        value = load(file)
        if len(files) > 1 and not (isinstance(value, dict) and "reference" in value):
            continue
        if isinstance(value, dict) and "spec" in value:
            continue  # a Solution, alone in its folder
        name = documents.definition(value, str(file)).name
        if name in found:
            raise DocumentError(f"{file}: name: there are two Definitions {name!r}")
        found[name] = value
    return found


def _workloads(root: Path, of: documents.Definition) -> list[Any]:
    """The lines of the files of workloads that belong to a Definition, checked."""
    lines, checked = [], False
    # Not by a pattern with the name, which may have any characters.
    for file in sorted(p for p in (root / "workloads").rglob("*.jsonl") if p.stem == of.name):
        texts = documents.read_text(file).split("\n")
        values = [documents.parse(t, f"{file}, line {i}") if t.strip() else None for i, t in enumerate(texts, 1)]
        check_sizes(of, documents.workloads(values, of, str(file)), root, str(file))
        lines += [value for value in values if value is not None]
        checked = True
    if not checked:
        check_sizes(of, [], root, f"Definition {of.name}")
    return lines


def write_plugin(found: Sequence[Found], path: Path) -> None:
    """Write a plugin that declares what was found, for `--kernel-plugin` and `LLM(kernel_plugins=...)`.

    The documents are in the file; files of tensors stay where they are.
    """
    names = ", ".join(re.sub(r"[^\w.+-]", "_", s["name"]) for one in found for s in one.solutions)
    parts = [
        f'"""Imported from FlashInfer-Bench by `nanovllm kernels import`: {names}."""',
        "",
        "from nanovllm.adapters.flashinfer_bench.plugin import declare",
    ]
    for one in found:
        values = {
            "definition": one.definition, "solutions": one.solutions, "workloads": one.workloads,
            "root": str(one.root.resolve()),
        }  # fmt: skip
        arguments = "".join(f"    {name}={_literal(value)},\n" for name, value in values.items())
        parts += ["", f"declare(\n{arguments})"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _literal(value: Any) -> str:
    return pprint.pformat(value, width=110, sort_dicts=False).replace("\n", "\n    ")
