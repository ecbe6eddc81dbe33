"""Finds out, in a process of its own, whether a grammar compiles within bounds of time and memory.

A hostile grammar can keep llguidance busy for hours (`{"multipleOf": 9999991}`) or overflow its stack. In the process
that serves, neither could be ended. Here a timer or the fault ends the process, and the next check starts another one.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from dataclasses import asdict
from typing import Any

from nanovllm.structured.grammar import grammar_text, parser_limits, plain_error, require_llguidance
from nanovllm.structured_outputs import GrammarsBusyError, StructuredOutputs

_MEMORY = 2 * 2**30
_STACK = 2 * 2**20
"""Bytes of stack for a check, a quarter of what a thread usually has: what passes here has room elsewhere."""
_REMEMBERED = 256
_BUSY = 20
"""Most seconds that a check may take for each second of processor time that it uses."""


class GrammarChecker:
    """Checks grammars, one at a time. Any thread may call it; a check blocks for milliseconds, at most `2 * seconds`
    where the processor is idle.

    Args:
        seconds: of a processor, that one grammar may take, since a busy machine must not refuse it; and for how long a
            check waits for the one before it.
    """

    def __init__(self, seconds: float = 2.0) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._passed: OrderedDict[StructuredOutputs, None] = OrderedDict()
        self._closed = False

    def check(self, spec: StructuredOutputs) -> None:
        """Raise a ValueError unless the grammar compiles, a GrammarsBusyError if others take too long before it, or
        after `close`.
        """
        if self.has_passed(spec):
            return
        require_llguidance()
        if not self._lock.acquire(timeout=self._seconds):
            raise GrammarsBusyError(f"{spec.called}: other grammars are being compiled; try again later")
        try:
            error = None if self._closed else self._ask(spec)
            if self._closed:
                raise GrammarsBusyError(f"{spec.called}: no grammar is compiled any more, since the engine ends")
            if error is not None:
                raise ValueError(f"{spec.called}: {error}")
            self._passed[spec] = None
            if len(self._passed) > _REMEMBERED:
                self._passed.popitem(last=False)
        finally:
            self._lock.release()

    def has_passed(self, spec: StructuredOutputs) -> bool:
        """Whether `check` returns at once. The grammars that passed last are known."""
        return spec in self._passed

    def close(self) -> None:
        """End the check that runs, and those that wait: a program that ends would wait for their threads."""
        self._closed = True
        if self._process is not None:
            self._process.kill()

    def _ask(self, spec: StructuredOutputs) -> str | None:
        """What is wrong; None: nothing."""
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = _start()
            weakref.finalize(self, _end, process)
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps({"spec": asdict(spec), "seconds": self._seconds}) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except OSError:
            answer = ""
        except BaseException:  # an interrupt: the answer would be taken for that of the next check
            _end(process)
            raise
        if answer:
            return json.loads(answer)
        code = process.wait()
        if code in (-signal.SIGPROF, -signal.SIGALRM):
            return f"compiling takes more than {self._seconds:g} seconds; simplify it"
        return f"compiling takes too much memory or nests too deeply (exit code {code}); simplify it"


def _start() -> subprocess.Popen[str]:
    code = "import sys; sys.path[:] = sys.argv[1:]; from nanovllm.structured.grammar_check import serve; serve()"
    return subprocess.Popen(
        [sys.executable, "-c", code, *sys.path],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def serve() -> None:
    """Check the grammars that come, one a line, until the input ends. A timer ends the process."""
    import resource

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is for the process that asks
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK)
    import llguidance  # noqa: F401  now, so that the first grammar's time has no part in it

    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        signal.setitimer(signal.ITIMER_REAL, _BUSY * request["seconds"])
        answer: list[str | None] = []
        thread = threading.Thread(target=lambda: answer.append(_error_of(request["spec"])))  # noqa: B023
        thread.start()
        thread.join()
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        print(json.dumps(answer[0]), flush=True)


def _error_of(spec: dict[str, Any]) -> str | None:
    from llguidance import LLMatcher, LLTokenizer

    try:
        matcher = LLMatcher(
            LLTokenizer("byte"), grammar_text(StructuredOutputs(**spec)), log_level=0, limits=parser_limits()
        )
        if not matcher.is_error():
            matcher.compute_bitmask()
        return plain_error(matcher.get_error())[:500] or None
    except ValueError as error:
        return plain_error(str(error))[:500]
