"""Writes an op as FlashInfer-Bench's Definitions with their workloads, and its providers as Solutions."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanovllm.adapters.flashinfer_bench.documents import Spec
from nanovllm.adapters.flashinfer_bench.self_contained import NotSelfContained, self_contained
from nanovllm.adapters.flashinfer_bench.symbolic_shapes import (
    MOST_BYTES,
    NotExpressible,
    Signature,
    shapes_only,
    signature,
)
from nanovllm.kernels import Op, Provider, Tensors
from nanovllm.kernels.op.inputs import Shape, nbytes, written
from nanovllm.kernels.op.provider import NATIVE

_HARDWARE = {NATIVE: ["cpu", "cuda"], "cpu": ["cpu"]}
_MOST_BYTES = 4 << 20
"""Of a file of inputs of a workload whose shape the user did not name."""
_NAMESPACE = uuid.UUID("5c0ab1fe-57b5-5a38-8f5e-0c7a4c3b6e10")


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        files: their paths.
        left_out: workloads that could not be written, and why.
    """

    files: tuple[Path, ...]
    left_out: tuple[str, ...]


def export_op(
    op: Op, directory: Path, dtype: torch.dtype = torch.bfloat16, shapes: Sequence[Shape] | None = None,
    providers: Sequence[str] | None = None, author: str = "nanovllm",
) -> Exported:  # fmt: skip
    """Write an op into the folders `definitions`, `workloads`, `blob` and `solutions` of a directory.

    A Definition has the sizes of a model as constants, and the number of rows, tokens or sequences as variable axes. So
    an op has one Definition for each model's sizes among its shapes. Normally distributed inputs and bytes of any value
    are random in the workloads; others, such as positions and block tables, are stored as safetensors.

    Args:
        shapes: those of the workloads; None: the op's decode steps and large shapes, without those that need a file of
            more than 4 MiB.
        providers: those to write as Solutions; None: all. The Solution of `native` is self-contained. Others call the
            provider in this package, which has to be installed where they run.

    Raises:
        ValueError: the schema cannot express the op, a shape or a provider is not the op's, or nothing is left.
    """
    reason = _not_expressible(op)
    if reason is not None:
        raise ValueError(f"{op.name} cannot be written as a Definition: {reason}")
    unknown = [name for name in providers or () if name not in op.providers]
    if unknown:
        raise ValueError(f"{op.name} has no provider {unknown[0]!r}; it has {', '.join(op.providers)}")
    try:
        reference = self_contained(*_records(op).values(), op.native)
    except NotSelfContained as e:
        raise ValueError(f"{op.name} cannot be written as a Definition: {e}") from e
    files: list[Path] = []
    groups, left_out = _workloads(op, directory, dtype, shapes, reference, files)
    if not groups:
        raise ValueError(f"{op.name}: no workload can be written: {'; '.join(left_out) or 'there are no shapes'}")
    for name, (definition, traces) in groups.items():
        _write(directory / "definitions" / op.name / f"{name}.json", json.dumps(definition, indent=2), files)
        _write(directory / "workloads" / op.name / f"{name}.jsonl", "\n".join(map(json.dumps, traces)), files)
        for provider in op.providers.values():
            if providers is None or provider.name in providers:
                solution = _solution(op, provider, definition, author)
                path = directory / "solutions" / op.name / name / f"{solution['name']}.json"
                _write(path, json.dumps(solution, indent=2), files)
    return Exported(tuple(dict.fromkeys(files)), tuple(left_out))


def _workloads(
    op: Op, directory: Path, dtype: torch.dtype, shapes: Sequence[Shape] | None, reference: str, files: list[Path]
) -> tuple[dict[str, tuple[dict[str, Any], list[dict[str, Any]]]], dict[str, None]]:
    """Writes the inputs of the workloads that are not simply random, and adds these files to `files`.

    Returns:
        For each Definition's name the Definition and its workloads; what was left out, and why.
    """
    assert op.inputs is not None
    left_out: dict[str, None] = {}
    groups: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {}
    for shape in [*op.inputs.decode, *op.inputs.large] if shapes is None else shapes:
        for variant in op.inputs.variants:
            try:
                symbols = signature(op, shape, dtype, variant)
                definition = _definition(op, symbols, dtype, reference)
                name = definition["name"]
                inputs, data = _inputs(op, name, shape, dtype, variant)
                size = sum(map(len, data.values()))
                if shapes is None and size > _MOST_BYTES:
                    raise NotExpressible(
                        f"its inputs are a file of {size >> 20} MiB; --shape {written(shape)} writes it"
                    )
            except NotExpressible as e:
                left_out[f"{written(shape)}: {e}"] = None
                continue
            for path, content in data.items():
                (directory / path).parent.mkdir(parents=True, exist_ok=True)
                (directory / path).write_bytes(content)
                files.append(directory / path)
            known, traces = groups.setdefault(name, (definition, []))
            if known != definition:
                raise ValueError(f"{op.name}: two Definitions would have the name {name}")
            traces.append(_trace(name, symbols.sizes, inputs))
    return groups, left_out


