"""Which sequences are near the end of a JSON string, where `string_masks` has their masks."""

from __future__ import annotations

import json
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np

from nanovllm.structured.grammar import parser_limits
from nanovllm.structured.string_masks import NEAR, PROBE, StringMasks, string_masks

logger = logging.getLogger(__name__)

_BEHIND = 512
"""Tokens that the second matcher may be behind: it moves on when its mask is needed, or when there are more."""
_SOON = 8
"""Tokens outside of strings, from which on it moves on while there is time: all sequences could be behind at once."""
_QUOTE, _BACKSLASH = b'"\\'
_IGNORED = {
    "type", "title", "description", "default", "examples", "$comment", "$schema", "readOnly", "writeOnly",
    "deprecated", "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties",
    "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
}  # fmt: skip
_OF_NAMES = {"properties", "$defs", "definitions"}
_LISTS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_SCHEMAS = {"items", "additionalProperties", "additionalItems"}
_VALUES = {"const", "enum", "required"}


def literals(schema: Any) -> list[bytes] | None:
    """All names and constants of a JSON schema, sorted; None: a string of it may be neither these nor any text.

    It is None for `pattern`, `format`, `patternProperties` and each keyword that is not known here.
    """
    found: set[str] = set()
    try:
        known = _collect(schema, found)
    except RecursionError:
        return None
    return sorted(text.encode(errors="surrogatepass") for text in found) if known else None


def _collect(schema: Any, found: set[str]) -> bool:
    if isinstance(schema, bool):
        return True
    if not isinstance(schema, dict):
        return False
    for key, value in schema.items():
        if key in _VALUES:
            _collect_texts(value, found)
        elif key in _OF_NAMES and isinstance(value, dict):
            found.update(value)
            if not all(_collect(part, found) for part in value.values()):
                return False
        elif key in _LISTS or (key == "items" and isinstance(value, list)):
            if not (isinstance(value, list) and all(_collect(part, found) for part in value)):
                return False
        elif key in _SCHEMAS:
            if not _collect(value, found):
                return False
        elif key == "$ref":
            parts = str(value).split("/")  # what it refers to has to be among what is looked at
            if value != "#" and not (len(parts) == 3 and parts[0] == "#" and parts[1] in ("$defs", "definitions")):
                return False
        elif key not in _IGNORED:
            return False
    return True


def _collect_texts(value: Any, found: set[str]) -> None:
    if isinstance(value, str):
        found.add(value)
    elif isinstance(value, dict):
        found.update(value)
        for part in value.values():
            _collect_texts(part, found)
    elif isinstance(value, list):
        for part in value:
            _collect_texts(part, found)


class StringEnd:
    """Follows the JSON text of a sequence: whether its next mask is one of `StringMasks`.

    Args:
        shared: of the vocabulary.
        matcher: the sequence's; it has taken the tokens before `take` is called. Its text is JSON from the beginning.
            It is asked for masks alone: work of any other kind could take it beyond llguidance's limits.
        others: a matcher of the same grammar with the vocabulary `shared.others`, at its beginning.
        literals: from `literals`.

    Attributes:
        left: the characters that the string may still have, 1 to `NEAR`; 0: the mask is none of these.
    """

    def __init__(self, shared: StringMasks, matcher: Any, others: Any, literals: Sequence[bytes]) -> None:
        self._shared, self._matcher, self._others, self._literals = shared, matcher, others, literals
        self.left = 0
        self._behind: list[int] = []
        """Tokens that `others` has not taken yet."""
        self._inside = False
        """In a string."""
        self._escape = b""
        """What there is of an escape."""
        self._content = b""
        """The string so far, or a beginning of it that is the beginning of no name and of no constant."""
        self._free = False
        """It becomes no name and no constant."""
        self._odd = False
        """It has an escape of half a surrogate pair, which the other half may have to follow."""
        self._at_least, self._exact = 0, False
        """Characters that are left, at least or exactly."""

    @property
    def filler(self) -> Any:
        """The matcher whose mask is needed."""
        return self._others if self.left else self._matcher

    def take(self, tokens: Sequence[int]) -> None:
        """These tokens follow."""
        self.left = 0
        if self._others is None:
            return
        lengths = self._shared.lengths
        for token in tokens:
            length = lengths[token]
            if not length or self._escape or (self._inside and not self._free):
                self._read(self._shared.decode([token]))
            elif self._inside:
                self._at_least = max(0, self._at_least - length)
        self._behind += tokens
        if self._inside and self._free and not self._odd and not self._escape and self._at_least <= NEAR:
            if not self._exact:
                self._look()
            if self._exact and 1 <= self._at_least <= NEAR:
                self.left = self._at_least
        if self.left or len(self._behind) > _BEHIND:
            self._catch_up()

    def prepare(self) -> None:
        """Do now what `take` would do soon; called while there is time."""
        if self._others is not None and (self._inside or len(self._behind) >= _SOON):
            self._catch_up()

    def _read(self, piece: bytes) -> None:
        """Bytes of a token that is not plain, or of a string that may become a name or a constant."""
        self._at_least, self._exact = 0, False
        for byte in piece:
            if not self._inside:
                if byte == _QUOTE:
                    self._inside, self._free, self._odd, self._content = True, False, False, b""
            elif self._escape or byte == _BACKSLASH:
                self._escape += bytes([byte])
                if len(self._escape) == (6 if self._escape[1:2] == b"u" else 2):
                    character = json.loads(b'"%s"' % self._escape)
                    self._odd |= "\ud800" <= character <= "\udfff"
                    self._content += character.encode(errors="surrogatepass")
                    self._escape = b""
            elif byte == _QUOTE:
                self._inside = False
            elif not self._free:
                self._content += bytes([byte])
        if self._inside and not self._free and self._content:
            index = bisect_left(self._literals, self._content)
            self._free = not (index < len(self._literals) and self._literals[index].startswith(self._content))

    def _look(self) -> None:
        """Find out how many characters are left."""
        self._catch_up()
        if self._others is not None:
            self._at_least = self._others.validate_tokens(self._shared.probe)
            self._exact = self._at_least < PROBE

    def _catch_up(self) -> None:
        if not self._behind:
            return
        byte_ids = self._shared.byte_ids
        tokens = [byte_ids[byte] for byte in self._shared.decode(self._behind)]
        self._behind.clear()
        if not self._others.consume_tokens(tokens):
            self._give_up()

    def _give_up(self) -> None:
        """All masks are the matcher's from now on."""
        self._others, self.left = None, 0

    def complete(self, mask: np.ndarray) -> None:
        """Make the mask of `filler` the whole one."""
        if not self.left:
            return
        if self._others.is_error():
            self._give_up()
            mask[:] = np.frombuffer(self._matcher.compute_bitmask(), np.int32, len(mask))
        else:
            self._shared.complete(mask, self.left)


