"""Masks of JSON strings that are nearly as long as they may be, without a walk over the vocabulary.

In a string, llguidance walks over the tokens that may be too long. Near `maxLength` these are most of the vocabulary,
and a mask takes a millisecond. But which *plain* tokens fit, those that neither end the string nor begin an escape,
depends on the number of characters that are left alone, if

- all strings of the schema are names, constants, or any text within bounds of length (`literals` says so), and
- the string so far is the beginning of no name and of no constant: then only text of any characters can follow.

So such a mask has two parts. A table has the mask of the plain tokens that are short enough. A second matcher, whose
vocabulary is the few thousand other tokens, gives the mask of these: llguidance walks over few of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

NEAR = 16
"""These masks are used if at most this many characters are left. With more left, llguidance walks over few tokens."""
PROBE = 32
"""Characters that are looked for. If there are that many, the next look is when some may have been written."""
_PLAIN, _ASCII = r'[^"\\\x00-\x1F\x7F]', r"[ !#-\[\]-~]"
_PART = 480
"""Words of a mask that are written at once. NumPy gives the interpreter away from 500 on, and others might keep it."""


class StringMasks:
    """What a vocabulary's masks of strings are made of. See `string_masks`.

    Attributes:
        lengths: by token: the characters of a plain token; 0: it is none, has more than `NEAR`, or has a part of one.
        others: llguidance's vocabulary without the plain tokens, but with all single bytes.
        byte_ids: by byte: its token in `others`. They are plain tokens of the model.
        probe: tokens of `others` for `PROBE` characters.
    """

    def __init__(
        self, vocabulary: Any, others: Any, byte_ids: Sequence[int], fitting: np.ndarray, whole: np.ndarray
    ) -> None:
        """fitting: [NEAR, vocab_size] bool, the plain tokens of at most 1, 2, ... characters; whole: [vocab_size] bool,
        those of whole characters.
        """
        self.lengths = np.where(fitting[-1] & whole, 1 + fitting.argmax(0), 0).astype(np.uint8).tobytes()
        self.others, self.byte_ids, self.probe = others, byte_ids, [byte_ids[ord("a")]] * PROBE
        self._decode: Callable[[list[int]], bytes] = vocabulary.decode_bytes
        not_bytes = np.ones(fitting.shape[1], bool)
        not_bytes[byte_ids] = False
        words = slice(byte_ids[0] // 32, byte_ids[-1] // 32 + 1)
        self._not_bytes = [(part, _bits(not_bytes)[part]) for part in _parts(words.start, words.stop)]
        parts = _parts(0, -(-len(not_bytes) // 32))
        self._fitting = [[(part, _bits(row)[part]) for part in parts] for row in fitting]

    def decode(self, tokens: list[int]) -> bytes:
        return self._decode(tokens)

    def complete(self, mask: np.ndarray, left: int) -> None:
        """Put the plain tokens that fit into a mask of the others. mask: [num_words] int32; left: characters."""
        for part, bits in self._not_bytes:
            mask[part] &= bits
        for part, bits in self._fitting[left - 1]:
            mask[part] |= bits


def _parts(start: int, stop: int) -> list[slice]:
    return [slice(i, min(i + _PART, stop)) for i in range(start, stop, _PART)]


def _bits(tokens: np.ndarray) -> np.ndarray:
    """[vocab_size] bool -> [num_words] int32"""
    padded = np.zeros(-(-len(tokens) // 32) * 32, bool)
    padded[: len(tokens)] = tokens
    return np.packbits(padded, bitorder="little").view(np.int32)


def _allowed(mask: bytes, vocab_size: int) -> np.ndarray:
    return np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")[:vocab_size].astype(bool)


def string_masks(vocabulary: Any, end_token_ids: Sequence[int]) -> StringMasks | None:
    """Masks of strings for a vocabulary of llguidance; None: it has too few tokens.

    llguidance itself says which tokens are plain, and how long they are.
    """
    from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

    size = vocabulary.vocab_size

    def allowed(regex: str) -> np.ndarray:
        mask = LLMatcher(vocabulary, LLMatcher.grammar_from_regex(regex), log_level=0).compute_bitmask()
        found = _allowed(mask, size)
        found[list(end_token_ids)] = False
        return found

    plain = allowed(f"{_PLAIN}+")
    fitting = np.stack([allowed(f"{_PLAIN}{{1,{n}}}") for n in range(1, NEAR + 1)])
    free = np.flatnonzero(plain)
    if len(free) < 256:
        return None
    whole = allowed(f"{_ASCII}+")
    for token in np.flatnonzero(fitting[-1] & ~whole).tolist():
        whole[token] = _is_whole(vocabulary.decode_bytes([token]))
    # Special tokens are in no string. llguidance decodes them to texts, which no regex allows as tokens. Nor does one
    # allow tokens that begin within a character, and these masks are not used there.
    text = allowed(r"(?s:.+)")
    pieces = [b""] * size
    for token in np.flatnonzero(text & ~plain).tolist():
        pieces[token] = vocabulary.decode_bytes([token])
    byte_ids = free[:256].tolist()
    for byte, token in enumerate(byte_ids):
        pieces[token] = bytes([byte])
    others = LLTokenizer(
        TokenizerWrapper(_Pieces(pieces, byte_ids, end_token_ids)), n_vocab=size, eos_token=list(end_token_ids),
        slices=[],
    )  # fmt: skip
    return StringMasks(vocabulary, others, byte_ids, fitting, whole)


def _is_whole(piece: bytes) -> bool:
    """Whether it ends with a whole character; llguidance allows its beginning as the text of a string."""
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


class _Pieces:
    """A vocabulary as llguidance wants it. Its texts are tokens of one byte."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes], byte_ids: Sequence[int], end_token_ids: Sequence[int]) -> None:
        self.tokens, self._byte_ids = tokens, byte_ids
        self.eos_token_id, self.special_token_ids = end_token_ids[0], list(end_token_ids)

    def __call__(self, text: bytes) -> list[int]:
        return [self._byte_ids[byte] for byte in text]
