"""Tokenizers built from GGUF metadata, against the rules of the published tokenizer.json files.

tokenizer.json files themselves need a network; what they say of normalisation, splitting and framing is written out
here as expected pieces, and transformers' own GGUF loader is the second opinion.
"""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from nanovllm.weights.gguf_file import GGUFError
from nanovllm.weights.tokenizer import eos_token_ids, load_tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "I'm sure they'll say it's DON'T and we'VE",
    "   leading, trailing and  inner   spaces   ",
    "tabs\tand\nnew\n\n\nlines\r\nand \u00a0 odd \u3000 spaces\u200b\ufeff",
    "def f(x: int) -> list[int]:\n    return [i ** 2 for i in range(x)]  # squares\n",
    "2024-01-05 is 1,000,000.5 or 0x1F; call 12345678 at 7pm",
    "日本語のテキストと漢字、한국어 텍스트, Привет мир, مرحبا بالعالم, हिन्दी",
    "naïve café résumé Ångström e\u0301 combining",
    "👍🏽 👩‍👩‍👧‍👦 🇫🇷 😀😀 ❤️",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><repo_name>x<jupyter_code>",
    "https://example.org/a_b-c?d=e&f=%20#g  ~~~ === !!! ...",
    "\x00\x01\x7f \ud7ff \U0010ffff",
]


def byte_alphabet() -> list[str]:
    """GPT-2's spelling of each byte as a printable character, written out once more."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def write(path: Path, model: str | None, tokens: list[str], types: list[int], **keys: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (("block_count", 1), ("context_length", 64), ("embedding_length", 8), ("feed_forward_length", 16),
                       ("attention.head_count", 2), ("rope.dimension_count", 4), ("vocab_size",
                       len(tokens))):  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    if model:
        writer.add_tokenizer_model(model)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
    for key, value in keys.items():
        key = "tokenizer.chat_template" if key == "chat_template" else f"tokenizer.ggml.{key}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level(
    path: Path,
    words: tuple[str, ...] = ("y z",),
    special: tuple[str, ...] = ("<s>", "</s>"),
    user: tuple[str, ...] = (),
    **keys: Any,
) -> Path:
    """256 bytes, what each of the merges in `words` leads to, then special and user-defined tokens. The first two
    specials are bos and eos; `keys` overrides any key."""
    plain = byte_alphabet() + [word.replace(" ", "") for word in words]
    types = [1] * len(plain) + [3] * len(special) + [4] * len(user)
    defaults = {"bos_token_id": len(plain), "eos_token_id": len(plain) + 1, "merges": list(words)}
    return write(path / "byte.gguf", "gpt2", [*plain, *special, *user], types, **(defaults | keys))


def sentencepiece(path: Path, **keys: Any) -> Path:
    words = [
        "▁t",
        "er",
        "he",
        "▁the",
        "in",
        "▁a",
        "re",
        "▁h",
        "▁he",
        "ll",
        "llo",
        "▁hello",
        "▁▁",
        "▁w",
        "or",
        "▁wor",
        "ld",
        "▁world",
    ]
    chars = sorted(set("".join(words)) | set("abcdefghijklmnopqrstuvwxyz.,!é"))
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *chars, "<|u|>"]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(words) + len(chars)) + [4]
    scores = [0.0] * 259 + [-float(i) for i in range(len(words))] + [-1000.0 - i for i in range(len(chars))] + [0.0]
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return write(path / "spm.gguf", "llama", tokens, types, **(ids | {"scores": scores} | keys))


def pieces(tokenizer: Any, text: str) -> list[str]:
    """The text's pre-tokens, decoded from byte spelling."""
    backend = tokenizer.backend_tokenizer
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    alphabet = {char: byte for byte, char in enumerate(byte_alphabet())}
    split = backend.pre_tokenizer.pre_tokenize_str(text)
    return [bytes(alphabet[char] for char in piece).decode() for piece, _ in split]


