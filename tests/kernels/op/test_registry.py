"""Ops, their providers, and the registry of both."""

import inspect
import re

import pytest
import torch

from nanovllm.kernels import KERNELS_AVAILABLE, Op, Provider, all_ops, op, unavailable_reason
from nanovllm.kernels.op.provider import NATIVE, bind
from nanovllm.kernels.op.selected_kernels import Kernels

CPU = torch.device("cpu")


def double(x):
    """Twice x."""
    return 2 * x


def test_an_op_shows_its_shapes_and_providers(capsys):
    from nanovllm.kernels import resolve_kernels, rms_norm

    shown = "<op rms_norm(x [..., size], weight [size], eps); providers: native, triton"
    assert repr(rms_norm).startswith(shown)
    help(rms_norm)
    text = capsys.readouterr().out
    assert shown in text and "added to the mean of the squares" in text
    kernels = resolve_kernels(CPU, False)
    assert (
        repr(kernels)
        == str(kernels)
        == (f"native  {len(kernels.providers)} ops: PyTorch references\n`.providers` names the provider of every op.")
    )


def test_the_kernels_of_an_engine_are_few_lines_whose_ops_are_those_with_a_custom_kernel():
    providers = {f"op_{i:02}": "triton" for i in range(20)} | {
        "linear": "<onednn>",
        "softmax": NATIVE,
        "sample": NATIVE,
    }
    kernels = Kernels({op: (Provider(name, double), double) for op, name in providers.items()})
    lines = str(kernels).splitlines()
    assert max(map(len, lines)) <= 80 and lines[0].startswith("triton    op_00, op_01,") and lines[1].endswith("op_19")
    assert lines[2:-1] == ["<onednn>  linear", "native    2 other ops: PyTorch references"]
    assert kernels.summary() == "triton (20 ops), <onednn> (linear), native (2 ops)"
    kernels = Kernels({"softmax": (Provider(NATIVE, double), double)})
    assert kernels.summary() == "native (1 op)" and str(kernels).startswith("native  1 op: PyTorch references\n")


def test_the_kernels_of_an_engine_as_a_table_of_a_notebook():
    names = {"linear": "<onednn>", "softmax": NATIVE, "sample": NATIVE}
    page = Kernels({op: (Provider(name, double), double) for op, name in names.items()})._repr_html_()
    assert "<td>&lt;onednn&gt;</td>" in page and "<summary>2 PyTorch references</summary>sample, softmax<" in page


def test_a_call_with_other_arguments_names_the_op_and_its_parameters():
    with pytest.raises(TypeError, match=r"^double: missing a required argument: 'x'; it takes \(x\)$"):
        Op(double)()
    with pytest.raises(TypeError, match=r"^double: too many positional arguments; it takes \(x\)$"):
        Op(double)(1, 2)


def test_providers_register_beside_the_reference():
    declared = Op(double)

    @declared.provider("sum")
    def by_adding(x):
        return x + x

    @declared.provider("shift", support=lambda device: f"integers only, not {device}", architectures="sm_90")
    def by_shifting(x):
        return x << 1

    with pytest.raises(
        ValueError, match=r"provider 'wrong' of op 'double': expected the parameters \(x\), not \(y, z\)"
    ):
        declared.provider("wrong")(lambda y, z: y)

    assert by_adding(3) == 6 and list(declared.providers) == [NATIVE, "sum", "shift"]
    assert declared.providers["sum"].fn is by_adding and declared.providers["sum"].support(CPU) is None
    assert declared.providers["shift"].support(CPU) == "integers only, not cpu"
    assert declared(1.5) == 3.0 and declared.name == "double" and declared.__doc__ == "Twice x."
    assert Provider("half", "statistics:mean").fn([1, 3]) == 2  # imported when it is wanted
    with pytest.raises(AttributeError, match="^statistics has no function 'double'; write it there"):
        Provider("triton", "statistics:double").fn  # noqa: B018


def test_names_are_given_once():
    declared = Op(double)
    declared.provider("sum")(double)
    for name in ("sum", NATIVE):
        with pytest.raises(ValueError, match=f"'double' already has a provider '{name}'"):
            declared.provider(name)(double)

    def rms_norm():
        pass

    with pytest.raises(ValueError, match="'rms_norm' is declared twice"):
        all_ops()
        op(rms_norm)


@pytest.mark.parametrize("name", ["a;b", "a=b", "a,b", "*", " a", "a ", "", None, 3])
def test_a_provider_that_the_environment_could_not_name_is_refused(name):
    declared = Op(double)
    with pytest.raises(ValueError, match=re.escape(f"provider {name!r}: expected a name without ';', '=', ',', '*'")):
        declared.provider(name)(double)
    assert list(declared.providers) == [NATIVE]


