"""Tests in Triton's interpreter: a process for them, and less time in it.

At every call of a jitted function within a kernel, triton 3.6 to 3.9 look through some hundred attributes of
`triton.language` for those that are still to be replaced by the interpreter's. At the launch they all were, but this
search takes a third of the time of a small kernel. `quicken` has it look at one attribute of each module and class
first: they are replaced together.

More is slow there. Which numpy type stands for one of Triton's is looked up in a table made anew each time; types and
shapes are compared after constants within them have been unwrapped, where there are none; and a reduction by a
function of the kernel's own combines one element after another, each a tensor. `quicken` keeps the table, compares at
once, and has neighbours combined in pairs, all pairs in one call, until one is left: as many combinations, in another
order, as on a GPU.

Most of the time of integer arithmetic goes into looking for overflows: triton 3.9 computes each sum and product again
in 64 bits, compares it with both limits, and asserts that nothing overflowed, which does nothing unless
`options.debug` is set. Operands of the same shape are broadcast to it, and the type of every result is found anew.
`quicken` leaves the first two out, and keeps the types. Operands of other shapes get the type of the result, and
numpy broadcasts them: a quarter of the time of attention and of small products went into copies of scalars.
"""

import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import FunctionType

import numpy as np

_ROOT = Path(__file__).parents[1]

# Replaced in a module of which the other attributes may not be.
_REPLACED_APART = {"reduce", "associative_scan"}


