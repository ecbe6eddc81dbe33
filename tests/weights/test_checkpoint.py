"""Where a model is, and its configuration: found, or an error that names what is missing."""

import errno
import json
import sys
from pathlib import Path

import pytest

from nanovllm.config import EngineConfig
from nanovllm.weights.checkpoint import locate
from tests.weights.checkpoints import not_found


@pytest.mark.parametrize(
    "content, said",
    [
        ('{"a":', "is not valid JSON"),
        ("[]", "holds no JSON object"),
        ("[" * 100_000 + "]" * 100_000, "nested too deeply"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "is not valid JSON"),
        ('{"architectures": ["LlamaForCausalLM"], "num_attention_heads": ' + "9" * 400 + "}", "num_attention_heads="),
        ('{"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1' + "0" * 400 + ', "num_attention_heads": 1,'
         ' "hidden_size": 2}', "rms_norm_eps="),
    ],
    ids=["half", "a list", "deep", "more digits than Python reads", "a huge count", "an integer beyond floats"],
)  # fmt: skip
def test_a_config_with_absurd_values_is_an_error_that_names_the_file(tmp_path, content, said):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError) as error:
        locate(EngineConfig(str(tmp_path)))
    assert str(tmp_path / "config.json") in str(error.value) and said in str(error.value)
    assert len(str(error.value)) < 600


def test_directories_and_presets(checkpoint, monkeypatch):
    found = locate(EngineConfig(str(checkpoint)))
    assert (found.path, found.format, found.config.architecture) == (checkpoint, "safetensors", "Qwen3ForCausalLM")
    assert locate(EngineConfig(str(checkpoint), load_format="dummy")).format == "dummy"
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    assert locate(EngineConfig(f"~/{checkpoint.name}")).path == checkpoint
    found = locate(EngineConfig("Qwen3-0.6B", load_format="dummy"))
    assert (found.path, found.format, found.config.hidden_size) == (None, "dummy", 1024)


@pytest.mark.parametrize(
    "model, error, words, arguments",
    [
        (
            "qwen3-0.6b",
            ValueError,
            ["is a preset", "'Qwen/Qwen3-0.6B'", 'for random ones pass load_format="dummy" (to `LLM` or'],
            {},
        ),
        (
            "qwen3-0.7b",
            ValueError,
            ["model='qwen3-0.7b' is no local directory, and no preset", "did you mean 'qwen3-"],
            dict(load_format="dummy"),
        ),
        ("{}", FileNotFoundError, ["holds no config.json", "pass a Hugging Face model directory"], {}),
        ("{}/none.gguf", FileNotFoundError, ["none.gguf", "no such file"], {}),
        ("{}/x.safetensors", ValueError, ["no .gguf", "pass the directory that holds config.json"], {}),
        ("{}", ValueError, ["is no .gguf file"], dict(load_format="gguf")),
        ("{}/x.gguf", ValueError, ["is a GGUF file"], dict(load_format="safetensors")),
    ],
)
def test_what_is_not_there_or_contradicts_the_format(tmp_path, model, error, words, arguments):
    for name in ("x.gguf", "x.safetensors"):
        (tmp_path / name).write_bytes(b"GGUF")
    not_found(error, model.format(tmp_path), *words, **arguments)


@pytest.mark.parametrize(
    "config",
    [
        dict(architectures=["DeepseekV3ForCausalLM"]),
        dict(architectures=["Qwen2_5_VLForConditionalGeneration"], text_config={}, vision_config={}),
        # Those that do not even have the entries of a decoder that we know.
        dict(architectures=["GPT2LMHeadModel"], n_head=12, n_embd=768),
        dict(architectures=["GemmaForCausalLM"], hidden_act="gelu_pytorch_tanh"),
        dict(architectures=["PhimoeForCausalLM"], rope_parameters=dict(rope_type="longrope")),
    ],
    ids=lambda c: c["architectures"][0],
)
def test_an_unsupported_architecture_lists_the_supported(checkpoint, config):
    path = checkpoint / "config.json"
    common = {} if "n_head" in config else json.loads(path.read_text())
    path.write_text(json.dumps(common | config))
    name = config["architectures"][0]
    not_found(ValueError, checkpoint, repr(name), "supported are Gemma2ForCausalLM, ")


