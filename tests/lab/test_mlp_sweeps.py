"""The sweeps of an MLP: what is run is the arithmetic that is said, and the shapes are the ones asked for."""

import json

import pytest
import torch
import torch.nn.functional as F

from nanovllm.cli.lab_show_mlp import in_words, show
from nanovllm.hardware.measured_rates import Rates
from nanovllm.lab import mlp_sweeps
from nanovllm.lab.mlp_sweeps import SWEEPS, Point, Shape, TrainingRun, run_sweeps

CPU = torch.device("cpu")
BASE = Shape(steps=1, layers=2, batch=4, dim=8)


RATES = Rates("a test", 1e10, 1e10, 1e10, {"float32": 1e11})


@pytest.fixture(autouse=True)
def fixed_rates(monkeypatch):
    monkeypatch.setattr(mlp_sweeps, "rates", lambda device, dtypes: RATES)


def sweeps(**arguments):
    return run_sweeps(BASE, CPU, seed=1, budget={"cpu": 0.0}, **arguments)


@pytest.mark.parametrize("shape", [Shape(1, 1, 8, 16), Shape(2, 3, 4, 32)])
def test_flops_are_those_that_pytorch_counts(shape):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        TrainingRun(shape, CPU, torch.float32, seed=1)()
    assert counter.get_total_flops() == shape.flops


def test_a_step_is_forward_and_backward():
    run = TrainingRun(Shape(steps=3, layers=2, batch=4, dim=8), CPU, torch.float32, seed=7)
    loss = run()
    weights = [w.detach().clone().requires_grad_() for w in run.weights]
    x = run.inputs
    for weight in weights:
        x = F.gelu(x @ weight)
    expected = x.square().mean()
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for got, want in zip(run.weights, weights):
        torch.testing.assert_close(got.grad, want.grad)  # of the last step alone, not the sum


@pytest.mark.parametrize("limit, unit, rate", [(1e11, "GFLOP/s", "2.50"), (1e13, "TFLOP/s", "0.00")])
def test_rates_have_the_unit_of_the_device(limit, unit, rate, capsys):
    """A CPU's rates in TFLOP/s were 0.00."""
    shape = Shape(steps=1, layers=2, batch=5, dim=50)
    point = Point(shape, seconds=shape.flops / 2.5e9, ratio=1.0, flops_ratio=1.0, share=0.02)
    rates = Rates("a test", 1e10, 1e10, 1e10, {"float32": limit})
    show(mlp_sweeps.Sweeps(rates, CPU, torch.float32, shape, {"batch": (point,)}))
    printed = capsys.readouterr().out
    assert f"limit of matrix products: {limit / {'G': 1e9, 'T': 1e12}[unit[0]]:.2f} {unit}" in printed
    head, _, row = printed.splitlines()[-3:]
    assert head.split()[-3:] == [unit, "of", "limit"] and row.split()[-2:] == [rate, "2%"]


def test_sweeps_change_one_number_at_a_time():
    result = sweeps(factors=(1, 3))
    assert list(result.points) == list(SWEEPS)
    for name, (first, last) in result.points.items():
        assert first.shape == BASE and first.ratio == first.flops_ratio == 1
        changed = {n for n in SWEEPS if getattr(last.shape, n) != getattr(BASE, n)}
        assert changed == {name} and getattr(last.shape, name) == 3 * getattr(BASE, name)
        assert last.flops_ratio == last.shape.flops / BASE.flops
        assert last.share == pytest.approx(last.shape.flops / last.seconds / 1e11)
    document = json.loads(json.dumps(result.as_dict()))
    assert document["sweeps"]["dim"][1]["flops"] == 9 * BASE.flops and document["base"]["dim"] == 8


def test_profile_at_both_ends():
    result = sweeps(names=["layers"], factors=(1, 2, 4), profile=True)
    first, middle, last = result.points["layers"]
    assert not middle.ran
    products = [next(k.count for k in p.ran if k.name == "aten::mm") for p in (first, last)]
    assert products == [3 * 2 - 1, 3 * 8 - 1]


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"names": ["width"]}, "sweep: expected one of steps, layers, batch, dim, not 'width'"),
        ({"factors": ()}, "factors: expected ascending"),
        ({"factors": (2, 1)}, "not 2,1"),
        ({"factors": (1, 10000)}, "steps: expected a number from 1 to 1024, not 10000"),
    ],
)
def test_bad_arguments(arguments, said):
    with pytest.raises(ValueError, match=said):
        sweeps(**arguments)


def test_words_for_growth():
    def points(ratio):
        return (Point(BASE, 1.0, 1.0, 1.0), Point(BASE, ratio, ratio, 8.0))

    assert "in proportion; the limit is the same" in in_words("batch", points(8.2))
    assert "less than in proportion; the small end" in in_words("dim", points(2.0))
    assert "more than in proportion" in in_words("batch", points(12.0))
    up_and_down = (*points(30.85)[:1], Point(BASE, 30.85, 30.85, 2.0), Point(BASE, 20.0, 20.0, 4.0))
    assert in_words("batch", up_and_down).startswith("More arithmetic took less time: the times vary too much.")
    assert in_words("batch", points(0.9)).startswith("8 times the arithmetic takes 0.9 times as long")  # a little noise
    assert in_words("batch", (Point(BASE, 1.0, 1.0, 1.0), Point(BASE, reason="out of memory"))) is None
