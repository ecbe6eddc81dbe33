"""Text that grows token by token: whole characters only, equal to decoding everything at once, and stop strings."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.engine.requests.detokenizer import Detokenizer, TextDecoder
from tests import tiny

TEXTS = [
    "hello world",
    "naïve café",
    "日本語とEnglish",
    "🤦🏽‍♂️👩‍👩‍👧‍👦 ok",
    " \n\t  spaces ",
    "a\u0301\u0302e",
    "<|user|>hi<|end|>there",
    "a , b . do n't",
]


def sentencepiece():
    """The kind of Llama 2: a space before the text that decoding strips, and bytes for unknown characters."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    tokens = [f"<0x{i:02X}>" for i in range(256)] + ["\u2581", *"abcdefgh", "\u2581a", "\u2581b", "cd"]
    merges = [("\u2581", "a"), ("\u2581", "b"), ("c", "d")]
    model = models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges, byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def metaspace():
    """A tokenizer with unknown bytes and with U+FFFD in its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate([*"abcdehlorw\u2581\ufffd", "<unk>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZERS = {"byte-level": tiny.tokenizer(), "sentencepiece": sentencepiece(), "metaspace": metaspace()}
BYTES = ["byte-level", "sentencepiece"]


def decode(tokenizer, token_ids, skip):
    return TextDecoder(tokenizer).decode(token_ids, skip)


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def feed(tokenizer, token_ids, **options):
    """(the texts after each token and at the end, the stop string); stops where a request would."""
    detokenizer = Detokenizer(TextDecoder(tokenizer), **options)
    texts = []
    for token_id in token_ids:
        stop = detokenizer.append(token_id)
        texts.append(detokenizer.text)
        if stop is not None:
            return texts, stop
    stop = detokenizer.finish()
    return [*texts, detokenizer.text], stop


def test_a_character_of_several_tokens_comes_with_its_last():
    token_ids = encode(tiny.tokenizer(), "é🤦")
    assert len(token_ids) == 6
    assert feed(tiny.tokenizer(), token_ids)[0] == ["", "é", "é", "é", "é", "é🤦", "é🤦"]


def test_the_end_takes_what_was_kept_back():
    token_ids = encode(tiny.tokenizer(), "a🤦")[:-1]
    texts, _ = feed(tiny.tokenizer(), token_ids)
    assert texts[-2:] == ["a", "a\ufffd"] and texts[-1] == decode(tiny.tokenizer(), token_ids, True)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30) | st.sampled_from(TEXTS), st.booleans())
def test_any_text(text, skip):
    """It grows in whole characters, and is decoded as the tokenizer does it, without a clean-up of spaces."""
    for name in BYTES:
        tokenizer = TOKENIZERS[name]
        token_ids = encode(tokenizer, text)
        texts, _ = feed(tokenizer, token_ids, skip_special_tokens=skip)
        theirs = tokenizer.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert texts[-1] == decode(tokenizer, token_ids, skip) == theirs
        assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:]))
        assert "\ufffd" in text or not any("\ufffd" in piece for piece in texts)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=80, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_a_stream_and_decoding_at_once_agree_on_any_tokens(name, data, skip):
    """Also on bytes that are no characters, and on ids that no token has."""
    tokenizer = TOKENIZERS[name]
    size = len(tokenizer)
    runs = st.tuples(st.integers(0, size + 2) | st.integers(0, min(256, size)), st.sampled_from((1, 1, 1, 2, 9, 20)))
    token_ids = [token for token, times in data.draw(st.lists(runs, max_size=20)) for _ in range(times)]
    texts, _ = feed(tokenizer, token_ids, skip_special_tokens=skip)
    assert texts[-1] == decode(tokenizer, token_ids, skip)
    assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:]))
    theirs = tokenizer.decode(token_ids, skip_special_tokens=skip)
    if name == "byte-level" or "\ufffd" not in theirs:
        assert texts[-1] == theirs


def test_tokens_that_decoding_drops_do_not_hide_the_first_one():
    """The first token loses its space; twenty ids of no token come before the next one."""
    tokenizer = TOKENIZERS["metaspace"]
    space, unknown = tokenizer.convert_tokens_to_ids("\u2581"), len(tokenizer) + 1
    token_ids = [space, *[unknown] * 20, space]
    assert feed(tokenizer, token_ids)[0][-1] == decode(tokenizer, token_ids, False) == " "


def test_right_bytes_before_wrong_ones_stay():
    """SentencePiece's own decoder replaces all four bytes; a stream has shown the first three."""
    token_ids = [*"\u3042".encode(), 0xFF, encode(sentencepiece(), "a")[0]]
    assert sentencepiece().decode(token_ids) == "\ufffd\ufffd\ufffd\ufffd a"
    texts, _ = feed(sentencepiece(), token_ids)
    assert texts == ["", "", "\u3042", "\u3042\ufffd", "\u3042\ufffd a", "\u3042\ufffd a"]
    assert decode(sentencepiece(), token_ids, True) == texts[-1]


