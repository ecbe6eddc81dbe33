"""The defaults of requests, from a model's files."""

import json

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.weights.checkpoint import locate
from nanovllm.weights.sampling_defaults import sampling_defaults
from tests import tiny
from tests.weights import gguf_files

QWEN3 = {
    "bos_token_id": 7, "do_sample": True, "eos_token_id": [7, 3], "pad_token_id": 7, "temperature": 0.6, "top_k": 20,
    "top_p": 0.95, "transformers_version": "4.51.0",
}  # fmt: skip
"""As Qwen3's file has them."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tiny.save_with_tokenizer(directory)
    (directory / "generation_config.json").write_text(json.dumps(QWEN3))
    return directory


def defaults(model, **arguments):
    config = EngineConfig(str(model), **arguments)
    return sampling_defaults(config, locate(config))


def test_the_file_of_the_model(model):
    found = defaults(model)
    assert found.values == dict(temperature=0.6, top_k=20, top_p=0.95)
    said = f"requests that do not set them take temperature 0.6, top_p 0.95, top_k 20, from {model}/generation_config"
    assert str(found) == f"{said}.json"
    assert (
        defaults(model, generation_config="vllm") == ({}, "") and str(defaults(model, generation_config="vllm")) == ""
    )


def test_a_directory_and_an_override(model, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"min_p": 0.1, "max_new_tokens": 9, "repetition_penalty": 1.1}')
    assert defaults(model, generation_config=tmp_path).values == dict(min_p=0.1, max_tokens=9, repetition_penalty=1.1)
    found = defaults(model, override_generation_config={"temperature": 0, "max_new_tokens": 5})
    assert found.values == dict(temperature=0, top_k=20, top_p=0.95, max_tokens=5)
    assert found.source == f"{model}/generation_config.json and override_generation_config"
    alone = defaults(model, generation_config="vllm", override_generation_config={"top_k": 3})
    assert alone == ({"top_k": 3}, "override_generation_config")


def test_a_model_without_a_file_has_none(tmp_path):
    tiny.save(tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    assert defaults(tmp_path) == ({}, "")
    assert defaults("qwen3-0.6b", load_format="dummy") == ({}, "")


@pytest.mark.parametrize(
    "content, said",
    [
        ('{"temperature": -1}', "generation_config.json: temperature=-1: must be at least 0; pass 0 for greedy"),
        ('{"top_p": "much"}', "top_p='much': must be a number, not str"),
        ('{"max_new_tokens": 0}', "max_new_tokens=0: must be at least 1"),
        ("{", "generation_config.json is not valid JSON"),
    ],
)
def test_wrong_files_are_named_with_the_entry(model, tmp_path, content, said):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError) as caught:
        defaults(model, generation_config=str(tmp_path))
    assert str(tmp_path) in str(caught.value) and said in str(caught.value)
    if "valid" not in said:
        assert str(caught.value).endswith('; generation_config="vllm" ignores the file')


def test_wrong_arguments(model, tmp_path):
    with pytest.raises(FileNotFoundError, match="generation_config='.*none': must be auto, vllm .*a directory"):
        defaults(model, generation_config=str(tmp_path / "none"))
    with pytest.raises(ValueError, match="'temprature' is not known; did you mean 'temperature'"):
        defaults(model, override_generation_config={"temprature": 1})
    with pytest.raises(ValueError, match="^override_generation_config: top_k=-3: must be at least -1; [^;]*$"):
        defaults(model, override_generation_config={"top_k": -3})
    with pytest.raises(ValueError, match="override_generation_config=3: must be a dict"):
        EngineConfig("m", override_generation_config=3)


def test_a_gguf_files_own(tmp_path):
    """As llama.cpp's converter writes them."""
    pytest.importorskip("gguf")
    path = gguf_files.tiny(tmp_path, **{
        "general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.05,
        "general.sampling.mirostat": 0,
    })  # fmt: skip
    found = defaults(path)
    assert found == (dict(temperature=0.6, top_k=20, repetition_penalty=1.05), "tiny.gguf")
    assert type(found.values["top_k"]) is int
    assert defaults(path, generation_config="vllm").values == {}


def test_calls_without_parameters_take_them(model):
    llm = LLM(model, device="cpu", num_kvcache_blocks=20, kvcache_block_size=16,
              override_generation_config={"max_new_tokens": 7})  # fmt: skip
    params = SamplingParams(temperature=0.6, top_k=20, top_p=0.95, max_tokens=7)
    assert llm.get_default_sampling_params() == params
    assert llm.engine.make_request("hello").params == params
    (out,) = llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)
    assert len(out.outputs[0].token_ids) <= 7
    given = SamplingParams(temperature=0)  # which sets every parameter
    assert llm.engine.make_request("hello", given).params == given
