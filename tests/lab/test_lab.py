"""The lessons: every way computes the function, mistakes are found, and what is measured adds up."""

import dataclasses
import json

import pytest
import torch

from nanovllm.hardware.measured_rates import Rates
from nanovllm.lab import way_timing as timing
from nanovllm.lab.check import SHAPES, check, compare, difference
from nanovllm.lab.interpret import check_interpreted
from nanovllm.lab.lesson import LARGEST_DIM, NAMES, WAYS, lesson
from nanovllm.lab.lesson_run import run
from nanovllm.lab.profiled import kernels_that_ran
from nanovllm.lab.traffic import torch_traffic
from nanovllm.lab.way_timing import Limits, measure
from nanovllm.lab.ways import Way, check_names, ways

CPU = torch.device("cpu")
LIMITS = Limits("a test", 1e10, 1e11)


@pytest.fixture
def fixed_rates(monkeypatch):
    rates = Rates("a test", 1e10, 1e10, 1e10, {"float32": 1e11, "float16": 1e11, "bfloat16": 1e11})
    monkeypatch.setattr(timing, "rates", lambda device, dtypes, refresh: rates)


def one(name, way):
    return ways(lesson(name), CPU, torch.float32, [way])[0]


@pytest.mark.parametrize("name", NAMES)
def test_torch_ways_are_right(name):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for way in ("plain", "torch"):
            found = check(lesson(name), one(name, way), CPU, dtype, seed=0)
            assert found.cases == len(SHAPES) and not found.failures and found.error <= 1, (dtype, way)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_triton_is_right_in_the_interpreter(name):
    pytest.importorskip("triton")
    dtype = torch.float16 if name in ("matmul", "gelu") else torch.float32
    found = check_interpreted(lesson(name), dtype, seed=0)
    assert found.cases == len(SHAPES) and not found.failures and found.how == "interpreter"


@pytest.mark.slow
def test_compile_is_right():
    found = check(lesson("layernorm"), one("layernorm", "compile"), CPU, torch.float32, seed=3)
    assert found.cases == 1 and not found.failures


@pytest.mark.parametrize("name", NAMES)
def test_exact_depends_on_its_own_row_only(name):
    """What `compare_rows` relies on."""
    inputs = lesson(name).inputs(6, 16, torch.float32, CPU, torch.Generator().manual_seed(1))
    first, *others = (t.double() for t in inputs)
    exact = lesson(name).exact
    torch.testing.assert_close(exact(first[[1, 4]], *others), exact(first, *others)[[1, 4]])


def skips_the_last(x):
    y = torch.empty_like(x)
    y[..., :-1] = x[..., :-1] + 1
    return y


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda x: x.cumsum(1), "elements are wrong"),
        (lambda x: torch.full_like(x, torch.nan), "nan instead of"),
        (lambda x: (x + 1)[:, 1:], "gave the shape"),
        (lambda x: x.double() + 1, "gave torch.float64"),
        (lambda x: x.add_(1), "wrote to its argument"),
        (skips_the_last, "nan instead of"),  # never written: it shows because memory is poisoned
    ],
)
def test_mistakes_are_found(call, said):
    right = dataclasses.replace(lesson("gelu"), exact=lambda x: x + 1)
    inputs = (torch.randn(3, 7),)
    assert compare(right, Way("w", lambda x: x + 1), inputs) == (pytest.approx(0, abs=0.1), None)
    error, failure = compare(right, Way("w", call), inputs)
    assert error > 1 and said in failure


def test_difference_is_a_multiple_of_the_tolerance():
    want = torch.ones(1, 4, dtype=torch.float64)
    got = want.float()
    got[0, 2] += 4e-5  # allowed: 1e-5 * (1 + 1)
    error, failure = difference(got, want)
    assert error == pytest.approx(2, rel=0.02) and "at [0, 2]; 1 of 4" in failure
    assert difference(want.half(), want) == (0, None)


def test_what_is_wrong_is_not_timed_and_said(fixed_rates):
    broken = dataclasses.replace(lesson("gelu"), plain=lambda x: x * 0.5)
    result = run(broken, CPU, sizes=[16], names=["plain", "torch"])
    plain, own = result.rows
    assert plain.timing is None and "wrong" in plain.reason and own.timing is not None
    assert any(line.startswith("plain: 3x7: ") for line in result.wrong)


def test_a_way_that_fails_is_a_row_and_the_others_go_on(fixed_rates):
    def fails(x):
        raise RuntimeError("out of registers\nand more")

    result = run(dataclasses.replace(lesson("gelu"), plain=fails), CPU, sizes=[16], names=["plain", "torch"])
    assert result.wrong == ["plain: RuntimeError: out of registers"]
    assert [r.timing is None for r in result.rows] == [True, False]

    def fails_later(x):
        return lesson("gelu").own(x) if x.shape[1] != 40 else fails(x)

    result = run(dataclasses.replace(lesson("gelu"), plain=fails_later), CPU, sizes=[16, 40], names=["plain"])
    assert result.wrong == ["plain at 40: failed: RuntimeError: out of registers"]


def test_compile_without_a_compiler_is_a_reason(fixed_rates, monkeypatch):
    def no_compiler(*args, **options):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch, "compile", no_compiler)
    result = run(lesson("gelu"), CPU, sizes=[16], names=["compile"])
    assert result.wrong == [] and result.checks[0].reason == "torch.compile failed: RuntimeError: no C++ compiler"
    assert result.rows[0].reason == result.checks[0].reason


