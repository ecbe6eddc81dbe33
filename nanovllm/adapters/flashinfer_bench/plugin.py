"""Declares a Definition as an op, and its Solutions as providers: what an imported plugin calls.

The code of the documents runs when it is called first, not when the plugin is loaded. It is not confined: import
documents only from people whose code you would run.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib
import inspect
import shutil
import sys
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from nanovllm.adapters.flashinfer_bench import documents
from nanovllm.adapters.flashinfer_bench.definition_inputs import declared_inputs, main_dtype
from nanovllm.adapters.flashinfer_bench.documents import Definition, Solution, Spec
from nanovllm.kernels import Cost, Op, all_ops, nbytes, triton_support
from nanovllm.kernels.op.declaration import TOLERANCE
from nanovllm.kernels.op.dispatch import op as declare_op
from nanovllm.kernels.op.provider import NATIVE

TOLERATED = 1e-2
"""The relative tolerance that FlashInfer-Bench has by default. Dtypes with a larger one here keep theirs."""
_OURS = "nanovllm:"


def declare(
    definition: Mapping[str, Any], solutions: Sequence[Mapping[str, Any]], workloads: Sequence[Any] = (),
    root: str | None = None,
) -> Op:  # fmt: skip
    """Declare a Definition as an op, with a provider for each Solution.

    If the Definition was exported from an op of this package, the Solutions become providers of that op too, for the
    dtypes and sizes of the Definition.

    Args:
        definition, solutions: the documents, as JSON has them.
        workloads: the lines of the Definition's file of workloads.
        root: the folder to which the paths of safetensors files are relative.

    Raises:
        DocumentError: a document is not what the schema asks for.
        ValueError: the op's name is taken.
    """
    of = documents.definition(dict(definition), f"Definition {definition.get('name', '')}")
    parsed = [documents.solution(dict(s), f"Solution {s.get('name', '')}") for s in solutions]
    tried = documents.workloads(list(workloads), of, f"the workloads of {of.name}")
    declared = declare_op(
        _native(of),
        arguments={n: _pattern(of, spec) for n, spec in of.inputs.items() if spec.shape is not None},
        inputs=declared_inputs(of, tried, Path(root) if root is not None else None),
        cost=_cost(of),
        tolerance={dtype: max(TOLERATED, tolerance) for dtype, tolerance in TOLERANCE.items()},
        compare=None if _one_dtype(of) else _comparison(of),
        fake=_named(of, lambda *args, **kwargs: _allocated(of, [*args, *kwargs.values()]), op_name(of.name)),
    )
    for solution in parsed:
        function = function_of(of, solution)
        support = _support(solution)
        name = provider_name(solution.name, of.name)
        declared.provider(name, support, _contiguous(of))(function)
        for ours in (all_ops().get(t.removeprefix(_OURS)) for t in of.tags if t.startswith(_OURS)):
            if ours is not None and [*ours.signature.parameters] == [*of.inputs]:
                # The op may have Solutions of other sizes under the short names.
                names = (name, f"solution_{name.removeprefix('solution_')}", op_name(solution.name))
                other = next((n for n in names if n not in ours.providers), names[-1])
                ours.provider(other, support, _fits(of, declared))(_like(ours, function))
    return declared


def provider_name(solution: str, definition: str) -> str:
    """The name of the provider that a Solution becomes: without that of its Definition, if it begins with it."""
    short = solution.removeprefix(f"{definition}_") or solution
    return f"solution_{short}" if short == NATIVE else short


def op_name(definition: str) -> str:
    """The name of the op that a Definition becomes: letters, digits and _, not a digit first."""
    name = "".join(c if c.isalnum() or c == "_" else "_" for c in definition)
    return name if name.isidentifier() else f"_{name}"


def _pattern(of: Definition, spec: Spec) -> str:
    return f"{spec.dtype}[{', '.join(a if of.axes[a] is None else str(of.axes[a]) for a in spec.shape or ())}]"


def _parameters(of: Definition) -> inspect.Signature:
    kinds: dict[str, Any] = {"bool": bool}
    empty = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(
            n, empty, annotation=torch.Tensor if s.shape is not None
            else kinds.get(s.dtype, int if s.dtype.startswith("int") else float),
        )
        for n, s in of.inputs.items()
    ]  # fmt: skip
    several: Any = tuple.__class_getitem__((torch.Tensor,) * len(of.outputs))
    return inspect.Signature(parameters, return_annotation=torch.Tensor if len(of.outputs) == 1 else several)


def _named(of: Definition, call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function with the parameters of a Definition."""
    call.__name__ = call.__qualname__ = name
    call.__signature__ = _parameters(of)  # type: ignore[attr-defined]  # what `inspect.signature` reads
    call.__annotations__ = {n: p.annotation for n, p in _parameters(of).parameters.items()}
    return call


