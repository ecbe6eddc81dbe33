"""How a kernel failed, in words: the error or the signal, the line of the kernel, and what to look for."""

from __future__ import annotations

import difflib
import inspect
import linecache
import re
import signal
import sys
import textwrap
import traceback
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

_FRAME = re.compile(r'^  File "(?P<path>[^"]+)", line (?P<line>\d+) in ', re.MULTILINE)
_LIBRARIES = re.compile(r"/site-packages/|/dist-packages/|/lib/python3|/nanovllm/kernels/(testing|op)/|^<")
_ACCESS = re.compile(r" in \w*(load|store|atomic)")
"""In Triton's interpreter the function that accesses memory is named for what it does."""
_WIDER_DTYPE = re.compile(r"Expected dtype \[[^]]*'fp32'[^]]*\] but got (bf16|fp16)")
"""Such as of `tl.exp`, which Triton has for wide floats only."""
_FUNCTION_OF_TORCH = re.compile(r"must be Tensor, not (tensor|constexpr)\b")
"""PyTorch's words for a block of Triton."""
_COMPILER_STOPPED = re.compile("PassManager::run failed|error encountered during parsing")
_COMPILER_PRINTED = re.compile(
    r'^(?:loc\()?"?(?P<path>[^"\n:]+)"?:(?P<line>\d+):\d+\)?: error: (?P<text>.+)$', re.MULTILINE
)
_NO_ATTRIBUTE = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")
_MEMORY_SIGNALS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)


class End(NamedTuple):
    """How a process ended. `hung`: a case took longer than allowed."""

    text: str
    hung: bool


def describe(code: int, stack: str, limit: float) -> End:
    """How a process ended.

    Args:
        code: as of `multiprocessing.Process.exitcode`: negative if a signal ended the process.
        stack: what faulthandler wrote, the innermost call first.
        limit: the seconds after which faulthandler ended the process.
    """
    place, above = _place(stack)
    if stack.startswith("Timeout"):
        return End(f"hung, or its process was paused: it took longer than {limit:g} s{place}", True)
    if code >= 0:
        return End(f"crashed: it ended the process with code {code}{place}", False)
    name = signal.Signals(-code).name
    if -code == signal.SIGKILL:
        return End(f"crashed ({name}): was the machine out of memory?", False)
    if -code not in _MEMORY_SIGNALS:
        return End(f"crashed ({name}){place}", False)
    access = _ACCESS.search(above)
    return End(f"crashed ({name}){place}: {out_of_bounds(access[1] if access else 'load or store')}", False)


def out_of_bounds(access: str) -> str:
    """What an access out of bounds may come from. A line that has a mask may have a wrong one."""
    return f"a {access} with a wrong or missing mask, or a wrong offset?"


def _place(stack: str) -> tuple[str, str]:
    """(" at file:line, `source`" of the innermost line outside of libraries, the stack above it); empty if there is
    none.
    """
    # Of several threads, the last one printed is the main one, where the case ran.
    main = stack[max(0, stack.rfind("hread 0x")) :]
    for frame in _FRAME.finditer(main):
        if not _LIBRARIES.search(frame["path"]):
            return f" at {_line(frame['path'], int(frame['line']))}", main[: frame.start()]
    return "", ""


def _line(path: str, number: int) -> str:
    """A line of a file, with its place: "file:line, `source`"."""
    return f"{Path(path).name}:{number}, `{linecache.getline(path, number).strip()}`"


