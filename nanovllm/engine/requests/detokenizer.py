"""Token ids to text: all at once, or token by token, never in the middle of a character.

Both give the same text for any tokens. Tokens stand for bytes. Bytes that are no UTF-8 become U+FFFD, one for each
maximal part of a character, as in `bytes.decode(errors="replace")`. A SentencePiece tokenizer with byte tokens would
replace every byte of a run as soon as one of them is wrong. A stream has shown the right bytes by then, so the text
here keeps them.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

_REPLACEMENT = "\ufffd"  # what a tokenizer decodes an incomplete UTF-8 sequence to
_MOST_HELD = 16
"""Most tokens that are kept back for an incomplete character, where the tokens' bytes are not known. A character has at
most four bytes; tokens without a text may lie between them."""
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_ToBytes = Callable[[str], bytes]


class TextDecoder:
    """Decodes the tokens of a tokenizer.

    Args:
        tokenizer: a transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
        self._bytes: dict[int, bytes] = {}
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._to_bytes, self._num_stripped = _byte_decoder(getattr(backend, "decoder", None))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """The text of token ids, exactly as they stand: no clean-up of spaces before punctuation."""
        if self._to_bytes is not None:
            bytes_of = self.bytes_of
            text = b"".join([bytes_of(token, skip_special_tokens) for token in token_ids]).decode(errors="replace")
            num_spaces = len(text) - len(text.lstrip(" "))
            return text[min(num_spaces, self._num_stripped) :]
        text = self.decode_whole(token_ids, skip_special_tokens)
        if _REPLACEMENT not in text:
            return text
        # Bytes that are no character: a stream may replace others of them than the tokenizer does.
        pieces = self.pieces(skip_special_tokens)
        return "".join([pieces.push(token) for token in token_ids]) + pieces.finish()

    def pieces(self, skip_special_tokens: bool) -> _BytePieces | _DifferencePieces:
        """A new text, to be decoded token by token, each in constant time.

        `push` takes a token and gives the characters that are complete now; `finish` gives what was kept back.
        """
        if self._to_bytes is not None:
            return _BytePieces(self, self._num_stripped, skip_special_tokens)
        return _DifferencePieces(self, skip_special_tokens)

    def bytes_of(self, token_id: int, skip_special_tokens: bool) -> bytes:
        """What a token stands for; nothing for one that the tokenizer does not know, as in decoding all at once."""
        if skip_special_tokens and token_id in self._special:
            return b""
        found = self._bytes.get(token_id)
        if found is None:
            assert self._to_bytes is not None
            token = self._tokenizer.backend_tokenizer.id_to_token(token_id)
            found = self._bytes[token_id] = b"" if token is None else self._to_bytes(token)
        return found

    def is_passed_over(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether decoding all at once drops the token before it looks at any text."""
        if skip_special_tokens and token_id in self._special:
            return True
        return self._tokenizer.convert_ids_to_tokens(token_id) is None

    def token_text(self, token_id: int) -> str:
        """The text of a token by itself, for reports of single tokens."""
        return self.decode_whole([token_id], skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, which may be a part of a character."""
        if self._to_bytes is None or token_id in self._special:
            return self.token_text(token_id).encode()
        return self.bytes_of(token_id, skip_special_tokens=False)

    def decode_whole(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """What the tokenizer itself says."""
        return self._tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )


class Detokenizer:
    """Decodes one completion as it grows, and finds its stop strings. `text` is what decoding all tokens at once gives.

    Args:
        stop: strings that end the text.
        min_tokens: tokens before a stop string counts.
        include_stop: keep the stop string at the text's end.
    """

    def __init__(
        self,
        decoder: TextDecoder,
        skip_special_tokens: bool = True,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        self._pieces = decoder.pieces(skip_special_tokens)
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, stop), default=1)
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._num_tokens = 0
        self.text = ""

    def append(self, token_id: int) -> str | None:
        """Take one more token; returns the stop string that it completed, with `text` cut there, or None."""
        self._num_tokens += 1
        return self._extend(self._pieces.push(token_id))

    def finish(self) -> str | None:
        """No more tokens will come: take over what was kept back. Returns a stop string as `append` does."""
        return self._extend(self._pieces.finish())

    @property
    def settled_length(self) -> int:
        """Characters of `text` that no stop string can still take back."""
        if self._include_stop or not self._stop:
            return len(self.text)
        return max(0, len(self.text) - self._longest_stop + 1)

    def _extend(self, piece: str) -> str | None:
        if not piece:
            return None
        num_searched = len(self.text)
        self.text += piece
        if self._num_tokens <= self._min_tokens:
            return None
        # The earliest occurrence that the new piece completed; among equals the first in the user's order.
        found, found_at = None, len(self.text)
        for stop in self._stop:
            at = self.text.find(stop, max(0, num_searched - len(stop) + 1))
            if 0 <= at < found_at:
                found, found_at = stop, at
        if found is not None:
            self.text = self.text[: found_at + len(found) if self._include_stop else found_at]
        return found


