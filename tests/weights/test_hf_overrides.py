"""Entries of config.json that an argument replaces: how YaRN is switched on."""

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.cli.serve_options import EngineOptions
from nanovllm.config import EngineConfig
from nanovllm.weights.checkpoint import locate
from tests import tiny
from tests.weights import gguf_files

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def test_yarn_gives_the_tokens_of_a_config_that_has_it(tmp_path):
    """And the context that it extends to. The base frequency is the file's own."""
    rope = {"rope_type": "default", "rope_theta": 5000.0}
    tiny.save(tmp_path / "plain", max_position_embeddings=64, rope_parameters=rope)
    theirs = tiny.save(tmp_path / "yarn", max_position_embeddings=256, rope_parameters=YARN | {"rope_theta": 5000.0})
    options = dict(skip_tokenizer_init=True, max_model_len="auto", num_kvcache_blocks=20, kvcache_block_size=16)
    llm = LLM(tmp_path / "plain", hf_overrides={"rope_scaling": YARN}, **options)
    assert llm.engine.runner.max_model_len == 256
    prompt = [(7 * i) % 199 for i in range(100)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (out,) = llm.generate([prompt], params, use_tqdm=False)
    assert out["token_ids"] == tiny.greedy(theirs, prompt, 12)
    assert LLM(tmp_path / "plain", **options).engine.runner.max_model_len == 64


def test_a_preset_and_a_gguf_file(tmp_path):
    pytest.importorskip("gguf")
    longer = {"rope_scaling": YARN | {"original_max_position_embeddings": 32768}}
    config = locate(EngineConfig("qwen3-0.6b", load_format="dummy", hf_overrides=longer)).config
    assert config.max_position_embeddings == 131072 and config.rope.theta == 1e6
    path = gguf_files.tiny(tmp_path)
    config = locate(EngineConfig(str(path), hf_overrides={"rope_scaling": YARN})).config
    assert config.max_position_embeddings == 256 and config.rope.theta == 50000


def test_wrong_ones_are_refused(tmp_path):
    tiny.save(tmp_path)
    for wrong in (print, {"hidden_size": 3}):
        with pytest.raises(ValueError, match="hf_overrides=.*: must be a dict with some of rope_scaling, "):
            EngineConfig("m", hf_overrides=wrong)
    with pytest.raises(ValueError, match="rope_type='yarm' is not supported"):
        locate(EngineConfig(str(tmp_path), hf_overrides={"rope_scaling": {"rope_type": "yarm"}}))


def test_the_option():
    assert EngineOptions(hf_overrides='{"rope_theta": 3}').config("m").hf_overrides == {"rope_theta": 3}
    with pytest.raises(ValueError, match="--hf-overrides x: must be a JSON object"):
        EngineOptions(hf_overrides="x").config("m")
