"""Which provider is selected, and what happens when it fails or does not take a call."""

import os
import types
from pathlib import Path

import pytest
import torch

from nanovllm.engine.model_setup import warn_of_interpreter
from nanovllm.kernels import KernelError, Kernels, Provider, all_ops, resolve_kernels, triton_support
from nanovllm.kernels.op.provider import NATIVE
from nanovllm.kernels.op.selection import decorated_kernels, fastest_that_cannot_run, ranked_providers, why_selected

CPU = torch.device("cpu")


def double_rows(x, weight, eps):
    """In place of rms_norm, and easily told from it."""
    return 2 * x


ROWS = (torch.ones(3, 4), torch.ones(4), 1e-6)


@pytest.fixture(autouse=True)
def nobody_said_otherwise(monkeypatch):
    monkeypatch.delenv("NANOVLLM_KERNELS", raising=False)


@pytest.fixture
def rms_norm(monkeypatch):
    """The op rms_norm with two providers more: "fast" can run here, "elsewhere" cannot."""
    declared = all_ops()["rms_norm"]
    why_not = "it needs a GPU; plug one in"
    monkeypatch.setitem(declared.providers, "fast", Provider("fast", double_rows))
    monkeypatch.setitem(declared.providers, "elsewhere", Provider("elsewhere", double_rows, lambda device: why_not))
    return declared


def test_native_is_always_a_provider_and_taken_without_custom_kernels(rms_norm):
    assert all(declared.providers[NATIVE].support(CPU) is None for declared in all_ops().values())
    kernels = resolve_kernels(CPU, False, {"rms_norm": ["fast"]})
    assert set(kernels.providers) == set(all_ops()) and set(kernels.providers.values()) == {NATIVE}
    assert torch.equal(kernels.rms_norm(*ROWS), rms_norm.native(*ROWS))
    assert kernels.summary() == f"native ({len(all_ops())} ops)"
    with pytest.raises(ValueError, match="use_custom_kernels=0: must be True or False"):
        resolve_kernels(CPU, 0)


def test_a_named_provider_is_taken_for_its_op_alone(rms_norm):
    kernels = resolve_kernels(CPU, True, {"rms_norm": ["fast"]})
    assert torch.equal(kernels.rms_norm(*ROWS), 2 * ROWS[0]) and kernels.providers["rms_norm"] == "fast"
    assert kernels.providers["silu_and_mul"] == NATIVE
    for named, taken in (([NATIVE, "fast"], NATIVE), (["elsewhere", "fast"], "fast")):
        assert resolve_kernels(CPU, True, {"rms_norm": named}).providers["rms_norm"] == taken
    assert "fast (rms_norm)" in kernels.summary()


def test_a_fused_op_yields_where_one_of_its_parts_is_named(rms_norm):
    fused = all_ops()["add_rms_norm_linear"]
    fused.provider("fast", support=lambda device: None)(lambda *args: None)
    try:

        def chosen(**named):
            priority = {"*": ["fast"], **named}
            return resolve_kernels(CPU, True, priority).providers["add_rms_norm_linear"]

        assert "rms_norm" in fused.fuses
        assert chosen() == "fast" == chosen(softmax=[NATIVE])
        assert chosen(rms_norm=[NATIVE]) == NATIVE  # the user's word on a part counts
        assert chosen(rms_norm=[NATIVE], add_rms_norm_linear=["fast"]) == "fast"
    finally:
        del fused.providers["fast"]


def test_a_named_provider_that_is_not_available_is_an_error_with_its_reason(rms_norm):
    with pytest.raises(
        ValueError, match="^kernel_priority names 'elsewhere'.*not available.*: it needs a GPU; plug one in"
    ):
        resolve_kernels(CPU, True, {"rms_norm": ["elsewhere"]})


def test_unknown_names_list_the_known(rms_norm):
    with pytest.raises(ValueError, match="'rms_nrom'.*rms_norm"):
        resolve_kernels(CPU, True, {"rms_nrom": ["fast"]})
    with pytest.raises(ValueError, match="'tritno'.*native.*fast.*; did you mean 'triton'\\? A provider of yours"):
        resolve_kernels(CPU, True, {"rms_norm": ["tritno"]})
    for names in (["nope"], ["fast", "nope"]):  # also where it would not be used
        for custom in (True, False):
            with pytest.raises(
                ValueError,
                match=r"kernel_priority names 'nope', but the providers of 'rms_norm' are native, .*; a provider of "
                r"yours needs --kernel-plugin FILE, in Python 'kernel_plugins=\[FILE\]'$",
            ):
                resolve_kernels(CPU, custom, {"rms_norm": names})
    with pytest.raises(ValueError, match="kernel_priority: unknown op 'nope'"):
        resolve_kernels(CPU, False, {"nope": ["fast"]})
    with pytest.raises(AttributeError, match="no op 'rms_nrom'; ops are .*rms_norm"):
        _ = resolve_kernels(CPU, True).rms_nrom