def _not_expressible(op: Op) -> str | None:
    """Why no Definition can say what the op does; None: one can."""
    if op.inputs is None:
        return "it declares no inputs"
    if op.mutates:
        return f"it writes to {', '.join(op.mutates)}, and the schema knows inputs and outputs only"
    if op.compare is not None:
        return "its results are not compared number by number"
    return None


def _definition(op: Op, symbols: Signature, dtype: torch.dtype, reference: str) -> dict[str, Any]:
    words = [op.name]
    words += [f"{axis}{'_' * axis[-1].isdigit()}{size}" for axis, size in symbols.axes.items() if size is not None]
    words += [f"{name}_{value}" for name, value in symbols.fixed.items() if value is not None]
    words += [f"no_{name}" for name, value in symbols.fixed.items() if value is None]
    optional = [n for n, p in op.records.flat.parameters.items() if p.default is not p.empty and n in symbols.inputs]
    words += [f"with_{name}" for name in optional]
    for name, spec in symbols.inputs.items():
        if spec.shape is not None and len({p.count(",") for p in op.arguments.get(name, "").split(" | ")}) > 1:
            words.append(f"{name}_{len(spec.shape)}d")  # the op takes it in several forms
    doc = (op.__doc__ or "").strip()
    return {
        # It is the name of files: a slash, as in "Q4_K/planes", would be a folder.
        "name": re.sub(r"\W", "_", "_".join([*words, str(dtype).removeprefix("torch.")])),
        "op_type": op.name,
        "description": doc.split("\n\n")[0].replace("\n", " "),
        "tags": [f"nanovllm:{op.name}"],
        "axes": {
            name: {"type": "var"} if size is None else {"type": "const", "value": size}
            for name, size in symbols.axes.items()
        },
        "inputs": {n: _input(s) for n, s in symbols.inputs.items()},
        "outputs": {n: {"shape": list(s.shape or ()), "dtype": s.dtype} for n, s in symbols.outputs.items()},
        "reference": f"{reference}\n\n{_run(op, symbols)}",
    }


def _input(spec: Spec) -> dict[str, Any]:
    shape = None if spec.shape is None else list(spec.shape)
    if spec.dtype == "uint8":
        return {"shape": shape, "dtype": "int8", "description": "Bytes: the bits of uint8, which the schema has not."}
    return {"shape": shape, "dtype": spec.dtype}


def _run(op: Op, symbols: Signature) -> str:
    """The text of `run`, which calls the op by its name with the inputs in their order."""
    words = {n: f"{n}.view(torch.uint8)" if spec.dtype == "uint8" else n for n, spec in symbols.inputs.items()}
    given = {**words, **{k: repr(v) for k, v in symbols.fixed.items()}}
    return f"def run({', '.join(symbols.inputs)}):\n    return {op.name}({', '.join(_grouped(op, given))})\n"


def _records(op: Op) -> dict[str, type]:
    """The op's parameters that take records, and these records."""
    return {n: record for n in op.signature.parameters if (record := op.records.type_of(n)) is not None}


def _grouped(op: Op, given: Mapping[str, str]) -> list[str]:
    """Arguments as text, with records in place of their fields."""
    left, words = dict(given), []
    for name, parameter in op.signature.parameters.items():
        record = _records(op).get(name)
        if record is not None:
            fields = [f"{f}={left.pop(f)}" for f in op.records.fields_of(name) if f in left]
            words.append(f"{name}={record.__name__}({', '.join(fields)})")
        elif name in left:
            words.append(f"{name}={left.pop(name)}")
        elif parameter.default is parameter.empty:
            raise NotExpressible(f"its inputs have no {name}")
    return words


