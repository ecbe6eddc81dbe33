"""Errors as clients of OpenAI's interface expect them."""

from __future__ import annotations

import math
import re
from typing import Any

from nanovllm.frontend.output_stream import EngineDeadError

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error",
    408: "timeout_error", 413: "invalid_request_error", 414: "invalid_request_error",
    415: "invalid_request_error", 429: "rate_limit_error", 431: "invalid_request_error", 500: "server_error",
    501: "not_supported_error", 503: "service_unavailable_error",
}  # fmt: skip


MOST_SAID = 4000
"""Characters of a message, which may quote a request."""
_QUOTED_OR_PYTHON = re.compile(r"""(?<!\w)(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|(?:True|False|None)(?!\w))""")
_JSON_WORDS = {"True": "true", "False": "false", "None": "null"}


class ServerShutdown(EngineDeadError):
    """The server has ended before the request did."""


class ApiError(Exception):
    """What a client is told. The message must not hold paths or other facts of the machine.

    Args:
        status: the HTTP status.
        message: outside of quotes, Python's True, False and None become JSON's words.
        param: the request's field that is wrong.
        code: a word for programs, such as "model_not_found"; as in OpenAI's errors, others have none.
        retry_after: seconds after which the client may try again.
        allow: of a 405, the methods that the path has.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        allow: str | None = None,
    ) -> None:
        message = message if len(message) <= MOST_SAID else message[:MOST_SAID] + "..."
        message = _QUOTED_OR_PYTHON.sub(lambda found: _JSON_WORDS.get(found[0], found[0]), message)
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.allow = allow

    @property
    def type(self) -> str:
        return _TYPES.get(self.status, "server_error")

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}

    def headers(self) -> list[tuple[bytes, bytes]]:
        found = []
        if self.retry_after is not None:
            found.append((b"retry-after", str(max(1, math.ceil(self.retry_after))).encode()))
        if self.allow is not None:
            found.append((b"allow", self.allow.encode()))
        if self.status == 401:
            found.append((b"www-authenticate", b"Bearer"))
        return found
