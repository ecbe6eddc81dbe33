"""Reading traces: which kernel belongs to which op and step, and what the host did."""

from nanovllm.bench.trace_reader import Trace, busy, flame, gaps, name_graph_kernels, op_of
from tests.bench.traces import EAGER, GRAPH, host, kernel, launch

LINEAR, NORM = ("linear", "o_proj", "torch"), ("rms_norm", "", "triton")


def test_names():
    assert op_of("rms_norm [triton]") == ("rms_norm", "", "triton")
    assert op_of("linear o_proj [torch]") == ("linear", "o_proj", "torch")
    assert op_of("layer 3") is None and op_of("aten::mm") is None and op_of("ModelRunner.execute") is None


def test_kernels_belong_to_the_op_that_launched_them():
    (step,) = Trace(EAGER).steps
    assert [k.name for k in step.kernels] == ["norm", "gemm", "split", "norm"]
    (owners,) = name_graph_kernels([step], [])
    assert owners == [NORM, LINEAR, LINEAR, NORM]
    assert [o for o, _ in step.ops()] == [NORM, LINEAR, NORM]


def test_kernels_of_a_graph_get_the_names_of_an_eager_step():
    steps = Trace(GRAPH).steps
    assert [len(s.kernels) for s in steps] == [5, 5]
    assert name_graph_kernels(steps, Trace(EAGER).steps) == [[NORM, LINEAR, LINEAR, NORM, None]] * 2


def test_a_kernel_that_only_the_graph_has_is_named_by_its_place():
    """A library takes another kernel for another shape: the head's product in a graph, which is padded, is not the
    eager one.
    """
    head, sample = ("linear", "lm_head", "triton"), ("sample", "", "triton")
    eager = [
        *EAGER, host("copy", 81, 1, "cuda_runtime", correlation=8), kernel("index", 230, 2, 8),
        host("linear lm_head [triton]", 83, 5), launch(84, 5), kernel("vector", 235, 70, 5),
        host("sample [triton]", 90, 5), launch(91, 6), kernel("draw", 310, 5, 6),
    ]  # fmt: skip
    graph = [
        *GRAPH[:6], kernel("gather", 121, 3, 9), kernel("memset", 125, 1, 9), kernel("nvjet", 127, 80, 9),
        kernel("draw", 210, 5, 9), kernel("advance", 216, 9, 9),
    ]  # fmt: skip
    (step,) = Trace(graph).steps
    (owners,) = name_graph_kernels([step], Trace(eager).steps)
    assert dict(zip((k.name for k in step.kernels), owners)) == {
        "norm": NORM, "gemm": LINEAR, "split": LINEAR, "gather": None, "memset": None, "nvjet": head, "draw": sample,
        "advance": None,
    }  # fmt: skip


def test_the_eager_step_of_the_same_size_names_kernels():
    first = [host("decode: 9 sequences", 0, 100), host("softmax [triton]", 10, 10)]
    other = [*first, launch(12, 1), kernel("norm", 200, 4, 1)]
    later = [{**e, "ts": e["ts"] + 1000, "args": {"correlation": e["args"].get("correlation", 0) + 50}} for e in EAGER]
    owners = name_graph_kernels(Trace(GRAPH).steps, Trace([*other, *later]).steps)
    assert owners[0][0] == NORM


def test_busy_and_gaps_with_streams_that_overlap():
    kernels = Trace(
        [kernel("a", 0, 10, 1), kernel("b", 5, 10, 2), kernel("c", 20, 1, 3), kernel("d", 20.5, 0.2, 4)]
    ).kernels
    assert busy(kernels) == 16 and gaps(kernels) == [5]


def test_flame_adds_up_what_has_one_name():
    layers = [host("layer 0", 1, 3), host("layer 1", 5, 4)]
    tree = flame(Trace([host("decode: 1 sequences", 0, 10), *layers, host("x", 6, 1)]).steps)
    (step,) = tree["children"]
    assert (step["name"], step["us"]) == ("decode step", 10)
    assert step["children"] == [{"name": "layer", "us": 7, "children": [{"name": "x", "us": 1, "children": []}]}]