def place_of_frame(frame: FrameType | None) -> str:
    """ ", at file:line, `source`" of the innermost line outside of libraries, from a frame outwards; empty if none."""
    while frame is not None and _LIBRARIES.search(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f", at {_line(frame.f_code.co_filename, frame.f_lineno)}"


def what_failed(error: BaseException) -> str:
    """What an error of a provider says, and the innermost line outside of libraries that raised it."""
    first = str(error).split("\n")[0]
    if "illegal memory access" in first:
        return f"crashed ({first}): {out_of_bounds('load or store')}"
    if (message := _compiler_message(error)) is not None:
        return f"the kernel does not compile:{message.line}: {message.text}{_hint(message.text)}"
    place = _place_of(error)
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        error = error.__cause__  # what the kernel's code raised, or a function of Triton that it calls
        place = _place_of(error) or place
    return f"{type(error).__name__}: {error}{place}{remedy(error)}"


def place_and_remedy(error: BaseException) -> str:
    """ ", at file:line, `source`" of the innermost line outside of libraries that raised an error; what to do."""
    return _place_of(error) + remedy(error)


def remedy(error: BaseException) -> str:
    """What to do about an error, to follow its message; empty if that is not known."""
    if isinstance(error, NameError) and error.name and error.__traceback__ is not None:
        frame = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
        near = difflib.get_close_matches(error.name, {**frame.f_globals, **frame.f_locals}, n=1)
        return f"; did you mean {near[0]!r}?" if near else ""
    return _hint(str(error))


def _place_of(error: BaseException) -> str:
    """ ", at file:line, `source`" of the innermost line outside of libraries in an error's traceback; empty if none."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not _LIBRARIES.search(f.filename)]
    return f", at {_line(frames[-1].filename, frames[-1].lineno)}" if frames and frames[-1].lineno else ""


def _hint(message: str) -> str:
    """What to do about an error whose message does not say it."""
    if "'function' object is not subscriptable" in message:
        return "; is `@triton.jit` missing above the kernel?"
    if "no attribute 'grid_idx'" in message or "'torch.dtype' object has no attribute 'is_ptr'" in message:
        return "; was the kernel launched without its grid, _kernel[grid](...)?"
    if "Boolean value of Tensor with more than one value is ambiguous" in message:
        return "; `if` decides once for the whole block: use tl.where to choose for each element"
    if _WIDER_DTYPE.search(message):
        return "; convert to float32 first: x.to(tl.float32)"
    if _FUNCTION_OF_TORCH.search(message):
        return "; a kernel calls functions of triton.language, such as tl.sigmoid, not of torch"
    if (missing := _NO_ATTRIBUTE.search(message)) is not None:
        near = difflib.get_close_matches(missing[2], dir(sys.modules.get(missing[1])), n=1)
        return f"; did you mean {near[0]!r}?" if near else ""
    return ""


class _CompilerMessage(NamedTuple):
    """What Triton's compiler says of a kernel, the text of the function that it says it of, and the line there."""

    text: str
    function: str
    number: int

    @property
    def line(self) -> str:
        """The line, as " `source`"; empty if it is not known."""
        lines = self.function.split("\n")
        return f" `{lines[self.number - 1].strip()}`" if 0 < self.number <= len(lines) else ""


def _compiler_message(error: BaseException) -> _CompilerMessage | None:
    """None for an error that is not of Triton's compiler."""
    place: Any = None
    link: BaseException | None = error
    while link is not None and hasattr(link, "error_message") and hasattr(link, "src") and hasattr(link, "node"):
        # A function of Triton is called in the line of the error before.
        if place is None or not _is_of_triton(link.src or ""):
            place = link
        inner: Any = link
        link = link.__cause__
    if place is None:
        return None
    text = str(inner.error_message or link or type(inner).__name__)
    return _CompilerMessage(text, place.src or "", getattr(place.node, "lineno", 0))


def why_not_compiled(error: BaseException, kernel: Any, printed: str) -> str | None:
    """What Triton's compiler says of a kernel (a `triton.jit` function), and where. None: the error is not about the
    kernel.

    Args:
        printed: what the compiler wrote to standard error: of some mistakes it says there where they are.
    """
    if (message := _compiler_message(error)) is not None:
        return f"{_place_in_file(kernel, message)}{message.line}: {message.text}{_hint(message.text)}"
    if type(error).__name__ != "PTXASError" and not _COMPILER_STOPPED.search(str(error)):
        return None
    for found in _COMPILER_PRINTED.finditer(printed):
        if not _LIBRARIES.search(found["path"]):
            return f", at {_line(found['path'], int(found['line']))}: {found['text']}"
    code = kernel.fn.__code__
    return f", at {Path(code.co_filename).name}:{code.co_firstlineno}: {str(error).splitlines()[0]}"


def _place_in_file(kernel: Any, message: _CompilerMessage) -> str:
    """ " at file:line,", of a kernel or a function that it calls; empty if it is another function."""
    for function in (kernel, *kernel.fn.__globals__.values()):
        if message.function and getattr(function, "src", None) == message.function:
            lines, first = inspect.getsourcelines(function.fn)
            before = textwrap.dedent("".join(lines)).partition(message.function)[0].count("\n")
            return f", at {Path(function.fn.__code__.co_filename).name}:{first + before + message.number - 1},"
    return ""


def _is_of_triton(source: str) -> bool:
    """Whether it is the text of a function in Triton's standard library, such as `tl.sigmoid`."""
    from triton.language import standard

    return source in inspect.getsource(standard)