class _BytePieces:
    """The pieces of text of a tokenizer with known bytes for each token.

    Args:
        num_stripped: up to this many spaces at the text's beginning are left out.
    """

    def __init__(self, decoder: TextDecoder, num_stripped: int, skip_special_tokens: bool) -> None:
        self._bytes_of = decoder.bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_stripped = num_stripped
        self._skip_special_tokens = skip_special_tokens

    def push(self, token_id: int) -> str:
        piece = self._utf8.decode(self._bytes_of(token_id, self._skip_special_tokens))
        return self._strip(piece) if self._num_stripped else piece

    def begins_after(self, token_id: int) -> int:
        """How many characters stand between those that were given out and the one in which a next token begins.

        It is 1 if the token shows that the bytes that are kept back are no character, else 0. Two bytes of a character
        of three and its last byte are 1 character; these two bytes and an "a" are 2, U+FFFD and "a".
        """
        kept = self._utf8.getstate()[0]
        first_byte = self._bytes_of(token_id, self._skip_special_tokens)[:1]
        return max(0, len((kept + first_byte).decode(errors="replace")) - 1)

    def finish(self) -> str:
        return self._strip(self._utf8.decode(b"", final=True))

    def _strip(self, piece: str) -> str:
        while piece and self._num_stripped:
            if piece[0] != " ":
                self._num_stripped = 0
                break
            piece = piece[1:]
            self._num_stripped -= 1
        return piece


class _DifferencePieces:
    """The pieces of any other tokenizer. A token's text can depend on its neighbours, such as a space, so a piece is
    the difference between decoding a short run of tokens with and without the new ones, as in vLLM."""

    def __init__(self, decoder: TextDecoder, skip_special_tokens: bool) -> None:
        self._decode = lambda token_ids: decoder.decode_whole(token_ids, skip_special_tokens)
        self._is_passed_over = lambda token_id: decoder.is_passed_over(token_id, skip_special_tokens)
        self._token_ids: list[int] = []
        self._num_read = 0
        """Leading tokens of `_token_ids` that stand for `_known`, which was given out; the others are kept back."""
        self._known = ""

    def push(self, token_id: int) -> str:
        if self._is_passed_over(token_id):
            return ""
        self._token_ids.append(token_id)
        text = self._decode(self._token_ids)
        holds_most = len(self._token_ids) - self._num_read >= _MOST_HELD
        if len(text) <= len(self._known):
            if holds_most:  # tokens without a text, but the first one of all may take a space from the next
                del self._token_ids[max(self._num_read, 1) :]
            return ""
        if text.endswith(_REPLACEMENT) and not holds_most:
            return ""  # it may be the beginning of a character
        piece = text[len(self._known) :]
        self._token_ids = self._token_ids[self._num_read :]
        self._num_read = len(self._token_ids)
        self._known = self._decode(self._token_ids)
        return piece

    def begins_after(self, token_id: int) -> int:
        """0: the bytes of tokens are not known here, so those that are kept back count as the beginning of one."""
        return 0

    def finish(self) -> str:
        return self._decode(self._token_ids)[len(self._known) :]


def _byte_decoder(decoder: Any) -> tuple[_ToBytes | None, int]:
    """(what gives a token's bytes from its name, spaces to leave out at the text's beginning).

    decoder: that of a `tokenizers.Tokenizer`, or None. For an unknown kind the result is (None, 0).
    """
    if decoder is None:
        return None, 0
    state = json.loads(decoder.__getstate__())
    if state["type"] == "ByteLevel":
        return partial(_byte_level, _byte_level_alphabet()), 0
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    if not re.fullmatch("(Replace )*ByteFallback Fuse( Strip)?", " ".join(step["type"] for step in steps)):
        return None, 0
    replaced = [(step["pattern"].get("String"), step["content"]) for step in steps if step["type"] == "Replace"]
    strips = [step for step in steps if step["type"] == "Strip"]
    has_patterns = any(old is None for old, _ in replaced)  # regular expressions in place of strings
    if has_patterns or any(step["content"] != " " or step["stop"] for step in strips):
        return None, 0
    return partial(_byte_fallback, replaced), sum(step["start"] for step in strips)


def _byte_level(byte_of: dict[str, int], token: str) -> bytes:
    try:
        return bytes([byte_of[character] for character in token])
    except KeyError:  # an added token, which has its text as it is
        return token.encode()


def _byte_fallback(replaced: list[tuple[str, str]], token: str) -> bytes:
    for old, new in replaced:
        token = token.replace(old, new)
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte else token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's: a printable byte is the character of its number, the others are characters from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
