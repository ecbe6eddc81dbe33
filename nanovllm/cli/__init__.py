"""The console command `nanovllm`, also `python -m nanovllm`."""

from __future__ import annotations

import gc
import importlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from nanovllm.cli.awaited_answer import awaited
from nanovllm.cli.command_group import CommandGroup, errors_of_usage_folded
from nanovllm.cli.foreign_options import EngineCommand
from nanovllm.cli.number_options import MaxModelLen
from nanovllm.cli.option_records import takes_records
from nanovllm.console import INTERRUPTED, StatusLine, import_torch, run_program, say, show_warnings
from nanovllm.environment import warn_of_misspelt
from nanovllm.garbage_collector import collector_off

if TYPE_CHECKING:
    from nanovllm import LLM

_ORDER = ("chat", "generate", "serve", "bench", "kernels", "plan", "fuse", "tune", "lab", "device")


@dataclass(frozen=True)
class _Later:
    """A command whose module is imported when the command is called, or listed.

    Attributes:
        attribute: the function or the group in `nanovllm.cli.<name>`.
        short_help: its line in the list of commands; None: the group's own.
    """

    attribute: str
    short_help: str | None
    cls: type[TyperCommand] | None = None

    def load(self, name: str) -> Any:
        """The command."""
        target = getattr(importlib.import_module(f"nanovllm.cli.{name}"), self.attribute)
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
        if isinstance(target, typer.Typer):
            alone.add_typer(target, name=name, short_help=self.short_help)
            group: Any = typer.main.get_command(alone)
            return group.commands[name]
        alone.command(name, cls=self.cls, short_help=self.short_help)(target)
        return typer.main.get_command(alone)


_LATER = {
    "serve": _Later("serve", "Serve a model to clients of OpenAI's and Anthropic's APIs.", EngineCommand),
    "bench": _Later("app", None),
    "kernels": _Later("app", "The ops and their providers: list, check and time them."),
    "plan": _Later("app", "Predict the best tiles of a kernel on a GPU, and its time."),
    "fuse": _Later("fuse", "Predict which kernels of a module to fuse, and the gain."),
    "tune": _Later("tune", "Time a kernel's configurations and keep the fastest one."),
    "lab": _Later("app", "Learn to write kernels: one function in five ways."),
    "device": _Later("device", "What a GPU has, and what it sustains."),
}

_OTHERS = {
    name: remedy
    for remedy, names in (
        ("use nanovllm chat --model MODEL", ("run", "cli")),
        ("use nanovllm generate TEXT --model MODEL", ("complete", "completion")),
        ("use nanovllm generate with several texts, or LLM.generate in Python", ("run-batch", "batch")),
        ("--model takes a directory, a .gguf file or a hub id, which is downloaded once",
         ("pull", "list", "ls", "show", "create", "rm", "ps")),
        ("use python bench.py in a clone, or nanovllm bench serve URL",
         ("bench latency", "bench throughput", "bench startup", "bench sweep")),
        ("embeddings are not supported", ("embed", "embedding")),
        ("docs/faq.md has a command under How do I report a bug", ("collect-env",)),
    )
    for name in names
}  # fmt: skip
"""Commands of vLLM, Ollama and llama.cpp."""


