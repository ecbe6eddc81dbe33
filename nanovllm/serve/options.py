"""The options of a server: one frozen record, checked once."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, field, replace
from typing import Any

from nanovllm.wording import brief, counted

TEMPLATE_VARIABLES_TAKEN = frozenset({
    "conversation", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message",
    "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs",
    "return_assistant_tokens_mask", "messages", "self",
})  # fmt: skip
"""Variables of chat templates that are the server's own."""


@dataclass(frozen=True)
class ServeOptions:
    """How a server behaves. The model and its engine have options of their own (`EngineConfig`).

    Raises:
        ValueError: a value is out of range.
    """

    model_names: tuple[str, ...] = ("model",)
    """Names by which requests may call the model; answers have the first one."""
    api_keys: tuple[str, ...] = ()
    """A request must bring one of these keys. Without keys, every client may use the server."""
    max_waiting: int = 4096
    """Most completions that wait for their first token; further requests get 503."""
    max_waiting_tokens: int = 4_000_000
    """Most prompt tokens that wait, counted once for each completion."""
    max_per_key: int | None = None
    """Most requests of one API key at a time; further ones get 429. None: any number."""
    queue_timeout: float = 600.0
    """Seconds that a request may wait for its first token."""
    max_connections: int = 10_000
    """Most open connections; a further one gets 503 and is closed."""
    max_body_bytes: int = 16 << 20
    max_header_bytes: int = 64 << 10
    max_headers: int = 128
    receive_timeout: float = 60.0
    """Seconds in which a request's headers, and then its body, must arrive."""
    send_timeout: float = 300.0
    """Seconds for which a client may take nothing of a stream before it is cut off."""
    ping_interval: float = 15.0
    """Seconds of silence after which a stream gets a comment, so that proxies keep it open."""
    stall_timeout: float = 120.0
    """Seconds without a step, while the engine has work, after which /health is 503."""
    stats_interval: float = 10.0
    """Seconds between two lines in the log with rates and the queue, while there is work; 0: none."""
    drain: float = 30.0
    """Seconds that running requests have after SIGTERM or SIGINT."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages may call the server; "*": all."""
    chat_template: str | None = None
    """A Jinja template in place of the model's own."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the template for requests that do not set them."""
    enable_force_include_usage: bool = False
    """The last chunk of every stream has the usage, whether the request asks for it or not, for those who count it."""
    strict_max_tokens: bool = False
    """A request whose prompt and `max_tokens` exceed the context gets 400. Else its `max_tokens` is lowered."""
    engine_restarts: bool = False
    """Whether the server starts an engine that has died again; /health says so meanwhile."""
    metrics_prefix: str = "vllm:"
    """Before the metrics that vLLM has as well, so that its dashboards work."""
    created: int = field(default_factory=lambda: int(time.time()))
    """The `created` of its models: the server's start in seconds since 1970, in all of its processes."""

    def __post_init__(self) -> None:
        for name in (
            "max_waiting", "max_waiting_tokens", "max_connections", "max_body_bytes", "max_header_bytes", "max_headers"
        ):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be at least 1")
        for name in (
            "queue_timeout",
            "receive_timeout",
            "send_timeout",
            "ping_interval",
            "stall_timeout",
            "stats_interval",
            "drain",
        ):
            value, may_be_zero = getattr(self, name), name in ("stats_interval", "drain")
            if not math.isfinite(value) or value < (0 if may_be_zero else 0.001):
                least = "of at least 0" if may_be_zero else "above 0"
                raise ValueError(f"{name}={value!r}: must be a number of seconds {least}")
        if self.max_per_key is not None and self.max_per_key < 1:
            raise ValueError(f"max_per_key={self.max_per_key!r}: must be at least 1; leave it out for any number")
        if self.max_per_key is not None and not self.api_keys:
            raise ValueError(
                f"max_per_key={self.max_per_key!r}: counts requests by API key, and there is no key; pass --api-key, or"
                " leave it out"
            )
        if not self.model_names or not all(self.model_names):
            raise ValueError("model_names: a model needs a name; pass --served-model-name")
        for origin in self.cors_origins:
            if not re.fullmatch(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ValueError(
                    f"cors_origin={origin!r}: must be an origin without a path, such as https://app.example.com, or *"
                )
        if not re.fullmatch(r"([A-Za-z_:][A-Za-z0-9_:]*)?", self.metrics_prefix):
            raise ValueError(
                f"metrics_prefix={self.metrics_prefix!r}: must be letters, digits, _ and :, not beginning with a digit"
            )
        if taken := TEMPLATE_VARIABLES_TAKEN & self.chat_template_kwargs.keys():
            raise ValueError(
                f"default_chat_template_kwargs={brief(self.chat_template_kwargs)}: {min(taken)!r} is not for the"
                " template; leave it out"
            )
        for i, key in enumerate(self.api_keys, 1):  # a message must not tell the key
            if len(key) < 8 or not key.isascii() or not key.isprintable():
                raise ValueError(
                    f"API key {i} of {len(self.api_keys)}, of {counted(len(key), 'character')}: must have at least 8"
                    " printable ASCII characters; choose another one"
                )

    def share(self, count: int) -> ServeOptions:
        """The options of each of `count` processes that have an equal share of the limits on the whole server."""
        names = "max_waiting", "max_waiting_tokens", "max_connections"
        return replace(self, **{name: -(-getattr(self, name) // count) for name in names})
