"""Requests that do not set a parameter take the model's default, on every route."""

import json

import pytest

from nanovllm.cli.serve_options import EngineOptions
from nanovllm.serve.options import ServeOptions
from tests import tiny
from tests.serve.running import RunningServer

FILE = dict(temperature=0.25, top_k=7, top_p=0.5, min_p=0.125, repetition_penalty=1.5, max_new_tokens=11)
ROUTES = {
    "/v1/completions": dict(prompt="hello"),
    "/v1/chat/completions": dict(messages=[{"role": "user", "content": "hi"}]),
    "/v1/responses": dict(input="hi"),
    "/v1/messages": dict(messages=[{"role": "user", "content": "hi"}], max_tokens=3),
}
ITS_MAX_TOKENS = {"/v1/messages": 3}


@pytest.fixture(scope="module")
def of_a_file(tmp_path_factory):
    directory = tmp_path_factory.mktemp("with_defaults")
    tiny.save_with_tokenizer(directory)
    (directory / "generation_config.json").write_text(json.dumps(FILE))
    with RunningServer(directory, ServeOptions(("a", "b"))) as running:
        running.seen = []
        start = running.server.service.start
        record = lambda exchange, key, prompts, params, **o: (  # noqa: E731
            running.seen.append(params) or start(exchange, key, prompts, params, **o)
        )
        running.server.service.start = record
        yield running


def expected(path):
    params = {name: FILE[name] for name in FILE if name != "max_new_tokens"}
    return params | {"max_tokens": ITS_MAX_TOKENS.get(path, 11)}


@pytest.mark.parametrize("path", ROUTES)
def test_fields_that_are_not_set(of_a_file, path):
    answer = of_a_file.post(path, **ROUTES[path], **({"top_p": None} if path != "/v1/messages" else {}))
    params = of_a_file.seen[-1]
    assert {name: getattr(params, name) for name in expected(path)} == expected(path)
    if path == "/v1/responses":
        assert (answer["temperature"], answer["top_p"]) == (0.25, 0.5)


@pytest.mark.parametrize("path", ROUTES)
def test_fields_that_are_set(of_a_file, path):
    given = dict(temperature=1.0, top_p=1.0, top_k=0)
    if path != "/v1/messages":
        given |= dict(min_p=0.0, repetition_penalty=1.0)
    limit = {"/v1/responses": "max_output_tokens"}.get(path, "max_tokens")
    of_a_file.post(path, **ROUTES[path] | given | {limit: 13})
    params = of_a_file.seen[-1]
    assert {name: getattr(params, name) for name in given} == given and params.max_tokens == 13


def test_without_a_file_defaults_are_openais(server):
    assert server.engine.info.sampling_defaults == {} and server.engine.info.sampling_source == ""
    answer = server.post("/v1/responses", input="hi", max_output_tokens=2)
    assert (answer["temperature"], answer["top_p"]) == (1.0, 1.0)
    whole = server.post("/v1/completions", prompt="hello", ignore_eos=True)
    assert whole["usage"]["completion_tokens"] == 16


def test_the_options():
    given = EngineOptions(generation_config="vllm", override_generation_config='{"temperature": 0.5}').config("m")
    assert (given.generation_config, given.override_generation_config) == ("vllm", {"temperature": 0.5})
    for wrong in ("[1]", "{"):
        with pytest.raises(ValueError, match='override-generation-config .*: must be a JSON object, such as {"temp'):
            EngineOptions(override_generation_config=wrong).config("m")
