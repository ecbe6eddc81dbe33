"""What a request demands of the form of its answer, as the engine's parameters take it."""

from __future__ import annotations

from typing import Any

from nanovllm.serve.errors import ApiError
from nanovllm.serve.protocol import GenerationRequest
from nanovllm.serve.request_params import bad_request
from nanovllm.structured_outputs import StructuredOutputs


def constraint(request: GenerationRequest) -> dict[str, Any]:
    """Keywords for `SamplingParams`.

    Raises:
        ApiError: 400, which names the field.
    """
    try:
        spec = StructuredOutputs.of_response_format(request.response_format)
        if request.structured_outputs is not None:
            if spec is not None:
                raise ApiError(400, "response_format and structured_outputs exclude each other", "response_format")
            spec = StructuredOutputs(**request.structured_outputs)
    except TypeError as error:
        said = str(error).replace(" got an unknown argument", ": there is no field").replace(" got ", ": ", 1)
        raise ApiError(400, said, "structured_outputs") from None
    except ValueError as error:
        raise bad_request(error) from None
    return {"structured_outputs": spec, "allowed_token_ids": request.allowed_token_ids}