def quicken() -> None:
    """Call it in a process with TRITON_INTERPRET=1, before the first launch.

    Without Triton, or in one that has no such search, nothing changes.
    """
    try:
        from triton.runtime import interpreter

        patch, no_change = interpreter._patch_lang, interpreter._LangPatchScope
        np_dtype, generic_reduce = interpreter._get_np_dtype, interpreter.ReduceOps.generic_reduce
        semantic = interpreter.TritonSemantic
        check_overflow, broadcast = semantic.binary_op_sanitize_overflow_impl, semantic.broadcast_impl_value
        computation_type, check_operands = semantic.computation_type_impl, semantic.binary_op_type_checking_impl
    except (ImportError, AttributeError):
        return
    tl, semantic_of_kernels = interpreter.tl, interpreter.interpreter_semantic
    is_builtin = tl.core.is_builtin
    checking = tl.core.builtin(lambda: None).__code__

    def first_builtin(owner: object) -> tuple[object, str]:
        names = (name for name, member in inspect.getmembers(owner) if is_builtin(member))
        return owner, next(name for name in names if name not in _REPLACED_APART)

    everywhere = [first_builtin(owner) for owner in (tl.core.tensor, tl.core.tensor_descriptor_base)]
    watched = [
        (tl, [*everywhere, first_builtin(tl), first_builtin(tl.math)]),
        (tl.core, [*everywhere, first_builtin(tl.core)]),
    ]

    def patch_attribute(owner: object, name: str, member: object, builder: object, scope: object) -> None:
        call = member.__wrapped__ if getattr(member, "__code__", None) is checking else member

        def given_semantic(*args: object, **options: object) -> object:
            options["_semantic"] = semantic_of_kernels
            return call(*args, **options)

        scope.set_attr(owner, name, given_semantic)

    marks_of: dict[int, list] = {}  # by the module of a kernel

    def patch_once(fn: FunctionType) -> object:
        marks = marks_of.get(id(fn.__globals__))
        if marks is None:
            seen = {id(value) for value in fn.__globals__.values()}
            marks = [mark for lang, marks in watched if id(lang) in seen for mark in marks]
            marks_of[id(fn.__globals__)] = marks
        for mark in marks:
            if is_builtin(getattr(*mark)):
                return patch(fn)
        return no_change()

    np_dtypes: dict[str, np.dtype] = {}

    def np_dtype_once(dtype: object) -> np.dtype:
        name = dtype.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype(dtype)
        return np_dtypes[name]

    def combined(self: object, tensors: tuple) -> list:
        if self.axis is None or tensors[0].handle.data.shape[self.axis] & (tensors[0].handle.data.shape[self.axis] - 1):
            return generic_reduce(self, tensors)
        arrays = [np.moveaxis(t.handle.data, self.axis, 0) for t in tensors]
        types = [t.dtype for t in tensors]

        def halves(start: int) -> list:
            return [self.to_tensor(array[start::2], dtype) for array, dtype in zip(arrays, types)]

        while len(arrays[0]) > 1:
            results = self.combine_fn.fn(*halves(0), *halves(1))
            results = results if isinstance(results, tuple | tl.tuple) else (results,)
            arrays = [
                r.handle.data if isinstance(r, tl.tensor) else np.full_like(a[::2], r) for r, a in zip(results, arrays)
            ]
        kept = [np.moveaxis(array, 0, self.axis) if self.keep_dims else array[0] for array in arrays]
        return [self.to_tensor(data, dtype) for data, dtype in zip(kept, types)]

    block_type, tensor = tl.block_type, tl.tensor
    init_block, init_tensor = block_type.__init__, tensor.__init__
    blocks: dict[tuple, tuple] = {}
    shapes: dict[tuple[int, ...], tuple] = {}

    def init_block_once(self: object, element_ty: object, shape: object) -> None:
        key = (element_ty.name, *shape)
        if key not in blocks:
            init_block(self, element_ty, shape)
            blocks[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = blocks[key]

    def init_tensor_once(self: object, handle: object, type: object) -> None:
        shape = tuple(type.shape.values) if type.is_block() else ()
        if shape not in shapes:
            init_tensor(self, handle, type)
            shapes[shape] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[shape]

    equal_types, equal_tuples, language_tuple = tl.dtype.__eq__, tl.tuple.__eq__, tl.tuple

    def same_type(self: object, other: object) -> bool:
        return self is other or equal_types(self, other)

    def same_tuple(self: object, other: object) -> object:
        if type(other) is language_tuple and all(type(value) is int for value in other.values):  # nothing to unwrap
            return tl.constexpr(self.values == other.values)
        return equal_tuples(self, other)

    def check_overflow_if_seen(self: object, lhs: object, rhs: object, binary_op: object) -> None:
        if self.builder.options.debug:
            check_overflow(self, lhs, rhs, binary_op)

    results: dict[tuple, list[int]] = {}  # the shape of an operation's result, by its operands' shapes
    of_an_operation = [False]

    def with_shape(operand: object, shape: list[int]) -> object:
        return operand if shape_of(operand) == shape else tensor(operand.handle, block_type(operand.dtype, shape))

    def shape_of(operand: object) -> list[int]:
        return list(operand.type.shape.values) if type(operand.type) is block_type else []

    def broadcast_if_needed(self: object, lhs: object, rhs: object) -> tuple:
        a, b = shape_of(lhs), shape_of(rhs)
        if a == b:
            return lhs, rhs
        if not of_an_operation[0]:  # a function of the language, such as `tl.broadcast`, or a choice among three
            return broadcast(self, lhs, rhs)
        key = tuple(a), tuple(b)
        if key not in results:
            results[key] = shape_of(broadcast(self, lhs, rhs)[0])  # raises where they do not fit
        return with_shape(lhs, results[key]), with_shape(rhs, results[key])

    def check_operands_of_one(self: object, *operands: object, **options: bool) -> tuple:
        before, of_an_operation[0] = of_an_operation[0], True
        try:
            return check_operands(self, *operands, **options)
        finally:
            of_an_operation[0] = before

    computation_types: dict[tuple, object] = {}

    def computation_type_once(self: object, a: object, a_scalar: bool, b: object, b_scalar: bool, div: bool) -> object:
        key = a.name, a_scalar, b.name, b_scalar, div
        if key not in computation_types:
            computation_types[key] = computation_type(self, a, a_scalar, b, b_scalar, div)
        return computation_types[key]

    semantic.binary_op_sanitize_overflow_impl = check_overflow_if_seen
    semantic.broadcast_impl_value = broadcast_if_needed
    semantic.computation_type_impl, semantic.binary_op_type_checking_impl = computation_type_once, check_operands_of_one
    tl.dtype.__eq__, tl.tuple.__eq__ = same_type, same_tuple
    block_type.__init__, tensor.__init__ = init_block_once, init_tensor_once
    interpreter._patch_lang, interpreter._patch_attr = patch_once, patch_attribute
    interpreter.TensorHandle.__post_init__ = lambda self: None  # it looks for mistakes of the interpreter's own
    interpreter._get_np_dtype = np_dtype_once
    interpreter.ReduceOps.generic_reduce = combined


def check_interpreted(*arguments: str | Path) -> None:
    """Run pytest with these arguments in the interpreter, in a process of its own. No test may fail or be skipped."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *map(str, arguments)],
        env=environment, cwd=_ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-300:]
