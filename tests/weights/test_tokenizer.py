"""Tokenizers built from GGUF metadata, against the rules of the published tokenizer.json files.

tokenizer.json files themselves need a network; what they say of normalisation, splitting and framing is written out
here as expected pieces, and transformers' own GGUF loader is the second opinion.
"""

from pathlib import Path
from typing import Any

import pytest

from nanovllm.weights.tokenizer import load_tokenizer
from tests.weights.gguf_files import read_quickly
from tests.weights.tokenizer_files import TEXTS, byte_alphabet, byte_level, pieces, sentencepiece


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Any:
    return load_tokenizer(smollm2_path)


def test_smollm2_chat_prompt(smollm2: Any) -> None:
    """The ids that the model's own tokenizer.json gives for its template, known from published logs."""
    chat = [{"role": "user", "content": "hello"}]
    ids = smollm2.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    system = [
        1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2,
        198,
    ]  # fmt: skip
    assert ids == [*system, 1, 4093, 198, 28120, 2, 198, 1, 520, 9531, 198]
    text = smollm2.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert smollm2.encode(text) == ids  # the special tokens are found in text, and nothing is put before it


def test_smollm2_special_tokens(smollm2: Any) -> None:
    assert (smollm2.bos_token_id, smollm2.eos_token_id, smollm2.pad_token_id, smollm2.unk_token_id) == (1, 2, 2, 0)
    assert len(smollm2) == smollm2.vocab_size == 49152
    ids = smollm2.encode("<|im_start|>a<jupyter_output>")
    assert ids == [1, smollm2.convert_tokens_to_ids("a"), 14]
    assert smollm2.decode(ids, skip_special_tokens=True) == "a"
    assert smollm2.decode(ids) == "<|im_start|>a<jupyter_output>"


def test_smollm2_decodes_what_it_encoded(smollm2: Any) -> None:
    for text in TEXTS:
        assert smollm2.decode(smollm2.encode(text)) == text


def test_smollm2_splits_every_digit(smollm2: Any) -> None:
    assert smollm2.convert_ids_to_tokens(smollm2.encode("x12345 67")) == ["x", "1", "2", "3", "4", "5", "Ġ", "6", "7"]
    assert pieces(smollm2, "ab12 3½ a1") == ["ab", "1", "2", " ", "3", "½", " a", "1"]


@pytest.mark.slow
def test_smollm2_against_transformers(smollm2: Any, smollm2_path: Path) -> None:
    """transformers ignores `tokenizer.ggml.pre`, so it does not cut before numerals that are not ASCII digits."""
    from transformers import AutoTokenizer

    with read_quickly():
        theirs = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name, local_files_only=True)
    assert smollm2.chat_template == theirs.chat_template
    assert smollm2.get_vocab() == theirs.get_vocab()
    for text in TEXTS:
        assert smollm2.encode(text) == theirs.encode(text), text
    for numeral in "½", "²", "Ⅷ", "٣":
        ours, other = (x.convert_ids_to_tokens(x.encode(f"a {numeral}")) for x in (smollm2, theirs))
        assert ours[:2] == ["a", "Ġ"], "the space stands alone, since the numeral is a piece of its own"
        assert ours == other or other[1] != "Ġ"


SPLITS = {
    "gpt-2": {
        "I'll go": ["I", "'ll", " go"],
        "I'LL go": ["I", "'", "LL", " go"],
        "a  b": ["a", " ", " b"],
        "abc12345 6": ["abc", "12345", " 6"],
        "x.y!\n\nz": ["x", ".", "y", "!", "\n", "\n", "z"],
    },
    "llama-bpe": {
        "I'LL go": ["I", "'LL", " go"],
        "abc12345 6": ["abc", "123", "45", " ", "6"],
        "x.y!\n\nz": ["x", ".y", "!\n\n", "z"],
        "a \n b": ["a", " \n", " b"],
        "e\u0301": ["e", "\u0301"],
    },
    "qwen2": {
        "I'LL go": ["I", "'LL", " go"],
        "abc12345 6": ["abc", "1", "2", "3", "4", "5", " ", "6"],
        "x.y!\n\nz": ["x", ".y", "!\n\n", "z"],
        "e\u0301": ["é"],  # normalised: NFC
    },
    "tekken": {
        "I'LL go": ["I", "'LL", " go"],
        "HTTPServer iPhone ÉTÉ": ["HTTPServer", " i", "Phone", " ÉTÉ"],
        "abc12 6": ["abc", "1", "2", " ", "6"],
        "x.y!/\n\nz": ["x", ".y", "!/\n\n", "z"],
        "e\u0301": ["e\u0301"],
    },
    "gpt-4o": {
        "I'LL go": ["I'LL", " go"],
        "don'ts HTTPServer iPhone": ["don't", "s", " HTTPServer", " i", "Phone"],
        "abc12345 6": ["abc", "123", "45", " ", "6"],
        "x.y!/\n\nz": ["x", ".y", "!/\n\n", "z"],
        "e\u0301": ["e\u0301"],
    },
    "smollm": {
        "I'LL go": ["I", "'", "LL", " go"],
        "abc12 6": ["abc", "1", "2", " ", "6"],
        "e\u0301": ["e", "\u0301"],
    },
}


