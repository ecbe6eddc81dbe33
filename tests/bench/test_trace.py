"""Reading traces: on a made-up one of a GPU, where every number is known, and on a real one of this machine."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from nanovllm import LLM
from nanovllm.bench.instrument import Instrument
from nanovllm.bench.job import Job
from nanovllm.bench.profile import summarize
from nanovllm.bench.profile_files import make_profile
from nanovllm.bench.profile_report import over_limit
from nanovllm.bench.profiler import profile
from nanovllm.bench.trace_reader import Trace, busy, flame, gaps, name_graph_kernels, op_of
from nanovllm.bench.trace_writer import bad_nesting, merge, separate_overlaps, write_trace
from nanovllm.bench.workloads import Workload
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.hardware.measured_rates import Rates, rates
from nanovllm.models.model_presets import PRESETS
from tests import tiny
from tests.bench.perfetto_reading import check

LOAD = Workload("w", 1, 1, 1)
RATES = Rates("GPU", 1e12, 1e12, 9e11, {"bfloat16": 1e14}, cache_bytes=0)


def host(name, ts, dur, cat="user_annotation", **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1, "args": args}


def kernel(name, ts, dur, correlation):
    return {
        "ph": "X",
        "cat": "kernel",
        "name": name,
        "ts": ts,
        "dur": dur,
        "pid": 0,
        "tid": 7,
        "args": {"correlation": correlation},
    }


def launch(ts, correlation):
    return host("cudaLaunchKernel", ts, 1, "cuda_runtime", correlation=correlation)


EAGER = [
    host("decode: 2 sequences", 0, 100),
    host("layer 0", 5, 60),
    host("rms_norm [triton]", 10, 10), launch(12, 1), kernel("norm", 200, 4, 1),
    host("linear o_proj [torch]", 25, 30), launch(30, 2), launch(40, 3), kernel("gemm", 206, 10, 2), kernel("split", 216, 2, 3),
    host("rms_norm [triton]", 70, 10), launch(72, 4), kernel("norm", 220, 6, 4),
]  # fmt: skip
# The same kernels out of a graph: one launch; and one that no eager step had.
GRAPH = [
    host("decode: 2 sequences", 0, 50),
    host("cudaGraphLaunch", 10, 5, "cuda_runtime", correlation=9),
    kernel("norm", 100, 3, 9), kernel("gemm", 104, 9, 9), kernel("split", 113, 1, 9), kernel("norm", 115, 5, 9),
    kernel("new", 122, 8, 9),
    host("decode: 2 sequences", 150, 50),
    host("cudaGraphLaunch", 160, 5, "cuda_runtime", correlation=10),
    kernel("norm", 200, 3, 10), kernel("gemm", 204, 9, 10), kernel("split", 213, 1, 10), kernel("norm", 215, 5, 10),
    kernel("new", 222, 8, 10),
]  # fmt: skip


def test_names():
    assert op_of("rms_norm [triton]") == ("rms_norm", "", "triton")
    assert op_of("linear o_proj [torch]") == ("linear", "o_proj", "torch")
    assert op_of("layer 3") is None and op_of("aten::mm") is None and op_of("ModelRunner.execute") is None


def test_kernels_belong_to_the_op_that_launched_them():
    (step,) = Trace(EAGER).steps
    assert [k.name for k in step.kernels] == ["norm", "gemm", "split", "norm"]
    (owners,) = name_graph_kernels([step], [])
    linear, norm = ("linear", "o_proj", "torch"), ("rms_norm", "", "triton")
    assert owners == [norm, linear, linear, norm]
    assert [o for o, _ in step.ops()] == [norm, linear, norm]


def test_kernels_of_a_graph_get_the_names_of_an_eager_step():
    steps = Trace(GRAPH).steps
    assert [len(s.kernels) for s in steps] == [5, 5]
    linear, norm = ("linear", "o_proj", "torch"), ("rms_norm", "", "triton")
    assert name_graph_kernels(steps, Trace(EAGER).steps) == [[norm, linear, linear, norm, None]] * 2


def test_a_kernel_that_only_the_graph_has_is_named_by_its_place():
    """A library takes another kernel for another shape: the head's product in a graph, which is padded, is not the eager one."""
    head, sample = ("linear", "lm_head", "triton"), ("sample", "", "triton")
    eager = [
        *EAGER, host("copy", 81, 1, "cuda_runtime", correlation=8), kernel("index", 230, 2, 8),
        host("linear lm_head [triton]", 83, 5), launch(84, 5), kernel("vector", 235, 70, 5),
        host("sample [triton]", 90, 5), launch(91, 6), kernel("draw", 310, 5, 6),
    ]  # fmt: skip
    graph = [
        *GRAPH[:6], kernel("gather", 121, 3, 9), kernel("memset", 125, 1, 9), kernel("nvjet", 127, 80, 9), kernel("draw", 210, 5, 9),
        kernel("advance", 216, 9, 9),
    ]  # fmt: skip
    norm, product = ("rms_norm", "", "triton"), ("linear", "o_proj", "torch")
    (step,) = Trace(graph).steps
    (owners,) = name_graph_kernels([step], Trace(eager).steps)
    assert dict(zip((k.name for k in step.kernels), owners)) == {
        "norm": norm, "gemm": product, "split": product, "gather": None, "memset": None, "nvjet": head, "draw": sample, "advance": None,
    }  # fmt: skip