def _inputs(
    op: Op, definition: str, shape: Shape, dtype: torch.dtype, variant: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[Path, bytes]]:
    """Where the inputs of a workload come from, and the file of those that are not simply random."""
    arguments, maker = shapes_only(op, shape, dtype, variant)
    tensors = {k: v for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    stored = {k: v for k, v in tensors.items() if not maker.is_random(v)}
    size = nbytes(*stored.values())
    if size > MOST_BYTES:
        raise NotExpressible(f"{', '.join(stored)} would be a file of {size >> 20} MiB, more than {MOST_BYTES >> 20}")
    if any(v.is_floating_point() and v.float().isnan().any() for v in stored.values()):  # it follows from random ones
        assert op.inputs is not None
        arguments = op.inputs(Tensors(dtype, torch.device("cpu")), shape, variant)
        stored = {k: arguments[k] for k in stored}
    found: dict[str, Any] = {}
    content: dict[Path, bytes] = {}
    if stored:
        from safetensors.torch import save

        data = save({k: _bits(v.contiguous()) for k, v in stored.items()})
        digest = hashlib.sha256(data).hexdigest()[:16]
        path = Path("blob", "workloads", op.name, definition, f"{definition}_{digest}.safetensors")
        content[path] = data
        found = {k: {"type": "safetensors", "path": path.as_posix(), "tensor_key": k} for k in stored}
    for name, value in arguments.items():
        if name in tensors:
            found.setdefault(name, {"type": "random"})
        elif isinstance(value, (bool, int, float)):
            found[name] = {"type": "scalar", "value": value}
    return {name: found[name] for name in arguments if name in found}, content


def _bits(value: torch.Tensor) -> torch.Tensor:
    """The tensor as a Definition has it."""
    return value.view(torch.int8) if value.dtype == torch.uint8 else value


def _trace(definition: str, sizes: Mapping[str, int], inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A line of a file of workloads. The same workload has the same uuid, whoever exports it."""
    workload = {"axes": dict(sizes), "inputs": dict(inputs)}
    name = json.dumps([definition, workload], sort_keys=True)
    return {"definition": definition, "workload": {**workload, "uuid": str(uuid.uuid5(_NAMESPACE, name))}}


def _solution(op: Op, provider: Provider, definition: Mapping[str, Any], author: str) -> dict[str, Any]:
    sources, dependencies = _sources(op, provider, definition)
    return {
        "name": f"{definition['name']}_{provider.name}",
        "definition": definition["name"],
        "author": author,
        "description": f"The provider {provider.name} of nanovllm's op {op.name}.",
        "spec": {
            "language": "triton" if provider.name == "triton" else "python",
            "target_hardware": _HARDWARE.get(provider.name, ["cuda"]),
            "entry_point": "main.py::run",
            "dependencies": dependencies,
            "destination_passing_style": False,
        },
        "sources": [{"path": path, "content": text} for path, text in sources.items()],
    }


def _sources(op: Op, provider: Provider, definition: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """(path -> text, the packages that they need)."""
    reference = definition["reference"]
    if provider.name == NATIVE:
        return {"main.py": reference}, ["torch"]
    run = reference[reference.rindex("def run(") :]
    body = run.replace("    return ", f"    with {op.name}.use({provider.name!r}):\n        return ")
    lines = ["from nanovllm.kernels import all_ops, load_plugins"]
    lines = (["import torch", ""] if "torch." in body else []) + lines
    lines += [f"from {record.__module__} import {record.__name__}" for record in _records(op).values()]
    dependencies, sources = ["nanovllm"], {}
    if provider.origin is not None and provider.origin.endswith(".py"):
        lines = ["from pathlib import Path", "", *lines, ""]
        lines += ["load_plugins([str(Path(__file__).with_name('kernels.py'))])"]
        sources["kernels.py"] = Path(provider.origin).read_text(encoding="utf-8")
    elif provider.origin is not None:
        lines += ["", f"load_plugins([{provider.origin!r}])"]
        dependencies.append(provider.origin.partition(".")[0])
    else:
        lines = [line.removesuffix(", load_plugins") for line in lines]
    lines += ["", f"{op.name} = all_ops()[{op.name!r}]", "", "", body]
    return {"main.py": "\n".join(lines), **sources}, dependencies


def _write(path: Path, text: str, files: list[Path]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")
    files.append(path)