class _InOrderOfUse(CommandGroup):
    """Lists the commands in the order in which a new user meets them, and imports those in `_LATER` at need."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_ORDER)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _LATER and cmd_name not in self.commands:
            self.commands[cmd_name] = _LATER[cmd_name].load(cmd_name)
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        for words in (" ".join(args[:2]), *args[:1]):
            if words in _OTHERS:
                ctx.fail(f"No such command {words!r}; {_OTHERS[words]}")
        if args and args[0] not in _ORDER:
            for name in _ORDER:  # the error proposes a name from `self.commands`
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with errors_of_usage_folded():
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with errors_of_usage_folded():  # of all commands
            return super().invoke(ctx)


app = typer.Typer(
    cls=_InOrderOfUse,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},  # of all commands
    rich_markup_mode=None,  # plain help texts: tables of options would be cut at 80 columns
    help="A small, fast LLM inference engine whose kernels you can swap.",
)

_Temperature = Annotated[float, typer.Option(help="0 for always the most likely token.")]
_TopP = Annotated[float, typer.Option(help="Nucleus sampling: keep the likeliest tokens up to this probability.")]
_TopK = Annotated[int, typer.Option(help="Keep this number of the likeliest tokens; 0 keeps all.")]
_MinP = Annotated[float, typer.Option(help="Keep tokens of at least this share of the likeliest one's probability.")]
_Repetition = Annotated[float, typer.Option(help="Above 1, tokens that were there before become less likely.")]
_Seed = Annotated[int | None, typer.Option(help="Makes the answers repeatable.")]


@dataclass
class _Filters:
    """The arguments of `SamplingParams` that `chat` and `generate` have with the same defaults."""

    top_k: _TopK = 0
    min_p: _MinP = 0.0
    repetition_penalty: _Repetition = 1.0
    seed: _Seed = None


@dataclass
class _Engine:
    """The arguments of `LLM` that can be given here."""

    model: Annotated[
        str | None,
        typer.Option(
            help="A Hugging Face directory, a hub id or a .gguf file; by default SmolLM2-135M-Instruct, downloaded "
            "once."
        ),
    ] = None
    use_custom_kernels: Annotated[
        bool | None,
        typer.Option(help="Custom kernels, or every op's PyTorch reference; custom unless config.json turns them off."),
    ] = None
    kernel_plugin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="A Python file or module with kernels of your own, which are preferred; repeatable."
        ),
    ] = None
    kernels: Annotated[
        str | None,
        typer.Option(help='Providers of ops, as NANOVLLM_KERNELS has them: "silu_and_mul=mine;rms_norm=native".'),
    ] = None
    device: Annotated[str, typer.Option(help="auto, cuda, cuda:N or cpu.")] = "auto"
    dtype: Annotated[str, typer.Option(help="Weights and activations: auto, bfloat16, float16, float32.")] = "auto"
    max_model_len: MaxModelLen = 4096
    tensor_parallel_size: Annotated[int, typer.Option(help="GPUs of this machine that share the model.")] = 1
    quantization: Annotated[
        str | None, typer.Option(help="fp8, int8, int4 or q4_k_m: quantise a floating-point model while it is loaded.")
    ] = None
    prompt_activations: Annotated[
        str, typer.Option(help="auto, or fp8: prompts are faster and less exact with int4, int8 and GGUF weights.")
    ] = "auto"
    expand_small_weights: Annotated[
        str,
        typer.Option(
            help="auto: on a Hopper GPU quantised weights of small layers are expanded where that is faster, if this "
            "takes at most 4 % of its memory; or off."
        ),
    ] = "auto"
    cpu_activations: Annotated[
        str, typer.Option(help="On a CPU: float32, or faster and less exact, int8 or bfloat16.")
    ] = "float32"

    def load(self) -> LLM:
        """The model, with a line that says that it is being loaded."""
        if self.device not in ("auto", "cpu"):  # else PyTorch is imported below, while the line is shown
            import_torch()
            from nanovllm.hardware.devices import check_device

            check_device(self.device)
        status = StatusLine()
        status.show(f"Loading {self.model or 'the default model'} ...", timed=True)
        try:
            with collector_off(gc.freeze):
                from nanovllm import LLM
                from nanovllm.kernels.op.priority import priority_of_option
                from nanovllm.weights.demo_model import demo_model_path

                arguments = vars(self).copy()
                arguments["kernel_plugins"] = arguments.pop("kernel_plugin") or ()
                arguments["kernel_priority"] = priority_of_option(arguments.pop("kernels"))
                arguments["model"] = self.model or demo_model_path()
                status.clear()  # from here on `LLM` says what it does
                return LLM(**arguments)
        finally:
            status.clear()
            if "triton.runtime.interpreter" in sys.modules:
                gc.unfreeze()  # nanobind would report what the interpreter leaves uncollected, in 40 lines


def _show_version(wanted: bool) -> None:
    if wanted:
        from nanovllm import __version__

        print(f"nanovllm {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    warn_of_misspelt()


@app.command(cls=EngineCommand)
@takes_records
def chat(
    engine: _Engine,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    temperature: _Temperature = 0.6,
    top_p: _TopP = 0.95,
    max_tokens: Annotated[int, typer.Option(help="Most tokens in an answer.")] = 512,
    *,
    filters: _Filters,
) -> None:
    """Talk with a model in the terminal. An empty line or Ctrl-D ends it; Ctrl-C cuts an answer short."""
    from nanovllm import SamplingParams

    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens, **vars(filters))
    llm = engine.load()
    messages = [{"role": "system", "content": system}] if system else []
    # Where either end is no terminal, standard output has the answers alone.
    talk = sys.stdout if sys.stdin.isatty() and sys.stdout.isatty() else sys.stderr if sys.stdin.isatty() else None
    if talk:
        print("Say something. An empty line ends the conversation.", file=talk)
    while True:
        try:
            if talk:
                print("\n> ", end="", file=talk, flush=True)
            question = input().strip()
        except (EOFError, KeyboardInterrupt):
            if talk:
                print(file=talk)  # the shell's prompt begins a line
            return
        if not question:
            return
        messages.append({"role": "user", "content": question})
        answer = ""
        try:
            for piece in awaited(llm.stream(llm.chat_prompt(messages), params)):
                print(piece, end="", flush=True)
                answer += piece
            print()
        except KeyboardInterrupt:
            print(" [cut short]" if talk is sys.stdout else "", flush=True)
            if talk is None:
                say("nanovllm: cut short", sys.stderr)
                raise typer.Exit(INTERRUPTED) from None
        except ValueError as e:  # the conversation has outgrown the model
            if talk is None:
                raise
            print(f"\n{e}", file=talk)
            return
        messages.append({"role": "assistant", "content": answer})


@app.command(cls=EngineCommand)
@takes_records
def generate(
    prompts: Annotated[
        list[str],
        typer.Argument(metavar="PROMPT", help="One or more prompts, completed together; - is standard input."),
    ],
    engine: _Engine,
    temperature: _Temperature = 0.6,
    top_p: _TopP = 1.0,
    max_tokens: Annotated[int, typer.Option(help="Most tokens in a completion.")] = 128,
    *,
    filters: _Filters,
) -> None:
    """Complete prompts as they stand, without a chat template. Ctrl-C cuts them short (exit status 130).

    A terminal shows the prompt above its completion. A file or a pipe has the completion of one prompt alone.
    """
    from nanovllm import SamplingParams

    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=max_tokens, **vars(filters))
    prompts = [sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt for prompt in prompts]
    llm = engine.load()
    terminal, empty, interrupted = sys.stdout.isatty(), True, False
    if len(prompts) > 1:
        try:
            outputs = llm.generate(prompts, params)
        except KeyboardInterrupt as interrupt:
            outputs, interrupted = getattr(interrupt, "outputs", []), True
        end = " [cut short]" if interrupted else ""
        for i, output in enumerate(outputs):
            between = "\n" if terminal or i else ""
            print(f"{between}> {output.prompt}\n{output['text']}{end}")
        empty = not all(output["text"] for output in outputs)
    else:
        pieces = awaited(llm.stream(prompts[0], params))  # first: a prompt that is refused has no heading
        if terminal:  # else standard output has the completion alone
            print(f"\n> {prompts[0]}")
        try:
            for piece in pieces:
                print(piece, end="", flush=True)
                empty = empty and not piece
        except KeyboardInterrupt:
            interrupted = True
        print(" [cut short]" if interrupted and terminal else "")
        if interrupted and not terminal:
            say("nanovllm: cut short", sys.stderr)
    if interrupted:
        raise typer.Exit(INTERRUPTED)
    if empty:
        _say_that_it_is_empty()


def _say_that_it_is_empty() -> None:
    say(
        "nanovllm: a completion is empty, since the model ended it at once. Chat models do so for a question without a"
        " chat template; `nanovllm chat` and `nanovllm serve` use it.",
        sys.stderr,
    )


def main(quick_exit: bool = False) -> None:
    """Run the command line, and answer what a user can mend in one line without a traceback.

    Args:
        quick_exit: this process ends after this call (`run_program`).
    """
    show_warnings()
    run_program("nanovllm", app, quick_exit)
