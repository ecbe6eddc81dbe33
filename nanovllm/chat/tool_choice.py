"""What a request's `tools` and `tool_choice` mean: what the model sees, what it must do, how its calls are found."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nanovllm.chat.tools import CALL, END_CALL, HermesToolParser, LlamaToolParser, ToolFormat, ToolParser, tool_format
from nanovllm.structured_outputs import JSON_STYLE
from nanovllm.wording import brief

MAX_TOOLS = 128
"""Most tools of a request: OpenAI's limit."""
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_EXAMPLE = '{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}'


@dataclass(frozen=True)
class ToolPlan:
    """A request's tools, checked.

    Attributes:
        tools: OpenAI's descriptions of functions.
        choice: "none", "auto", "required" or "named".
        name: the function that must be called, if `choice` is "named".
        format: how the model writes calls.
        parallel: whether an answer may have several calls.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    choice: str = "none"
    name: str | None = None
    format: ToolFormat = "hermes"
    parallel: bool = True

    @classmethod
    def of(
        cls, tools: Any, tool_choice: Any = None, chat_template: str | None = None, parallel: bool = True
    ) -> ToolPlan:
        """The plan that a request's fields ask for.

        Args:
            tools: a list of OpenAI's descriptions of functions, or None.
            tool_choice: "none", "auto", "required", or `{"type": "function", "function": {"name": ...}}`. None: "auto"
                if there are tools.
            chat_template: the model's, which decides the format of calls; one that shows no tools gets hermes.
            parallel: OpenAI's `parallel_tool_calls`.

        Raises:
            ValueError: a field is wrong; the message names it.
        """
        checked = _checked_tools(tools)
        names = [tool["function"]["name"] for tool in checked]
        choice, name = ("auto" if checked else "none") if tool_choice is None else tool_choice, None
        if isinstance(choice, Mapping):
            function = choice.get("function")
            name = function.get("name") if isinstance(function, Mapping) else None
            if choice.get("type") != "function" or not isinstance(name, str):
                raise ValueError(
                    f'tool_choice={brief(tool_choice)}: must be {{"type": "function", "function": {{"name": ...}}}}'
                )
            if name not in names:
                raise ValueError(f"tool_choice: there is no function {brief(name)} in tools, which has {names}")
            choice = "named"
        elif choice not in ("none", "auto", "required"):
            raise ValueError(
                f'tool_choice={brief(tool_choice)}: must be "none", "auto", "required" or a named function'
            )
        if choice == "required" and not checked:
            raise ValueError('tool_choice="required" needs tools, and there are none; pass tools')
        if not checked:
            choice = "none"
        return cls(checked, choice, name, tool_format(chat_template) or "hermes", parallel)

    @property
    def template_tools(self) -> list[Mapping[str, Any]] | None:
        """What the chat template shows to the model. None: nothing, also where the model may not call a tool."""
        return None if self.choice == "none" else list(self.tools)

    def parser(self) -> ToolParser | None:
        """A new parser of an answer; None: a call would be text."""
        if self.choice == "none":
            return None
        kind = LlamaToolParser if self.format == "llama3" else HermesToolParser
        return kind(None if self.parallel and self.choice != "named" else 1, self._must_call)

    @property
    def _must_call(self) -> bool:
        return self.choice in ("required", "named")

    @property
    def grammar(self) -> str | None:
        """A grammar (Lark, llguidance's dialect) of answers that call a tool; None: the model need not call one."""
        if not self._must_call:
            return None
        key = "parameters" if self.format == "llama3" else "arguments"
        before, after, between = ("", "", "; ") if self.format == "llama3" else (CALL + "\n", "\n" + END_CALL, "\n")
        functions = [tool["function"] for tool in self.tools if self.name in (None, tool["function"]["name"])]
        rules = []
        for i, function in enumerate(functions):
            # A schema is the root of its own: references in it begin there.
            schema = {"type": "object", **(function.get("parameters") or {}), "x-guidance": JSON_STYLE}
            beginning = f'{before}{{"name": {json.dumps(function["name"])}, "{key}": '
            rules += [f"call_{i}: {json.dumps(beginning)} arguments_{i} {json.dumps('}' + after)}"]
            rules += [f"arguments_{i}: %json {json.dumps(schema)}"]
        more = f" ({json.dumps(between)} call)*" if self.parallel and self.choice == "required" else ""
        calls = " | ".join(f"call_{i}" for i in range(len(functions)))
        return "\n".join([f"start: call{more}", f"call: {calls}", *rules])

    def finish_reason(self, reason: str | None, has_calls: bool) -> str | None:
        """OpenAI's finish reason of an answer. "length" and "abort" stay; a named function ends with "stop"."""
        return "tool_calls" if reason == "stop" and has_calls and self.choice != "named" else reason


def _checked_tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    if tools is None:
        return ()
    if not isinstance(tools, Sequence) or isinstance(tools, (str, bytes)):
        raise ValueError(f"tools={brief(tools)}: must be a list of descriptions of functions, such as {_EXAMPLE}")
    if len(tools) > MAX_TOOLS:
        raise ValueError(f"tools: {len(tools)} tools, at most {MAX_TOOLS} are allowed; leave some out")
    names = set()
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        if not isinstance(function, Mapping):
            raise ValueError(f"tools[{i}]={brief(tool)}: must be a description of a function, such as {_EXAMPLE}")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(
                f"tools[{i}]: name={brief(name)}: must have 1 to 64 letters, digits, dashes, dots and underscores"
            )
        if name in names:
            raise ValueError(f"tools[{i}]: name={name!r}: another tool has this name; rename one")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise ValueError(f"tools[{i}]: parameters={brief(parameters)}: must be a JSON schema, or left out")
        names.add(name)
    return tuple(tools)
