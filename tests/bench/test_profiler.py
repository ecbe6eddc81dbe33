"""Profiles of real engines: a tiny model on this machine, and on a GPU."""

import dataclasses
import json
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch

from nanovllm import LLM
from nanovllm.bench import profiler
from nanovllm.bench.engines.nanovllm import NanovllmEngine
from nanovllm.bench.instrument import Instrument
from nanovllm.bench.job import Job
from nanovllm.bench.profile import summarize
from nanovllm.bench.profile_files import make_profile
from nanovllm.bench.profile_report import over_limit
from nanovllm.bench.profiler import profile
from nanovllm.bench.trace_reader import Trace
from nanovllm.bench.trace_writer import merge, write_trace
from nanovllm.bench.workloads import Workload
from nanovllm.hardware.measured_rates import rates
from nanovllm.models.model_presets import PRESETS
from tests import tiny
from tests.bench.perfetto_reading import check
from tests.bench.traces import LOAD, bad_nesting
from tests.shared_gpu import gpu_is_shared


def test_what_a_provider_takes_beyond_the_op_is_passed_on():
    given = []
    x, weight = torch.ones(2, 4), torch.ones(4)
    instrument = Instrument()
    call = instrument.decorate("rms_norm", "some", lambda *args, **kwargs: given.append((args, kwargs)))
    with instrument.costing(), instrument.step("mixed", "2 tokens"):
        call(x, weight, eps=1e-6, out=x, concurrent=True)
    assert given == [((x, weight), {"eps": 1e-6, "out": x, "concurrent": True})]
    ((c, work),) = instrument.costs.items()
    assert (c.op, c.provider, c.phase, work.bytes) == ("rms_norm", "some", "mixed", 80)


def profile_tiny(folder, workload, llm_class=LLM, **options):
    tiny.save(folder / "model", "qwen3", seed=2)
    options = {"device": "cpu", "max_model_len": 512, **options}
    job = Job(
        "nanovllm", "custom", str(folder / "model"), (workload,), options=options, trace=str(folder / "trace.json")
    )
    return profile(job, llm_class), folder / "trace.json"


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    return profile_tiny(
        tmp_path_factory.mktemp("profile"), Workload("w", 3, 8, 40), num_kvcache_blocks=16, max_model_len=128
    )


def test_nothing_of_an_engine_is_left_when_it_is_closed(tmp_path, monkeypatch):
    """The next engine in the same process needs its memory."""
    parts = weakref.WeakSet()
    left = []

    class Watched(LLM):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            runner = self.engine.runner
            parts.update((self, self.engine, runner, runner.fast, runner.model))

    class Closed(NanovllmEngine):
        def close(self):
            assert len(parts) == 5
            super().close()
            left.extend(type(part).__name__ for part in parts)
            left.append("closed")

    monkeypatch.setattr(profiler, "NanovllmEngine", Closed)
    profile_tiny(tmp_path, Workload("w", 1, 4, 3), Watched, num_kvcache_blocks=4)
    assert left == ["closed"]


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
def test_prompts_are_piggybacked_in_a_profile_as_in_runs(ahead, tmp_path):
    load, given_up = Workload("w", 24, (100, 200), (20, 120)), []

    def watched(model, **options):
        llm = LLM(model, **options)
        abort = llm.engine.abort
        llm.engine.abort = lambda request: (given_up.append(request.first_token_time is None), abort(request))[1]
        return llm

    options = {"num_kvcache_blocks": 200, "piggyback_prefill": True, "async_scheduling": ahead}
    options["max_num_batched_tokens"] = 2048  # the counts below are of steps of this size
    result, path = profile_tiny(tmp_path, load, watched, **options)
    trace = Trace(json.loads(path.read_text())["traceEvents"])
    kinds = [s.kind for s in trace.steps]
    assert result["piggybacks"] and kinds == sorted(kinds, key=["prefill", "mixed", "decode"].index)
    assert kinds.count("decode") == 6 and kinds.count("mixed") >= 6
    # In the midst of the run, and what had begun goes on when no prompt is left.
    assert all(int(step.range.name.split()[-2]) >= 12 for step in trace.steps[-12:])
    assert any(given_up) and result["unprofiled_us"] > 0  # some prompts were left, and some steps
    for step in trace.steps:
        names = [n.name for n in step.range.walk()]
        assert names.count("attention_prefill [native]") == 2 * (step.kind != "decode")
        assert names.count("attention_decode [native]") == 2 * (step.kind != "prefill")
    calls = {(c["op"], c["phase"]): c["calls"] for c in result["costs"]}
    assert calls["attention_prefill", "mixed"] == calls["attention_decode", "mixed"] == 2 * kinds.count("mixed")