def test_the_eager_step_of_the_same_size_names_kernels():
    other = [
        host("decode: 9 sequences", 0, 100),
        host("softmax [triton]", 10, 10),
        launch(12, 1),
        kernel("norm", 200, 4, 1),
    ]
    later = [{**e, "ts": e["ts"] + 1000, "args": {"correlation": e["args"].get("correlation", 0) + 50}} for e in EAGER]
    owners = name_graph_kernels(Trace(GRAPH).steps, Trace([*other, *later]).steps)
    assert owners[0][0] == ("rms_norm", "", "triton")


def launched_early(*more):
    """Two products, a norm between them that waits, and the second one, which reads its weights while it waits."""
    return [
        host("decode: 1 sequences", 0, 50),
        host("linear a [triton]", 1, 5), launch(2, 1), kernel("a", 100, 20, 1),
        host("rms_norm [triton]", 8, 5), launch(9, 2), kernel("norm", 101, 21, 2),
        host("linear b [triton]", 15, 5), launch(16, 3), kernel("b", 110, 17, 3), *more,
    ]  # fmt: skip


def profile_of(events, costs):
    result = {"about": {"device": "GPU", "dtype": "bfloat16"}, "unprofiled_us": None, "memory": []}
    trace = Trace(events)
    return summarize(trace, trace, result, costs, RATES, LOAD, "m")


def linear_cost(module, megabytes):
    size = round(megabytes * 1e6)
    names = {"op": "linear", "module": module, "provider": "triton", "phase": "decode"}
    return {**names, "calls": 1, "cold_bytes": size, "bytes": size, "flops": 0}


def test_waiting_is_not_an_ops_time():
    """a from 100 to 120; norm from 101 to 122, so 2 of its own; b from 110 to 127, so 5 of its own."""
    p = profile_of(launched_early(), [linear_cost("a", 16), linear_cost("b", 4)])
    by_op = {o.label: o for o in p.ops}
    assert [(o.label, o.device_us) for o in p.ops] == [("linear a", 20), ("linear b", 5), ("rms_norm", 2)]
    assert by_op["linear a"].share == pytest.approx(0.8) and by_op["linear b"].share == pytest.approx(0.8)
    assert [by_op[n].early_us for n in ("linear a", "rms_norm", "linear b")] == [0, 19, 12]
    assert not any(o.read_early_us for o in p.ops)
    assert {k.name: k.us for k in p.kernels} == {"a": 20, "norm": 2, "b": 5} and p.steps[0].device_us == 27
    assert p.steps[0].wall_us == 27 and p.steps[0].idle == 0
    assert p.timeline["decode"] == [("linear", 0, 20), ("rms_norm", 20, 2), ("linear", 22, 5)]