def _native(of: Definition) -> Callable[..., Any]:
    """The reference, in the Definition's dtypes whatever it is given: it may name them."""
    names = list(of.inputs)

    @cache
    def run() -> Callable[..., Any]:
        module = types.ModuleType(f"nanovllm_reference_of_{op_name(of.name)}")
        sys.modules[module.__name__] = module  # where dataclasses look for the names in annotations
        exec(compile(of.reference, f"<reference of {of.name}>", "exec"), module.__dict__)
        return module.run

    def native(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args), **kwargs)
        with torch.no_grad():
            return _checked(of, run()(*(_in_dtype(of.inputs[n], given[n]) for n in names)), "its reference")

    native.__doc__ = f"The Definition {of.name} ({of.op_type}) of FlashInfer-Bench."
    return _named(of, native, op_name(of.name))


def _in_dtype(spec: Spec, value: Any) -> Any:
    return value.to(getattr(torch, spec.dtype)) if isinstance(value, torch.Tensor) else value


def _checked(of: Definition, given: Any, who: str) -> Any:
    """One tensor, or a tuple in the order of the outputs."""
    if isinstance(given, dict):
        given = tuple(given[name] for name in of.outputs)
    results = (given,) if isinstance(given, torch.Tensor) else tuple(given or ())
    if len(results) != len(of.outputs) or not all(isinstance(r, torch.Tensor) for r in results):
        raise TypeError(f"{who} gave {len(results)} results; the outputs of {of.name} are {', '.join(of.outputs)}")
    return results[0] if len(results) == 1 else results


def _allocated(of: Definition, args: Sequence[Any], device: Any = None) -> Any:
    """Tensors for the outputs, not initialised. args: a call's arguments in the order of the inputs."""
    sizes = {name: size for name, size in of.axes.items() if size is not None}
    for spec, value in zip(of.inputs.values(), args):
        if isinstance(value, torch.Tensor):
            sizes.update(zip(spec.shape or (), value.shape))
    device = device or next((a.device for a in args if isinstance(a, torch.Tensor)), "cpu")
    made = tuple(
        torch.empty([sizes[a] for a in s.shape or ()], dtype=getattr(torch, s.dtype), device=device)
        for s in of.outputs.values()
    )
    return made[0] if len(made) == 1 else made


def function_of(of: Definition, solution: Solution) -> Callable[..., Any]:
    """The Solution's function, which takes the inputs and returns the outputs; imported at its first call."""
    names = list(of.inputs)
    run = cache(lambda: _imported(solution))

    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args), **kwargs)
        values = [given[n] for n in names]
        if solution.returns:
            return _checked(of, run()(*values), f"Solution {solution.name}")
        outputs = _allocated(of, values)
        run()(*values, *((outputs,) if isinstance(outputs, torch.Tensor) else outputs))
        return outputs

    return _named(of, call, op_name(solution.name))


