"""How many characters of a text a token of a tokenizer covers at most."""

from __future__ import annotations

import json
from typing import Any, NamedTuple


class MostCharacters(NamedTuple):
    """No token covers more than `number` characters of a text."""

    number: int
    without_spaces: bool
    """Whether white space does not count, since some tokens cover any number of spaces beside them."""


def most_characters(tokenizer: Any) -> MostCharacters | None:
    """How many characters of a text a token can cover, or None where there is no such number.

    There is none where a tokenizer drops characters (normalisers that strip, white space that only separates,
    characters outside of the vocabulary), or where one token stands for any run of them. A token's name has at least as
    many characters as the text that the token covers.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or type(backend.model).__name__ != "BPE":
        return None
    if backend.model.continuing_subword_prefix or backend.model.end_of_word_suffix:
        return None
    shrinks = _shrinks(_steps(backend.normalizer, "normalizers"))
    cuts = _steps(backend.pre_tokenizer, "pretokenizers")
    if shrinks is None or not all(map(_keeps_characters, cuts)):
        return None
    vocabulary = backend.get_vocab(with_added_tokens=True)
    if backend.model.byte_fallback:
        every_byte = [f"<0x{byte:02X}>" for byte in range(256)]
    elif any(step["type"] == "ByteLevel" for step in (*cuts, *_steps(backend.normalizer, "normalizers"))):
        from tokenizers.pre_tokenizers import ByteLevel

        every_byte = ByteLevel.alphabet()
    else:
        return None
    if not all(byte in vocabulary for byte in every_byte):
        return None
    added = backend.get_added_tokens_decoder().values()
    return MostCharacters(shrinks * max(map(len, vocabulary)), any(token.lstrip or token.rstrip for token in added))


def _steps(component: Any, name: str) -> list[dict[str, Any]]:
    """The JSON of a tokenizer's component, or of the components of a sequence, which tokenizer.json calls `name`."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    if state["type"] != "Sequence":
        return [state]
    # Sequences may hold sequences.
    flat: list[dict[str, Any]] = []
    for step in state[name]:
        flat += step[name] if step["type"] == "Sequence" else [step]
    return flat


def _shrinks(normalizers: list[dict[str, Any]]) -> int | None:
    """How many characters at most become one, or None if any number may."""
    most = 1
    for step in normalizers:
        kind = step["type"]
        if kind in ("NFC", "NFKC"):
            most *= 4  # no character is composed of more (Unicode Standard Annex 15)
        elif kind == "Replace" and step["pattern"].get("String") and step["content"]:
            most *= -(-len(step["pattern"]["String"]) // len(step["content"]))
        elif kind not in ("NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"):
            return None
    return most


def _keeps_characters(cut: dict[str, Any]) -> bool:
    kind = cut["type"]
    if kind in ("Split", "Punctuation"):
        return cut["behavior"] != "Removed"
    return kind in ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts")