def test_a_priority_of_another_form_is_named(rms_norm):
    for priority, said in [
        ("rms_norm=native", "kernel_priority='rms_norm=native': must map ops to providers"),
        ({3: ["fast"]}, r"kernel_priority={3: \['fast'\]}: must map ops to providers"),
        ({"rms_norm": []}, r"kernel_priority: 'rms_norm' is given \[\]; must be the names of providers"),
        ({"rms_norm": ["fast", 3]}, r"kernel_priority: 'rms_norm' is given \['fast', 3\]; must be"),
        ({"*": None}, r"kernel_priority: '\*' is given None; must be"),
    ]:
        with pytest.raises(ValueError, match=said):
            resolve_kernels(CPU, True, priority)


def test_an_argument_wins_over_the_environment_even_with_a_star(rms_norm, monkeypatch):
    monkeypatch.setenv("NANOVLLM_KERNELS", "rms_norm=fast;*=native")
    assert resolve_kernels(CPU).providers["rms_norm"] == "fast"
    assert resolve_kernels(CPU, True, {"silu_and_mul": ["native"]}).providers["rms_norm"] == "fast"
    assert resolve_kernels(CPU, True, {"*": ["native"]}).providers["rms_norm"] == "native"


@pytest.mark.parametrize(
    "text, message",
    [
        ("rms_norm=", "NANOVLLM_KERNELS='rms_norm=': 'rms_norm=' is not of the form op=provider"),
        ("*=nope", "NANOVLLM_KERNELS names 'nope'; providers are"),
        ("nope=native", "NANOVLLM_KERNELS: unknown op 'nope'; `nanovllm kernels list` shows all ops$"),
        ("rms_norm=nope", "NANOVLLM_KERNELS names 'nope', but the providers of 'rms_norm' are native"),
        (
            "rms_norm=elsewhere",
            "NANOVLLM_KERNELS names 'elsewhere', which is not available for 'rms_norm': it needs a GPU",
        ),
        (
            "rms_norm=native; rms_norm = fast",
            "'rms_norm' is given twice; name several providers as rms_norm=provider,provider",
        ),
        ("*=native;*=fast", r"'\*' is given twice"),
    ],
)
def test_what_is_wrong_with_the_environment_is_said(rms_norm, monkeypatch, text, message):
    monkeypatch.setenv("NANOVLLM_KERNELS", text)
    for call in (lambda: resolve_kernels(CPU), lambda: rms_norm(*ROWS)):
        with pytest.raises(ValueError, match=message):
            call()


def test_use_holds_within_its_block(rms_norm):
    with rms_norm.use("fast"):
        assert torch.equal(rms_norm(*ROWS), 2 * ROWS[0])
    assert not torch.equal(rms_norm(*ROWS), 2 * ROWS[0])
    with pytest.raises(ValueError, match="not available.*it needs a GPU"), rms_norm.use("elsewhere"):
        rms_norm(*ROWS)
    choosy = Provider("choosy", double_rows, accepts=lambda *args: "never")
    rms_norm.providers["choosy"] = choosy
    with (
        pytest.raises(ValueError, match="the provider of rms_norm does not take these arguments: never"),
        rms_norm.use("choosy"),
    ):
        rms_norm(*ROWS)
    del rms_norm.providers["choosy"]
    with pytest.raises(ValueError, match="no provider 'tritno'"), rms_norm.use("tritno"):
        pass


def test_what_a_provider_does_not_accept_goes_to_native_with_one_warning(rms_norm, monkeypatch, caplog):
    choosy = Provider("choosy", double_rows, accepts=lambda x, *_: None if (x > 0).all() else "x must be positive")
    monkeypatch.setitem(rms_norm.providers, "choosy", choosy)
    fn = resolve_kernels(CPU, True, {"rms_norm": ["choosy"]}).rms_norm
    x, *others = ROWS
    assert torch.equal(fn(x, *others), 2 * x)
    for negative in (-2 * x, -3 * x):
        assert torch.equal(fn(negative, *others), rms_norm.native(negative, *others))
    assert [r.message for r in caplog.records].count(
        "rms_norm: choosy does not take these arguments (x must be positive); using native"
    ) == 1


