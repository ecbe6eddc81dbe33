"""Tracks of a trace that viewers can draw: on one track, ranges lie beside or within one another."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from nanovllm.bench.trace import DEVICE

_NOTE = "gpu_user_annotation"  # a host range, drawn on the stream around the kernels that were launched in it


def bad_nesting(events: Iterable[dict[str, Any]]) -> list[str]:
    """Pairs of ranges on one track that overlap without one containing the other: viewers cannot draw them.

    Perfetto drops the later one of a pair; it counts in whole nanoseconds, and so does this.
    """
    tracks: dict[tuple[Any, Any], list[tuple[int, int, str]]] = defaultdict(list)
    for e in events:
        if e.get("ph") == "X":
            tracks[e["pid"], e["tid"]].append((*_span(e), e["name"]))
    problems = []
    for track, ranges in tracks.items():
        stack: list[tuple[int, int, str]] = []
        for start, end, name in sorted(ranges, key=lambda r: (r[0], -r[1])):
            while stack and stack[-1][1] <= start:
                stack.pop()
            if stack and end > stack[-1][1]:
                problems.append(f"{track}: {name!r} overlaps the end of {stack[-1][2]!r}")
            else:
                stack.append((start, end, name))
    return problems


def _span(event: dict[str, Any]) -> tuple[int, int]:
    """An event's start and end in nanoseconds. Sums of microseconds since the machine's start have no digits left for that."""
    start = nanoseconds(event["ts"])
    return start, start + nanoseconds(event.get("dur", 0))


def nanoseconds(microseconds: Any) -> int:
    """As Perfetto rounds them, halves up: of a clock that has run for weeks a float has no more than half nanoseconds."""
    time = 1000 * float(microseconds)
    whole = math.floor(time)
    return whole + (time - whole >= 0.5)


def separate_overlaps(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Device events that overlap another one of their stream, on a track of their own.

    With programmatic dependent launch a kernel begins before the one before it has ended, and with it the annotation of
    its op; viewers only draw ranges of one track that nest.
    """
    streams: dict[tuple[Any, Any], list[_Lane]] = defaultdict(list)
    moved: dict[tuple[Any, Any, int], Any] = {}  # where the kernel of a stream that starts at a time went
    result = []
    # Of those that start together, the ones around the others first.
    for event in sorted(events, key=lambda e: (float(e.get("ts", -1)), e.get("cat") != _NOTE, -float(e.get("dur", 0)))):
        if event.get("ph") == "X" and event.get("cat") in (_NOTE, *DEVICE):
            start, end = _span(event)
            lanes = streams[event["pid"], event["tid"]]
            places = [i for i, lane in enumerate(lanes) if lane.has_room(start, end)]
            if not places:
                places = [len(lanes)]
                lanes.append(_Lane())
            # Within the annotation that began last; the first track, if there is none.
            index = max(places, key=lambda i: lanes[i].began)
            lanes[index].open.append((start, end, event["cat"] == _NOTE))
            if index:
                tid = _lane_id(event["tid"], index)
                if event["cat"] != _NOTE:
                    moved[event["pid"], event["tid"], start] = tid
                event = {**event, "tid": tid}
        result.append(event)
    # An arrow from a launch ends where its kernel is.
    for i, event in enumerate(result):
        if event.get("ph") in ("f", "t") and (at := (event["pid"], event["tid"], _span(event)[0])) in moved:
            result[i] = {**event, "tid": moved[at]}
    for (pid, tid), lanes in streams.items():
        for index in range(1, len(lanes)):
            name = {"name": f"stream {tid}, overlapping"}
            result.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": _lane_id(tid, index), "args": name})
    return result


class _Lane:
    """A track: what is open on it, as (start, end, whether others may lie within)."""

    def __init__(self) -> None:
        self.open: list[tuple[int, int, bool]] = []

    @property
    def began(self) -> float:
        return self.open[-1][0] if self.open else float("-inf")

    def has_room(self, start: int, end: int) -> bool:
        """Whether a range fits, once what has ended is closed."""
        while self.open and self.open[-1][1] <= start:
            self.open.pop()
        return not self.open or (self.open[-1][2] and end <= self.open[-1][1])


def _lane_id(tid: Any, lane: int) -> Any:
    return tid + 1_000_000 * lane if isinstance(tid, int) else f"{tid}, {lane}"
