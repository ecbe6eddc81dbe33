"""The progress bar of `LLM.generate`."""

from __future__ import annotations

import io
from typing import Any

from nanovllm.console import CellOutput
from nanovllm.engine.requests.request import Request
from nanovllm.frontend.step_loop import Waiter


def per_second(rate: float) -> str:
    """A rate as the bar shows it. Below 10 it has a decimal, else an interpreted kernel shows 0."""
    return f"{rate:.1f}" if rate < 9.95 else f"{rate:.0f}"


class ProgressBar:
    """A progress bar over requests, with prompt and output tokens a second; in a notebook, a line of text.

    There rich needs ipywidgets, which show no bar in a saved notebook.
    """

    def __init__(self, requests: list[Request], waiter: Waiter) -> None:
        from rich.console import Console, ConsoleDimensions
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        class Narrower(Console):
            """A terminal shows Ctrl-C as "^C" where the bar ends. In a full line that would begin a new one."""

            @property  # type: ignore[misc]
            def size(self) -> ConsoleDimensions:
                width, height = super().size
                return ConsoleDimensions(max(1, width - len("^C")), height)

        self._requests = requests
        self._waiter = waiter
        self._next_update = 0.0
        console = Narrower(stderr=True)
        self._bar = Progress(
            TextColumn("Generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rate]}"),
            console=console,
            auto_refresh=not console.is_jupyter,
        )
        self._in_cell = _BarInCell(self._bar) if console.is_jupyter else None
        self._task = self._bar.add_task("", total=len(requests), rate="")

    @staticmethod
    def prepare() -> None:
        """Import what draws the bar. Called before the requests arrive, whose times then do not contain the import."""
        import rich.progress  # noqa: F401

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._in_cell:
            self._in_cell.refresh()
            return
        try:
            self._bar.refresh()
        finally:
            self._bar.stop()

    def show(self) -> None:
        """Called in the `with` block, not on entering it, so that the bar is taken back if an interrupt comes."""
        if self._in_cell:
            self._in_cell.refresh()
        else:
            self._bar.start()

    def update(self) -> None:
        num_finished = len(self._requests) - len(self._waiter.unfinished)
        elapsed = self._bar.tasks[0].elapsed or 0.0
        # Counting tokens takes time in proportion to the requests: ten times a second is enough.
        if elapsed <= 0 or (elapsed < self._next_update and num_finished < len(self._requests)):
            return
        self._next_update = elapsed + 0.1
        prompt = sum(len(r.prompt_token_ids) for r in self._requests if r.first_token_time is not None)
        output = sum(r.num_output_tokens for r in self._requests)
        rate = f"prompt {per_second(prompt / elapsed)} tok/s, output {per_second(output / elapsed)} tok/s"
        self._bar.update(self._task, completed=num_finished, rate=rate)
        if self._in_cell:
            self._in_cell.refresh()


class _BarInCell(CellOutput):
    """The output of a notebook's cell that shows a bar."""

    def __init__(self, bar: Any) -> None:
        super().__init__()
        self._bar = bar

    def refresh(self) -> None:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=100, color_system=None, force_jupyter=False)
        with console.capture() as capture:
            console.print(self._bar.get_renderable())
        self.show(capture.get().strip())