@pytest.mark.parametrize(
    "raised, seen",
    [
        (RuntimeError("misaligned address"), KernelError),
        # Callers act on these, which stay what they are.
        (ValueError("x: expected"), ValueError),
        (torch.OutOfMemoryError("no memory"), torch.OutOfMemoryError),
    ],
)
def test_a_kernel_that_fails_says_where_and_is_not_replaced(rms_norm, monkeypatch, raised, seen):
    def fails(x, weight, eps):
        raise raised

    monkeypatch.setitem(rms_norm.providers, "fails", Provider("fails", fails))
    note = "op 'rms_norm', provider 'fails', called with (float32[4, 3] strides [1, 4], float32[3], 1e-06)"
    for call in (resolve_kernels(CPU, True, {"rms_norm": ["fails"]}).rms_norm, rms_norm):
        with pytest.raises(seen) as error, rms_norm.use("fails"):
            call(ROWS[0].t(), ROWS[1][:3], 1e-6)
        if seen is KernelError:
            said = f"{note}: RuntimeError: {raised}, at test_selection.py:"
            assert str(error.value).startswith(said) and error.value.__cause__ is raised
        else:
            assert error.value is raised and "\n".join((str(raised), *getattr(raised, "__notes__", ()))).endswith(note)


def test_before_python_3_11_the_message_names_the_plugins(rms_norm, monkeypatch):
    class Old(AttributeError):
        add_note = None

    monkeypatch.setitem(rms_norm.providers, "mine", Provider("mine", double_rows, origin="my_kernels.py"))
    kernels = resolve_kernels(CPU, True, {"rms_norm": ["mine"]})
    error = Old("'NoneType' object has no attribute 'shape'")
    kernels.name_plugins(error)
    first, second = str(error).split("\n")
    assert first.startswith("'NoneType'") and "kernels of yours: rms_norm by mine, of my_kernels.py. " in second
    assert second.endswith(": `nanovllm kernels verify rms_norm --kernel-plugin my_kernels.py`")


def test_the_reference_that_fails_in_place_of_a_choosy_provider_names_itself(rms_norm, monkeypatch):
    monkeypatch.setitem(rms_norm.providers, "choosy", Provider("choosy", double_rows, accepts=lambda *args: "never"))
    x, _, eps = ROWS
    with pytest.raises(KernelError, match="op 'rms_norm', provider 'native', called with .*size of tensor"):
        resolve_kernels(CPU, True, {"rms_norm": ["choosy"]}).rms_norm(x, torch.ones(5), eps)


def test_a_provider_that_cannot_be_imported_is_named(rms_norm, monkeypatch):
    monkeypatch.setitem(rms_norm.providers, "gone", Provider("gone", "nanovllm.no_such_module:rms_norm"))
    with pytest.raises(KernelError, match="op 'rms_norm', provider 'gone': cannot be imported: ModuleNotFoundError"):
        resolve_kernels(CPU, True, {"rms_norm": ["gone"]})


def test_a_triton_that_cannot_be_imported_is_a_reason(tmp_path, warm_python):
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(
        "raise ImportError('libcuda.so.1: cannot open shared object file')"
    )
    program = tmp_path / "program.py"
    program.write_text("""
import torch
from nanovllm.kernels import resolve_kernels, rms_norm
assert resolve_kernels(torch.device("cpu")).providers["softmax"] == "native"
try:
    with rms_norm.use("triton"):
        rms_norm(torch.ones(2, 4), torch.ones(4), 1e-6)
except ValueError as error:
    print(error)
""")
    root = Path(__file__).parents[3]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(root)))}
    reason = "Triton is installed but cannot be imported (ImportError: libcuda.so.1"
    for command in ([program], ["-m", "nanovllm", *"kernels verify rms_norm --quick --timeout 0".split()]):
        done = warm_python.run(*command, env=environment, cwd=root)
        assert done.returncode == 0 and reason in done.stdout, done.stdout + done.stderr


def test_every_choice_can_be_decorated(rms_norm):
    seen = []

    def decorate(name, provider, fn):
        def call(*args):
            seen.append((name, provider))
            return fn(*args)

        return call

    with decorated_kernels(decorate):
        kernels = resolve_kernels(CPU, True, {"rms_norm": ["fast"]})
    assert torch.equal(kernels.rms_norm(*ROWS), 2 * ROWS[0])
    kernels.softmax(ROWS[0])
    assert seen == [("rms_norm", "fast"), ("softmax", NATIVE)]


def test_a_fused_op_is_shown_as_an_engine_uses_it(monkeypatch):
    fused = all_ops()["add_rms_norm_gate_up"]
    monkeypatch.setitem(fused.providers, "it", Provider("it", fused.native))
    monkeypatch.setitem(all_ops()["silu_and_mul"].providers, "it", Provider("it", fused.native))
    monkeypatch.setenv("NANOVLLM_KERNELS", "*=it")
    assert ranked_providers(fused, CPU)[0].name == resolve_kernels(CPU).providers[fused.name] == "it"
    monkeypatch.setenv("NANOVLLM_KERNELS", "*=it;silu_and_mul=native")
    assert ranked_providers(fused, CPU)[0].name == resolve_kernels(CPU).providers[fused.name] == NATIVE
    assert "it contains silu_and_mul, of which you chose a provider" in why_selected(fused, CPU)


