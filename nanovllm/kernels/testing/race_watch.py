"""Finds races between the programs of a Triton kernel, in Triton's interpreter.

The interpreter runs the programs of a launch one after the other, so a kernel with a race gives the right result there.
On a GPU the programs run at the same time.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from nanovllm.kernels.testing.crash_report import place_of_frame

_PAGE = 4096
"""Bytes of memory whose accesses are kept in one array."""
_NOBODY, _SEVERAL = -1, -2


class _Accesses:
    """Which program accessed each byte of a page, and how many atomic operations that program had made before."""

    def __init__(self) -> None:
        self.program = np.full(_PAGE, _NOBODY, np.int64)
        self.atomics = np.zeros(_PAGE, np.int64)


class RaceWatch:
    """Within the block, loads and stores of interpreted kernels are compared with those of the launch's other programs.

    A race is an element that one program changes and another one reads or changes. It is none if the first program
    makes an atomic operation after its access and the second one before its own: then they may have an agreement, such
    as a counter of the programs that are done. Atomic operations themselves are no races, loads and stores included.

    Attributes:
        race: None, or what was found first.
    """

    def __init__(self) -> None:
        self.race: str | None = None
        self._in_atomic = False
        self._undo: list[Callable[[], None]] = []
        self._begin((1, 1, 1))

    def _begin(self, dims: tuple[int, ...]) -> None:
        """A launch of that many programs begins."""
        self._dims = dims
        self._program = 0
        self._atomics: dict[int, int] = {}
        self._reads: dict[int, _Accesses] = {}
        self._writes: dict[int, _Accesses] = {}

    def __enter__(self) -> RaceWatch:
        from triton.runtime import interpreter

        builder, memory = interpreter.interpreter_builder, interpreter._interpreter
        vars(builder).pop("grid_idx", None)  # of an earlier launch: a kernel called without a grid must not find it
        originals = {name: getattr(builder, name) for name in (*_WATCHED, *_ATOMIC) if hasattr(builder, name)}

        def watched_grid_dim(*dims: int) -> None:
            self._begin(dims)
            originals["set_grid_dim"](*dims)

        def watched_grid_idx(x: int, y: int, z: int) -> None:
            self._program = (x * self._dims[1] + y) * self._dims[2] + z
            originals["set_grid_idx"](x, y, z)

        def watched_load(ptrs: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
            loaded = originals["create_masked_load"](ptrs, mask, *args, **kwargs)
            if self._looks():
                self._read(ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)])
            return loaded

        def watched_store(ptrs: Any, value: Any, mask: Any, *args: Any, **kwargs: Any) -> Any:
            if self._looks():
                new = np.ascontiguousarray(value.data)
                old = memory.load(ptrs.data, mask.data, new, new.dtype)
                bits = f"u{new.itemsize}"
                changed = np.broadcast_to(old.view(bits) != new.view(bits), ptrs.data.shape)
                stored = np.broadcast_to(mask.data, ptrs.data.shape)
                self._write_again(ptrs.data[~changed & stored])
                self._write(ptrs.data[changed & stored])
            return originals["create_masked_store"](ptrs, value, mask, *args, **kwargs)

        def watched_atomic(name: str) -> Callable[..., Any]:
            def atomic(*args: Any, **kwargs: Any) -> Any:
                self._atomics[self._program] = self._atomics.get(self._program, 0) + 1
                self._in_atomic = True  # some of them call the functions of plain loads and stores
                try:
                    return originals[name](*args, **kwargs)
                finally:
                    self._in_atomic = False

            return atomic

        watched = (watched_grid_dim, watched_grid_idx, watched_load, watched_store)
        atomics = {name: watched_atomic(name) for name in _ATOMIC if name in originals}
        for name, function in (dict(zip(_WATCHED, watched, strict=True)) | atomics).items():
            setattr(builder, name, function)
            self._undo.append(functools.partial(delattr, builder, name))  # the class's method is there again
        return self

    def __exit__(self, *exception: object) -> None:
        while self._undo:
            self._undo.pop()()

    def _looks(self) -> bool:
        return self.race is None and self._dims != (1, 1, 1) and not self._in_atomic

    def _read(self, addresses: np.ndarray) -> None:
        for page, at in _pages(addresses):
            if (writes := self._writes.get(page)) is not None:
                self._report(writes, at, "reads an element that was changed by")
            reads = self._reads.setdefault(page, _Accesses())
            others = (reads.program[at] != _NOBODY) & (reads.program[at] != self._program)
            reads.program[at] = np.where(others, _SEVERAL, self._program)
            reads.atomics[at] = self._atomics.get(self._program, 0)

    def _write(self, addresses: np.ndarray) -> None:
        for page, at in _pages(addresses):
            if (writes := self._writes.get(page)) is not None:
                self._report(writes, at, "writes another value to an element that was written by")
            if (reads := self._reads.get(page)) is not None:
                self._report(reads, at, "changes an element that was read by")
            writes = self._writes.setdefault(page, _Accesses())
            writes.program[at] = self._program
            writes.atomics[at] = self._atomics.get(self._program, 0)

    def _write_again(self, addresses: np.ndarray) -> None:
        """This program stores what is there already: it may read that, whichever program stored it first."""
        for page, at in _pages(addresses):
            if (writes := self._writes.get(page)) is not None:
                at = at[writes.program[at] != _NOBODY]
                writes.program[at] = self._program
                writes.atomics[at] = self._atomics.get(self._program, 0)

    def _report(self, accesses: _Accesses, at: np.ndarray, what: str) -> None:
        """Keep the race between this program and those of earlier accesses, if there is one."""
        earlier = accesses.program[at]
        for program in np.unique(earlier[(earlier != _NOBODY) & (earlier != self._program)]).tolist():
            before = accesses.atomics[at][earlier == program].max()
            agreed = program == _SEVERAL or self._atomics.get(program, 0) > before
            if agreed and self._atomics.get(self._program, 0):
                continue
            other = "another program" if program == _SEVERAL else f"program {self._index(program)}"
            does = f"program {self._index(self._program)} {what} {other}" + place_of_frame(sys._getframe())
            self.race = (
                f"a race: {does}. They run at the same time on a GPU: let one program own the element, or use "
                "tl.atomic_add or a second launch"
            )
            return

    def _index(self, program: int) -> tuple[int, int, int]:
        x, rest = divmod(program, self._dims[1] * self._dims[2])
        return (x, *divmod(rest, self._dims[2]))


_WATCHED = ("set_grid_dim", "set_grid_idx", "create_masked_load", "create_masked_store")
_ATOMIC = (
    "create_atomic_rmw", "create_atomic_cas", "create_atomic_load", "create_atomic_store", "create_atomic_poll",
)  # fmt: skip
"""The last three are there from some version of Triton on."""


def race_watch() -> AbstractContextManager[RaceWatch | None]:
    """A `RaceWatch` if Triton's interpreter is in use, else nothing."""
    return RaceWatch() if "triton.runtime.interpreter" in sys.modules else nullcontext()


def _pages(addresses: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Addresses by page: (the page's number, offsets in it)."""
    flat = np.asarray(addresses, np.uint64).ravel().astype(np.int64)
    numbers = flat // _PAGE
    for page in np.unique(numbers).tolist():
        yield page, flat[numbers == page] - page * _PAGE
