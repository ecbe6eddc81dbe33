"""The harness that verifies providers: it must find what is wrong, and every provider here must pass."""

import ctypes
import dataclasses
import math
import re

import pytest
import torch

from nanovllm.kernels import Op, Provider, all_ops
from nanovllm.kernels.op.inputs import Cost, Inputs
from nanovllm.kernels.testing.verify import Case, cases, results_of, verify, verify_op

CPU = torch.device("cpu")


def double(x: torch.Tensor) -> torch.Tensor:
    """Twice x."""
    return 2 * x


def declared(native=double, inputs=None, **more):
    inputs = inputs or Inputs(
        lambda t, rows, size: {"x": t.normal(rows, size)}, small=[(1, 1), (3, 40), (0, 5)], decode=[(9, 64)]
    )
    return Op(native, arguments={"x": "[..., n]"}, inputs=inputs, cost=lambda x: Cost(2 * x.numel()), **more)


def failures(fn, op=None):
    return [f"{v.case}: {v.failure}" for v in verify_op(op or declared(), Provider("it", fn), CPU) if v.failure]


def test_what_is_right_passes_within_the_tolerance():
    verdicts = verify_op(declared(), Provider("it", lambda x: x + x), CPU)
    assert len(verdicts) == 3 * (3 * 4 + 1) + 2 and not [v for v in verdicts if v.failure or v.skipped]
    assert max(v.error for v in verdicts) < 0.2


def test_small_errors_and_wrong_elements_fail():
    assert any("times the tolerance" in f for f in failures(lambda x: 2 * x * (1 + 1e-3)))

    def last_is_wrong(x):
        y = 2 * x
        y[..., -1:] = 0
        return y

    assert failures(last_is_wrong)


def test_a_loss_of_precision_everywhere_fails_and_one_where_values_cancel_does_not():
    off = failures(lambda x: x * 2.06)
    said = r"the root of the mean square of the result's errors in row \[\d+\] is ([\d.e-]+), allowed ([\d.e-]+); "
    found = [m for f in off if "bfloat16" in f and (m := re.search(r"error ([\d.e+]+) times .*" + said, f))]
    assert found and all(float(m[2]) / float(m[3]) == pytest.approx(float(m[1]), rel=0.1) for m in found)
    assert all(re.search(r"(rows|elements) (is|are) wrong", f) for f in off)

    def difference(x):
        return (x + 8 * x.flip(-1)) - 8 * x.flip(-1)  # of which the second parts cancel, but for their rounding

    inputs = Inputs(lambda t, rows, size: {"x": t.normal(rows, size)}, small=[(3, 4)], decode=[], scales=())
    small = Op(
        difference, arguments={"x": "[..., n]"}, inputs=inputs, cost=lambda x: Cost(2 * x.numel()), magnitude=8.0
    )
    assert not failures(difference, small)


# Each made one of these references wrong: the tail of an activation, or a difference, as a row's only element.
UNLUCKY = {
    "element_wise_mul_add": (1000, 1028), "fused_activation": (1012, 1025), "gelu_and_mul": (1010, 1116),
    "silu_and_mul": (1038, 1048), "fused_add_gelu": (1038, 1070, 101), "linear_silu_and_mul": (1008, 1043),
    "add_rms_norm_gate_up": (1015,),
}  # fmt: skip


@pytest.mark.parametrize("name", UNLUCKY)
def test_no_draw_makes_a_reference_wrong(name):
    op = all_ops()[name]
    for seed in UNLUCKY[name]:
        verdicts = verify_op(op, op.providers["native"], CPU, seed=seed)
        assert not [f"{v.case}: {v.failure}" for v in verdicts if v.failure]


@pytest.mark.parametrize("cancels", [False, True])
def test_a_row_of_one_element_is_looked_at(cancels):
    """By the arguments' magnitude only where the op says that its results may be small."""
    inputs = Inputs(lambda t, rows, size: {"x": t.normal(rows, size)}, small=[(64, 1)], decode=[], scales=())
    op = declared(cancels=cancels, inputs=inputs)

    # Less than a rounding of the largest, and most of the smallest.
    assert bool(failures(lambda x: 2 * x + 4e-6, op)) != cancels
    # Dtypes, layouts; one with two leading dimensions.
    assert len(failures(lambda x: -2 * x, op)) == len(failures(torch.zeros_like, op)) == 3 * 2 + 2