ALIASES = {
    "default": "gpt-2", "mellum": "gpt-2", "deepseek-r1-qwen": "qwen2",
    **dict.fromkeys(("llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0", "dbrx", "smaug-bpe"), "llama-bpe"),
}  # fmt: skip


@pytest.mark.parametrize("pre", [None, *SPLITS, *ALIASES])
def test_pre_tokenizers(tmp_path: Path, pre: str | None) -> None:
    """None that is named means GPT-2's."""
    tokenizer = load_tokenizer(byte_level(tmp_path, **({"pre": pre} if pre else {})))
    for text, expected in SPLITS[ALIASES.get(pre, pre) if pre else "gpt-2"].items():
        assert pieces(tokenizer, text) == expected, text


def test_qwen2_splits_like_transformers_own_qwen2(tmp_path: Path) -> None:
    from transformers import Qwen2Tokenizer

    ours = load_tokenizer(byte_level(tmp_path, pre="qwen2"))
    vocab = {char: index for index, char in enumerate(byte_alphabet())}
    theirs = Qwen2Tokenizer(vocab=vocab, merges=[])
    for text in TEXTS:
        assert pieces(ours, text) == pieces(theirs, text), text


def test_merges_and_whole_words(tmp_path: Path) -> None:
    """Llama 3 and Tekken take a word that the vocabulary holds; the others only what the merges lead to."""
    merges = ("a b", "c d", "b c", "ab cd", "bc d")
    words, merged = ["bcd"], ["b", "cd"]
    for pre, expected in (
        ("llama-bpe", words), ("tekken", words), ("qwen2", merged), ("dbrx", merged), ("gpt-4o", merged),
    ):  # fmt: skip
        path = byte_level(tmp_path, merges, pre=pre, add_bos_token=False)
        tokenizer = load_tokenizer(path)
        assert tokenizer.tokenize("bcd") == expected
        assert tokenizer.tokenize("abcd") == ["abcd"]


@pytest.mark.parametrize(
    ("pre", "keys", "expected"),
    [
        ("gpt-2", {}, ["a"]),
        ("gpt-2", {"add_bos_token": True}, ["<s>", "a"]),
        ("gpt-2", {"add_bos_token": True, "add_eos_token": True}, ["<s>", "a", "</s>"]),
        ("gpt-2", {"add_eos_token": True}, ["a", "</s>"]),
        ("llama-bpe", {}, ["<s>", "a"]),  # llama.cpp's default for this family, and Llama 3's own
        ("llama-bpe", {"add_bos_token": False}, ["a"]),
        ("tekken", {}, ["<s>", "a"]),
        ("dbrx", {}, ["a"]),
        ("gpt-4o", {}, ["a"]),
    ],
)
def test_framing(tmp_path: Path, pre: str, keys: dict[str, bool], expected: list[str]) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path, pre=pre, **keys))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a")) == expected
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a", add_special_tokens=False)) == ["a"]


def test_control_and_user_defined_tokens(tmp_path: Path) -> None:
    """Both stay whole, whatever characters they are spelled with; only control tokens are left out of decoded text."""
    path = byte_level(
        tmp_path, special=("<s>", "</s>", "<｜end▁of▁turn｜>"), user=("<think>", "   "), padding_token_id=258
    )
    tokenizer = load_tokenizer(path)
    ids = tokenizer.encode("a<｜end▁of▁turn｜><think>   b")
    assert ids == [ord("a"), 259, 260, 261, ord("b")]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>   b"
    names = tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token
    assert names == ("<s>", "</s>", "</s>", None)
    assert len(tokenizer) == 262


def test_decoding_leaves_spaces_alone(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path))
    for text in ("a , b . c ! do n't", " 's"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece(tmp_path))
    for text, expected in {
        "hello world": ["▁hello", "▁world"], "  hello": ["▁▁", "▁hello"],
        "the日": ["▁the", "<0xE6>", "<0x97>", "<0xA5>"], "é\nx": ["▁", "é", "<0x0A>", "x"], "": [],
        "the</s>he": ["▁the", "</s>", "▁he"], "<|u|>hello": ["<|u|>", "▁hello"],
    }.items():  # fmt: skip
        ids = tokenizer.encode(text)
        assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", *expected]
        if "<" not in text:
            assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_sentencepiece_against_transformers(tmp_path: Path) -> None:
    """Text begins with a word: for other text versions of transformers differ, and we follow llama.cpp."""
    from transformers import AutoTokenizer

    path = sentencepiece(tmp_path)
    ours = load_tokenizer(path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name, local_files_only=True)
    for text in ("hello world", "the  other, thinner world!", "a\nb\tc", "naïve 日本 ▁x", "rellorinhereld"):
        assert ours.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False), text


def test_sentencepiece_options(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(sentencepiece(tmp_path, add_space_prefix=False, add_bos_token=False, add_eos_token=True))
    ids = tokenizer.encode("he hello")
    assert tokenizer.convert_ids_to_tokens(ids) == ["he", "▁hello", "</s>"]
    assert tokenizer.decode(tokenizer.encode(" he"), skip_special_tokens=True) == " he"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