class StringEnds:
    """Makes the `StringEnd` of each sequence of a grammar. See `string_ends`."""

    def __init__(self, shared: StringMasks, text: str, names: Sequence[bytes]) -> None:
        self._shared, self._text, self._literals = shared, text, names

    def compile(self) -> Any:
        """A matcher at the beginning, of which `make` takes copies."""
        from llguidance import LLMatcher

        return LLMatcher(self._shared.others, self._text, log_level=0, limits=parser_limits())

    def make(self, matcher: Any, others: Any) -> StringEnd:
        return StringEnd(self._shared, matcher, others.deep_copy(), self._literals)


def string_ends(shared: Callable[[], StringMasks | None], text: str) -> StringEnds | None:
    """For a grammar of llguidance as `grammar_text` makes it; None: its masks are none of `StringMasks`, or none of its
    strings has a bound. shared: of the vocabulary; called if they are needed.
    """
    if '"maxLength"' not in text:
        return None
    grammars = json.loads(text)["grammars"]
    schema = grammars[0].get("json_schema") if len(grammars) == 1 else None
    if schema is None:
        return None
    found = literals({key: value for key, value in schema.items() if key != "x-guidance"})
    masks = None if found is None else shared()
    return None if found is None or masks is None else StringEnds(masks, text, found)


def checked_string_masks(vocabulary: Any, end_token_ids: Sequence[int]) -> StringMasks | None:
    """`string_masks`; None too if llguidance's masks of a string that may have 1, 2, ... `NEAR` more characters are not
    the same: another version of it might read a string in another way.
    """
    made = string_masks(vocabulary, end_token_ids)
    if made is None or _agrees(made, vocabulary):
        return made
    logger.warning(
        "masks of strings near maxLength are computed by llguidance %s alone, which takes longer: the table's differ",
        version("llguidance"),
    )
    return None


def _agrees(made: StringMasks, vocabulary: Any) -> bool:
    """Whether these are llguidance's masks, of a string in an object with something behind it."""
    from llguidance import LLMatcher

    bound = {"type": "string", "maxLength": NEAR + 1}
    schema = {"type": "object", "properties": {"x": bound, "y": bound}, "required": ["x", "y"]}
    grammar = LLMatcher.grammar_from_json_schema({**schema, "additionalProperties": False})
    whole = LLMatcher(vocabulary, grammar, log_level=0)
    end = StringEnd(made, whole, LLMatcher(made.others, grammar, log_level=0), literals(schema) or [])
    letter = vocabulary.greedy_tokenize("a")
    begin = vocabulary.greedy_tokenize('{"x":"') + letter
    if not whole.consume_tokens(begin):
        return False
    end.take(begin)
    for left in range(NEAR, 0, -1):
        mask = np.frombuffer(end.filler.compute_bitmask(), np.int32).copy()[: -(-vocabulary.vocab_size // 32)]
        if end.left != left:
            return False
        made.complete(mask, left)
        expected = np.frombuffer(whole.compute_bitmask(), np.int32)[: len(mask)]
        if not np.array_equal(mask, expected) or not whole.consume_tokens(letter):
            return False
        end.take(letter)
    return end.left == 0
