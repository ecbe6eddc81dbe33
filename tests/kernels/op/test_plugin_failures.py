"""Plugins that fail, or give other results, and what the commands show of plugins."""

import json
import re
import sys

import pytest
import torch

from nanovllm.kernels import KernelError, all_ops, resolve_kernels
from nanovllm.kernels.op.plugins import failures, load_plugins
from nanovllm.kernels.op.selection import ranked_providers, why_selected
from tests.kernels.op.plugin_texts import OP, PROVIDER, cli

pytestmark = pytest.mark.usefixtures("untouched")
CPU = torch.device("cpu")


@pytest.mark.parametrize("value", ["plugin_module_that_is_not_there", "plugin_module:nothing"])
def test_an_installed_plugin_that_fails_stops_nobody(installed, value):
    before = set(failures())
    installed(PROVIDER.format(name="theirs"), value)
    assert resolve_kernels(CPU).providers["softmax"] == "native"
    assert set(failures()) - before == {value.partition(":")[0]}
    assert "theirs" not in all_ops()["softmax"].providers


def test_what_fails_half_way_is_taken_back_whole(plugin):
    text = PROVIDER.format(name="mine") + OP.format(name="half_way") + "\nraise OSError('no more fish')\n"
    path = plugin(text)
    before = {name: dict(declared.providers) for name, declared in all_ops().items()}
    with pytest.raises(ValueError) as error:
        load_plugins([path])
    assert {name: dict(declared.providers) for name, declared in all_ops().items()} == before
    said = "line 24, `raise OSError('no more fish')`: OSError: no more fish"
    assert failures()[path] == said
    assert str(error.value) == f"kernel plugin {path}: {said}"
    assert not [m for m in sys.modules if m.startswith("nanovllm_kernel_plugin_my_kernels")]