def test_unwritten_memory_fails():
    def leaves_a_column(x):
        y = torch.empty_like(x)
        y[..., :-1] = 2 * x[..., :-1]
        return y

    assert all("error inf" in f for f in failures(leaves_a_column)) and len(failures(leaves_a_column)) > 10


def test_a_kernel_that_takes_the_elements_of_a_row_to_be_adjacent_fails():
    def adjacent(x):
        return 2 * x.as_strided(x.shape, (*x.stride()[:-1], 1))

    wrong = [v for v in verify_op(declared(), Provider("it", adjacent), CPU) if v.failure]
    assert wrong and {v.case.apart for v in wrong} == {True} and str(wrong[0].case).endswith(" elements apart")


def test_writing_past_the_end_fails():
    def one_more(x):
        y = torch.empty(x.shape, dtype=x.dtype)
        y.copy_(2 * x)
        if x.numel():
            ctypes.memset(y.data_ptr() + y.nbytes, 3, 1)
        return y

    found = failures(one_more)
    assert found and all(f.endswith("a store with a wrong or missing mask, or a wrong offset?") for f in found)
    assert all(re.search(r": wrote 1 element past the end of a b?float\d\d tensor: ", f) for f in found)


def test_writing_to_an_argument_fails_unless_it_is_declared():
    def in_place(x):
        return x.mul_(2)

    assert any("wrote to its argument x" in f for f in failures(in_place))
    assert not failures(in_place, declared(reuses=("x",)))


def test_other_results_fail():
    assert any("has shape" in f for f in failures(lambda x: 2 * x[:, :1]))
    assert any("dtype float32 instead of bfloat16" in f for f in failures(lambda x: 2 * x.float()))
    assert any("returned 2 tensors instead of a tensor" in f for f in failures(lambda x: (x, x)))
    assert all("returned None instead of a tensor: is a `return` missing?" in f for f in failures(lambda x: None))
    assert all("returned a float in a list instead of a tensor" in f for f in failures(lambda x: [1.0]))
    assert all("returned a str instead of a tensor" in f for f in failures(lambda x: "2x"))
    assert all(
        "NotImplementedError: no" in f for f in failures(lambda x: (_ for _ in ()).throw(NotImplementedError("no")))
    )


def test_an_error_names_the_line_that_raised_it():
    def raises(x):
        return undefined_name  # noqa: F821

    (said,) = {f.partition(": ")[2] for f in failures(raises)}
    assert said.startswith("NameError: name 'undefined_name' is not defined, at test_verify.py:")
    assert "`return undefined_name" in said


def test_a_kernel_without_its_decorator_is_named():
    def kernel(x):
        pass

    assert all("is `@triton.jit` missing above the kernel?" in f for f in failures(lambda x: kernel[(1,)](x)))


def test_overflow_must_be_overflow():
    op = declared()
    big = Case((3, 40), torch.float16, scale=6e4)
    assert not verify(op, Provider("it", double), CPU, big).failure
    assert verify(op, Provider("it", lambda x: (2 * x).nan_to_num(0, 0, 0)), CPU, big).failure


def test_written_arguments_are_results():
    def fill(x: torch.Tensor, y: torch.Tensor) -> None:
        """y = x, in place."""
        y.copy_(x)

    inputs = Inputs(lambda t, n: {"x": t.normal(n), "y": t.normal(n)}, small=[(5,)])
    op = Op(fill, inputs=inputs, mutates=("y",))
    assert not failures(fill, op)
    assert failures(lambda x, y: None, op) and failures(lambda x, y: y[1:].copy_(x[1:]) and None, op)


def test_a_provider_that_cannot_run_here_is_an_error_with_its_reason():
    provider = Provider("it", double, support=lambda device: f"no kernel for {device}")
    with pytest.raises(ValueError, match="nothing was verified: it: no kernel for cpu"):
        verify_op(declared(), provider, CPU)


def test_what_is_not_accepted_is_skipped():
    provider = Provider("it", lambda x: math.nan, accepts=lambda x: "never")
    assert {v.skipped for v in verify_op(declared(), provider, CPU)} == {"never"}


def test_cases_cover_dtypes_layouts_magnitudes_and_shapes():
    op = declared()
    few, many = list(cases(op, full=False)), list(cases(op, full=True))
    assert {c.dtype for c in few} == {torch.float32, torch.float16, torch.bfloat16}
    assert {(c.strided, c.apart) for c in few} == {(False, False), (True, False), (True, True)}
    assert {c.scale for c in few} == {1.0, 1e-3, 50.0}
    assert {c.shape for c in many} - {c.shape for c in few} == {(9, 64)}