def test_nothing_is_piggybacked_when_requests_arrive_over_time(tmp_path):
    load = Workload("w", 8, (50, 100), (40, 60), rate=100.0)
    _, path = profile_tiny(tmp_path, load, num_kvcache_blocks=100, piggyback_prefill=True)
    steps = Trace(json.loads(path.read_text())["traceEvents"]).steps
    assert [s.kind for s in steps] == ["prefill"] + ["decode"] * 6


@pytest.mark.parametrize("piggybacks, pads", [(False, False), (False, True), (True, False)])
def test_the_pass_without_graphs_piggybacks_and_pads_as_the_one_with_them(piggybacks, pads, tmp_path):
    class Enough(Exception):
        pass

    def launch(job, take):
        jobs.append(job)
        if job.options.get("enforce_eager"):
            raise Enough
        Path(job.trace).write_text('{"traceEvents": []}')
        take("profile", {"eager": False, "piggybacks": piggybacks, "pads_prompts": pads})

    jobs, told = [], []
    job = Job("nanovllm", "custom", "model", (Workload("w", 1, 8, 8),), options={"max_model_len": 64})
    with pytest.raises(Enough):
        make_profile(launch, job, None, "label", tmp_path, False, lambda *said: told.append(said))
    assert told == [("started", "profiling w")]  # what a terminal shows meanwhile
    same = {"piggyback_prefill": piggybacks, "capture_prefill": pads}
    assert [j.options for j in jobs] == [job.options, {"max_model_len": 64, "enforce_eager": True, **same}]


@pytest.mark.parametrize("pads", [False, True])
def test_costs_are_of_the_rows_that_padded_steps_compute(pads, tmp_path):
    """A graph computes the padded rows, so a profile's costs and kernels are to be of these."""
    options = dict(num_kvcache_blocks=40, enforce_eager=True, capture_prefill=pads)
    result, _ = profile_tiny(tmp_path, Workload("w", 1, 8, 8), **options)
    rows = {c["module"]: c["flops"] / c["calls"] for c in result["costs"] if c["phase"] == "prefill"}
    assert result["pads_prompts"] is pads
    assert rows["lm_head"] == 2 * 199 * 48 * (64 if pads else 1)  # vocabulary, hidden size
    assert rows["o_proj"] == 2 * 48 * 64 * (64 if pads else (8 + 1) / 2)  # in the last layer one token's


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


@pytest.fixture(scope="module", params=[False, True], ids=["alone", "piggybacked"])
def on_gpu(tmp_path_factory, request):
    """Four layers of Qwen3-0.6B as they run and without graphs: both traces, and both together in a file."""
    folder = tmp_path_factory.mktemp("profile")
    config = {**PRESETS["qwen3-0.6b"], "num_hidden_layers": 4}
    (folder / "config.json").write_text(json.dumps(config))  # all that random weights need
    load = Workload("w", 64, (100, 400), (50, 400)) if request.param else Workload("w", 1, 128, 64)
    job = Job("nanovllm", "custom", str(folder), (load,), config=config, trace=str(folder / "a.json"))
    results, traces = [], []
    for eager in (False, True):
        options = {"num_kvcache_blocks": 300, "enforce_eager": eager, "piggyback_prefill": request.param}
        if eager:
            options["capture_prefill"] = results[0]["pads_prompts"]
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
@pytest.mark.alone
def test_times_of_a_gpu_add_up_and_none_beats_the_limit(on_gpu):
    (as_run, named), traces, _ = on_gpu
    p = summarize(*traces, as_run, named["costs"], rates(torch.device("cuda"), refresh=True), LOAD, "qwen3-0.6b")
    assert ("mixed" in p.phases()) == as_run["piggybacks"]
    for phase in p.phases():
        (step,) = [s for s in p.steps if s.phase == phase]
        ops = [o for o in p.ops if o.phase == phase]
        assert sum(o.device_us for o in ops) == pytest.approx(step.device_us, rel=1e-3)
        assert step.device_us <= step.wall_us * 1.001
        assert sum(k.us for k in p.kernels if k.phase == phase) == pytest.approx(step.device_us, rel=1e-3)
        # Nearly all of it has an op, the head among them.
        assert sum(o.device_us for o in ops if o.op == "no op") < 0.2 * step.device_us
        heads = [o.device_us for o in ops if o.module == "lm_head"]
        assert sum(heads) > 20
        # With piggybacked prompts the number of rows changes, and with it the provider.
        assert len(heads) == 1 or as_run["piggybacks"]
    if gpu_is_shared():
        pytest.skip("another program uses the GPU, so the rates that are its limit say nothing")
    assert over_limit(p) == []