def _imported(solution: Solution) -> Callable[..., Any]:
    """Write a Solution's sources into a package of their own, and import its function."""
    digest = hashlib.sha256(repr(sorted(solution.sources.items())).encode()).hexdigest()[:12]
    package = f"nanovllm_solution_{op_name(solution.name)}_{digest}"
    folder = Path(tempfile.mkdtemp(prefix="nanovllm-solution-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, text in solution.sources.items():
        path = folder / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    file, function = solution.entry
    sys.path.insert(0, str(folder))
    try:
        importlib.invalidate_caches()
        module = importlib.import_module(".".join([package, *Path(file).with_suffix("").parts]))
    finally:
        sys.path.remove(str(folder))
    if not callable(getattr(module, function, None)):
        raise AttributeError(f"Solution {solution.name}: {file} has no function {function!r} (spec.entry_point)")
    return getattr(module, function)


def _support(solution: Solution) -> Callable[[torch.device], str | None]:
    """Whether a Solution can run on a device, by its language and hardware."""

    def support(device: torch.device) -> str | None:
        if solution.language == "triton":
            return triton_support(device)
        wants = [h.lower() for h in solution.target_hardware]
        if device.type == "cpu" and not any("cpu" in h for h in wants):
            return f"its target_hardware is {', '.join(solution.target_hardware)}, this is a CPU"
        if device.type == "cuda" and all("cpu" in h for h in wants):
            return f"its target_hardware is {', '.join(solution.target_hardware)}, this is a GPU"
        return None

    return support


def _contiguous(of: Definition) -> Callable[..., str | None]:
    """Accept contiguous tensors, which is all that FlashInfer-Bench gives."""

    def accepts(*args: Any, **kwargs: Any) -> str | None:
        given = dict(zip(of.inputs, args), **kwargs)
        name = next((n for n, v in given.items() if isinstance(v, torch.Tensor) and not v.is_contiguous()), None)
        return None if name is None else f"{name} is not contiguous, and a Solution takes contiguous tensors"

    return accepts


def _fits(of: Definition, declared: Op) -> Callable[..., str | None]:
    """Accept calls of our op that are calls of the Definition: its dtypes and sizes."""
    contiguous = _contiguous(of)

    def accepts(*args: Any, **kwargs: Any) -> str | None:
        given = dict(zip(of.inputs, args), **kwargs)
        for name, spec in of.inputs.items():
            if spec.shape is None and isinstance(given.get(name), torch.Tensor):
                return f"{name}: the Definition {of.name} takes a scalar"
        try:
            declared.check(given)
        except ValueError as error:
            return str(error)
        return contiguous(**given)

    return accepts


def _like(ours: Op, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the signature of our op."""

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = ours.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return function(*bound.arguments.values())

    call.__module__ = function.__module__
    return call


def _cost(of: Definition) -> Callable[..., Cost]:
    def cost(**arguments: Any) -> Cost:
        outputs = _allocated(of, [arguments[n] for n in of.inputs], "meta")
        results = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
        return Cost(nbytes(*(v for v in arguments.values() if isinstance(v, torch.Tensor)), *results))

    return cost


def _one_dtype(of: Definition) -> bool:
    """Whether the outputs are floats of the one dtype that the cases are named for."""
    return {spec.dtype for spec in of.outputs.values()} == {str(main_dtype(of)).removeprefix("torch.")}


def _comparison(of: Definition) -> Callable[..., str | None]:
    """FlashInfer-Bench's own comparison: each element within 1e-2, of the value or absolutely."""
    native = _native(of)

    def compare(got: Any, arguments: dict[str, Any], dtype: torch.dtype) -> str | None:
        wanted = native(**arguments)
        results, expected = ((v,) if isinstance(v, torch.Tensor) else tuple(v) for v in (got, wanted))
        for (name, spec), mine, right in zip(of.outputs.items(), results, expected):
            if mine.shape != right.shape or str(mine.dtype) != f"torch.{spec.dtype}":
                return f"{name} is {mine.dtype} {list(mine.shape)} instead of {spec.dtype} {list(right.shape)}"
            off = ~torch.isclose(mine.double(), right.double(), rtol=TOLERATED, atol=TOLERATED, equal_nan=True)
            if off.any():
                return f"{name}: {int(off.sum())} of {off.numel()} elements are off by more than {TOLERATED}"
        return None

    return compare
