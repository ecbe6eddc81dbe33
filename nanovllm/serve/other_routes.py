"""What to ask for in place of a path that the server lacks."""

from __future__ import annotations

import difflib
from collections.abc import Collection

_TEXT_ALONE = "this server generates text; embeddings, scores, images and audio are not supported"
_LISTED = "the routes are listed under Routes in docs/serving.md"
_INSTEAD = {
    name: answer
    for answer, names in (
        ("use /v1/chat/completions", "/api/chat"),  # Ollama's
        ("use /v1/completions", "/api/generate /completion /infill"),  # Ollama's, llama.cpp's
        ("use /v1/models", "/api/tags /api/ps /api/show /props /tokenizer_info /server_info"),
        ("use /version", "/api/version"),
        ("use /metrics", "/slots /load /stats"),
        ("use /health", "/ping /healthz /ready /readyz"),
        ("use /health/live", "/livez"),
        ("use /v1/chat/completions", "/apply-template /invocations /inference/v1/generate"),
        ("the prefix cache cannot be reset; send another cache_salt", "/reset_prefix_cache"),
        ("LoRA is not supported; merge the adapter into the weights",
         "/v1/load_lora_adapter /v1/unload_lora_adapter /lora-adapters"),
        ("the engine cannot sleep", "/sleep /wake_up /is_sleeping"),
        ("profiles are written by `python bench.py --profile`", "/start_profile /stop_profile"),
        (_TEXT_ALONE, "/api/embed /api/embeddings /embedding /embeddings /v1/embeddings /v1/embedding /pooling"
         " /classify /score /v1/score /rerank /v1/rerank /v2/rerank /v1/moderations"),
        (_LISTED, "/v1 /docs /redoc /openapi.json /api"),
    )
    for name in names.split()
}  # fmt: skip
"""Paths of the servers of vLLM, llama.cpp and Ollama."""


def instead_of(path: str, routes: Collection[str]) -> str:
    """The remedy for a path that is no route.

    Args:
        path: without a slash at its end.
        routes: the paths that the server has.
    """
    if path in _INSTEAD:
        return _INSTEAD[path]
    if path.startswith(("/v1/audio/", "/v1/images/")):
        return _TEXT_ALONE
    meant = [route for route in routes if route != "/" and (route == f"/v1{path}" or path.endswith(route))]
    nearest = max(meant, key=len, default="") or next(iter(difflib.get_close_matches(path, routes, 1, 0.8)), "")
    return f"use {nearest}" if nearest else _LISTED