def test_what_was_certainly_read_early_is_the_ops_own():
    p = profile_of(launched_early(), [linear_cost("a", 16), linear_cost("b", 8)])
    by_op = {o.label: o for o in p.ops}
    # b needs 8 of which it has 5: the 3 come out of a's 4 that nothing accounts for.
    assert (by_op["linear b"].device_us, by_op["linear b"].share, by_op["linear b"].read_early_us) == (8, 1.0, 3)
    assert by_op["linear a"].device_us == pytest.approx(17) and by_op["rms_norm"].device_us == 2
    assert sum(o.device_us for o in p.ops) == pytest.approx(27) and over_limit(p) == []


def test_no_more_time_than_there_was_hides_a_wrong_account():
    # b needs 40: it ran 17 in all, of which 12 beside others; a spares 1 of its 20, the norm its 2.
    p = profile_of(launched_early(), [linear_cost("a", 19), linear_cost("b", 40)])
    by_op = {o.label: o for o in p.ops}
    assert by_op["linear b"].device_us == pytest.approx(8) and by_op["linear a"].share == pytest.approx(1)
    assert sum(o.device_us for o in p.ops) == pytest.approx(27)
    assert over_limit(p) == ["decode linear b: 500.0% of the limit"]
    # And what did not overlap gives nothing.
    p = profile_of(EAGER, [{**linear_cost("o_proj", 40), "provider": "torch"}])
    assert over_limit(p) == ["decode linear o_proj: 333.3% of the limit"]


def test_a_profile_by_hand():
    costs = [
        {"op": "rms_norm", "module": "", "provider": "triton", "phase": "decode", "calls": 2, "cold_bytes": 0, "bytes": 4_000_000, "flops": 0},
        {"op": "linear", "module": "o_proj", "provider": "torch", "phase": "decode", "calls": 1, "cold_bytes": 2_000_000, "bytes": 3_000_000, "flops": 800_000_000},
    ]  # fmt: skip
    result = {"about": {"device": "GPU", "dtype": "bfloat16"}, "unprofiled_us": 95.0, "memory": []}
    p = summarize(Trace(GRAPH), Trace(EAGER), result, costs, RATES, LOAD, "m")
    by_op = {o.op: o for o in p.ops}
    assert by_op["rms_norm"].device_us == 8 and by_op["linear"].device_us == 10 and by_op["no op"].device_us == 8
    assert by_op["rms_norm"].calls == 2 and by_op["rms_norm"].bytes == 4_000_000
    assert by_op["rms_norm"].floor_us == pytest.approx(4.0) and by_op["rms_norm"].share == pytest.approx(0.5)
    assert by_op["linear"].floor_us == pytest.approx(8.0)  # 8e8 flops at 1e14 a second; its bytes need 3
    (step,) = p.steps
    # From 100 to 230: busy 26 of each 30, and once 70 between them.
    assert (step.count, step.kernels, step.device_us) == (2, 5, 26)
    assert step.wall_us == 65 and step.idle == pytest.approx(1 - 52 / 130)
    assert step.gaps_us == pytest.approx((4 + 70 + 4) / 2)
    assert p.timeline["decode"][0] == ("rms_norm", 0.0, 3.0)
    assert {(k.name, k.us) for k in p.kernels} == {("norm", 8), ("gemm", 9), ("split", 1), ("new", 8)}


def test_busy_and_gaps_with_streams_that_overlap():
    kernels = Trace(
        [kernel("a", 0, 10, 1), kernel("b", 5, 10, 2), kernel("c", 20, 1, 3), kernel("d", 20.5, 0.2, 4)]
    ).kernels
    assert busy(kernels) == 16 and gaps(kernels) == [5]


def test_what_lies_between_two_recordings_is_no_gap():
    events = [host("recorded window", 0, 60), *GRAPH[:7], host("recorded window", 140, 80), *GRAPH[7:]]
    result = {"about": {"device": "GPU", "dtype": "bfloat16"}, "unprofiled_us": None, "memory": []}
    (step,) = summarize(Trace(events), Trace(EAGER), result, [], RATES, LOAD, "m").steps
    assert step.count == 2 and step.wall_us == 30 and step.gaps_us == pytest.approx(4)
    assert step.idle == pytest.approx(4 / 30)


