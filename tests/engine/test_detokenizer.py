"""Text that grows token by token: whole characters only, equal to decoding everything at once, and stop strings."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.engine.detokenizer import Detokenizer, decode
from tests import tiny

TEXTS = [
    "hello world",
    "naïve café",
    "日本語とEnglish",
    "🤦🏽‍♂️👩‍👩‍👧‍👦 ok",
    " \n\t  spaces ",
    "a\u0301\u0302e",
    "<|user|>hi<|end|>there",
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


TOKENIZERS = {"byte-level": tiny.tokenizer(), "sentencepiece": sentencepiece()}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]


def encode(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False)


def feed(tokenizer, token_ids, **options):
    """(the texts after each token and at the end, the stop string); stops where a request would."""
    detokenizer = Detokenizer(tokenizer, **options)
    texts = []
    for token_id in token_ids:
        stop = detokenizer.append(token_id)
        texts.append(detokenizer.text)
        if stop is not None:
            return texts, stop
    stop = detokenizer.finish()
    return [*texts, detokenizer.text], stop


@pytest.mark.parametrize("text", TEXTS)
def test_grows_to_the_text_in_whole_characters(tokenizer, text):
    for skip in (True, False):
        token_ids = encode(tokenizer, text)
        texts, _ = feed(tokenizer, token_ids, skip_special_tokens=skip)
        assert texts[-1] == decode(tokenizer, token_ids, skip)
        for piece in texts:
            assert "\ufffd" not in piece and texts[-1].startswith(piece)
    assert texts[-1] == text


def test_a_character_of_several_tokens_comes_with_its_last():
    token_ids = encode(tiny.tokenizer(), "é🤦")
    assert len(token_ids) == 6
    assert feed(tiny.tokenizer(), token_ids)[0] == ["", "é", "é", "é", "é", "é🤦", "é🤦"]


def test_the_end_takes_what_was_kept_back():
    token_ids = encode(tiny.tokenizer(), "a🤦")[:-1]
    texts, _ = feed(tiny.tokenizer(), token_ids)
    assert texts[-2:] == ["a", "a\ufffd"] and texts[-1] == decode(tiny.tokenizer(), token_ids, True)


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=30))
def test_any_text(text):
    for tokenizer in TOKENIZERS.values():
        token_ids = encode(tokenizer, text)
        texts, _ = feed(tokenizer, token_ids)
        assert texts[-1] == decode(tokenizer, token_ids, True)
        assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:]))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, len(tiny.tokenizer()) - 1), max_size=40))
def test_any_tokens_of_a_byte_level_vocabulary(token_ids):
    """Random bytes are mostly no characters: what is invalid ends in U+FFFD, as in decoding all at once."""
    texts, _ = feed(tiny.tokenizer(), token_ids)
    assert texts[-1] == decode(tiny.tokenizer(), token_ids, True)
    assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:]))


# What never becomes a character, as often as wanted: bytes of characters, the n-th of them from the m-th on.
ENDLESS = {
    "a byte of a character": ("", "é", 1, 2),
    "characters without their last byte": ("", "😀", 0, 3),
    "a byte too many, then characters of two bytes": ("é", "é", 0, 2),
    "a byte too many, then characters of four bytes": ("é", "😀", 0, 4),
    "the replacement character": ("", "\ufffd", 0, 3),
}


@pytest.mark.parametrize("kind", ENDLESS)
def test_a_long_run_of_invalid_bytes_takes_time_in_proportion(tokenizer, kind):
    start, character, first, last = ENDLESS[kind]
    run = encode(tokenizer, character)[-len(character.encode()) :][first:last]
    token_ids = (encode(tokenizer, start)[-1:] + run * 20_000)[:20_000]
    began = time.process_time()
    texts, _ = feed(tokenizer, token_ids)
    assert (
        time.process_time() - began < 3
    )  # 0.2 to 0.6 s; when every token had everything that was kept back decoded, over a minute
    assert texts[-1] == decode(tokenizer, token_ids, True)


class Plain:
    """What `Detokenizer` is to say, by decoding all that is kept back with every token."""

    def __init__(self, tokenizer, skip_special_tokens):
        self.token_ids, self.prefix, self.read, self.text = [], 0, 0, ""
        self.decode = lambda start, end: decode(tokenizer, self.token_ids[start:end], skip_special_tokens)

    def append(self, token_id):
        self.token_ids.append(token_id)
        known, piece = self.decode(self.prefix, self.read), self.decode(self.prefix, len(self.token_ids))
        if len(piece) > len(known) and not piece.endswith("\ufffd"):
            self.prefix, self.read = self.read, len(self.token_ids)
            self.text += piece[len(known) :]


@settings(max_examples=60, deadline=None)
@given(st.data(), st.booleans())
def test_runs_of_bytes_of_any_kind(data, skip):
    """Long runs are not decoded whole: the text must be what it would be, after every token."""
    for tokenizer in TOKENIZERS.values():
        pieces = [encode(tokenizer, c)[-n:] for c, n in zip("é€😀\ufffda", (2, 3, 4, 3, 1))]
        special = tokenizer.convert_tokens_to_ids("<|user|>")  # without a text, if it is skipped
        pieces += [p[:n] for p in pieces[:3] for n in range(1, len(p))] + ([] if special is None else [[special]])
        runs = data.draw(
            st.lists(st.tuples(st.sampled_from(pieces), st.sampled_from((1, 1, 1, 2, 9, 13, 30))), max_size=7)
        )
        detokenizer, plain = Detokenizer(tokenizer, skip), Plain(tokenizer, skip)
        for token_id in [token_id for piece, times in runs for token_id in piece * times]:
            detokenizer.append(token_id)
            plain.append(token_id)
            assert detokenizer.text == plain.text


def test_a_character_with_special_tokens_between_its_bytes_after_a_long_run():
    first, second = encode(tiny.tokenizer(), "é")
    token_ids = [second] * 30 + [first] + encode(tiny.tokenizer(), "<|user|>") * 30 + [second]
    texts, _ = feed(tiny.tokenizer(), token_ids)
    assert texts[-2:] == ["\ufffd" * 30 + "é"] * 2 and set(texts[:-2]) == {""}


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("character", "é€😀a")
def test_a_character_after_many_that_are_the_replacement_character_itself(tokenizer, character, prefix):
    """Its three bytes are right ones, though the text that is kept back ends in U+FFFD all along."""
    text = "é" * prefix + "\ufffd" * 40 + character + "b"
    token_ids = encode(tokenizer, text)
    plain = Plain(tokenizer, True)
    texts, _ = feed(tokenizer, token_ids)
    for got, token_id in zip(texts, token_ids):
        plain.append(token_id)
        assert got == plain.text
    assert texts[-1] == text


def test_no_clean_up_of_spaces():
    text = "a , b . do n't"
    assert feed(tiny.tokenizer(), encode(tiny.tokenizer(), text))[0][-1] == text


# ------------------------------------------------------------------------------------------------ stop strings


def stopped(text, stop, **options):
    texts, found = feed(tiny.tokenizer(), encode(tiny.tokenizer(), text), stop=stop, **options)
    return texts[-1], found


@pytest.mark.parametrize(
    "text, stop, expected",
    [
        ("hello world", ["wo"], ("hello ", "wo")),
        (
            "hello world",
            ["o w"],
            ("hell", "o w"),
        ),  # over several tokens, from the middle of one to the middle of another
        ("hello world", ["hello"], ("", "hello")),
        ("hello world", ["d"], ("hello worl", "d")),
        ("hello world", ["x"], ("hello world", None)),
        ("hello world", ["rld", "or"], ("hello w", "or")),
        ("hello world", ["world", "wor"], ("hello ", "wor")),  # complete first
        ("ab", ["b", "ab"], ("", "ab")),  # complete with one token: the earlier one
        ("ab", ["a", "ab"], ("", "a")),  # at the same place too: the user's order
        ("ab", ["ab", "a"], ("", "ab")),
        ("xyxyxz", ["xyxz"], ("xy", "xyxz")),
        ("naïve 🤦 ok", ["🤦"], ("naïve ", "🤦")),
        ("one\n\ntwo", ["\n\n"], ("one", "\n\n")),
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


@settings(max_examples=200, deadline=None)
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


@settings(max_examples=150, deadline=None)
@given(st.text("abé ", max_size=25), st.lists(st.text("abé ", min_size=1, max_size=5), max_size=3), st.booleans())
def test_what_is_settled_is_never_taken_back(text, stop, include):
    detokenizer = Detokenizer(tiny.tokenizer(), stop=stop, include_stop=include)
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
