"""The small routes: what is served, whether it works, and its tokenizer."""

from __future__ import annotations

from typing import Any

from nanovllm import __version__
from nanovllm.serve.errors import ApiError
from nanovllm.serve.http import Exchange
from nanovllm.serve.protocol import DetokenizeRequest, TokenizeRequest, parse
from nanovllm.serve.service import Service


def _card(service: Service, name: str) -> dict[str, Any]:
    info = service.engine.info
    return {
        "id": name, "object": "model", "created": service.options.created, "owned_by": "nanovllm",
        "root": service.model_name, "parent": None, "max_model_len": info.max_model_len,
    }  # fmt: skip


async def list_models(service: Service, exchange: Exchange, key: str) -> None:
    """GET /v1/models"""
    cards = [_card(service, name) for name in service.options.model_names]
    await exchange.answer_json({"object": "list", "data": cards})


async def get_model(service: Service, exchange: Exchange, key: str) -> None:
    """GET /v1/models/{id}; an id may have slashes."""
    name = exchange.path.rstrip("/").removeprefix("/v1/models/")
    service.check_model(name)
    await exchange.answer_json(_card(service, name))


async def version(service: Service, exchange: Exchange, key: str) -> None:
    """GET /version"""
    await exchange.answer_json({"version": __version__})


async def health(service: Service, exchange: Exchange, key: str) -> None:
    """GET /health: whether the server should get requests."""
    draining = service.admission.draining
    await _health("the server is shutting down" if draining else service.fault(await service.counts()), exchange)


async def live(service: Service, exchange: Exchange, key: str) -> None:
    """GET /health/live: whether the engine works; a server that drains is alive."""
    await _health(service.fault(await service.counts()), exchange)


async def _health(reason: str | None, exchange: Exchange) -> None:
    if reason is None:
        await exchange.answer_json({"status": "ok"})
    else:
        await exchange.answer_json({"status": "unavailable", "reason": reason}, 503)


async def tokenize(service: Service, exchange: Exchange, key: str) -> None:
    """POST /tokenize: of a text or of a conversation."""
    request = parse(await service.json(exchange), TokenizeRequest)
    service.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "prompt: pass exactly one of prompt and messages", "prompt")
    useless = [name for name in request.OF_MESSAGES if request.prompt is not None and getattr(request, name)]
    if useless:
        raise ApiError(400, f"{useless[0]}: a prompt has no use for it; leave it out, or pass messages", useless[0])
    if request.messages is not None:
        text = await service.offload(
            exchange.body_size, service.render, request.messages, request.chat_template_kwargs or {},
            tools=request.tools,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
        )  # fmt: skip
        token_ids = await service.encode(text, "messages", bool(request.add_special_tokens))
    else:
        assert request.prompt is not None
        token_ids = await service.encode(request.prompt, "prompt", request.add_special_tokens is not False)
    found: dict[str, Any] = {
        "tokens": token_ids, "count": len(token_ids), "max_model_len": service.engine.info.max_model_len,
        "token_strs": None,
    }  # fmt: skip
    if request.return_token_strs:
        names = service.engine.tokenizer.convert_ids_to_tokens
        found["token_strs"] = await service.offload(len(token_ids), names, token_ids)
    await exchange.answer_json(found)


async def detokenize(service: Service, exchange: Exchange, key: str) -> None:
    """POST /detokenize"""
    request = parse(await service.json(exchange), DetokenizeRequest)
    service.check_model(request.model)
    decoder = service.engine.maker.decoder
    if decoder is None:
        raise ApiError(400, "this server has no tokenizer")
    try:
        await service.offload(len(request.tokens), service.engine.maker.prompts.check_ids, request.tokens)
    except ValueError as error:
        raise ApiError(400, f"tokens: {error}", "tokens") from None
    text = await service.offload(len(request.tokens), decoder.decode, request.tokens, skip_special_tokens=False)
    await exchange.answer_json({"prompt": text})
