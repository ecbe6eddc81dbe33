"""Trace files that viewers can draw: recordings merged on one clock, and tracks on which ranges nest."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanovllm.bench.instrument import STEP_NAME
from nanovllm.bench.trace_reader import DEVICE

# A host range, drawn on the stream around the kernels that were launched in it.
_NOTE = "gpu_user_annotation"
# The profiler's own work has the process -1 in PyTorch's traces, which Perfetto takes for GPU 0. No process has this
# one.
_PROFILER = 9_999_999
_PROFILER_NAME = {"ph": "M", "name": "process_name", "pid": _PROFILER, "tid": 0, "args": {"name": "profiler"}}
_LEFT_OUT = ("Record Window End", "Iteration Start: PyTorch Profiler")


def merge(windows: Sequence[dict[str, Any]], labels: Sequence[str] | None = None) -> dict[str, Any]:
    """One trace of several, on one clock. With labels, each keeps tracks of its own, named by its label.

    A trace counts microseconds from its own base, `baseTimeNanoseconds`: PyTorch's from a time weeks ago, the merged
    one from its first event, so that a float of viewers has the digits for every nanosecond.
    """
    bases = [int(w.get("baseTimeNanoseconds", 0)) for w in windows]
    events: list[dict[str, Any]] = []
    # Arrows of different traces get different ids. They must be numbers: Perfetto drops other arrows.
    arrows: dict[tuple[int, Any], int] = {}
    for i, window in enumerate(windows):
        shift = (bases[i] - bases[0]) / 1e3
        for event in (*window["traceEvents"], _PROFILER_NAME):
            # "Trace" is the span of the whole recording, which crosses other tracks.
            if event.get("ph") == "i" or event.get("cat") == "Trace" or event.get("name") in _LEFT_OUT:
                continue
            event = dict(event)
            if "ts" in event:
                event["ts"] = round(float(event["ts"]) + shift, 3)
            if "id" in event:  # arrows from launches to kernels
                event["id"] = arrows.setdefault((i, event["id"]), len(arrows) + 1)
            if event.get("pid") == -1:
                event["pid"] = _PROFILER
            if labels is not None:
                event["pid"] = _renamed(event.get("pid"), i)
                if event.get("ph") == "M" and event.get("name") == "process_name":
                    event["args"] = {"name": f"{labels[i]}: {event['args'].get('name', '')}"}
            if (correlation := event.get("args", {}).get("correlation")) is not None:
                # Merged windows may be merged again, as one of several passes.
                kind = "w" if labels is None else ""
                event["args"] = {**event["args"], "correlation": f"{kind}{i}.{correlation}"}
            events.append(event)
    origin = math.floor(min((e["ts"] for e in events if "ts" in e), default=0))
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - origin, 3)
    used = {e.get("pid") for e in events if e.get("ph") == "X"}
    events = separate_overlaps([e for e in events if e.get("ph") != "M" or e.get("pid") in used])
    head = {k: v for k, v in windows[0].items() if k != "traceEvents"}
    head.pop("traceName", None)
    return {**head, "baseTimeNanoseconds": bases[0] + 1000 * origin, "traceEvents": events}


def _renamed(pid: Any, index: int) -> int:
    """Process numbers of different traces apart; they need not be numbers to begin with."""
    number = pid if isinstance(pid, int) else sum(ord(c) << i for i, c in enumerate(str(pid)))
    return number + index * 10_000_000


def add_memory_track(trace: dict[str, Any], memory: Sequence[dict[str, Any]]) -> None:
    """Counters of the samples, at the ends of the steps that they follow."""
    ends = sorted(
        (e["ts"] + e["dur"], e["pid"])
        for e in trace["traceEvents"]
        if e.get("ph") == "X" and e.get("cat") == "user_annotation" and STEP_NAME.match(e["name"])
    )
    for (ts, pid), sample in zip(ends, memory):
        sizes = {k: v / 2**20 for k, v in sample.items() if k in ("allocated", "reserved", "resident")}
        blocks = {"used": sample["kv_blocks_used"]} if "kv_blocks_used" in sample else {}
        for name, values in (("memory, MiB", sizes), ("KV cache blocks", blocks)):
            if values:
                counter = {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": ts, "args": values}
                trace["traceEvents"].append(counter)


def write_trace(trace: dict[str, Any], path: Path, max_bytes: int = 50 * 2**20) -> None:
    """Write a trace of at most `max_bytes`, without its shortest PyTorch ops if it would be larger."""
    text = json.dumps(trace, separators=(",", ":"))
    shortest = 1.0
    while len(text) > max_bytes and shortest < 1e6:
        kept = [e for e in trace["traceEvents"] if not (e.get("cat") == "cpu_op" and e.get("dur", 0) < shortest)]
        trace = {**trace, "traceEvents": kept}
        shortest *= 2
        text = json.dumps(trace, separators=(",", ":"))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


# ------------------------------------------------------------------------------------------------------------- tracks


def _span(event: dict[str, Any]) -> tuple[int, int]:
    """An event's start and end in nanoseconds.

    Sums of microseconds since the machine's start have no digits left for that.
    """
    start = nanoseconds(event["ts"])
    return start, start + nanoseconds(event.get("dur", 0))


def nanoseconds(microseconds: Any) -> int:
    """As Perfetto rounds them, halves up: of a clock that has run for weeks a float has no more than half
    nanoseconds.
    """
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
