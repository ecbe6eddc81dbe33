"""Tests in Triton's interpreter: a process for them, and less time in it.

At every call of a jitted function within a kernel, triton 3.6 to 3.9 look through some hundred attributes of `triton.language`
for those that are still to be replaced by the interpreter's. At the launch they all were, but this search takes a third of the
time of a small kernel. `quicken` has it look at one attribute of each module and class first: they are replaced together.
"""

import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import FunctionType

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
    except (ImportError, AttributeError):
        return
    tl = interpreter.tl
    is_builtin = tl.core.is_builtin

    def first_builtin(owner: object) -> tuple[object, str]:
        names = (name for name, member in inspect.getmembers(owner) if is_builtin(member))
        return owner, next(name for name in names if name not in _REPLACED_APART)

    everywhere = [first_builtin(owner) for owner in (tl.core.tensor, tl.core.tensor_descriptor_base)]
    watched = [
        (tl, [*everywhere, first_builtin(tl), first_builtin(tl.math)]),
        (tl.core, [*everywhere, first_builtin(tl.core)]),
    ]

    def patch_once(fn: FunctionType) -> object:
        seen = fn.__globals__.values()
        for lang, marks in watched:
            if any(value is lang for value in seen) and any(is_builtin(getattr(*mark)) for mark in marks):
                return patch(fn)
        return no_change()

    interpreter._patch_lang = patch_once


def check_interpreted(*files: str | Path, skips: bool = False) -> None:
    """Run test files in the interpreter, which is chosen when Triton is imported: in a process of its own.

    Args:
        skips: whether some tests may be skipped there.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", *map(str, files)],
        env=environment, cwd=_ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout and (skips or "skipped" not in done.stdout), done.stdout[-300:]