# ---- the real model --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Any:
    return load_tokenizer(smollm2_path)


def test_smollm2_chat_prompt(smollm2: Any) -> None:
    """The ids that the model's own tokenizer.json gives for its template, known from published logs."""
    chat = [{"role": "user", "content": "hello"}]
    ids = smollm2.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
    system = [
        1,
        9690,
        198,
        2683,
        359,
        253,
        5356,
        5646,
        11173,
        3365,
        3511,
        308,
        34519,
        28,
        7018,
        411,
        407,
        19712,
        8182,
        2,
        198,
    ]
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


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_decodes_what_it_encoded(smollm2: Any, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text)) == text


def test_smollm2_splits_every_digit(smollm2: Any) -> None:
    assert smollm2.convert_ids_to_tokens(smollm2.encode("x12345 67")) == ["x", "1", "2", "3", "4", "5", "Ġ", "6", "7"]
    assert pieces(smollm2, "ab12 3½ a1") == ["ab", "1", "2", " ", "3", "½", " a", "1"]


def test_smollm2_against_transformers(smollm2: Any, smollm2_path: Path) -> None:
    """Equal but for one thing: transformers ignores `tokenizer.ggml.pre`, so it does not cut before the numerals that
    are
    not ASCII digits (for these the vocabulary happens to hold no merge that its omission would let through)."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name, local_files_only=True)
    assert smollm2.chat_template == theirs.chat_template
    assert smollm2.get_vocab() == theirs.get_vocab()
    for text in TEXTS:
        assert smollm2.encode(text) == theirs.encode(text), text
    for numeral in "½", "²", "Ⅷ", "٣":
        ours, other = (x.convert_ids_to_tokens(x.encode(f"a {numeral}")) for x in (smollm2, theirs))
        assert ours[:2] == ["a", "Ġ"], "the space stands alone, since the numeral is a piece of its own"
        assert ours == other or other[1] != "Ġ"


# ---- byte-level BPE --------------------------------------------------------------------------------------------------

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
    "smollm": {
        "I'LL go": ["I", "'", "LL", " go"],
        "abc12 6": ["abc", "1", "2", " ", "6"],
        "e\u0301": ["e", "\u0301"],
    },
}
ALIASES = {"default": "gpt-2", "llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}


@pytest.mark.parametrize("pre", [*SPLITS, *ALIASES])
def test_pre_tokenizers(tmp_path: Path, pre: str) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path, pre=pre))
    for text, expected in SPLITS[ALIASES.get(pre, pre)].items():
        assert pieces(tokenizer, text) == expected, text


def test_no_pre_tokenizer_named_means_gpt2(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path))
    for text, expected in SPLITS["gpt-2"].items():
        assert pieces(tokenizer, text) == expected


def test_qwen2_splits_like_transformers_own_qwen2(tmp_path: Path) -> None:
    from transformers import Qwen2Tokenizer

    ours = load_tokenizer(byte_level(tmp_path, pre="qwen2"))
    vocab = {char: index for index, char in enumerate(byte_alphabet())}
    theirs = Qwen2Tokenizer(vocab=vocab, merges=[])
    for text in TEXTS:
        assert pieces(ours, text) == pieces(theirs, text), text


def test_merges_and_whole_words(tmp_path: Path) -> None:
    """Llama 3 takes a word that the vocabulary holds; the others only what the merges lead to."""
    merges = ("a b", "c d", "b c", "ab cd", "bc d")
    for pre, expected in (("llama-bpe", ["bcd"]), ("qwen2", ["b", "cd"])):
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
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token) == (
        "<s>",
        "</s>",
        "</s>",
        None,
    )
    assert len(tokenizer) == 262


def test_chat_template(tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    tokenizer = load_tokenizer(byte_level(tmp_path, chat_template=template))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "[user]x"


def test_decoding_leaves_spaces_alone(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(byte_level(tmp_path))
    for text in ("a , b . c ! do n't", " 's"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


# ---- SentencePiece ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello world", ["▁hello", "▁world"]),
        ("  hello", ["▁▁", "▁hello"]),
        ("the日", ["▁the", "<0xE6>", "<0x97>", "<0xA5>"]),
        ("é\nx", ["▁", "é", "<0x0A>", "x"]),
        ("", []),
        ("the</s>he", ["▁the", "</s>", "▁he"]),
        ("<|u|>hello", ["<|u|>", "▁hello"]),
    ],
)
def test_sentencepiece(tmp_path: Path, text: str, expected: list[str]) -> None:
    tokenizer = load_tokenizer(sentencepiece(tmp_path))
    ids = tokenizer.encode(text)
    assert tokenizer.convert_ids_to_tokens(ids) == ["<s>", *expected]
    if "<" not in text:
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_sentencepiece_against_transformers(tmp_path: Path) -> None:
    """Equal for text that begins with a word. For text that begins with spaces, or follows a special token,
    transformers
    versions differ among themselves; there we follow llama.cpp and Llama 2's published tokenizer.json, as above."""
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