def test_kernels_that_overlap_get_tracks_of_their_own():
    events = [
        kernel("a", 0, 10, 1),
        kernel("b", 9, 10, 2),
        kernel("c", 18.5, 4, 3),
        kernel("d", 18.6, 1, 4),
        kernel("e", 30, 1, 5),
    ]
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
        {"ph": "s", "cat": "ac2g", "id": 2, "pid": 1, "tid": 1, "ts": 3}, {"ph": "f", "cat": "ac2g", "id": 2, "pid": 0, "tid": 7, "ts": 15},
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


def test_flame_adds_up_what_has_one_name():
    tree = flame(
        Trace([host("decode: 1 sequences", 0, 10), host("layer 0", 1, 3), host("layer 1", 5, 4), host("x", 6, 1)]).steps
    )
    (step,) = tree["children"]
    assert (step["name"], step["us"]) == ("decode step", 10)
    assert step["children"] == [{"name": "layer", "us": 7, "children": [{"name": "x", "us": 1, "children": []}]}]


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


def test_what_viewers_cannot_draw_is_found():
    assert bad_nesting([host("a", 0, 10), host("b", 2, 3), host("c", 10, 5)]) == []
    assert len(bad_nesting([host("a", 0, 10), host("b", 5, 10)])) == 1
    # A nanosecond is enough, of a clock that has run for two months.
    late = 5e12
    assert bad_nesting([host("a", late + 0.25, 10.003), host("b", late + 10.0, 0.253)]) == []
    assert len(bad_nesting([host("a", late + 0.25, 10.003), host("b", late + 10.0, 0.254)])) == 1
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


def test_what_a_provider_takes_beyond_the_op_is_passed_on():
    given = []
    x, weight = torch.ones(2, 4), torch.ones(4)
    instrument = Instrument()
    call = instrument.decorate("rms_norm", "some", lambda *args, **kwargs: given.append((args, kwargs)))
    with instrument.costing(), instrument.step("mixed", "2 tokens"):
        call(x, weight, eps=1e-6, out=x, concurrent=True)
    assert given == [((x, weight), {"eps": 1e-6, "out": x, "beside": True})]
    assert [(c.op, c.provider, c.phase, work.bytes) for c, work in instrument.costs.items()] == [
        ("rms_norm", "some", "mixed", 80)
    ]


# ------------------------------------------------------------------------------------------------------ a real trace


def profile_tiny(folder, workload, **options):
    tiny.save(folder / "model", "qwen3", seed=2)
    options = {"device": "cpu", "max_model_len": 512, **options}
    job = Job(
        "nanovllm", "custom", str(folder / "model"), (workload,), options=options, trace=str(folder / "trace.json")
    )
    return profile(job, LLM), folder / "trace.json"


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    return profile_tiny(
        tmp_path_factory.mktemp("profile"), Workload("w", 3, 8, 40), num_kvcache_blocks=16, max_model_len=128
    )


def test_a_real_trace_holds_the_expected_slices(real):
    result, path = real
    events = json.loads(path.read_text())["traceEvents"]
    trace = Trace(events)
    kinds = [s.kind for s in trace.steps]
    assert kinds[0] == "prefill" and kinds.count("decode") >= 6 and set(kinds) == {"prefill", "decode"}
    assert trace.steps[0].range.name == "prefill: 24 tokens of 3 prompts"
    for step in trace.steps:
        names = [n.name for n in step.range.walk()]
        assert names.count("layer 0") == names.count("layer 1") == 1
        attention = f"attention_{step.kind} [native]"
        assert names.count(attention) == 2 and names.count("sample [native]") == 1
        assert names.index("layer 0") < names.index(attention) < names.index("layer 1")
    host_names = {n.name for roots in trace.roots.values() for r in roots for n in r.walk()}
    assert {"Scheduler.schedule", "LLMEngine.step"} <= host_names
    assert bad_nesting(events) == []
    assert any(e["ph"] == "C" and e["name"] == "KV cache blocks" and e["args"]["used"] == 3 for e in events)
    # Steps that were counted are the steps that were recorded.
    calls = {(c["op"], c["phase"]): c["calls"] for c in result["costs"]}
    assert calls["attention_prefill", "prefill"] == 2 * kinds.count("prefill")
    assert calls["attention_decode", "decode"] == 2 * kinds.count("decode")
    assert result["unprofiled_us"] > 0


