"""What a request demands of the form of its answer, as the engine's parameters take it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanovllm.serve.errors import ApiError
from nanovllm.serve.protocol import GenerationRequest

if TYPE_CHECKING:
    from nanovllm.serve.service import Service


def constraint(request: GenerationRequest, service: Service, grammar: str | None = None) -> dict[str, Any]:
    """Keywords for `SamplingParams`. grammar: of the tool calls that the request demands."""
    kind = (request.response_format or {}).get("type", "text")
    if kind != "text":
        raise ApiError(400, f"response_format: type={kind!r:.80} is not supported", "response_format")
    if request.structured_outputs:
        raise ApiError(400, "structured_outputs: it is not supported", "structured_outputs")
    if grammar is not None:
        raise ApiError(400, "tool_choice: only 'none' and 'auto' are supported", "tool_choice")
    if request.allowed_token_ids is not None:
        raise ApiError(400, "allowed_token_ids: it is not supported; use logit_bias", "allowed_token_ids")
    return {}
