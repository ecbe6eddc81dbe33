"""A profile's numbers from made-up traces and costs."""

import dataclasses

import pytest

from nanovllm.bench.profile import summarize
from nanovllm.bench.profile_report import over_limit
from nanovllm.bench.trace_reader import Trace
from tests.bench.traces import EAGER, GRAPH, LOAD, RATES, host, kernel, launch

RESULT = {"about": {"device": "GPU", "dtype": "bfloat16"}, "unprofiled_us": None, "memory": []}


def launched_early(*more):
    """Two products, a norm between them that waits, and the second one, which reads its weights while it waits."""
    return [
        host("decode: 1 sequences", 0, 50),
        host("linear a [triton]", 1, 5), launch(2, 1), kernel("a", 100, 20, 1),
        host("rms_norm [triton]", 8, 5), launch(9, 2), kernel("norm", 101, 21, 2),
        host("linear b [triton]", 15, 5), launch(16, 3), kernel("b", 110, 17, 3), *more,
    ]  # fmt: skip


def profile_of(events, costs):
    trace = Trace(events)
    return summarize(trace, trace, RESULT, costs, RATES, LOAD, "m")


def linear_cost(module, megabytes):
    size = round(megabytes * 1e6)
    names = {"op": "linear", "module": module, "provider": "triton", "phase": "decode"}
    return {**names, "calls": 1, "cold_bytes": size, "bytes": size, "flops": 0, "fp8_flops": 0}


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


def test_products_of_8_bit_floats_have_a_floor_of_their_own():
    product = {**linear_cost("o_proj", 1), "provider": "torch", "flops": 2_000_000_000}

    def floor(fp8_flops, **matmul):
        rates = dataclasses.replace(RATES, matmul=RATES.matmul | matmul)
        trace = Trace(EAGER)
        found = summarize(trace, trace, RESULT, [{**product, "fp8_flops": fp8_flops}], rates, LOAD, "m")
        return next(o.floor_us for o in found.ops if o.op == "linear")

    assert floor(0, float8=4e14) == pytest.approx(20) and floor(2_000_000_000, float8=4e14) == pytest.approx(5)
    assert floor(2_000_000_000) == pytest.approx(1)  # their rate is not known: the bytes alone


def test_a_profile_by_hand():
    norm = {"op": "rms_norm", "module": "", "provider": "triton", "phase": "decode"}
    norm |= {"calls": 2, "cold_bytes": 0, "fp8_flops": 0}
    product = {**linear_cost("o_proj", 3), "provider": "torch", "cold_bytes": 2_000_000, "flops": 800_000_000}
    costs = [{**norm, "bytes": 4_000_000, "flops": 0}, product]
    p = summarize(Trace(GRAPH), Trace(EAGER), RESULT, costs, RATES, LOAD, "m")
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


def test_what_lies_between_two_recordings_is_no_gap():
    events = [host("recorded window", 0, 60), *GRAPH[:7], host("recorded window", 140, 80), *GRAPH[7:]]
    (step,) = summarize(Trace(events), Trace(EAGER), RESULT, [], RATES, LOAD, "m").steps
    assert step.count == 2 and step.wall_us == 30 and step.gaps_us == pytest.approx(4)
    assert step.idle == pytest.approx(4 / 30)
