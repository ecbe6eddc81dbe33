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
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict", "return", "cache_control")
"""What a description may have: OpenAI's fields, "return" of transformers, and a hint that asks for nothing."""
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_EXAMPLE = '{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}'


_THOUGHT = r"/<think>(.|\n)*/"
_TAG = rf"""
to_call[lazy]: TO_CALL
text: TEXT
TO_CALL: /(.|\n)*{CALL}/ & ~{_THOUGHT}
TEXT: /(.|\n)*/ & ~{_THOUGHT}"""
_OBJECT = (
    r"""
text: TEXT
TEXT: /([^{ \n\t\r](.|\n)*)?/ & ~/(.|\n)*<\|python_tag\|>(.|\n)*/ & ~"""
    + _THOUGHT
)
"""Rules of the text of answers that may call a tool: nothing that begins as a call is text. A thought before the answer
has a rule of its own, which a text that may begin with one would hide.
"""


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
            tool_choice: "none", "auto", "required", `{"type": "function", "function": {"name": ...}}`, or
                `{"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [...]}}`. None: "auto" if there
                are tools.
            chat_template: the model's, which decides the format of calls; one that shows no tools gets hermes.
            parallel: OpenAI's `parallel_tool_calls`.

        Raises:
            ValueError: a field is wrong; the message names it.
        """
        checked = _checked_tools(tools)
        if isinstance(tool_choice, Mapping) and tool_choice.get("type") == "allowed_tools":
            _refuse_others("tool_choice", tool_choice, ("type", "allowed_tools"))
            checked, tool_choice = _allowed(checked, tool_choice.get("allowed_tools"))
        names = [tool["function"]["name"] for tool in checked]
        choice, name = ("auto" if checked else "none") if tool_choice is None else tool_choice, None
        if isinstance(choice, Mapping):
            function = choice.get("function")
            name = function.get("name") if isinstance(function, Mapping) else None
            if choice.get("type") != "function" or not isinstance(name, str):
                raise ValueError(
                    f'tool_choice={brief(tool_choice)}: must be {{"type": "function", "function": {{"name": ...}}}}'
                )
            _refuse_others("tool_choice", choice, ("type", "function"))
            _refuse_others("tool_choice: function", function, ("name",))
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
        return kind(None if self.parallel and self.choice != "named" else 1, self.must_call)

    @property
    def must_call(self) -> bool:
        """Whether an answer must be calls."""
        return self.choice in ("required", "named")

    @property
    def grammar(self) -> str | None:
        """A grammar (Lark, llguidance's dialect) of answers; None: any answer is right.

        If a tool must be called, it allows calls alone. If one may be called, and a tool has `strict`, it allows text,
        and calls whose arguments match the schemas of tools with `strict`.
        """
        is_strict = [tool["function"].get("strict") is True for tool in self.tools]
        if not self.must_call and not (self.choice == "auto" and any(is_strict)):
            return None
        key = "parameters" if self.format == "llama3" else "arguments"
        before, after, between = ("", "", "; ") if self.format == "llama3" else (CALL + "\n", "\n" + END_CALL, "\n")
        if self.format == "hermes" and not self.must_call:
            before = "\n"  # the text before it ends with the tag
        functions = [tool["function"] for tool in self.tools if self.name in (None, tool["function"]["name"])]
        rules = []
        for i, function in enumerate(functions):
            # A schema is the root of its own: references in it begin there.
            parameters = function.get("parameters") if self.must_call or function.get("strict") else None
            schema = {"type": "object", **(parameters or {}), "x-guidance": JSON_STYLE}
            beginning = f'{before}{{"name": {json.dumps(function["name"])}, "{key}": '
            rules += [f"call_{i}: {json.dumps(beginning)} arguments_{i} {json.dumps('}' + after)}"]
            rules += [f"arguments_{i}: %json {json.dumps(schema)}"]
        more = f" ({json.dumps(between)} call)*" if self.parallel and self.choice != "named" else ""
        start = f"start: call{more}"
        if not self.must_call and self.format == "llama3":
            start += " | text" + _OBJECT
        elif not self.must_call:
            start = ("start: (to_call call)* text" if more else "start: to_call call | text") + _TAG
        calls = " | ".join(f"call_{i}" for i in range(len(functions)))
        return "\n".join([start, f"call: {calls}", *rules])

    def finish_reason(self, reason: str | None, has_calls: bool) -> str | None:
        """OpenAI's finish reason of an answer. "length" and "abort" stay; a named function ends with "stop"."""
        return "tool_calls" if reason == "stop" and has_calls and self.choice != "named" else reason


def _allowed(tools: tuple[Mapping[str, Any], ...], allowed: Any) -> tuple[tuple[Mapping[str, Any], ...], str]:
    """(the tools that OpenAI's `allowed_tools` leaves, "auto" or "required")"""
    mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
    chosen = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(chosen, Sequence) or isinstance(chosen, str) or not chosen:
        raise ValueError(
            f'tool_choice: allowed_tools={brief(allowed)}: must be {{"mode": "auto" or "required", "tools": [{{"type":'
            ' "function", "function": {"name": ...}}, ...]}'
        )
    left = {tool["function"]["name"]: tool for tool in tools}
    names = []
    for one in chosen:
        function = one.get("function") if isinstance(one, Mapping) and one.get("type") == "function" else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or name not in left:
            raise ValueError(f"tool_choice: there is no function {brief(name or one)} in tools, which has {[*left]}")
        names.append(name)
    return tuple(tool for name, tool in left.items() if name in names), mode


def _refuse_others(name: str, given: Any, known: Sequence[str]) -> None:
    """Raise a ValueError if a mapping has fields that would be ignored. A None is the same as no field."""
    if unknown := {key for key, value in given.items() if value is not None} - set(known):
        hints = ("return", "cache_control")
        listed = ", ".join(field for field in known if field not in hints)
        raise ValueError(f"{name} has no field {min(map(str, unknown))[:80]!r}; known are {listed}")


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
        _refuse_others(f"tools[{i}]", tool, ("type", "function", "cache_control"))
        _refuse_others(f"tools[{i}]: function", function, _FUNCTION_FIELDS)
        if not isinstance(function.get("strict"), bool | None):
            raise ValueError(f"tools[{i}]: strict={brief(function['strict'])}: must be true or false")
        if name in names:
            raise ValueError(f"tools[{i}]: name={name!r}: another tool has this name; rename one")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise ValueError(f"tools[{i}]: parameters={brief(parameters)}: must be a JSON schema, or left out")
        names.add(name)
    return tuple(tools)