@pytest.mark.parametrize("architectures", ["", "sm80", "hopper", "sm_90+,", "SM_90", ("sm_90",), None, 90])
def test_architectures_that_say_nothing_are_refused(architectures):
    with pytest.raises(ValueError, match=re.escape(f"provider 'it': architectures={architectures!r}: expected 'any'")):
        Op(double).provider("it", architectures=architectures)(double)
    for known in ("any", "sm_80+", "sm_90a", "sm_80, sm_90", "sm_100f,sm_120"):
        Op(double).provider("it", architectures=known)(double)


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"archs": "sm_80+"}, "provider 'x' got an unknown argument 'archs'; known are support, accepts,"),
        ({"acepts": bool}, "provider 'x' got an unknown argument 'acepts'; did you mean 'accepts'?"),
        ({"support": 3}, "provider 'x': support=3: expected a function of the device that returns None or the reason"),
        (
            {"accepts": "all"},
            "provider 'x': accepts='all': expected a function of the arguments of a call that returns",
        ),
    ],
)
def test_arguments_of_a_provider_that_mean_nothing_are_refused(arguments, said):
    declared = Op(double)
    with pytest.raises((TypeError, ValueError)) as error:
        declared.provider("x", **arguments)(double)
    assert str(error.value).startswith(said) and "x" not in declared.providers


def test_a_pattern_that_is_none_is_refused_when_the_op_is_declared():
    with pytest.raises(ValueError, match=r"^arguments: '\[n' is no pattern; expected such as '\[..., size\]'"):
        Op(double, arguments={"x": "[n"})


def test_all_ops_are_declared_documented_and_read_only():
    ops = all_ops()
    assert set(ops) >= {
        "add_rms_norm", "attention_decode", "attention_prefill", "embedding", "rms_norm", "rotary_embedding", "sample",
        "silu_and_mul", "store_kvcache",
    }  # fmt: skip
    assert all(name == declared.name and declared.__doc__ for name, declared in ops.items())
    with pytest.raises(TypeError):
        ops["another"] = ops["sample"]


def test_fused_ops_name_ops():
    for declared in all_ops().values():
        assert set(declared.fuses) <= set(all_ops()) - {declared.name}


def test_before_python_3_11_the_note_is_in_the_message():
    class Old(ValueError):
        add_note = None

    def fails(error):
        raise error

    call, note = bind("it", Provider("mine", fails)), "op 'it', provider 'mine', called with ("
    for error, text in ((Old("x: expected 3"), ["x: expected 3"]), (Old(), []), (Old(2, "no file"), ["2", "no file"])):
        with pytest.raises(Old) as caught:
            call(error)
        *lines, last = str(caught.value).split("\n")
        assert lines == text and last.startswith(note)


def test_available_or_why_not():
    assert KERNELS_AVAILABLE == torch.cuda.is_available() == (unavailable_reason() is None)
    assert torch.cuda.is_available() or "no CUDA device" in unavailable_reason()


def test_a_provider_can_be_asked_by_name_whether_it_accepts_a_call():
    for declared in all_ops().values():
        names = inspect.signature(declared.native).parameters
        for provider in declared.providers.values():
            if provider.accepts is not None:
                inspect.signature(provider.accepts).bind(**dict.fromkeys(names))


CELL = """
import torch
from nanovllm.kernels import op

@op
def tripled(x: torch.Tensor) -> torch.Tensor:
    return {factor} * x

@tripled.provider("mine", support=lambda device: None)
def mine(x):
    return {factor} * x
"""
PROVIDER_CELL = """
from nanovllm.kernels import silu_and_mul

@silu_and_mul.provider("mine")
def mine(gate_up):
    return gate_up[..., :2] + {factor}
"""


@pytest.mark.parametrize("cell, call", [(CELL, "tripled"), (PROVIDER_CELL, "silu_and_mul")])
@pytest.mark.parametrize("prompt", [True, False])
def test_a_cell_of_a_notebook_can_be_run_again(cell, call, prompt, warm_python):
    """In a script, two providers or ops of a name are a mistake still."""
    program = f"import sys, torch\n{'sys.ps1 = 1' if prompt else ''}\n"
    for factor in (2, 3):
        use = "torch.ops.nanovllm.tripled(x), " if call == "tripled" else ""
        program += cell.format(factor=factor) + f"x = torch.zeros(1, 4) + 1\nwith {call}.use('mine'):\n    "
        program += f"print([y.flatten()[0].item() for y in ({use}{call}(x),)])\n"
    done = warm_python.run("-c", program)
    values = [line.strip("[]").split(", ") for line in done.stdout.splitlines()]
    first, second = ("2.0", "3.0") if call == "tripled" else ("3.0", "4.0")
    if prompt:
        assert [set(line) for line in values] == [{first}, {second}], done.stdout + done.stderr
        assert done.stderr == ""
    else:
        assert set(values[0]) == {first} and len(values) == 1
        assert "is declared twice" in done.stderr or "already has a provider 'mine', from __main__" in done.stderr
