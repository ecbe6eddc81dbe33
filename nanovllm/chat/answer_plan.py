"""One prompt's answer: what the model must write, and how it is taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from nanovllm.chat.answer import AnswerParser
from nanovllm.chat.reasoning import ReasoningParser, may_reason, opens_reasoning
from nanovllm.chat.tool_choice import ToolPlan
from nanovllm.sampling_params import SamplingParams
from nanovllm.structured_outputs import StructuredOutputs


@dataclass(frozen=True)
class AnswerPlan:
    """What follows from a request's tools and from its rendered prompt.

    Attributes:
        tools: the request's tools.
        reasoning: "open", the prompt ends with `<think>`; "optional", the model may begin with `<think>`; None: it
            does neither, and the tag would be text.
    """

    tools: ToolPlan
    reasoning: Literal["open", "optional"] | None = None

    @classmethod
    def of(cls, tools: ToolPlan, prompt: str, chat_template: str | None) -> AnswerPlan:
        """The plan for a prompt, as the chat template rendered it."""
        if opens_reasoning(prompt):
            return cls(tools, "open")
        return cls(tools, "optional" if may_reason(prompt, chat_template) else None)

    def params(self, params: SamplingParams) -> SamplingParams:
        """The parameters, with the grammar of calls, if there is one; any constraint begins after reasoning.

        Structured outputs take the place of calls that the model may write, but need not.

        Where tools may be called, the text keeps special tokens: `<|python_tag|>` is one, and so may `<tool_call>` be.

        Raises:
            ValueError: there are structured outputs, and a tool must be called.
        """
        given, grammar = params.structured_outputs, self.tools.grammar
        if given is not None and grammar is not None and self.tools.must_call:
            called = given.called if isinstance(given, StructuredOutputs) else "structured_outputs"
            raise ValueError(f'{called}: it and tool_choice="{self.tools.choice}" exclude each other; drop one')
        if self.tools.choice != "none":
            params = replace(params, skip_special_tokens=False)
        spec = given if grammar is None or given is not None else StructuredOutputs(grammar=grammar, called="tools")
        if not isinstance(spec, StructuredOutputs):
            return params
        return replace(params, structured_outputs=replace(spec, reasoning=spec.reasoning or self.reasoning))

    def parser(self) -> AnswerParser:
        """A new parser of an answer."""
        reasoning = None if self.reasoning is None else ReasoningParser(self.reasoning == "open")
        return AnswerParser(reasoning, self.tools.parser())


def with_constraints(params: Any, plans: Sequence[AnswerPlan]) -> Any:
    """The parameters of each prompt, with its plan's constraint; what is not one for all or one for each stays."""
    each = list(params) if isinstance(params, (list, tuple)) else [params] * len(plans)
    if len(each) != len(plans) or not all(isinstance(p, SamplingParams) for p in each):
        return params  # `generate` says what is wrong
    planned = [plan.params(p) for plan, p in zip(plans, each)]
    return params if planned == each else planned
