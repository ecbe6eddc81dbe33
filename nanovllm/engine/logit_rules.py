"""What a sequence's parameters add to its logits before sampling: bias, bad words, banned end tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple


class LogitChange(NamedTuple):
    """A number that is added to one logit of a row."""

    token_id: int
    value: float = -math.inf
    """-inf bans the token."""
    after: int = -1
    """The change applies only if this is the sequence's last token. -1: it always applies."""


class LogitRules:
    """The bias and the bad words of a request.

    Args:
        logit_bias: token id -> what is added to its logit.
        bad_words: token ids of each word. The last one is banned where the others are the end of the output.
    """

    def __init__(self, logit_bias: Mapping[int, float], bad_words: Iterable[Sequence[int]] = ()) -> None:
        words = [list(word) for word in bad_words]
        self._always = [LogitChange(token_id, bias) for token_id, bias in logit_bias.items()]
        self._always += [LogitChange(word[0]) for word in words if len(word) == 1]
        self._words = [word for word in words if len(word) > 1]

    def changes(self, token_ids: Sequence[int], prompt_len: int, last_is_unknown: bool) -> Iterator[LogitChange]:
        """What changes for the token after these. The bad word [5, 6, 7] bans token 7 after tokens 5 and 6. If the host
        knows the 5 alone, the ban of 7 says that it applies after 6.

        Args:
            token_ids: the sequence's tokens, prompt included, as far as the host knows them.
            prompt_len: how many of them are the prompt's.
            last_is_unknown: one more token was sampled. Only the device knows it, and compares it with `after`.
        """
        yield from self._always
        num_tokens = len(token_ids)
        for word in self._words:
            beginning = word[:-2] if last_is_unknown else word[:-1]
            start = num_tokens - len(beginning)
            if start >= prompt_len and token_ids[start:] == beginning:
                yield LogitChange(word[-1], after=word[-2] if last_is_unknown else -1)


def bad_word_token_ids(words: Iterable[str], tokenizer: Any, vocab_size: int) -> list[list[int]]:
    """The token ids of each word at the beginning of a text, and of the word after a space where these differ.

    Words with a token outside of the vocabulary are left out: the model cannot write them.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            token_ids = tuple(tokenizer.encode(text, add_special_tokens=False))
            if token_ids and max(token_ids) < vocab_size:
                found[token_ids] = None
    return [list(token_ids) for token_ids in found]
