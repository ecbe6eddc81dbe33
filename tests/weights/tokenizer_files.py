"""Small GGUF files with a vocabulary, for tests of tokenizers."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.weights.gguf_files import finish

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
    numbers = {
        "block_count": 1, "context_length": 64, "embedding_length": 8, "feed_forward_length": 16,
        "attention.head_count": 2, "rope.dimension_count": 4, "vocab_size": len(tokens),
    }  # fmt: skip
    for key, value in numbers.items():
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
    finish(writer)
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
    words = "▁t er he ▁the in ▁a re ▁h ▁he ll llo ▁hello ▁▁ ▁w or ▁wor ld ▁world".split()
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
