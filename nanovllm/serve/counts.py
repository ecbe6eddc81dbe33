"""What the API processes of a server have counted: a record that goes between them, and its sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec


class Counts(msgspec.Struct):
    """Statistics of one API process, or of several."""

    histograms: list[tuple[list[int], float]]
    """(how many in each bucket, the sum), in the order of `Metrics`."""
    counters: dict[tuple[str, ...], int]
    """By name and values of the labels."""
    requests_open: int
    engine_up: bool
    heartbeat_age: float
    missing: tuple[str, ...] = ()
    """Why counts of other processes are not among these, or are old."""
    partial: bool = False
    """Whether they are of one process of several: Prometheus would take them for counters that began anew."""

    def ended(self) -> Counts:
        """What remains of a process that has ended."""
        return msgspec.structs.replace(self, requests_open=0, engine_up=True, heartbeat_age=0.0, missing=())


def total(found: Sequence[Counts], missing: Sequence[str] = ()) -> Counts:
    """Of several processes of one server; the engine is as bad as the worst of them says."""
    counters: Counter[tuple[str, ...]] = Counter()
    for counts in found:
        counters.update(counts.counters)
    return Counts(
        histograms=[
            ([sum(column) for column in zip(*(buckets for buckets, _ in same))], sum(amount for _, amount in same))
            for same in zip(*(counts.histograms for counts in found))
        ],
        counters=counters,
        requests_open=sum(counts.requests_open for counts in found),
        engine_up=all(counts.engine_up for counts in found),
        heartbeat_age=max(counts.heartbeat_age for counts in found),
        missing=tuple(missing),
    )
