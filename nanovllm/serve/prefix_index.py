"""Which replica has the beginning of a prompt in its cache, as far as a router can know."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

_BLOCK = 256
_BLOCKS = 64


class PrefixIndex:
    """Chooses a replica for each prompt: the one that has seen the longest part of it, unless it is much busier.

    A text is cut into blocks of 256 characters; the first 64 blocks count. Each block is known by a hash of the text
    up to its end, so equal beginnings share blocks. The index keeps the replicas that each block was sent to.

    Args:
        slack: a replica with a match is passed over if it has more open requests than the least busy one by more than
            this number.
        max_blocks: the most blocks that the index keeps; those not used for the longest time are forgotten.
    """

    def __init__(self, slack: float = 32, max_blocks: int = 200_000) -> None:
        self._slack, self._max_blocks = slack, max_blocks
        self._replicas: OrderedDict[int, set[str]] = OrderedDict()

    def choose(self, text: str | None, loads: Mapping[str, float]) -> str:
        """The replica for a prompt. The index records the choice.

        Args:
            text: None: only the loads count.
            loads: the open requests of each replica that can be chosen; at least one.
        """
        blocks = list(_blocks(text or ""))
        least = min(loads.values())
        chosen: str | None = None
        for block in reversed(blocks):
            known = self._replicas.get(block, set()) & loads.keys()
            if known:
                best = min(known, key=lambda replica: (loads[replica], replica))
                if loads[best] - least <= self._slack:
                    chosen = best
                break
        if chosen is None:
            idle = sorted(replica for replica, load in loads.items() if load == least)
            chosen = idle[blocks[0] % len(idle)] if blocks else idle[0]
        for block in blocks:
            self._replicas.setdefault(block, set()).add(chosen)
            self._replicas.move_to_end(block)
        while len(self._replicas) > self._max_blocks:
            self._replicas.popitem(last=False)
        return chosen

    def keep_only(self, replicas: set[str]) -> None:
        """Forget replicas that are gone: those that come in their place have empty caches."""
        for block in list(self._replicas):
            self._replicas[block] &= replicas
            if not self._replicas[block]:
                del self._replicas[block]


def _blocks(text: str) -> Iterator[int]:
    """A hash of the text up to the end of each block, equal in all processes. A text shorter than a block is one."""
    before = 0
    for start in range(0, min(len(text), _BLOCK * _BLOCKS), _BLOCK):
        piece = text[start : start + _BLOCK]
        if len(piece) < _BLOCK and start:
            break
        digest = blake2b(piece.encode(errors="surrogatepass"), digest_size=8, key=before.to_bytes(8, "big")).digest()
        before = int.from_bytes(digest, "big")
        yield before


def prompt_text(body: bytes) -> str | None:
    """The beginning of the prompt in a request's body; None if the body has no prompt or is not JSON."""
    try:
        request = json.loads(body)
    except ValueError:
        return None
    if not isinstance(request, dict):
        return None
    parts = [request.get(name) for name in ("cache_salt", "tools", "system", "instructions")]
    said = next((request[name] for name in ("messages", "prompt", "input") if request.get(name)), None)
    return None if said is None else "\n".join(_text(part) for part in (*parts, said) if part)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
