"""Trace files: merged on one clock, and drawn without holes by viewers."""

import json

import pytest

from nanovllm.bench.trace_reader import Trace
from nanovllm.bench.trace_writer import merge, separate_overlaps, write_trace
from tests.bench.perfetto_reading import check
from tests.bench.traces import bad_nesting, host, kernel, launch


def test_kernels_that_overlap_get_tracks_of_their_own():
    spans = {"a": (0, 10), "b": (9, 10), "c": (18.5, 4), "d": (18.6, 1), "e": (30, 1)}
    events = [kernel(name, *span, i) for i, (name, span) in enumerate(spans.items())]
    assert bad_nesting(events)
    apart = separate_overlaps(events)
    assert bad_nesting(apart) == []
    tracks = {e["name"]: e["tid"] for e in apart if e["ph"] == "X"}
    assert tracks["a"] == tracks["c"] == tracks["e"] == 7 and len({tracks[n] for n in "abd"}) == 3
    assert [(e["ts"], e["dur"]) for e in apart if e["ph"] == "X"] == [(e["ts"], e["dur"]) for e in events]


def note(name, ts, dur):
    return {**kernel(name, ts, dur, 0), "cat": "gpu_user_annotation", "args": {}}


def test_annotations_of_kernels_that_overlap_move_with_them():
    """`vector` has not ended when the kernels of `sample` begin, and so begins the annotation of that op."""
    events = [
        note("linear [triton]", 0, 20), kernel("vector", 0, 20, 1),
        note("sample [triton]", 15, 20), kernel("draw", 15, 8, 2), kernel("pick", 30, 5, 3),
        note("step", 40, 20), note("rms_norm [triton]", 40, 10), kernel("norm", 40, 10, 4), kernel("late", 50, 10, 5),
        {"ph": "s", "cat": "ac2g", "id": 2, "pid": 1, "tid": 1, "ts": 3},
        {"ph": "f", "cat": "ac2g", "id": 2, "pid": 0, "tid": 7, "ts": 15},
        {"ph": "f", "cat": "ac2g", "id": 1, "pid": 0, "tid": 7, "ts": 0},
    ]  # fmt: skip
    assert bad_nesting(events)
    for _ in range(2):  # windows first, then passes: the second time changes nothing
        apart = separate_overlaps(events)
        assert bad_nesting(apart) == []
        tracks = {e["name"]: e["tid"] for e in apart if e["ph"] == "X"}
        assert tracks["linear [triton]"] == tracks["vector"] == tracks["step"] == tracks["norm"] == tracks["late"] == 7
        # The second kernel of the op stays within its annotation, though the stream's own track is free by then.
        assert tracks["sample [triton]"] == tracks["draw"] == tracks["pick"] == 1_000_007
        assert {e["id"]: e["tid"] for e in apart if e["ph"] == "f"} == {1: 7, 2: 1_000_007}
        assert [e["tid"] for e in apart if e["ph"] == "s"] == [1]
        events = apart


def test_merging_keeps_clocks_and_tracks_apart():
    first = {"baseTimeNanoseconds": 1_000_000, "traceEvents": [host("a", 1, 1), {**launch(1, 5), "id": 3}]}
    second = {"baseTimeNanoseconds": 3_000_000, "traceEvents": [host("b", 1, 1), kernel("k", 2, 1, 5)]}
    merged = merge([first, second])
    one_process = merged["traceEvents"]
    # From the first event on.
    assert merged["baseTimeNanoseconds"] == 1_001_000
    assert [e["ts"] for e in one_process] == [0, 0, 2000, 2001] and {e["pid"] for e in one_process} == {0, 1}
    assert Trace(one_process).kernels[0].launch is None  # the same correlation id, but of another recording
    two = merge([first, second], ["x", "y"])["traceEvents"]
    assert len({(e["pid"]) for e in two}) == 3