@pytest.mark.parametrize("ahead", [False, True])
def test_prompts_ride_in_a_profile_as_they_do_in_runs(ahead, tmp_path, monkeypatch):
    load = Workload("w", 24, (100, 200), (20, 120))
    given_up, abort = [], LLMEngine.abort
    monkeypatch.setattr(
        LLMEngine, "abort", lambda self, r: (given_up.append(r.first_token_time is None), abort(self, r))[1]
    )
    result, path = profile_tiny(tmp_path, load, num_kvcache_blocks=200, ride_prompts=True, async_scheduling=ahead)
    trace = Trace(json.loads(path.read_text())["traceEvents"])
    kinds = [s.kind for s in trace.steps]
    assert result["rides"] and kinds == sorted(kinds, key=["prefill", "mixed", "decode"].index)
    assert kinds.count("decode") == 6 and kinds.count("mixed") >= 6
    # In the midst of the run, and what had begun goes on when no prompt is left.
    assert all(int(step.range.name.split()[-2]) >= 12 for step in trace.steps[-12:])
    assert any(given_up) and result["unprofiled_us"] > 0  # some prompts were left, and some steps
    for step in trace.steps:
        names = [n.name for n in step.range.walk()]
        expected = {
            "attention_prefill [native]": step.kind != "decode",
            "attention_decode [native]": step.kind != "prefill",
        }
        assert {name: names.count(name) for name in expected} == {name: 2 * there for name, there in expected.items()}
    calls = {(c["op"], c["phase"]): c["calls"] for c in result["costs"]}
    assert calls["attention_prefill", "mixed"] == calls["attention_decode", "mixed"] == 2 * kinds.count("mixed")


def test_nobody_rides_in_a_profile_of_requests_that_arrive_over_time(tmp_path):
    load = Workload("w", 24, (100, 200), (20, 120), rate=100.0)
    _, path = profile_tiny(tmp_path, load, num_kvcache_blocks=200, ride_prompts=True)
    steps = Trace(json.loads(path.read_text())["traceEvents"]).steps
    assert [s.kind for s in steps] == ["prefill"] + ["decode"] * 6


@pytest.mark.parametrize("rides", [False, True])
def test_in_the_pass_without_graphs_prompts_ride_where_they_do_with_them(rides, tmp_path):
    class Enough(Exception):
        pass

    def launch(job, take):
        jobs.append(job)
        if job.options.get("enforce_eager"):
            raise Enough
        Path(job.trace).write_text('{"traceEvents": []}')
        take("profile", {"eager": False, "rides": rides})

    jobs = []
    job = Job("nanovllm", "custom", "model", (Workload("w", 1, 8, 8),), options={"max_model_len": 64})
    with pytest.raises(Enough):
        make_profile(launch, job, None, "label", tmp_path, False, print)
    assert [j.options for j in jobs] == [
        job.options,
        {"max_model_len": 64, "enforce_eager": True, "ride_prompts": rides},
    ]


def test_perfettos_own_trace_processor_reads_it(real):
    read = check(real[1])
    (pid,) = read.processes
    used = [c.value for c in sorted(read.counters, key=lambda c: c.ts) if c.name == "KV cache blocks used"]
    assert used == [s["kv_blocks_used"] for s in real[0]["memory"]] and max(used) == 3
    assert {c.name for c in read.counters} <= {"KV cache blocks used", "memory, MiB resident"}
    decodes = [read.around(s) for s in read.slices if s.name == "attention_decode [native]"]
    layers = [names[0] for names in decodes]
    assert layers.count("layer 0") == layers.count("layer 1") == len(layers) / 2 >= 6
    assert all("decode: 3 sequences" in names and "recorded window" in names for names in decodes)
    assert read.threads[pid, pid].startswith(f"thread {pid} ")


