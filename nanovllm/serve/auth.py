"""API keys: any of several opens the server, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from nanovllm.serve.errors import ApiError


class ApiKeys:
    """The keys of a server. Without keys, every client may use it."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def check(self, headers: Mapping[bytes, bytes]) -> str:
        """The name under which a request's key is counted: a few digits of its hash, or "" without keys.

        Takes `Authorization: Bearer KEY`, and Anthropic's `x-api-key: KEY`.

        Raises:
            ApiError: 401, the key is missing or wrong.
        """
        if not self._digests:
            return ""
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer":
            key = headers.get(b"x-api-key", b"")
        digest = _digest(key.strip())
        # Every digest is compared: the time tells neither which key it is nor how much of it is right.
        if not sum([hmac.compare_digest(digest, own) for own in self._digests]):
            said = f"{'wrong' if key else 'no'} API key: send one of the server's keys as Authorization: Bearer KEY"
            raise ApiError(401, said, code="invalid_api_key")
        return digest.hex()[:12]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
