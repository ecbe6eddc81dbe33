"""`LLM`: the engine behind a few lines of Python."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.request import Request
from nanovllm.engine.step_loop import StepLoop, Waiter
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


class LLM:
    """A model, ready to generate.

    Args:
        model: a Hugging Face directory, a hub id, a .gguf file, or with `load_format="dummy"` a preset's name.
        **kwargs: see `nanovllm.config.EngineConfig`.

    Raises:
        ValueError, TypeError, FileNotFoundError: an argument or the model is wrong; the message says what.

    Threads may share an LLM: calls of `generate`, `chat` and `stream` that come at the same time share its batches, and
    each returns when its own requests have ended.

    Example:
        llm = LLM("path/to/Qwen3-0.6B")
        outputs = llm.generate(["Hello"], SamplingParams(temperature=0.6, max_tokens=32))
        print(outputs[0]["text"])
    """

    def __init__(self, model: str | Path, **kwargs: Any) -> None:
        self.engine = LLMEngine(EngineConfig(str(model) if isinstance(model, Path) else model, **kwargs))
        self._loop = StepLoop(self.engine)

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer, or None."""
        return self.engine.tokenizer

    def get_tokenizer(self) -> Any:
        """As in vLLM: the same as `tokenizer`."""
        return self.engine.tokenizer

    @property
    def kernels(self) -> Any:
        """The provider that serves each op: `print(llm.kernels)` shows them, `llm.kernels.providers` is the mapping."""
        return self.engine.kernels

    @property
    def device_name(self) -> str:
        """For example "NVIDIA H200, bfloat16" or "cpu, float32"."""
        return self.engine.runner.device_name

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete the prompts, batched together.

        Args:
            prompts: one prompt or a list of them; a prompt is a string, a list of token ids, or a dict with "prompt" or
                "prompt_token_ids". A dict may also have a "cache_salt", as in vLLM: cached prefixes are shared only
                among prompts of the same salt.
            sampling_params: for all prompts, or one for each.
            use_tqdm: show a progress bar with prompt and output tokens a second.

        Returns:
            One output a prompt, in the prompts' order.

        Raises:
            ValueError, TypeError: a prompt or parameter that cannot be served; then none of them was started.
            RuntimeError: a step failed that another thread ran and that computed one of these requests.
        """
        prompts = _as_list(prompts)
        params: Any = sampling_params
        one_each = isinstance(params, (list, tuple))
        params = list(params) if one_each else [params] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(
                f"{len(prompts)} prompts but {len(params)} sampling_params; pass one for all, or one for each"
            )
        requests = [
            self.engine.make_request(
                prompt, p, names=(f"prompts[{i}]", f"sampling_params[{i}]" if one_each else "sampling_params")
            )
            for i, (prompt, p) in enumerate(zip(prompts, params))
        ]
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's own chat template.

        Args:
            messages: dicts with "role" and "content"; or a list of such lists.
            chat_template_kwargs: further variables for the template, for example `{"enable_thinking": False}`.

        Raises:
            ValueError, TypeError: a conversation or parameter that cannot be served; then none of them was started.
        """
        if not _is_list(messages):
            raise _no_conversation("messages", messages)
        variables = {} if chat_template_kwargs is None else chat_template_kwargs
        if not isinstance(variables, Mapping):
            raise TypeError(
                f"chat_template_kwargs={variables!r:.80}: must be a dict, for example"
                ' {"enable_thinking": False}, or None'
            )
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: dict[str, Any] = (
            {"messages": messages} if one else {f"messages[{i}]": c for i, c in enumerate(messages)}
        )
        prompts = [self._chat_prompt(name, c, variables) for name, c in conversations.items()]
        return self.generate(prompts, sampling_params, use_tqdm)

    def chat_prompt(self, messages: Sequence[Message], **template_kwargs: Any) -> dict[str, Any]:
        """A conversation as a prompt: the template's text, and its token ids."""
        return self._chat_prompt("messages", messages, template_kwargs)

    def _chat_prompt(self, name: str, messages: Sequence[Message], variables: Mapping[str, Any]) -> dict[str, Any]:
        """name: what the user calls the messages."""
        if not _is_list(messages) or not messages:
            raise _no_conversation(name, messages)
        for i, message in enumerate(messages):
            # What else it holds is up to the template.
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise _no_conversation(f"{name}[{i}]", message)
        tokenizer = self.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise ValueError("this model has no chat template; use generate with a plain prompt")
        text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **variables)
        # The template writes the special tokens itself.
        return {"prompt": text, "prompt_token_ids": self.engine.prompts.encode(text, name, add_special_tokens=False)}

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Complete one prompt, yielding its text piece by piece, never half a character.

        Leaving the iterator early aborts the request. Several streams may be open at once: they share the batch.

        Raises:
            ValueError, TypeError: the request cannot be served.
            RuntimeError: in the iterator: a step failed that another stream or thread ran and that computed this
                request.
        """
        if self.tokenizer is None:
            raise ValueError("streaming text needs a tokenizer, and this engine has none; use generate")
        request = self.engine.make_request(prompt, sampling_params, incremental=True)
        if request.params.n != 1:
            raise ValueError(f"n={request.params.n}: a stream has one completion; use generate for more")
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[str]:
        waiter = Waiter([request])
        try:
            try:
                self.engine.queue(request)  # here, since an iterator that is never started cannot clean up
                while True:
                    self._loop.wait(waiter, lambda: waiter.over or waiter.has_text)
                    over, text = waiter.over, waiter.take_text()
                    if text:
                        yield text
                    elif over:
                        waiter.raise_if_lost()
                        if request.completions[0].seq.finish_reason == "abort":
                            raise RuntimeError("the output is incomplete: the stream's request was aborted")
                        return
            finally:
                self._end(waiter, [request])
        finally:  # again, since an interrupt may have come at the first time, when the stream was left early
            self._end(waiter, [request])

    def _run(self, requests: list[Request], show_progress: bool) -> list[RequestOutput]:
        waiter = Waiter(requests)
        try:
            with _Progress(requests, waiter) if show_progress else nullcontext() as progress:
                if progress is not None:
                    progress.show()
                self.engine.queue(*requests, offline=True)
                self._loop.wait(waiter, lambda: waiter.over, None if progress is None else progress.update)
            waiter.raise_if_lost()
        finally:  # an interrupt may have come at any line: all that was queued is taken back
            self._end(waiter, requests)
        return [request.output() for request in requests]

    def _end(self, waiter: Waiter, requests: list[Request]) -> None:
        for request in requests:
            self.engine.abort(request)
        waiter.close()


def _as_list(prompts: Any) -> list[Any]:
    if isinstance(prompts, (str, bytes, Mapping, Set)):  # one prompt, or something that is refused as one
        return [prompts]
    try:
        prompts = iter(prompts)
    except TypeError:
        raise TypeError(
            f"prompts={prompts!r:.80}: must be a prompt or a list of prompts; a prompt is a string, a list of token ids"
            " or a dict with one of them"
        ) from None
    prompts = list(prompts)
    # A flat list of integers is one prompt of token ids.
    return [prompts] if prompts and isinstance(prompts[0], numbers.Integral) else prompts


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _no_conversation(name: str, value: Any) -> TypeError:
    return TypeError(
        f'{name}={value!r:.80}: a conversation is a list of dicts with "role" and "content"; pass for example'
        ' [{"role": "user", "content": "Hello!"}], or a list of such lists'
    )


class _Progress:
    """A progress bar over requests, with prompt and output tokens a second."""

    def __init__(self, requests: list[Request], waiter: Waiter) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._requests = requests
        self._waiter = waiter
        self._next_update = 0.0
        self._bar = Progress(
            TextColumn("Generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[rate]}"),
            console=Console(stderr=True),
        )
        self._task = self._bar.add_task("", total=len(requests), rate="")

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._bar.refresh()
        finally:
            self._bar.stop()

    def show(self) -> None:
        """Called in the `with` block, not on entering it, so that the bar is taken back if an interrupt comes."""
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
        rate = f"prompt {prompt / elapsed:.0f} tok/s, output {output / elapsed:.0f} tok/s"
        self._bar.update(self._task, completed=num_finished, rate=rate)