# ---- Hugging Face directories, and what is refused -------------------------------------------------------------------


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


@pytest.mark.parametrize("template", ["{% for m in messages %}", "{{ messages", "{% nonsense %}"])
def test_a_chat_template_that_is_no_template_is_an_error_when_it_is_loaded(tmp_path: Path, template: str) -> None:
    path = byte_level(tmp_path, chat_template=template)
    with pytest.raises(ValueError, match=r"'tokenizer.chat_template' is no Jinja template: .* in line 1") as error:
        load_tokenizer(path)
    assert str(path) in str(error.value)
    tokenizer = load_tokenizer(byte_level(tmp_path))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "hf")
    with pytest.raises(ValueError, match=r"hf: the tokenizer's chat_template is no Jinja template"):
        load_tokenizer(tmp_path / "hf")


def test_a_chat_template_may_refuse_a_conversation(tmp_path: Path) -> None:
    template = "{{ raise_exception('a system message is needed') }}"
    assert load_tokenizer(byte_level(tmp_path, chat_template=template)).chat_template == template


def test_missing_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no tokenizer at .*nowhere"):
        load_tokenizer(tmp_path / "nowhere")


def test_gguf_without_a_tokenizer(tmp_path: Path) -> None:
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


# ---- end tokens ------------------------------------------------------------------------------------------------------


class Ends:
    def __init__(self, eos_token_id: Any) -> None:
        self.eos_token_id = eos_token_id


def test_eos_token_ids(tmp_path: Path) -> None:
    assert eos_token_ids(tmp_path) == ()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    assert eos_token_ids(tmp_path) == (3,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 3]}))
    assert eos_token_ids(tmp_path, Ends(9)) == (7, 3, 9)
    assert eos_token_ids(str(tmp_path), Ends(None)) == (7, 3)
    assert eos_token_ids({"eos_token_id": [4, 5]}, Ends(5)) == (4, 5)
    assert eos_token_ids({}) == eos_token_ids(Ends(None)) == ()
    assert eos_token_ids(Ends(0), Ends(0)) == (0,)  # zero is a token like any other
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
        eos_token_ids(tmp_path)


@pytest.mark.parametrize(
    "content, said",
    [("[]", "generation_config.json holds no JSON object"), ("null", "holds no JSON object")]
    + [
        (json.dumps({"eos_token_id": junk}), "eos_token_id holds")
        for junk in ("x", {}, {"a": 1}, [[1]], True, 2.5, [3, "4"])
    ],
)
def test_what_is_no_end_token_is_named(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ValueError, match=said):
        eos_token_ids(tmp_path)


def test_eos_token_ids_of_a_gguf_file(tmp_path: Path) -> None:
    assert eos_token_ids(byte_level(tmp_path, eot_token_id=3, eom_token_id=4), Ends(8)) == (258, 3, 4, 8)