def test_what_gives_way_is_logged(rms_norm, monkeypatch, caplog):
    fused = all_ops()["add_rms_norm_gate_up"]
    monkeypatch.setitem(fused.providers, "cpu", Provider("cpu", fused.native))
    resolve_kernels(CPU)
    resolve_kernels(CPU, priority={"rms_norm": ["fast", "native"]}, who="ops")  # of a transformers model
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    resolve_kernels(CPU, priority={"rms_norm": ["fast", "native"]})
    assert caplog.messages[-1].startswith(
        "`fast`, which you named for rms_norm, runs, so fused ops with it are not used: "
    )
    assert "add_rms_norm_gate_up (cpu)" in caplog.messages[-1]
    monkeypatch.setitem(all_ops()["silu_and_mul"].providers, "mine", Provider("mine", double_rows))
    resolve_kernels(CPU, priority={"rms_norm": ["fast"], "silu_and_mul": ["mine"]})
    rms_norm, silu = "`fast`, which you named for rms_norm,", "`mine`, which you named for silu_and_mul,"
    either = f"{rms_norm} and {silu}", f"{silu} and {rms_norm}"
    assert caplog.messages[-1].startswith(tuple(f"{both} run, so fused ops with them are" for both in either))
    resolve_kernels(CPU, priority={"rms_norm": ["native"], "silu_and_mul": ["native"]})
    either = "rms_norm and silu_and_mul", "silu_and_mul and rms_norm"
    assert caplog.messages[-1].startswith(
        tuple(f"`native`, which you named for {both}, runs, so fused ops with them are" for both in either)
    )


def test_the_order_and_its_reason(rms_norm, monkeypatch):
    monkeypatch.delitem(rms_norm.providers, "cpu")
    names = [p.name for p in ranked_providers(rms_norm, CPU)]
    assert names[0] == NATIVE and set(names) >= {NATIVE, "fast"} and "elsewhere" not in names
    assert "on a CPU the reference runs" in why_selected(rms_norm, CPU)
    monkeypatch.setenv("NANOVLLM_KERNELS", "rms_norm=fast")
    assert ranked_providers(rms_norm, CPU)[0].name == "fast"
    assert "NANOVLLM_KERNELS='rms_norm=fast' names it" in why_selected(rms_norm, CPU)


def test_a_fastest_provider_that_cannot_run_is_named_with_its_reason(rms_norm, monkeypatch, measured):
    gpu = torch.device("cuda", 0)
    softmax = all_ops()["softmax"]
    why_not = "it needs a GPU; plug one in"
    monkeypatch.setitem(softmax.providers, "elsewhere", Provider("elsewhere", double_rows, lambda device: why_not))
    measured(rms_norm=["elsewhere", "fast", NATIVE], softmax=["elsewhere", NATIVE], silu_and_mul=[NATIVE])
    selected = {"rms_norm": "fast", "softmax": NATIVE, "silu_and_mul": NATIVE}
    assert fastest_that_cannot_run(selected, selected, gpu) == [
        f"rms_norm runs on fast, not on elsewhere; softmax runs on native, not on elsewhere: {why_not}"
    ]
    monkeypatch.setenv("NANOVLLM_KERNELS", "rms_norm=fast")  # who names a provider knows it
    assert fastest_that_cannot_run(selected, ["rms_norm", "silu_and_mul"], gpu) == []


def test_on_a_gpu_the_measured_order_counts_and_then_the_built_in_one(rms_norm, monkeypatch, measured):
    gpu = torch.device("cuda", 0)
    for provider in ("triton", "fast"):
        monkeypatch.setitem(rms_norm.providers, provider, Provider(provider, double_rows))
    for orders, first in [
        ({"rms_norm": ["fast", "triton", NATIVE]}, "fast"),
        ({"rms_norm": ["gone", "elsewhere", NATIVE, "triton"]}, NATIVE),
        ({}, "triton"),
    ]:
        measured(**orders)
        assert ranked_providers(rms_norm, gpu)[0].name == first


@pytest.mark.parametrize("layers, said", [(28, True), (4, False)])
def test_a_kernel_that_is_interpreted_in_a_model_that_is_not_tiny_is_a_warning(rms_norm, caplog, layers, said):
    declared = all_ops()["rms_norm"]
    mine = Provider("mine", declared.native, triton_support)
    other = Provider("other", declared.native)
    kernels = Kernels({"rms_norm": (mine, mine.fn), "softmax": (other, other.fn)})
    model = types.SimpleNamespace(hidden_size=1024, num_hidden_layers=layers)
    for device in ("cpu", "cuda"):
        warn_of_interpreter(kernels, model, torch.device(device))
    assert [r.message.partition(":")[0] for r in caplog.records] == (["rms_norm (mine)"] if said else [])
