"""From a conversation to the text of a prompt, through the model's chat template."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

from nanovllm.chat.tools import CALL, END_CALL
from nanovllm.quiet_import import quiet_imports
from nanovllm.wording import brief

logger = logging.getLogger(__name__)
_warned: WeakSet[Any] = WeakSet()
"""Tokenizers whose templates show no tools, as was logged."""

Message = Mapping[str, Any]
_TEXT_PARTS = ("text", "input_text", "output_text")
_TEXT_ROLES = ("system", "developer", "user")
"""Roles whose messages must have a text; others may call tools, or bring what a tool has returned."""
_EXAMPLE_CALL = '{"type": "function", "function": {"name": "f", "arguments": "{}"}}'
_ROLES = (*_TEXT_ROLES, "assistant", "tool", "function")
"""Roles that every model takes, unless its template refuses them."""


def check_conversations(messages: Any) -> dict[str, Sequence[Message]]:
    """The conversations that a user passed, one or a list of them, each by what the user calls it.

    Raises:
        TypeError: something is no conversation.
    """
    if not _is_list(messages):
        raise _no_conversation("messages", messages)
    one = bool(messages) and isinstance(messages[0], Mapping)
    conversations = {"messages": messages} if one else {f"messages[{i}]": c for i, c in enumerate(messages)}
    for name, conversation in conversations.items():
        check_messages(name, conversation)
    return conversations


def check_messages(name: str, messages: Any) -> None:
    """Raise a TypeError unless this is a list of messages, with texts where a text must be.

    What else a message holds is up to the template.
    """
    if not _is_list(messages) or not messages:
        raise _no_conversation(name, messages)
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise _no_conversation(f"{name}[{i}]", message)
        content = message.get("content")
        if message["role"] in _TEXT_ROLES and not (isinstance(content, str) or _is_list(content)):
            said = f"content={brief(content)}" if "content" in message else "content is missing"
            raise TypeError(f"{name}[{i}]: {said}: pass a text, or a list of parts with texts")
        _check_calls(f"{name}[{i}]", message.get("tool_calls"))


def _check_calls(name: str, calls: Any) -> None:
    """Raise a TypeError unless these are calls of functions, or None."""
    if calls is not None and not _is_list(calls):
        raise TypeError(f"{name}: tool_calls={brief(calls)}: must be a list of calls, such as [{_EXAMPLE_CALL}]")
    for i, call in enumerate(calls or ()):
        function = call.get("function", call) if isinstance(call, Mapping) else None  # templates take both
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise TypeError(f"{name}: tool_calls[{i}]={brief(call)}: must be a call, such as {_EXAMPLE_CALL}")


def chat_text(tokenizer: Any, name: str, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
    """The text that a chat template makes of a conversation.

    Args:
        tokenizer: a transformers tokenizer, or None.
        name: what the user calls the messages.
        variables: arguments of `apply_chat_template` ("tools", "chat_template", "add_generation_prompt",
            "continue_final_message") and variables of the template. None is the same as leaving one out.

    Raises:
        ValueError: there is no template, or the template refuses the conversation.
    """
    given = {key: value for key, value in variables.items() if value is not None}
    given.setdefault("add_generation_prompt", not given.get("continue_final_message"))
    if tokenizer is None:
        raise ValueError(
            "this engine has no tokenizer, so it has no chat template: pass token ids to generate, or tokenizer= to LLM"
        )
    if not (tokenizer.chat_template or given.get("chat_template")):
        raise ValueError("this model has no chat template; use generate with a plain prompt, or pass chat_template")
    if given["add_generation_prompt"] and given.get("continue_final_message"):
        raise ValueError(
            f"{name}: an answer cannot begin and the last message go on; pass add_generation_prompt=False with"
            " continue_final_message=True"
        )
    template = str(given.get("chat_template", tokenizer.chat_template))
    for i, role in enumerate(message["role"] for message in messages):
        if role not in _ROLES and f"'{role}'" not in template and f'"{role}"' not in template:
            raise ValueError(
                f"{name}[{i}]: role={brief(role)}: expected {', '.join(_ROLES[:-1])} or {_ROLES[-1]}, or a role that"
                " the model's chat template names"
            )
    if (tools := given.get("tools")) is not None:
        if not _is_list(tools):
            raise TypeError(f"tools={brief(tools)}: must be a list of descriptions of functions, or None")
        if "tools" not in template:
            _warn_of_tools(tokenizer)
    plain = [
        _with_reasoning(_with_call_objects(_with_plain_content(f"{name}[{i}]", m))) for i, m in enumerate(messages)
    ]
    if "tool_calls" not in template:
        plain = list(map(_with_calls_as_text, plain))
    try:
        return tokenizer.apply_chat_template(plain, tokenize=False, **given)
    except Exception as error:  # of Jinja, of transformers, or what the template itself raises
        raise ValueError(f"{name}: the chat template refuses the conversation: {error}") from error


def _warn_of_tools(tokenizer: Any) -> None:
    """Once for each model that is loaded: a server would say it with every request."""
    if tokenizer in _warned:
        return
    _warned.add(tokenizer)
    logger.warning(
        "the chat template of %s does not show tools, so the model does not know them; describe them in a system"
        " message, or take a model whose template shows tools",
        _name_of(tokenizer),
    )  # fmt: skip


def _name_of(tokenizer: Any) -> str:
    """The hub's name of a model, or that of its directory or file."""
    path = Path(tokenizer.name_or_path or "this model")
    if path.parent.name == "snapshots":  # in the hub's cache, as models--OWNER--NAME/snapshots/COMMIT
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.name