def test_a_provider_that_flattens_leading_dimensions_fails():
    """In every op whose declaration has such, also if few cases are wanted."""
    assert failures(lambda x: (2 * x).reshape(-1, x.shape[-1])) == [
        "1x1 bfloat16 strided without the 1: the result has shape [1, 1] instead of [1]",
        "6x40 float16 with 6 as 2x3: the result has shape [6, 40] instead of [2, 3, 40]",
    ]
    for op in (o for o in all_ops().values() if o.inputs and any("..." in p for p in o.check.patterns.values())):
        for quick in (False, True):
            led = {case.leading for case in cases(op, full=False, quick=quick) if case.leading is not None}
            assert led == {(), (2, 3)}, op.name


def test_leading_dimensions_have_every_number_once():
    """Of a strided case in another order in memory, so that no matrix has the rows."""
    op = declared()
    for strided in (False, True):
        case = Case((6, 5), torch.float32, strided=strided, leading=(2, 3))
        x = case.arguments(op, CPU)["x"]
        plain = dataclasses.replace(case, leading=None).arguments(op, CPU)["x"]
        assert x.shape == (2, 3, 5) and (x.stride(0) == 3 * x.stride(1)) != strided
        assert torch.equal(x.transpose(0, 1) if strided else x, plain.view((3, 2, 5) if strided else (2, 3, 5)))
    (one,) = Case((1, 5), torch.float32, leading=()).arguments(op, CPU).values()
    assert one.shape == (5,)


@pytest.mark.parametrize(
    "fn, wrong",
    [
        (lambda x: x * 2.06, "the root of the mean square of the result's errors is 0.0"),
        (lambda x: torch.cat((2 * x[..., :-1], 9 * x[..., -1:]), -1), "the result at [49] is "),
    ],
)
def test_what_is_wrong_with_a_single_dimension_is_said(fn, wrong):
    inputs = Inputs(lambda t, rows, size: {"x": t.normal(rows, size)}, small=[(1, 50)], dtypes=[torch.bfloat16])
    (of_one,) = [f for f in failures(fn, declared(inputs=inputs)) if "without the 1" in f]
    assert wrong in of_one


def test_inputs_without_rows_have_no_other_leading_dimensions():
    flat = Inputs(lambda t, n: {"x": t.normal(n)}, small=[(5,), (0,)])
    assert not failures(double, declared(inputs=flat))

    def needs(numbers):
        return None if numbers["rows"] == 4 else "4 ROWS"

    four = Inputs(lambda t, rows, size: {"x": t.normal(rows, size)}, small=[(4, 8)], needs=needs)
    assert {case.shape for case in cases(declared(inputs=four), full=False)} == {(4, 8)}
    assert not failures(double, declared(inputs=four))
    nothing = Inputs(lambda t: {"x": t.normal(2, 3)}, small=[()])
    assert not failures(double, declared(inputs=nothing))


PAIRS = [(o, p) for o in all_ops().values() for p in o.providers.values() if o.inputs and o.inputs.decode]


@pytest.mark.gpu
@pytest.mark.parametrize("op, provider", PAIRS, ids=lambda x: x.name)
def test_in_a_cuda_graph_with_new_data(op, provider):
    """Captured once, replayed with other inputs of the same shapes: the results are those of the new inputs."""
    device = torch.device("cuda", 0)
    if (reason := provider.support(device)) is not None:
        pytest.skip(reason)
    old, new = (
        Case(op.inputs.decode[0], torch.float32, op.inputs.variants[0], seed=seed).arguments(op, device)
        for seed in (1, 2)
    )
    if provider.accepts is not None and (reason := provider.accepts(**op.records.group(old))) is not None:
        pytest.skip(reason)
    clone = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in new.items()}
    expected = provider.fn(**op.records.group(clone))
    expected = [*results_of(expected), *(clone[name] for name in op.mutates)]
    static = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in old.items()}
    provider.fn(**op.records.group({k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in old.items()}))
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            got = provider.fn(**op.records.group(static))
    except RuntimeError:
        torch.cuda.synchronize()
        if provider.capturable and provider.name != "native":
            raise
        pytest.skip("reads lengths on the host, so it cannot be captured")
    for name, value in static.items():
        if isinstance(value, torch.Tensor):
            value.copy_(new[name])
    graph.replay()
    for g, e in zip([*results_of(got), *(static[name] for name in op.mutates)], expected, strict=True):
        assert torch.equal(*(r.float().nan_to_num() for r in (g, e)))  # 8-bit floats have no nan_to_num on a GPU
