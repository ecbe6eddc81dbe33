"""`nanovllm bench`: measurements from outside of the engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanovllm.cli.foreign_options import BenchCommand
from nanovllm.cli.kernels_common import Json
from nanovllm.cli.option_records import takes_records
from nanovllm.console import WIDTH, Column, TablePrinter, say
from nanovllm.json_output import STDOUT, write_json

if TYPE_CHECKING:
    from nanovllm.bench.serving import Load, ServingResult
    from nanovllm.bench.serving_client import Target

_BUSY_CLIENT = 0.9
"""Share of a processor above which the client is said to be a possible limit."""
_LENGTH = 128
"""Words of a prompt and tokens of an answer by default."""
_STREAMS = "1,8"
app = typer.Typer(no_args_is_help=True, add_completion=False, help="Measure a server under load.")


@app.callback()
def _root() -> None:
    pass


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"--prompts {path}: {error.strerror}; name a text file with one prompt in each line") from None
    except UnicodeDecodeError:
        raise ValueError(f"--prompts {path}: is no text in UTF-8; name a file with one prompt in each line") from None


@dataclass(frozen=True)
class _Loads:
    """What is asked of the server, and how fast."""

    concurrency: Annotated[
        str | None, typer.Option(help="Streams at a time; several numbers are measured in turn. By default 1,8.")
    ] = None
    rate: Annotated[
        str | None, typer.Option(help="Requests per second, at random times, in place of --concurrency: 2,8")
    ] = None
    num_requests: Annotated[int | None, typer.Option(help="Requests of each load; by default 4 for each stream.")] = (
        None
    )
    input_len: Annotated[int | None, typer.Option(help="Words of a prompt, of about a token each; by default 128.")] = (
        None
    )
    output_len: Annotated[int | None, typer.Option(help="Tokens of an answer; by default 128.")] = None
    vocab_size: Annotated[
        int | None, typer.Option(help="Prompts are --input-len random token ids below this number, not words.")
    ] = None
    workload: Annotated[
        str | None,
        typer.Option(help="Loads of bench.py in place of --concurrency: std256,bs128; prompts are token ids."),
    ] = None
    prompts: Annotated[Path | None, typer.Option(help="A text file with one prompt per line.")] = None
    ignore_eos: Annotated[bool, typer.Option(help="Ask for answers of exactly --output-len tokens.")] = True
    seed: Annotated[int, typer.Option(help="Seed of the prompts and of the arrival times.")] = 0

    def __post_init__(self) -> None:
        lengths = "input_len", "output_len"
        if self.workload is not None:
            why = f"--workload {self.workload} brings its own load"
            self._refuse(why, "rate", "concurrency", "num_requests", *lengths, "prompts")
        if self.rate is not None:
            self._refuse(f"--rate {self.rate} sends requests at its own times", "concurrency")
        if self.prompts is not None:
            self._refuse(f"--prompts {self.prompts} brings the prompts", "input_len", "vocab_size")

    def _refuse(self, why: str, *names: str) -> None:
        """An error for options that would have no effect."""
        given = [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) is not None]
        if given:
            raise ValueError(f"{why}; leave out {' and '.join(given)}")

    def as_dict(self) -> dict[str, Any]:
        """For JSON: what the loads have in common. None: an option has no effect, or its value is in each load."""
        own = self.workload is not None
        return {
            "workload": self.workload, "prompts": None if self.prompts is None else str(self.prompts),
            "input_len": None if own or self.prompts is not None else self._words,
            "output_len": None if own else self._tokens, "vocab_size": self.vocab_size, "seed": self.seed,
            "ignore_eos": self.ignore_eos,
        }  # fmt: skip

    @property
    def _words(self) -> int:
        return _LENGTH if self.input_len is None else self.input_len

    @property
    def _tokens(self) -> int:
        return _LENGTH if self.output_len is None else self.output_len

    def all(self) -> list[Load]:
        """The loads in the order in which they are measured."""
        from nanovllm.bench.serving import Load
        from nanovllm.bench.workloads import select

        texts = _text_of(self.prompts).splitlines() if self.prompts is not None else ()
        lines = tuple(line for line in texts if line.strip())
        if self.prompts is not None and not lines:
            raise ValueError(f"--prompts {self.prompts}: holds no prompt; write one in each line")
        common: dict[str, Any] = dict(
            input_len=self._words, output_len=self._tokens, prompts=lines,
            vocab_size=self.vocab_size, seed=self.seed,
            extra={"ignore_eos": True, "temperature": 0.6} if self.ignore_eos else {"temperature": 0.6},
        )  # fmt: skip
        if self.workload is not None:
            return [Load(workload=w, **common) for w in select(self.workload.split(","))]
        count = self.num_requests
        if self.rate is None:
            numbers = [
                int(n) for n in _numbers("--concurrency", _STREAMS if self.concurrency is None else self.concurrency)
            ]
            return [Load(count or 4 * n, concurrency=n, **common) for n in numbers]
        return [Load(count or 64, concurrency=None, rate=r, **common) for r in _numbers("--rate", self.rate)]


@app.command(cls=BenchCommand)
@takes_records
def serve(
    url: Annotated[
        str,
        typer.Argument(metavar="URL", help="The address of a server with OpenAI's interface: http://127.0.0.1:8000"),
    ],
    model: Annotated[str | None, typer.Option(help="The model's name; by default the server's first one.")] = None,
    endpoint: Annotated[str, typer.Option(help="completions or chat.")] = "completions",
    *,
    load_options: _Loads,
    goal_ttft: Annotated[float | None, typer.Option(help="Goodput: at most these ms to the first token.")] = None,
    goal_tpot: Annotated[float | None, typer.Option(help="Goodput: at most these ms for each later token.")] = None,
    goal_e2e: Annotated[float | None, typer.Option(help="Goodput: at most these ms for the whole answer.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="The server's key.")] = None,
    insecure: Annotated[bool, typer.Option(help="Take any certificate of an https server.")] = False,
    json_file: Json = None,
) -> None:
    """Measure throughput and latency of a server.

    The table has tokens and requests per second, the time to the first token (TTFT), the time between events of
    the stream, each with one or more tokens (ITL), the time per token after the first (TPOT), and the share of requests
    that meet all goals (goodput).

    Ctrl-C keeps the loads that were measured.
    """
    from nanovllm.bench.serving import Goal, measure
    from nanovllm.bench.serving_client import Target, get_json

    endpoint = {"/v1/completions": "completions", "/v1/chat/completions": "chat"}.get(endpoint, endpoint)  # as for vLLM
    target = Target(url, endpoint, model or "", api_key, insecure)
    if model is None:
        target = replace(target, model=get_json(target, "models")["data"][0]["id"])
    limits = [None if ms is None else ms / 1000 for ms in (goal_ttft, goal_tpot, goal_e2e)]
    goal = None if limits == [None] * 3 else Goal(*limits)
    loads = load_options.all()
    found: list[ServingResult] = []
    goals = {"goal_ttft_ms": goal_ttft, "goal_tpot_ms": goal_tpot, "goal_e2e_ms": goal_e2e}
    head = {"server": url, "model": target.model, "endpoint": endpoint, "options": load_options.as_dict() | goals}
    interrupted = False
    try:
        shown = json_file != STDOUT and not sys.stderr.isatty()  # on a terminal there is a bar
        for i, load in enumerate(loads, 1):
            if shown:
                begun = f"load {i} of {len(loads)} of {target.model} at {url}: {load.name}, {load.total} requests ..."
                print(begun, file=sys.stderr, flush=True)
            with _bar(load.name, load.total, shown=json_file != STDOUT) as advance:
                found.append(measure(target, load, goal, advance))
            if not any(m.num_ok for m in found):  # a wrong name or key: the other loads would fail too
                write_json(json_file, head | {"loads": [m.as_dict() for m in found]})
                raise ValueError(_nothing_succeeded(target, found[-1]))
    except KeyboardInterrupt:
        interrupted = True
    if not write_json(json_file, head | {"loads": [m.as_dict() for m in found]}):
        _print(found)
    if interrupted:
        print(f"interrupted after {len(found)} of {len(loads)} loads", file=sys.stderr)
        raise typer.Exit(130)


def _nothing_succeeded(target: Target, measured: ServingResult) -> str:
    """What is said of a load without a good answer."""
    from nanovllm.bench.serving_client import get_json

    with suppress(ValueError, LookupError, TypeError):
        names = [entry["id"] for entry in get_json(target, "models")["data"]]
        if target.model not in names:
            return f"--model {target.model}: the server has no such model; it has {', '.join(names)}"
    error = max(measured.errors, key=measured.errors.__getitem__)
    return f"{target.url}: no request succeeded of {measured.num_failed}; the most frequent error: {error}"


def _numbers(option: str, text: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) <= 0:
        raise ValueError(f"{option} {text}: must be numbers above 0, with commas between them: 1,8,64")
    return numbers


@contextmanager
def _bar(name: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar of progress; calls take how much is done."""
    from rich.console import Console
    from rich.progress import Progress

    shown = shown and sys.stderr.isatty()  # elsewhere rich prints an empty line
    with Progress(console=Console(stderr=True), disable=not shown, transient=True) as progress:
        task = progress.add_task(name, total=total)
        yield lambda done: progress.update(task, completed=done)