@pytest.mark.parametrize(
    "text, reason",
    [
        ("x = 1\nx = x + 1)", "line 2, `x = x + 1)`: SyntaxError: unmatched ')'"),
        ("import no_such_module_at_all", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        (PROVIDER.format(name="native"), "ValueError: op 'softmax' already has a provider 'native'"),
        (PROVIDER.format(name="triton"), "ValueError: op 'softmax' already has a provider 'triton'"),
        (OP.format(name="softmax"), "ValueError: op 'softmax' is declared twice"),
        (PROVIDER.format(name="mine").replace("mine(x)", "mine(y)"), "expected the parameters (x), not (y)"),
        (
            "from nanovllm.kernels import all_ops\nall_ops()['sofmax']",
            "KeyError: 'sofmax': there is no such op; did you mean 'softmax'?",
        ),
        (
            "from nanovllm.kernels import all_ops\nall_ops()['moe_ex']",
            "did you mean 'moe_experts' or 'moe_experts_fp8'?",
        ),
        ("from nanovllm.kernels import softmax\nsofmax.provider", "'sofmax' is not defined; did you mean 'softmax'?"),
        ("import triton\ntriton.jitt", "no attribute 'jitt'; did you mean 'jit'?"),
        (OP.format(name="odd").replace('{"x": "[..., n]"}', '{"y": "[..., n]"}'), "unknown argument 'y'"),
    ],
)
def test_why_it_failed(plugin, text, reason):
    path = plugin(text)
    with pytest.raises(ValueError, match=f"^kernel plugin {re.escape(path)}: .*{re.escape(reason)}"):
        resolve_kernels(CPU, plugins=[path])
    assert reason in failures()[path]
    assert resolve_kernels(CPU).providers["softmax"] == "native"


def test_a_key_of_a_dict_of_a_plugin_is_no_name_of_an_op(plugin):
    with pytest.raises(ValueError, match="KeyError: 'rms'$"):
        load_plugins([plugin("{}['rms']")])


def failing(argument, value):
    """A plugin whose function of that name gives a value, or fails."""
    return PROVIDER.format(name="mine").replace('"mine")', f'"mine", {argument}=lambda *args, **kwargs: {value})', 1)


FAILING = [
    ("1 / 0", "ZeroDivisionError: division by zero"),
    ("False", "it returned False; it must return None"),
    ("True", "it returned True; it must return None"),
]


@pytest.mark.parametrize("value, reason", FAILING)
@pytest.mark.parametrize("added", [False, True])
def test_a_support_function_that_fails_is_a_reason(plugin, monkeypatch, caplog, value, reason, added):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    text = failing("support", value)
    if added:
        text = (
            "from nanovllm.kernels import Provider, all_ops\n"
            f"all_ops()['softmax'].add(Provider('mine', lambda x: x, lambda device: {value}))\n"
        )
    path = plugin(text)
    assert resolve_kernels(CPU, plugins=[path]).providers["softmax"] == "native"
    said = "op 'softmax', provider 'mine': its support function failed: "
    assert [r.message for r in caplog.records if said in r.message and reason in r.message]
    options = ("softmax", "--device", "cpu", "--kernel-plugin", path, "--json", "-")
    for command in (("list",), ("verify", "--provider", "mine", "--provider", "native")):
        (row,) = [r for r in cli(*command, *options) if r["provider"] == "mine"]
        assert reason in row["reason"]
    assert sum(said in r.message for r in caplog.records) == 1
    with pytest.raises(
        ValueError, match=f"kernel_priority names 'mine', which is not available for 'softmax': .*{reason}"
    ):
        resolve_kernels(CPU, priority={"softmax": ["mine"]}, plugins=[path])


@pytest.mark.parametrize("value, reason", FAILING)
def test_an_accepts_function_that_fails_is_a_reason_and_an_error_of_a_call(plugin, value, reason):
    path = plugin(failing("accepts", value))
    options = ("softmax", "--device", "cpu", "--kernel-plugin", path, "--json", "-")
    why = cli("why", *options, "--shape", "2x4")
    (row,) = [r for r in why["providers"] if r["provider"] == "mine"]
    called = "op 'softmax', provider 'mine', called with (x=bfloat16[2, 4]): its accepts function failed: "
    assert called in row["reason"] and reason in row["reason"] and why["runs"] == "native"
    done = cli("verify", *options, "--provider", "mine", fails=True)
    (row,) = json.loads(done.stdout)
    assert done.exit_code == 1 and row["cases"] == len(row["failures"]) and reason in row["failures"][0]
    (m,) = [m for m in cli("bench", *options, "--shape", "2x4")["measurements"] if m["provider"] == "mine"]
    assert reason in m["reason"]
    kernels = resolve_kernels(CPU, plugins=[path])
    for call in (kernels.softmax, all_ops()["softmax"]):
        with pytest.raises(KernelError) as error, all_ops()["softmax"].use("mine"):
            call(torch.ones(2, 4))
        assert "op 'softmax', provider 'mine', called with (float32[2, 4]): " in str(error.value) and reason in str(
            error.value
        )


@pytest.mark.parametrize("fails, kind, remedy", [
    ("mine[1](x)", TypeError, "is `@triton.jit` missing above the kernel?"),
    ('raise RuntimeError("must be Tensor, not tensor")', KernelError, "such as tl.sigmoid, not of torch"),
])  # fmt: skip
def test_an_engine_says_the_line_and_the_remedy_as_verify_does(plugin, fails, kind, remedy):
    path = plugin(PROVIDER.format(name="mine").replace("return", f"{fails}\n    return"))
    with pytest.raises(kind) as error:
        resolve_kernels(CPU, plugins=[path]).softmax(torch.ones(2, 4))
    said = "\n".join((str(error.value), *getattr(error.value, "__notes__", ())))
    assert "op 'softmax', provider 'mine', called with (float32[2, 4])" in said
    assert re.search(rf", at my_kernels\w*\.py:\d+, `{re.escape(fails)}`; .*{re.escape(remedy)}$", said, re.M), said
    options = ("softmax", "--device", "cpu", "--kernel-plugin", path, "--provider", "mine", "--quick", "--json", "-")
    (row,) = json.loads(cli("verify", *options, fails=True).stdout)
    assert row["failures"] and all(remedy in failure for failure in row["failures"])


def test_nothing_done_is_an_error(plugin):
    bare = "from nanovllm.kernels import op\n@op\ndef without_inputs(x):\n    return x\n"
    path = plugin(
        PROVIDER.format(name="mine").replace('"mine")', '"mine", support=lambda device: "no fish; buy one")', 1) + bare
    )
    options = ("--device", "cpu", "--kernel-plugin", path)
    for command, done_to in (("verify", "verified"), ("bench", "timed")):
        for arguments, reason in (
            (("softmax", "--provider", "mine"), "mine: no fish; buy one"),
            (("without_inputs",), "declares no inputs"),
        ):
            done = cli(command, *arguments, *options, fails=True)
            assert f"nothing was {done_to}: " in str(done.exception) and reason in str(done.exception)
            assert "`nanovllm kernels list`" in str(done.exception)
        assert cli(command, "softmax", "--provider", "mine", "--provider", "native", *options, "--json", "-")


@pytest.mark.parametrize("written", [".", "..", "/", ""])
def test_what_is_neither_a_file_nor_a_module(written):
    reason = f"ValueError: {written!r} is neither a Python file, whose name ends in .py, nor the name of a module"
    with pytest.raises(ValueError, match=re.escape(reason)):
        load_plugins([written])
    assert failures()[written] == reason
    done = cli("why", "softmax", "--device", "cpu", "--kernel-plugin", written, fails=True)
    assert str(done.exception) == f"kernel plugin {written}: {reason}"


def test_list_and_why_show_that_a_plugin_is_preferred(plugin, monkeypatch, tmp_path):
    path = plugin(PROVIDER.format(name="mine"))
    declared = all_ops()["softmax"]
    origins = load_plugins([path])
    assert ranked_providers(declared, CPU, origins)[0].name == "mine"
    assert why_selected(declared, CPU, origins) == f"it comes from the plugin {path}"
    monkeypatch.chdir(tmp_path)
    for written in (path, "my_kernels.py"):
        options = ("--device", "cpu", "--kernel-plugin", written, "--json", "-")
        ranks = {r["provider"]: r["rank"] for r in cli("list", *options) if r["op"] == "softmax"}
        assert ranks["mine"] == 1 and ranks["native"] == 2
        assert cli("why", "softmax", *options)["runs"] == "mine"


def test_a_command_stops_at_a_plugin_that_was_named_and_list_shows_one_that_is_installed(plugin, installed):
    path = plugin("raise OSError('no more fish')")
    options = ("--device", "cpu", "--kernel-plugin", path, "--json", "-")
    for command in ("list", "why", "bench"):
        assert "no more fish" in str(cli(command, "softmax", *options, fails=True).exception)
    name = installed("raise OSError('no bread')")
    (row,) = [r for r in cli("list", "--device", "cpu", "--json", "-") if r["provider"] == name]
    assert row["op"] == "" and row["reason"] == "OSError: no bread"


def test_a_new_op_has_what_ours_have(plugin):
    path = plugin(OP.format(name="twice_as_much"))
    options = ("--device", "cpu", "--kernel-plugin", path, "--json", "-")
    rows = [r for r in cli("list", *options) if r["op"] == "twice_as_much"]
    assert [(r["provider"], r["reason"]) for r in rows] == [("sum", None), ("native", None)]
    bench = cli("bench", "twice_as_much", *options)["measurements"]
    assert {m["provider"] for m in bench} == {"native", "sum"} and all(
        m["us"] > 0 and m["shape"] == [2, 64] for m in bench
    )
    verified = cli("verify", "twice_as_much", *options, "--seed", "0")
    assert {r["provider"] for r in verified} == {"native", "sum"} and all(
        r["cases"] and not r["failures"] for r in verified
    )
    declared = all_ops()["twice_as_much"]
    assert resolve_kernels(CPU, plugins=[path]).twice_as_much(torch.ones(2)).tolist() == [2, 2]
    with pytest.raises(ValueError, match="twice_as_much: x: expected a tensor"):
        declared(3)
    compiled = torch.compile(lambda x: declared(x), fullgraph=True, backend="eager")
    assert compiled(torch.ones(2)).tolist() == [2, 2]


def test_a_provider_that_nobody_has_is_not_verified_as_right(plugin, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = cli("verify", "softmax", "--device", "cpu", "--provider", "mien", fails=True)
    said = str(done.exception)
    assert said.startswith("--provider mien: expected one of native, triton")
    assert said.endswith("; a provider of yours needs --kernel-plugin FILE")
    path = plugin(PROVIDER.format(name="mine"))
    done = cli("verify", "softmax", "--device", "cpu", "--provider", "mien", "--kernel-plugin", path, fails=True)
    assert str(done.exception).endswith(f"did you mean 'mine'? plugin {path} has 'mine' of softmax")
    for command in ("verify", "bench"):  # a plugin with providers of another op alone, and one with none at all
        options = (command, "rms_norm", "--device", "cpu", "--provider", "own", "--kernel-plugin")
        said = str(cli(*options, path, fails=True).exception)
        assert said.startswith("--provider own: expected one of cpu, native") and said.endswith(
            f"; plugin {path} has 'mine' of softmax"
        )
        empty = plugin("x = 1", "empty.py")
        said = str(cli(*options, empty, fails=True).exception)
        assert said.endswith(f"; plugin {empty} registers no provider; write @OP.provider('own') above your function")


@pytest.mark.parametrize(
    "name, remedy",
    [
        ("mien", "did you mean 'mine'?"),
        ("tritno", "did you mean 'triton'?"),
        ("own", "register one with @softmax.provider('own')"),
        (3, "register one with @softmax.provider(3)"),
    ],
)
def test_a_provider_that_an_op_lacks_is_answered_by_use(plugin, name, remedy):
    load_plugins([plugin(PROVIDER.format(name="mine"))])
    with pytest.raises(ValueError) as error, all_ops()["softmax"].use(name):
        pass
    assert str(error.value).startswith(f"op 'softmax' has no provider {name!r}; it has native, triton, ")
    assert str(error.value).endswith(f"mine; {remedy}")
