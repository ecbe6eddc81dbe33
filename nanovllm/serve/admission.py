"""Which requests may wait: a server that accepts more requests than it can serve delays all of them without end."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

from nanovllm.serve.errors import ApiError
from nanovllm.wording import counted

_RATE_SAMPLES = 64


class Ticket:
    """One request's place. `started` when its first token has come, `close` in every case."""

    def __init__(self, admission: Admission, key: str, completions: int, tokens: int) -> None:
        self._admission = admission
        self._key = key
        self._completions = completions
        self._tokens = tokens
        self._open = self._waits = True

    def set_tokens(self, tokens: int) -> None:
        """Replace the estimate of the prompt's tokens by their number, for each completion."""
        if self._waits:
            self._admission.waiting_tokens += tokens - self._tokens
            self._tokens = tokens

    def started(self) -> None:
        if self._waits:
            self._waits = False
            self._admission.left(self._completions, self._tokens)

    def close(self) -> None:
        self.started()
        if self._open:
            self._open = False
            self._admission.closed(self._key)


class Admission:
    """Bounds on what waits for a first token. Used in one event loop.

    Args:
        max_waiting: completions.
        max_waiting_tokens: prompt tokens, counted for each completion.
        max_per_key: requests of one client key at a time; None: any number.
        rejected: called with the reason of each refusal: "queue", "tokens", "key" or "drain".
    """

    def __init__(
        self,
        max_waiting: int,
        max_waiting_tokens: int,
        max_per_key: int | None = None,
        rejected: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._max_waiting = max_waiting
        self._max_waiting_tokens = max_waiting_tokens
        self._max_per_key = max_per_key
        self._rejected = rejected
        self._open: Counter[str] = Counter()
        self._starts: deque[float] = deque(maxlen=_RATE_SAMPLES)
        self.waiting = 0
        self.waiting_tokens = 0
        self.draining = False

    @property
    def num_open(self) -> int:
        return self._open.total()

    def enter(self, key: str, completions: int, tokens: int) -> Ticket:
        """Admit a request that waits for its first tokens.

        Args:
            key: the client's.
            completions: `n` times the number of prompts.
            tokens: an estimate of its prompt tokens times `n`.

        Raises:
            ApiError: 503 or 429, with the seconds after which to try again; 400, it could never be admitted.
        """
        if self.draining:
            self._rejected("drain")
            raise ApiError(503, "the server is shutting down", code="server_shutdown", retry_after=5)
        if self._max_per_key is not None and self._open[key] >= self._max_per_key:
            self._rejected("key")
            raise ApiError(
                429, f"this key has {counted(self._open[key], 'request')} running, the limit is {self._max_per_key}",
                code="too_many_requests", retry_after=1,
            )  # fmt: skip
        if completions > self._max_waiting:  # a later try would not help
            said = f"{completions} completions in a request, at most {self._max_waiting} are allowed"
            raise ApiError(400, f"n: {said}; send several requests", "n")
        if self.waiting + completions > self._max_waiting:
            self._rejected("queue")
            raise self._full(f"{counted(self.waiting, 'completion')} waiting, at most {self._max_waiting} may wait")
        if self.waiting and self.waiting_tokens + tokens > self._max_waiting_tokens:
            self._rejected("tokens")
            said = counted(self.waiting_tokens, "prompt token")
            raise self._full(f"{said} waiting, at most {self._max_waiting_tokens} may wait")
        self._open[key] += 1
        self.waiting += completions
        self.waiting_tokens += tokens
        return Ticket(self, key, completions, tokens)

    def left(self, completions: int, tokens: int) -> None:
        """Completions wait no more."""
        self.waiting -= completions
        self.waiting_tokens -= tokens
        self._starts.append(time.monotonic())

    def closed(self, key: str) -> None:
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]

    def _full(self, what: str) -> ApiError:
        """When to come back: the time in which what waits will have started, at the rate of late."""
        seconds = 5.0
        if len(self._starts) > 1 and (elapsed := self._starts[-1] - self._starts[0]) > 0:
            seconds = self.waiting * elapsed / (len(self._starts) - 1)
        return ApiError(
            503, f"the server is overloaded: {what}; try again later", code="overloaded",
            retry_after=min(max(seconds, 1.0), 60.0),
        )  # fmt: skip