def _print(found: list[ServingResult]) -> None:
    titles = "load", "ok", "tok/s", "req/s", "TTFT ms", "ITL ms", "TPOT ms", "good"
    rows = [
        (
            m.load, str(m.num_ok), f"{m.output_rate:.0f}", f"{m.request_rate:.2f}", _pair(m.ttft), _pair(m.itl),
            "-" if m.tpot is None else _ms(m.tpot.median),
            "-" if m.num_good is None else f"{100 * m.num_good / max(1, m.num_ok + m.num_failed):.0f}%",
        )
        for m in found
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(titles, *rows)]
    widths[0] = min(widths[0], WIDTH - sum(widths[1:]) - len(widths) + 1)  # a longer name moves the rest of its row
    table = TablePrinter(*(Column(title, width, number=i > 0) for i, (title, width) in enumerate(zip(titles, widths))))
    for row in rows:
        table.add(*row)
    table.end()
    say(
        "ok: requests without an error. TTFT, ITL: median / 99th percentile. ITL: between events of the stream, each"
        " with one or more tokens. TPOT: median of the requests' means."
        " good: share of the requests that meet every --goal-..., if one is given."
    )
    for m in found:
        for error, count in m.errors.items():
            print(f"{m.load}: {count} failed: {error}")
        if (m.client_load or 0) > _BUSY_CLIENT:
            print(f"{m.load}: the client used {100 * (m.client_load or 0):.0f} % of a processor and may be the limit")


def _pair(spread: Any) -> str:
    return "-" if spread is None else f"{_ms(spread.median)} / {_ms(spread.p99)}"


def _ms(seconds: float) -> str:
    """Milliseconds, with a decimal below 100."""
    return f"{1000 * seconds:.1f}" if seconds < 0.09995 else f"{1000 * seconds:.0f}"
