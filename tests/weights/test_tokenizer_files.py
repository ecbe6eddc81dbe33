"""Directories and files with a tokenizer, or with none, or with one that cannot be used; end tokens."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm.weights.gguf_file import GGUFError
from nanovllm.weights.tokenizer import eos_token_ids, load_tokenizer
from tests.weights.tokenizer_files import TEXTS, byte_level, sentencepiece, write


def test_directory(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None
    source = load_tokenizer(byte_level(tmp_path, ("h e", "he l"), chat_template="x"))
    source.save_pretrained(tmp_path / "hf")
    loaded = load_tokenizer(str(tmp_path / "hf"))
    for text in TEXTS:
        assert loaded.encode(text) == source.encode(text)
    assert loaded.chat_template == "x" and loaded.eos_token == "</s>"
    assert loaded.decode(loaded.encode("a , b")) == "a , b"


def test_directory_with_a_broken_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot load the tokenizer in .*skip_tokenizer_init=True"):
        load_tokenizer(tmp_path)


def test_code_of_a_checkpoint_is_neither_run_nor_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks on standard input, unless it is told not to trust the code."""
    load_tokenizer(byte_level(tmp_path)).save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(
        json.dumps({"model_type": "unheard-of", "auto_map": {"AutoConfig": "code.Config", "AutoTokenizer": "code.T"}})
    )
    (tmp_path / "hf" / "code.py").write_text("raise SystemExit('code of the checkpoint was run')")
    settings = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Unheard", "auto_map": {"AutoTokenizer": ["code.T", None]}}
    (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on standard input"))
    with pytest.raises(ValueError, match=r"hf is code of the checkpoint, which is never run; .*tokenizer="):
        load_tokenizer(tmp_path / "hf")


def test_a_chat_template_that_is_no_template_is_an_error_when_it_is_loaded(tmp_path: Path) -> None:
    path = byte_level(tmp_path, chat_template="{% for m in messages %}")
    with pytest.raises(ValueError, match=r"'tokenizer.chat_template' is no Jinja template: .* in line 1") as error:
        load_tokenizer(path)
    assert str(path) in str(error.value)
    tokenizer = load_tokenizer(byte_level(tmp_path))
    tokenizer.chat_template = "{{ messages"
    tokenizer.save_pretrained(tmp_path / "hf")
    with pytest.raises(ValueError, match=r"hf: the tokenizer's chat_template is no Jinja template"):
        load_tokenizer(tmp_path / "hf")


def test_a_chat_template_may_refuse_a_conversation(tmp_path: Path) -> None:
    template = "{{ raise_exception('a system message is needed') }}"
    assert load_tokenizer(byte_level(tmp_path, chat_template=template)).chat_template == template


def test_nothing_and_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no tokenizer at .*nowhere"):
        load_tokenizer(tmp_path / "nowhere")
    assert load_tokenizer(write(tmp_path / "x.gguf", None, ["a"], [1])) is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"pre": "chameleon"}, r"tokenizer\.ggml\.pre is 'chameleon'; supported: .*llama-bpe.*skip_tokenizer_init"),
        ({"eos_token_id": 100000}, r"eos_token_id is 100000, outside the vocabulary of 259"),
        ({"merges": ["a zz"]}, r"vocabulary and merges that do not fit together"),
        ({"merges": [1, 2]}, r"'tokenizer\.ggml\.merges' is missing or no list of strings"),
    ],
)
def test_unusable_metadata(tmp_path: Path, keys: dict[str, Any], message: str) -> None:
    path = byte_level(tmp_path, **keys)
    with pytest.raises(GGUFError, match=message) as error:
        load_tokenizer(path)
    assert str(path) in str(error.value)


def test_unsupported_model_and_missing_scores(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=r"tokenizer\.ggml\.model is 't5'; supported: gpt2, llama"):
        load_tokenizer(write(tmp_path / "t5.gguf", "t5", ["a"], [1]))
    with pytest.raises(GGUFError, match=r"'tokenizer\.ggml\.scores' is missing or not as long"):
        load_tokenizer(sentencepiece(tmp_path, scores=[0.0, 1.0]))


def test_eos_token_ids(tmp_path: Path) -> None:
    def ends(token: Any) -> SimpleNamespace:
        return SimpleNamespace(eos_token_id=token)

    assert eos_token_ids(tmp_path) == ()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert eos_token_ids(tmp_path) == (3,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 3]}))
    assert eos_token_ids(tmp_path, ends(9)) == (7, 3, 9) and eos_token_ids(tmp_path, ends(None)) == (7, 3)
    assert eos_token_ids({"eos_token_id": [4, 5]}, ends(5)) == (4, 5)
    assert eos_token_ids({}) == () and eos_token_ids({}, ends(0)) == (0,)  # zero is a token like any other
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        eos_token_ids(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    for content, said in (
        ("[]", "generation_config.json holds no JSON object"),
        *((json.dumps({"eos_token_id": junk}), "eos_token_id holds") for junk in ("x", {"a": 1}, [[1]], True, 2.5)),
    ):
        (tmp_path / "generation_config.json").write_text(content)
        with pytest.raises(ValueError, match=said):
            eos_token_ids(tmp_path)