@pytest.mark.parametrize("name, passes", [("gelu", 22), ("softmax", 8)])
def test_bytes_of_eager_operations(name, passes):
    """passes: each operation reads its tensors and writes its result."""
    x = torch.empty(256, 256)
    moved, operations = torch_traffic(lesson(name).plain, x)
    assert moved / x.nbytes == pytest.approx(passes, rel=0.02) and operations > 3
    moved, operations = torch_traffic(lesson(name).own, x)
    assert (moved, operations) == (2 * x.nbytes, 1)


def test_bytes_of_matmul_and_broadcasts():
    a = torch.empty(64, 64)
    assert torch_traffic(torch.matmul, a, a) == (3 * a.nbytes, 1)
    assert torch_traffic(lambda x: x.expand(64, 64) + 1, torch.empty(1, 64))[0] == a.nbytes + 64 * 4  # read once
    assert torch_traffic(lambda x: x.view(-1)[3:], a) == (0, 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_row_adds_up(name):
    row = measure(lesson(name), one(name, "torch"), 64, CPU, torch.float32, LIMITS, seed=1)
    cost = lesson(name).cost(64, 4)
    assert (row.least_bytes, row.flops) == (cost.bytes, cost.flops)
    assert row.limit == max(cost.bytes / 1e10, cost.flops / 1e11)
    assert row.share == pytest.approx(row.limit / row.timing.median) and row.error <= 1
    assert row.timing.p20 <= row.timing.median <= row.timing.p80
    assert row.counted and row.bytes >= 0.99 * cost.bytes
    assert row.ran and all(k.count >= 1 and k.seconds >= 0 for k in row.ran)
    json.dumps(row.as_dict())


def test_plain_matmul_has_a_largest_size_with_a_reason():
    row = measure(lesson("matmul"), one("matmul", "plain"), 1025, CPU, torch.float32, LIMITS, seed=1)
    assert row.timing is None and row.reason.startswith("only up to 1024: ")


def test_which_operators_ran():
    x = torch.randn(32, 32)
    ran = {k.name: k.count for k in kernels_that_ran(lambda a: torch.exp(a) + torch.exp(a.t()), [x])}
    assert ran == {"aten::exp": 2, "aten::add": 1}  # the transposed view is no work
    assert [k.name for k in kernels_that_ran(lambda a: torch.softmax(a, 1), [x])] == ["aten::_softmax"]


def test_an_interrupt_keeps_what_is_there(fixed_rates):
    def tell(line):
        if line == "timing torch at 16":
            raise KeyboardInterrupt

    result = run(lesson("gelu"), CPU, sizes=[16], names=["plain", "torch"], tell=tell)
    assert result.interrupted and len(result.checks) == 2 and [r.way for r in result.rows] == ["plain"]


def test_nothing_is_said_to_be_compiled_where_nothing_is(fixed_rates):
    said = []
    run(lesson("gelu"), CPU, sizes=[16], names=["plain", "torch"], tell=said.append)
    assert "timing torch at 16" in said and not any("compiling" in line for line in said)


def test_result_as_json(fixed_rates):
    result = run(lesson("softmax"), CPU, sizes=[24, 8], names=["torch", "cuda", "triton"], gpu="a100", seed=5)
    assert check_names(None) == WAYS
    document = json.loads(json.dumps(result.as_dict()))
    assert (document["lesson"], document["seed"], document["compiled_for"]) == ("softmax", 5, "nvidia-a100")
    expected = [(way, dim) for dim in (8, 24) for way in ("torch", "cuda", "triton")]
    assert [(r["way"], r["dim"]) for r in document["rows"]] == expected
    for r in document["rows"]:  # each has a time or a reason
        assert (r["timing"] is None) == (r["reason"] is not None)
    assert {c["way"] for c in document["checks"]} == {"torch", "cuda", "triton"}
    for listing in document["ptx"]:
        assert listing["reason"] or (".target sm_80" in listing["ptx"] and listing["lines"] and listing["resources"])
    assert [x["way"] for x in document["ptx"]] == ["cuda", "triton"]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (dict(sizes=[0]), f"sizes: expected numbers from 1 to {LARGEST_DIM}, not 0"),
        (dict(sizes=[LARGEST_DIM + 1]), "not 32769"),
        (dict(sizes=[]), "sizes: expected at least one"),
        (dict(sizes=[1], names=["tritn"]), "way: expected one of plain, torch, compile, cuda, triton, not 'tritn'"),
        (dict(dtype=torch.float64), "dtype: gelu takes float32, bfloat16, float16, not float64"),
        (dict(gpu="h1000"), "did you mean 'h100'"),
    ],
)
def test_bad_arguments(arguments, said):
    with pytest.raises(ValueError, match=said):
        run(lesson("gelu"), CPU, **arguments)
    with pytest.raises(ValueError, match="lesson: expected one of gelu, softmax"):
        lesson("gleu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", WAYS)
def test_all_ways_on_a_gpu(name, way):
    device = torch.device("cuda", torch.cuda.current_device())
    for dtype in lesson(name).dtypes:
        (candidate,) = ways(lesson(name), device, dtype, [way])
        if candidate.reason is not None:
            pytest.skip(candidate.reason)
        found = check(lesson(name), candidate, device, dtype, seed=0)
        assert found.cases and not found.failures, found


@pytest.mark.gpu
@pytest.mark.alone
def test_a_gpu_names_its_kernels(fixed_rates):
    device = torch.device("cuda", torch.cuda.current_device())
    result = run(lesson("gelu"), device, sizes=[1024], names=["plain", "triton"])
    plain, triton = result.rows
    assert any("gelu_kernel" in k.name for k in triton.ran) and sum(k.count for k in triton.ran) == 1
    assert sum(k.count for k in plain.ran) > 5 and plain.timing.median > triton.timing.median