def _with_plain_content(name: str, message: Message) -> Message:
    """The message with its content's parts joined, and with a content. name: what the user calls the message."""
    parts: Any = message.get("content")
    if parts is None and message["role"] == "assistant" and not message.get("tool_calls"):
        return {**message, "content": ""}  # an answer without a text; a template would have no name for it
    if not _is_list(parts):
        return message
    texts = []
    for i, part in enumerate(parts):
        text, kind = part, "text"
        if isinstance(part, Mapping):
            text, kind = part.get("text"), part.get("type", "text")
        if kind not in _TEXT_PARTS:
            raise ValueError(f"{name}: a part of type {brief(kind)} is not supported; the engine reads text alone")
        if not isinstance(text, str):
            raise TypeError(
                f'{name}: content[{i}]={brief(part)}: a part is {{"type": "text", "text": ...}} or a string'
            )
        texts.append(text)
    return {**message, "content": "\n".join(texts)}


def _with_reasoning(message: Message) -> Message:
    """The message with its `reasoning`, as vLLM's answers call it, under the name that templates know."""
    if message.get("reasoning") is None or message.get("reasoning_content") is not None:
        return message
    return {**message, "reasoning_content": message["reasoning"]}


def _with_call_objects(message: Message) -> Message:
    """The message with the arguments of its tool calls as objects, which templates want; OpenAI's API has JSON text."""
    calls: Any = message.get("tool_calls")
    if not _is_list(calls):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def _with_calls_as_text(message: Message) -> Message:
    """The message with its calls as text in Qwen's format, for a template that would leave them out."""
    calls: Any = message.get("tool_calls")
    if not _is_list(calls) or not calls:
        return message
    functions = [call.get("function") if isinstance(call, Mapping) else call for call in calls]
    texts = [f"{CALL}\n{json.dumps(function, ensure_ascii=False)}\n{END_CALL}" for function in functions]
    return {**message, "content": "\n".join([*filter(None, [message.get("content")]), *texts])}


def _with_object(call: Any) -> Any:
    function: Any = call.get("function") if isinstance(call, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(arguments, str):
        return call
    try:
        given = json.loads(arguments or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": given}} if isinstance(given, dict) else call


def described(tools: Any) -> Any:
    """Descriptions of functions, in place of Python functions among the tools.

    Raises:
        ValueError: a function lacks types or a docstring.
    """
    if not _is_list(tools) or not any(map(callable, tools)):
        return tools
    with quiet_imports():
        from transformers.utils import get_json_schema

    try:
        return [get_json_schema(tool) if callable(tool) else tool for tool in tools]
    except Exception as error:  # of transformers
        raise ValueError(f"tools: a function cannot be described: {error}") from error


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _no_conversation(name: str, value: Any) -> TypeError:
    return TypeError(
        f'{name}={brief(value)}: a conversation is a list of dicts with "role" and "content"; pass for example'
        ' [{"role": "user", "content": "Hello!"}], or a list of such lists'
    )