def test_decoders_of_other_kinds_are_left_to_the_tokenizer():
    from tokenizers import decoders

    tokenizer = sentencepiece()
    tokenizer.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    token_ids = encode(tokenizer, "a b")
    assert feed(tokenizer, token_ids)[0][-1] == decode(tokenizer, token_ids, True) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_long_run_of_invalid_bytes_takes_time_in_proportion(name):
    """And of the replacement character itself, and of tokens without a text."""
    tokenizer = TOKENIZERS[name]
    runs = [encode(tokenizer, "\ufffd"), [tokenizer.added_tokens_encoder.get("<s>", 0)]]
    if name in BYTES:
        runs += [encode(tokenizer, "é")[-1:], encode(tokenizer, "😀")[-4:-1]]
    for run in runs:
        token_ids = (run * 20_000)[:20_000]
        began = time.process_time()
        texts, _ = feed(tokenizer, token_ids)
        assert time.process_time() - began < 5  # 0.1 to 2 s; if every token had the whole run decoded, over a minute
        assert texts[-1] == decode(tokenizer, token_ids, True)


# ------------------------------------------------------------------------------------------------ stop strings


def stopped(text, stop, **options):
    texts, found = feed(tiny.tokenizer(), encode(tiny.tokenizer(), text), stop=stop, **options)
    return texts[-1], found


@pytest.mark.parametrize(
    "text, stop, expected",
    [
        ("hello world", ["o w"], ("hell", "o w")),  # from the middle of a token to the middle of another
        ("hello world", ["x"], ("hello world", None)),
        ("hello world", ["world", "wor"], ("hello ", "wor")),  # complete first
        ("ab", ["b", "ab"], ("", "ab")),  # complete with one token: the earlier one
        ("ab", ["ab", "a"], ("", "ab")),  # at the same place too: the user's order
        ("xyxyxz", ["xyxz"], ("xy", "xyxz")),
        ("naïve 🤦 ok", ["🤦"], ("naïve ", "🤦")),
    ],
)
def test_stop_strings_end_the_text(text, stop, expected):
    assert stopped(text, stop) == expected
    left, found = stopped(text, stop, include_stop=True)
    assert (left, found) == (expected[0] + (expected[1] or ""), expected[1])


def test_a_stop_string_counts_only_after_min_tokens():
    text = "q1q2q3q4"  # a token a character
    assert stopped(text, ["q"], min_tokens=3) == ("q1q2", "q")
    assert stopped(text, ["q"], min_tokens=2) == ("q1", "q")
    assert stopped(text, ["2q"], min_tokens=4) == ("q1q", "2q")
    assert stopped(text, ["q"], min_tokens=8) == (text, None)


def test_a_stop_string_in_what_was_kept_back_is_found_at_the_end():
    token_ids = encode(tiny.tokenizer(), "a🤦")[:-1]
    texts, found = feed(tiny.tokenizer(), token_ids, stop=["\ufffd"])
    assert (texts[-1], found) == ("a", "\ufffd")


@settings(max_examples=100, deadline=None)
@given(
    st.text("ab é\n", max_size=25),
    st.lists(st.text("ab é\n", min_size=1, max_size=4), min_size=1, max_size=3),
    st.booleans(),
)
def test_stop_strings_against_searching_the_whole_text(text, stop, include):
    token_ids = encode(tiny.tokenizer(), text)
    expected = text, None
    for end in range(1, len(token_ids) + 1):
        sofar = decode(tiny.tokenizer(), token_ids[:end], True).rstrip("\ufffd")
        found = [(sofar.find(s), i) for i, s in enumerate(stop) if s in sofar]
        if found:
            at, i = min(found)
            expected = sofar[: at + len(stop[i]) if include else at], stop[i]
            break
    assert stopped(text, stop, include_stop=include) == expected


@settings(max_examples=80, deadline=None)
@given(st.text("abé ", max_size=25), st.lists(st.text("abé ", min_size=1, max_size=5), max_size=3), st.booleans())
def test_what_is_settled_is_never_taken_back(text, stop, include):
    detokenizer = Detokenizer(TextDecoder(tiny.tokenizer()), stop=stop, include_stop=include)
    settled, found = "", None
    for token_id in encode(tiny.tokenizer(), text):
        found = detokenizer.append(token_id)
        if found is not None:
            break
        assert detokenizer.text.startswith(settled)
        settled = detokenizer.text[: detokenizer.settled_length]
        longest = max(map(len, stop), default=1)
        assert len(detokenizer.text) - len(settled) < longest  # no more is kept back than must be
    if found is None:
        detokenizer.finish()
    assert detokenizer.text.startswith(settled)
