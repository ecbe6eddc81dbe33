"""`LLM`: the engine behind a few lines of Python."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

from nanovllm.arguments import drop_foreign, reject_unknown
from nanovllm.chat import AnswerPlan, ToolPlan, parse, with_constraints
from nanovllm.chat.template import Message, chat_text, check_conversations, check_messages, described
from nanovllm.config import EngineConfig
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.requests.prompts import Prompt
from nanovllm.engine.requests.request import Request
from nanovllm.environment import warn_of_misspelt
from nanovllm.foreign_arguments import CALL_ARGUMENTS
from nanovllm.foreign_names import METHODS, NOT_CALLED
from nanovllm.frontend.progress import ProgressBar
from nanovllm.frontend.prompt_list import prompt_list
from nanovllm.frontend.step_loop import StepLoop, Waiter
from nanovllm.loading_line import LoadingLine
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.wording import brief, counted


class LLM:
    """A model, ready to generate.

    Args:
        model: a Hugging Face directory, a hub id, a .gguf file, or with `load_format="dummy"` a preset's name.
        **kwargs: see `help(nanovllm.config.EngineConfig)`. `use_tqdm_on_load=False` shows no status line meanwhile.

    Raises:
        ValueError, TypeError, FileNotFoundError: an argument or the model is wrong; the message says what.

    Threads may share an LLM: calls at the same time share its batches, and each returns when its own requests ended.

    Example:
        ```python
        llm = LLM("path/to/Qwen3-0.6B")
        outputs = llm.generate(["Hello"], SamplingParams(temperature=0.6, max_tokens=32))
        print(outputs[0]["text"])
        ```
    """

    _closed = False

    def __init__(self, model: str | Path, *, use_tqdm_on_load: bool = True, **kwargs: Any) -> None:
        warn_of_misspelt()
        config = EngineConfig(str(model) if isinstance(model, Path) else model, **kwargs)
        LLMEngine.check_device(config)  # before anything is said to be loaded
        with LoadingLine(model, disable=not use_tqdm_on_load):
            self.engine = LLMEngine(config)
        self._loop = StepLoop(self.engine)
        self._added: dict[int, Request] = {}  # by `add_request`; `step` has not returned them yet

    def close(self) -> None:
        """Free the engine's memory. It waits for the calls of other threads; a stream that is open keeps the memory.

        `with LLM(...) as llm:` closes the LLM at its end. To close it again does nothing.
        """
        if self._closed:
            return
        on_gpu = self._loop.between_steps(lambda: self.engine.runner.device.type == "cuda")
        self.__dict__ = {"_closed": True}  # at once: other threads find an open or a closed LLM
        if on_gpu:
            from torch.cuda import empty_cache  # so that other processes have it too

            empty_cache()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if self._closed and name in ("engine", "_loop", "_added"):
            raise RuntimeError("this LLM is closed; make a new one")
        answer = METHODS.get(name)
        raise AttributeError(f"LLM.{name}: {answer}" if answer else f"'LLM' object has no attribute {name!r}")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError(NOT_CALLED)

    def __repr__(self) -> str:
        if "engine" not in vars(self):  # a debugger looks at one whose start failed
            return "<LLM that is closed>" if self._closed else "<LLM that was not started>"
        return f"<LLM {self.engine.config.model!r} on {self.device_name}>"

    @property
    def llm_engine(self) -> LLMEngine:
        """As in vLLM: the same as `engine`."""
        return self.engine

    @property
    def tokenizer(self) -> Any:
        """The transformers tokenizer, or None."""
        return self.engine.transformers_tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """As in vLLM: the parameters of a call that passes none: the model's own (`generation_config`)."""
        return self.engine.maker.default_params

    def get_tokenizer(self) -> Any:
        """As in vLLM: the same as `tokenizer`."""
        return self.tokenizer

    @property
    def kernels(self) -> Any:
        """The provider that serves each op: `print(llm.kernels)` shows them, `llm.kernels.providers` is the mapping."""
        return self.engine.kernels

    @property
    def device_name(self) -> str:
        """For example "NVIDIA H200, bfloat16" or "cpu, float32"."""
        return self.engine.runner.device_name

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes, for example before a measurement.

        It waits for the calls of other threads.

        Returns:
            False, with nothing changed, if requests are unfinished: those of `stream` and `add_request`.
        """
        return self._loop.between_steps(self.engine.reset_prefix_cache)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **others: Any,
    ) -> list[RequestOutput]:
        """Complete the prompts, batched together.

        Args:
            prompts: one prompt or a list of them; a prompt is a string, a list of token ids, or a dict with "prompt" or
                "prompt_token_ids". A dict may also have a "cache_salt", as in vLLM: cached prefixes are shared only
                among prompts of the same salt.
            sampling_params: for all prompts, or one for each.
            use_tqdm: show a progress bar with prompt and output tokens a second.
            others: arguments of vLLM's `generate` that have no effect here.

        Returns:
            One output a prompt, in the prompts' order.

        Raises:
            ValueError, TypeError: a prompt or parameter that cannot be served; then none of them was started.
            RuntimeError: a step that computed one of these requests failed in another thread.
            KeyboardInterrupt: Ctrl-C was pressed. Its attribute `outputs` has what there is of each output.
        """
        _drop("generate", others)
        prompts = prompt_list(prompts)
        params: Any = sampling_params
        one_each = isinstance(params, (list, tuple))
        params = list(params) if one_each else [params] * len(prompts)
        if len(params) != len(prompts):
            counts = f"{counted(len(prompts), 'prompt')} but {len(params)} sampling_params"
            raise ValueError(f"{counts}; pass one for all, or one for each")
        if use_tqdm and prompts:
            ProgressBar.prepare()
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
        *,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, through the model's own chat template.

        Each completion has a `message`: `content`, `reasoning_content` (a `<think>` block) and `tool_calls`. Its `text`
        is what the model wrote.

        Args:
            messages: dicts with "role" and "content", or a list of such lists. A content is a string, or a list of
                parts `{"type": "text", "text": ...}`, which are joined with line breaks.
            chat_template_kwargs: further variables for the template, for example `{"enable_thinking": False}`.
            tools: functions that the model may call, as OpenAI's API describes them, or Python functions with types and
                docstrings.
            chat_template: a Jinja template to use instead of the model's own.
            add_generation_prompt: end the prompt with the beginning of an answer.
            continue_final_message: the model goes on with the last message instead of answering it. It needs
                `add_generation_prompt=False`.
            tool_choice: "auto", "none", "required", or `{"type": "function", "function": {"name": ...}}`. None: "auto".
            parallel_tool_calls: False: at most one call.
            others: arguments of vLLM's `chat` that have no effect here.

        Raises:
            ValueError, TypeError: a conversation or parameter that cannot be served; then none of them was started.
        """
        _drop("chat", others)
        variables = {} if chat_template_kwargs is None else chat_template_kwargs
        if not isinstance(variables, Mapping):
            wanted = 'must be a dict, for example {"enable_thinking": False}, or None'
            raise TypeError(f"chat_template_kwargs={brief(variables)}: {wanted}")
        template = chat_template or getattr(self.engine.tokenizer, "chat_template", None)
        plan = ToolPlan.of(described(tools), tool_choice, str(template or ""), parallel_tool_calls)
        variables = {
            "tools": plan.template_tools, "chat_template": chat_template,
            "add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message,
            **variables,
        }  # fmt: skip
        conversations = check_conversations(messages)
        prompts = [self._chat_prompt(name, c, variables) for name, c in conversations.items()]
        plans = [AnswerPlan.of(plan, prompt["prompt"], str(template or "")) for prompt in prompts]
        given = self.get_default_sampling_params() if sampling_params is None else sampling_params
        outputs = self.generate(prompts, with_constraints(given, plans), use_tqdm)
        for output, answer in zip(outputs, plans):
            for completion in output.outputs:
                completion.message = parse(answer.parser(), completion.text)
        return outputs

    def chat_prompt(self, messages: Sequence[Message], **template_kwargs: Any) -> dict[str, Any]:
        """A conversation as a prompt: the template's text, and its token ids. template_kwargs: as `chat` takes them."""
        check_messages("messages", messages)
        return self._chat_prompt("messages", messages, template_kwargs)

    def _chat_prompt(self, name: str, messages: Sequence[Message], variables: Mapping[str, Any]) -> dict[str, Any]:
        """name: what the user calls the messages."""
        text = chat_text(self.engine.tokenizer, name, messages, variables)
        # The template writes the special tokens itself.
        token_ids = self.engine.maker.prompts.encode(text, name, add_special_tokens=False)
        return {"prompt": text, "prompt_token_ids": token_ids}

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """Complete one prompt, yielding its text piece by piece, never half a character.

        Leaving the iterator early aborts the request. Several streams may be open at once: they share the batch.

        Raises:
            ValueError, TypeError: the request cannot be served.
            RuntimeError: in the iterator: a step that computed this request failed in another stream or thread.
        """
        if self.engine.tokenizer is None:
            raise ValueError("streaming text needs a tokenizer, and this engine has none; use generate")
        request = self.engine.make_request(prompt, sampling_params, incremental=True)
        if request.params.n != 1:
            raise ValueError(f"n={request.params.n}: a stream has one completion; use generate for more")
        return self._stream(request)

    def _stream(self, request: Request) -> Iterator[str]:
        waiter, engine, loop = Waiter([request]), self.engine, self._loop  # it goes on when the LLM is closed
        try:
            try:
                engine.queue(request)  # here, since an iterator that is never started cannot clean up
                while True:
                    loop.wait(waiter, lambda: waiter.over or waiter.has_text)
                    over, text = waiter.over, waiter.take_text()
                    if text:
                        yield text
                    elif over:
                        waiter.raise_if_lost()
                        if request.completions[0].seq.finish_reason == "abort":
                            raise RuntimeError("the output is incomplete: the stream's request was aborted")
                        return
            finally:
                loop.end(waiter, [request])
        finally:  # again, since an interrupt may have come at the first time, when the stream was left early
            loop.end(waiter, [request])

    def add_request(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> int:
        """Queue a prompt for `step`, as in nano-vLLM. Returns the request's id, which `step` names.

        Raises:
            ValueError, TypeError: the request cannot be served.
        """
        request = self.engine.make_request(prompt, sampling_params)
        if request.params.n != 1:
            raise ValueError(f"n={request.params.n}: add_request has one completion; use generate for more")
        self._added[request.request_id] = request
        self.engine.queue(request)
        return request.request_id

    def step(self) -> tuple[list[tuple[int, list[int]]], int]:
        """Run one step, as in nano-vLLM, after the calls of other threads.

        Returns:
            The requests of `add_request` that have ended, each with its id and its output's token ids; and the number
            of prompt tokens of the requests that got their first token, or else minus the number of tokens that were
            generated.

        Raises:
            Exception: the forward pass failed with it. The requests that ran are lost then.
        """
        return self._loop.between_steps(self._step)

    def _step(self) -> tuple[list[tuple[int, list[int]]], int]:
        before = {key: request.num_output_tokens for key, request in self._added.items()}
        try:
            if self.engine.has_unfinished:
                self.engine.step()
        finally:
            self._added = {key: request for key, request in self._added.items() if request.failure is None}
        grown = [r for r in self._added.values() if r.num_output_tokens > before.get(r.request_id, 0)]
        num_prompt_tokens = sum(len(r.prompt_token_ids) for r in grown if not before.get(r.request_id))
        ended = [request for request in self._added.values() if request.finished]
        for request in ended:
            del self._added[request.request_id]
        outputs = [(r.request_id, r.completions[0].seq.output_token_ids) for r in ended]
        return outputs, num_prompt_tokens or -len(grown)

    def is_finished(self) -> bool:
        """Whether `step` has returned every request of `add_request`."""
        return not self._added

    def _run(self, requests: list[Request], show_progress: bool) -> list[RequestOutput]:
        waiter, engine, loop = Waiter(requests), self.engine, self._loop
        try:
            with ProgressBar(requests, waiter) if show_progress and requests else nullcontext() as progress:
                if progress is not None:
                    progress.show()
                engine.queue(*requests, offline=True)
                loop.wait(waiter, lambda: waiter.over, None if progress is None else progress.update)
            waiter.raise_if_lost()
        except KeyboardInterrupt as interrupt:
            interrupt.outputs = [request.output() for request in requests]  # type: ignore[attr-defined]
            raise
        finally:  # an interrupt may have come at any line: all that was queued is taken back
            loop.end(waiter, requests)
        return [request.output() for request in requests]


def _drop(method: str, others: dict[str, Any]) -> None:
    """Refuse unknown arguments of a method; those of vLLM that have no effect are dropped."""
    drop_foreign(method, others, CALL_ARGUMENTS)
    reject_unknown(method, others, list(inspect.signature(getattr(LLM, method)).parameters)[1:-1])
