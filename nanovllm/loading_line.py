"""The line that says how far a model is loaded, for programs that show none of their own."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from types import TracebackType

from nanovllm.console import CellOutput, StatusLine

logger = logging.getLogger(__name__)


class LoadingLine:
    """In its `with` block a `StatusLine` names the model, its device and dtype, what is being done, and the seconds.

    A notebook shows it in the output of its cell, where the last text stays. Nothing is shown where a status line is
    shown already, where standard error is neither a terminal nor a notebook's, and where the log either says all this
    (INFO) or is to be silent (above WARNING).

    Args:
        model: as `LLM` takes it.
        disable: show nothing.
    """

    def __init__(self, model: str | Path, disable: bool = False) -> None:
        text = str(model)
        self._name = os.path.basename(os.path.abspath(text)) if os.path.exists(text) else text
        self._where = ""
        heard = logger.isEnabledFor(logging.WARNING) and not logger.isEnabledFor(logging.INFO)
        self._line: StatusLine | None = None
        if heard and not disable and StatusLine.current is None:
            self._line = _CellLine(self) if CellOutput.possible() else _LoadingStatus(self)

    def __enter__(self) -> LoadingLine:
        self._begun = time.monotonic()
        if self._line is not None:
            self._line.show(f"Loading {self._name} ...", timed=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        if isinstance(self._line, _CellLine):
            seconds = f"{time.monotonic() - self._begun:.0f} s"
            self._line.show(f"{'Loaded' if kind is None else 'Failed to load'} {self._name}{self._where} in {seconds}")
        if self._line is not None:
            self._line.clear()

    def stage(self, what: str, where: str) -> None:
        """Say what is being done now, and on which device, in which dtype."""
        self._where = f" on {where}" if where else self._where
        if self._line is not None:
            self._line.show(f"Loading {self._name}{self._where}: {what} ...", timed=True)


class _LoadingStatus(StatusLine):
    """The status line of a `LoadingLine`."""

    def __init__(self, owner: LoadingLine) -> None:
        super().__init__()
        self.owner = owner


class _CellLine(_LoadingStatus):
    """The same in the output of a notebook's cell, where it stays."""

    def __init__(self, owner: LoadingLine) -> None:
        super().__init__(owner)
        self._output = CellOutput()

    def _visible(self) -> bool:
        return True

    def _print(self, text: str, seconds: str = "") -> None:
        self._output.show(text + seconds)


def loading_stage(what: str, where: str = "") -> None:
    """If a `LoadingLine` is shown, it says from now on what the engine does.

    Args:
        where: device and dtype, once they are known.
    """
    if isinstance(StatusLine.current, _LoadingStatus):
        StatusLine.current.owner.stage(what, where)
