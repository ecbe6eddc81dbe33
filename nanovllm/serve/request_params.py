"""From the fields of a request to `SamplingParams`, and from the engine's errors to those of HTTP."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nanovllm.async_llm import EngineDeadError, RequestFailed
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.errors import MOST_SAID, ApiError, ServerShutdown
from nanovllm.serve.protocol import GenerationRequest
from nanovllm.structured_outputs import GrammarsBusyError
from nanovllm.wording import brief

_FIELDS = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "ignore_eos", "stop_token_ids", "bad_words", "stop", "skip_special_tokens",
    "include_stop_str_in_output", "prompt_logprobs",
)  # fmt: skip


def sampling_params(request: GenerationRequest, defaults: Mapping[str, Any], **others: Any) -> SamplingParams:
    """The parameters that a request asks for.

    Args:
        defaults: the model's, of what the request does not set.
        others: what its kind of request decides.

    Raises:
        ApiError: 400, which names the field.
    """
    if request.best_of is not None and request.best_of != request.n:
        raise ApiError(
            400,
            f"best_of={brief(request.best_of)}: it is not supported; use n, and choose the best",
            "best_of",
            "unsupported_parameter",
        )
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options: it needs stream=true; leave it out", "stream_options")
    if request.prompt_logprobs is not None and request.stream:
        raise ApiError(400, "prompt_logprobs: a stream has no place for them; leave stream out", "prompt_logprobs")
    if others["max_tokens"] is None:
        others["max_tokens"] = defaults.get("max_tokens")
    given = {**defaults} | {name: value for name in _FIELDS if (value := getattr(request, name)) is not None}
    given["logit_bias"] = _logit_bias(request.logit_bias)
    if request.seed is not None:
        if not -(2**63) <= request.seed < 2**63:
            raise ApiError(400, f"seed={brief(request.seed)}: must be at least -2**63 and less than 2**63", "seed")
        given["seed"] = request.seed % 2**63
    try:
        return SamplingParams(**given | others)
    except (ValueError, TypeError) as error:
        raise bad_request(error) from None


def _logit_bias(given: dict[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    wrong = [name for name in given if not re.fullmatch(r"\d{1,9}", name)]
    if wrong:
        named = ", ".join(f"{name[:80]!r}" for name in wrong[:5])
        raise ApiError(400, f"logit_bias: expected token ids, not {named}", "logit_bias")
    return {int(name): bias for name, bias in given.items()}


def bad_request(error: Exception) -> ApiError:
    """A 400 of what the engine says of a request; the message begins with the name of what is wrong.

    It speaks to Python. Here an argument of `LLM` is an option of the server.
    """
    message = str(error)
    if len(message) > MOST_SAID:
        message = message[:MOST_SAID] + "..."
    # Without bounds the search takes time in the square of the message's length.
    message = re.sub(r"(?:pass )?\b(\w{1,40})=(\S{0,40}) to LLM\b", _as_option, message)
    message = message.replace("raise max_model_len", "start the server with a larger --max-model-len")
    name = re.match(r"([a-z_]\w*)(\[\d+\])?[=:]", message)
    code = "context_length_exceeded" if re.search(r"max_model_len=\d", message) else None
    return ApiError(400, message, name[1] if name else None, code)


def _as_option(argument: re.Match[str]) -> str:
    """ "pass max_logprobs=30 to LLM" -> "start the server with --max-logprobs 30"."""
    return f"start the server with --{argument[1].replace('_', '-')} {argument[2]}".rstrip()


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an error of the engine or of a request."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ServerShutdown):
        return ApiError(503, str(error), code="server_shutdown", retry_after=5)
    if isinstance(error, EngineDeadError):
        return ApiError(503, str(error), code="engine_dead", retry_after=5)
    if isinstance(error, RequestFailed):
        return ApiError(500, str(error), code="request_failed")
    if isinstance(error, GrammarsBusyError):  # the request is right
        return ApiError(503, str(error), code="overloaded", retry_after=2)
    if isinstance(error, (ValueError, TypeError)):
        return bad_request(error)
    return ApiError(500, "an error inside of the server; its log has the details", code="internal_error")