def test_a_nanosecond_of_overlap_counts_on_a_clock_that_has_run_for_two_months():
    late = 5e12
    assert bad_nesting([host("a", late + 0.25, 10.003), host("b", late + 10.0, 0.253)]) == []
    assert bad_nesting([host("a", late + 0.25, 10.003), host("b", late + 10.0, 0.254)]) == ["b"]
    apart = separate_overlaps(
        [kernel("a", late + 0.25, 10.003, 1), kernel("b", late + 10.252, 1, 2), kernel("c", late + 20.0, 1, 3)]
    )
    assert bad_nesting(apart) == [] and [e["tid"] for e in apart if e["ph"] == "X"] == [7, 1_000_007, 7]


def test_a_trace_is_kept_below_its_limit(tmp_path):
    events = [host("decode: 1 sequences", 0, 1000), *(host("aten::mm", i, i / 100, "cpu_op") for i in range(300))]
    write_trace({"traceEvents": events}, tmp_path / "t.json", max_bytes=20_000)
    kept = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert (tmp_path / "t.json").stat().st_size <= 20_000 and len(kept) > 10
    assert kept[0]["name"] == "decode: 1 sequences"


def test_perfetto_reads_two_passes_of_a_gpu_in_one_trace(tmp_path):
    """Kernels that overlap, as those that are launched early do, and an arrow from each launch to its kernel."""

    def recording(start):
        arrow = {"cat": "ac2g", "name": "ac2g"}
        events = [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}},
            {"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "GPU 0"}},
            host("decode: 2 sequences", start, 400),
        ]
        for i in range(30):
            at = start + 10 * i
            events += [
                launch(at + 1, i), kernel(f"kernel {i % 3}", at + 100, 12, i),
                {**arrow, "ph": "s", "id": i, "pid": 1, "tid": 1, "ts": at + 1},
                {**arrow, "ph": "f", "bp": "e", "id": i, "pid": 0, "tid": 7, "ts": at + 100},
            ]  # fmt: skip
        return {"baseTimeNanoseconds": 10**9, "traceEvents": events}

    passes = [merge([recording(0), recording(1000)]), merge([recording(50)])]
    write_trace(merge(passes, ["as it runs", "without graphs"]), tmp_path / "t.json")
    read = check(tmp_path / "t.json")
    assert len(read.arrows) == 90 and "stream 7, overlapping" in read.threads.values()
    assert {n.split(":")[0] for n in read.processes.values()} == {"as it runs", "without graphs"}
    assert {(a.origin, a.target.split()[0]) for a in read.arrows} == {("cudaLaunchKernel", "kernel")}


def test_what_perfetto_would_drop_is_found(tmp_path):
    """And so are the ranges that `bad_nesting` and `separate_overlaps` exist for."""

    def reads(events):
        (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
        return check(tmp_path / "t.json")

    late = 4488456729412.807  # of a clock on which a float has half nanoseconds
    overlap = [launch(late - 1, 1), kernel("a", late, 10.003, 1), kernel("b", round(late + 10.002, 3), 1, 2)]
    arrow = {"cat": "ac2g", "name": "ac2g", "id": 7}
    arrows = [
        {**arrow, "ph": "s", "pid": 1, "tid": 1, "ts": late - 1},
        {**arrow, "ph": "f", "bp": "e", "pid": 0, "tid": 7, "ts": late},
    ]
    assert len(bad_nesting(overlap)) == 1
    with pytest.raises(AssertionError, match="slice_drop_overlapping_complete_event"):
        reads(overlap)
    with pytest.raises(AssertionError, match="flow_invalid_id"):
        reads([*overlap[:2], *({**e, "id": "0.7"} for e in arrows)])
    read = reads(separate_overlaps([*overlap, *arrows]))
    assert {s.name for s in read.slices} == {"cudaLaunchKernel", "a", "b"}
    assert [(a.origin, a.target) for a in read.arrows] == [("cudaLaunchKernel", "a")]
