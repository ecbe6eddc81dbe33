"""`BareTokenizer` against the transformers tokenizer that it stands for."""

import builtins
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest

from nanovllm.weights.bare_tokenizer import BareTokenizer, check_template, whole_tokenizer
from nanovllm.weights.gguf_file import open_gguf
from nanovllm.weights.tokenizer import load_tokenizer
from tests.weights.tokenizer_files import TEXTS, byte_level, sentencepiece


def files(directory: Path) -> list[Path]:
    found = []
    for i, make in enumerate((
        lambda d: byte_level(d, add_bos_token=True, padding_token_id=65),  # "A" is padding, and no token of control
        lambda d: byte_level(d, special=("<s>", "</s>", "<|x|>"), user=("<think>",), pre="qwen2"),
        lambda d: sentencepiece(d),
    )):  # fmt: skip
        (directory / str(i)).mkdir()
        found.append(make(directory / str(i)))
    return found


def test_ids_and_texts_are_those_of_transformers(tmp_path: Path) -> None:
    for path in files(tmp_path):
        bare: Any = load_tokenizer(path)
        assert isinstance(bare, BareTokenizer)
        mine = [(bare.encode(text), bare.encode(text, add_special_tokens=False)) for text in (*TEXTS, "aA<|x|>b<s>c")]
        whole = whole_tokenizer(bare)
        assert whole is whole_tokenizer(bare) and type(whole).__module__.startswith("transformers")
        theirs = [
            (whole.encode(text), whole.encode(text, add_special_tokens=False)) for text in (*TEXTS, "aA<|x|>b<s>c")
        ]
        assert mine == theirs
        for ids, _ in mine:
            for skip in (False, True):
                assert bare.decode(ids, skip_special_tokens=skip) == whole.decode(ids, skip_special_tokens=skip)
            assert bare.convert_ids_to_tokens(ids) == whole.convert_ids_to_tokens(ids)
        assert bare.decode(97) == whole.decode(97) and bare.convert_ids_to_tokens(3) == whole.convert_ids_to_tokens(3)
        assert len(bare) == len(whole) and bare.eos_token_id == whole.eos_token_id
        flags = [
            {i: (t.content, t.special, t.normalized, t.lstrip, t.rstrip) for i, t in of.added_tokens_decoder.items()}
            for of in (bare, whole)
        ]
        assert flags[0] == flags[1]


def test_truncation_by_a_user_does_not_reach_the_engine(tmp_path: Path) -> None:
    bare: Any = load_tokenizer(byte_level(tmp_path))
    assert len(bare("a long text", truncation=True, max_length=2)["input_ids"]) == 2
    assert len(bare.encode("a long text")) == 11
    assert bare.vocab_size and not hasattr(bare, "no_such_attribute")


def test_other_threads_run_while_a_long_text_is_encoded(tmp_path: Path) -> None:
    """A server's other streams must not wait for one prompt."""
    bare: Any = load_tokenizer(byte_level(tmp_path))
    thread = threading.Thread(target=bare.encode, args=("a long text " * 20_000,))
    thread.start()
    turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 5


def test_a_template_that_a_user_sets(tmp_path: Path) -> None:
    bare: Any = load_tokenizer(byte_level(tmp_path, chat_template="a"))
    assert bare.chat_template == "a"
    whole_tokenizer(bare).chat_template = "b"
    assert bare.chat_template == "b" and whole_tokenizer(None) is None


def test_templates() -> None:
    check_template(
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}", "t"
    )
    for text in ("{% if %}", "{{ a", "{% generation %}x", "{% unknown %}"):
        with pytest.raises(ValueError, match="file: key is no Jinja template: .*, in line 2; correct it"):
            check_template("\n" + text, "file: key")


def test_a_header_is_parsed_once(tmp_path: Path) -> None:
    path = byte_level(tmp_path)
    first = open_gguf(path)
    assert open_gguf(str(path)) is first
    byte_level(tmp_path, pre="qwen2")
    assert open_gguf(path) is not first and open_gguf(path).field("tokenizer.ggml.pre", str) == "qwen2"
    with pytest.raises(FileNotFoundError):
        open_gguf(tmp_path / "none.gguf")


def test_no_warning_of_tqdm_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: Any) -> None:
    def imported(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "transformers":
            warnings.warn("IProgress not found. Please update jupyter and ipywidgets.", stacklevel=2)
            warnings.warn("something else", stacklevel=2)
        return real(name, *args, **kwargs)

    real = builtins.__import__
    monkeypatch.setattr(builtins, "__import__", imported)
    tokenizer: Any = load_tokenizer(byte_level(tmp_path))
    assert tokenizer.padding_side in ("left", "right")  # transformers' own attribute
    assert [str(warning.message) for warning in recwarn] == ["something else"]
