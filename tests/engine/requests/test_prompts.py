"""Prompts: a text that cannot fit is refused before it is tokenised, a text that may fit never is; salts."""

import unicodedata

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.engine.requests.prompts import PromptReader
from nanovllm.weights.token_lengths import most_characters
from tests import tiny
from tests.engine.requests.test_detokenizer import metaspace, sentencepiece


def changed(normalizer=None, pre_tokenizer=None, token=None):
    """`tiny.tokenizer()` with other parts."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer.from_str(tiny.tokenizer().backend_tokenizer.to_str())
    if normalizer is not None:
        backend.normalizer = normalizer
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    if token is not None:
        backend.add_special_tokens([token])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def variants():
    from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return {
        "byte-level": (tiny.tokenizer(), 13),  # <|assistant|>
        "sentencepiece": (sentencepiece(), 6),  # <0x00>
        "NFC": (changed(normalizers.NFC()), 52),
        "replaces": (changed(normalizers.Replace("abc", "d")), 39),
        "digits": (changed(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Digits(), level])), 13),
        "takes spaces": (changed(token=AddedToken("<x>", rstrip=True)), 13),
        # Any number of characters may go into one token, or into none.
        "drops the unknown": (metaspace(), None),
        "strips": (changed(normalizers.Strip()), None),
        "replaces runs": (changed(normalizers.Replace(Regex(" +"), " ")), None),
        "removes": (
            changed(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), level])),
            None,
        ),
        "white space": (changed(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), level])), None),
    }


VARIANTS = variants()
LIMIT = 20


@pytest.mark.parametrize("name", VARIANTS)
def test_characters_that_a_token_covers(name):
    tokenizer, expected = VARIANTS[name]
    most = most_characters(tokenizer)
    assert (None if most is None else most.number) == expected
    assert most is None or most.without_spaces == (name == "takes spaces")


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(VARIANTS)), st.data())
def test_what_fits_is_never_refused(name, data):
    tokenizer = VARIANTS[name][0]
    piece = st.sampled_from(["<|assistant|>", "<x>", "abc", " ", "\t\n", "e\u0301\u0302", "\u1f82", "é", "😀", "the"])
    text = "".join(data.draw(st.lists(piece | st.text(max_size=3), max_size=20))) * data.draw(st.integers(1, 60))
    if 0 < len(tokenizer.encode(text)) < LIMIT:
        vocabulary = max(tokenizer.get_vocab().values()) + 1
        assert PromptReader(tokenizer, vocabulary, LIMIT).read(text, "prompt").text == text


def test_a_character_is_composed_of_four_at_most():
    assert max(len(unicodedata.normalize("NFD", chr(c))) for c in range(0x110000)) == 4


@pytest.mark.parametrize("name", VARIANTS)
def test_what_cannot_fit_is_refused_before_it_is_tokenised(name, monkeypatch):
    tokenizer, most = VARIANTS[name]
    reader = PromptReader(tokenizer, len(tokenizer), LIMIT)
    if most is not None:
        monkeypatch.setattr(type(tokenizer), "encode", None)
    words = f"characters, but max_model_len={LIMIT} allows 19 tokens" if most else f"tokens, but max_model_len={LIMIT}"
    with pytest.raises(ValueError, match=words):
        reader.read("ab" * 10_000, "prompt")


def test_token_ids_are_counted_before_they_are_looked_at():
    class Unlooked(list):
        def __iter__(self):
            raise AssertionError

    reader = PromptReader(None, 100, LIMIT)
    with pytest.raises(ValueError, match="20 tokens, but max_model_len=20 allows 19"):
        reader.read(Unlooked([1] * 20), "prompt")
    assert reader.read([1] * 19, "prompt").token_ids == [1] * 19


def test_a_cache_salt():
    reader = PromptReader(None, 100, LIMIT)
    assert reader.read({"prompt_token_ids": [1, 2], "cache_salt": "x"}, "prompt") == (None, [1, 2], "x")
    assert reader.read({"prompt_token_ids": [1, 2]}, "prompt").cache_salt is None
    for salt in ("", None, 3, b"x"):
        with pytest.raises(ValueError, match="prompt: cache_salt=.*must be a string that is not empty"):
            reader.read({"prompt_token_ids": [1, 2], "cache_salt": salt}, "prompt")
    with pytest.raises(ValueError, match='a prompt dict has "prompt" or "prompt_token_ids", and maybe "cache_salt"'):
        reader.read({"cache_salt": "x"}, "prompt")


def test_a_key_of_vllm_alone_is_named():
    reader = PromptReader(None, 100, LIMIT)
    with pytest.raises(ValueError, match='or "prompt_token_ids", not "multi_modal_data": images, audio and video are'):
        reader.read({"prompt": "x", "multi_modal_data": {}}, "prompt")