def test_a_mistyped_directory_is_told_of_the_one_that_is_there(tmp_path, monkeypatch):
    (tmp_path / "small-qwen3").mkdir()
    (tmp_path / "small-qwen").mkdir()
    (tmp_path / "small-qwen3" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    words = "is no local directory, and no preset", "did you mean './small-qwen3'?"
    not_found(ValueError, "small-qwen2", *words, load_format="dummy")
    not_found(ValueError, "tiny", "presets are qwen3-0.6b, ", load_format="dummy")
    for name, meant in (("./small-qwen2", "./small-qwen3"), (f"{tmp_path}/small-qwen2", f"{tmp_path}/small-qwen3")):
        not_found(FileNotFoundError, name, f"model={name!r} is no local directory", f"did you mean {meant!r}?")


@pytest.mark.parametrize("name", ["./none", "/none", "~/none", "../none", "not a hub id!"])
def test_what_can_be_no_hub_id_is_an_error_without_another_before_it(name, monkeypatch):
    if name != "not a hub id!":
        monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(FileNotFoundError, match="is no local directory") as error:
        locate(EngineConfig(name))
    assert error.value.__suppress_context__ or error.value.__context__ is None


@pytest.mark.parametrize("name", ["no-such-directory", "someone/no-such-model", "not a hub id!", "/no/such/directory"])
def test_what_is_nowhere_while_offline(name, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    not_found(FileNotFoundError, name, repr(name))
    if name == "someone/no-such-model":
        not_found(FileNotFoundError, name, "could not be downloaded: HF_HUB_OFFLINE is set; unset it")
        with pytest.raises(FileNotFoundError) as error:
            locate(EngineConfig(name))
        assert error.value.__suppress_context__  # no hundred lines of the hub's client


def test_a_model_that_is_not_downloaded_is_one_error_without_the_hubs_traceback(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match="could not be downloaded") as error:
        locate(EngineConfig("someone/no-such-model"))
    assert error.value.__suppress_context__ and error.value.__cause__ is None


@pytest.mark.parametrize(
    "kind, said",
    [
        ("RepositoryNotFoundError", "the hub has no such model, or it is a private one; correct the name"),
        ("GatedRepoError", "the model is gated; ask for access on its page, and set HF_TOKEN"),
    ],
)
def test_a_model_that_the_hub_does_not_give(kind, said, monkeypatch):
    import httpx
    import huggingface_hub
    from huggingface_hub import errors

    def snapshot_download(model_id, local_files_only=False, **_):
        if local_files_only:
            raise errors.LocalEntryNotFoundError("nothing cached")
        raise getattr(errors, kind)("no", response=httpx.Response(404, request=httpx.Request("GET", "http://x")))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    not_found(FileNotFoundError, "someone/model", said)


def test_a_network_that_fails_is_not_a_traceback(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot_download(model_id, local_files_only=False, **_):
        raise LocalEntryNotFoundError("nothing cached") if local_files_only else ConnectionError("no route to host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    not_found(FileNotFoundError, "someone/model", "'someone/model'", "not be downloaded", "ConnectionError: no route")


def test_a_full_disk_is_no_matter_of_the_connection(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot_download(model_id, local_files_only=False, **_):
        raise LocalEntryNotFoundError("nothing cached") if local_files_only else OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    not_found(FileNotFoundError, "someone/model", "No space left); free space, or set HF_HOME elsewhere")


def test_a_hub_id_comes_from_the_cache_and_only_then_from_the_network(monkeypatch, checkpoint):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    calls, cached = [], []

    def snapshot_download(model_id, allow_patterns, ignore_patterns, local_files_only=False):
        assert model_id == "someone/model"
        assert not [p for p in allow_patterns if Path(p).suffix in (".bin", ".pt", ".py", "")]
        assert ignore_patterns == ["consolidated*.safetensors"]  # Mistral's second copy of the weights
        calls.append(local_files_only)
        if local_files_only and not cached:
            raise LocalEntryNotFoundError("nothing cached")
        return str(checkpoint)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    assert locate(EngineConfig("someone/model")).path == checkpoint and calls == [True, False]
    cached.append("someone/model")
    assert locate(EngineConfig("someone/model")).path == checkpoint and calls == [True, False, True]