def test_perfetto_reads_two_runs_in_one_trace(real, tmp_path):
    runs = [json.loads(real[1].read_text()) for _ in range(2)]
    runs[1]["baseTimeNanoseconds"] += 10**9
    write_trace(merge(runs, ["one", "two"]), tmp_path / "both.json")
    read = check(tmp_path / "both.json")
    assert sorted(name.split(":")[0] for name in read.processes.values()) == ["one", "two"]
    assert len(read.slices) == 2 * sum(e["ph"] == "X" for e in runs[0]["traceEvents"])


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


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "riding"])
def on_gpu(tmp_path_factory, request):
    """Four layers of Qwen3-0.6B as they run and without graphs: both traces, and both together in a file."""
    folder = tmp_path_factory.mktemp("profile")
    config = {**PRESETS["qwen3-0.6b"], "num_hidden_layers": 4}
    (folder / "config.json").write_text(json.dumps(config))  # all that random weights need
    load = Workload("w", 64, (100, 400), (50, 400)) if request.param else Workload("w", 1, 128, 64)
    job = Job("nanovllm", "custom", str(folder), (load,), config=config, trace=str(folder / "a.json"))
    results, traces = [], []
    for eager in (False, True):
        options = {"gpu_memory_utilization": 0.3, "enforce_eager": eager, "ride_prompts": request.param}
        results.append(profile(dataclasses.replace(job, options=options), LLM))
        traces.append(json.loads((folder / "a.json").read_text()))
    write_trace(merge(traces, ["as it runs", "without graphs"]), folder / "both.json")
    return results, [Trace(t["traceEvents"]) for t in traces], folder / "both.json"


@pytest.mark.gpu
def test_viewers_can_draw_the_trace_of_a_gpu(on_gpu):
    events = json.loads(on_gpu[2].read_text())["traceEvents"]
    assert bad_nesting(events) == []
    kernels = {(e["pid"], e["tid"], e["ts"]) for e in events if e.get("cat") == "kernel"}
    streams = {(pid, tid) for pid, tid, _ in kernels}
    ends = [e for e in events if e.get("ph") == "f" and (e["pid"], e["tid"]) in streams]
    assert len(ends) > 100 and sum((e["pid"], e["tid"], e["ts"]) in kernels for e in ends) > 0.9 * len(ends)


@pytest.mark.gpu
def test_perfettos_own_trace_processor_reads_the_trace_of_a_gpu(on_gpu):
    read = check(on_gpu[2])
    assert Counter(s.name for s in read.slices)["layer 0"] >= 7 and len(read.arrows) > 100


@pytest.mark.gpu
def test_times_of_a_gpu_add_up_and_none_beats_the_limit(on_gpu):
    (as_run, named), traces, _ = on_gpu
    p = summarize(*traces, as_run, named["costs"], rates(torch.device("cuda"), refresh=True), LOAD, "qwen3-0.6b")
    assert ("mixed" in p.phases()) == as_run["rides"]
    for phase in p.phases():
        (step,) = [s for s in p.steps if s.phase == phase]
        ops = [o for o in p.ops if o.phase == phase]
        assert (
            sum(o.device_us for o in ops) == pytest.approx(step.device_us, rel=1e-3)
            and step.device_us <= step.wall_us * 1.001
        )
        assert sum(k.us for k in p.kernels if k.phase == phase) == pytest.approx(step.device_us, rel=1e-3)
        # Nearly all of it has an op, the head among them.
        assert sum(o.device_us for o in ops if o.op == "no op") < 0.2 * step.device_us
        heads = [o.device_us for o in ops if o.module == "lm_head"]
        assert sum(heads) > 20 and (
            len(heads) == 1 or as_run["rides"]
        )  # where prompts ride the rows change, and with them the provider
    assert over_limit(p) == []
