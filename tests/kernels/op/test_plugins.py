"""Kernels from outside the package: files, modules, installed distributions, and what becomes of those that fail."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from nanovllm.cli import app
from nanovllm.kernels import KernelError, Provider, all_ops, resolve_kernels
from nanovllm.kernels.op import plugins, registry
from nanovllm.kernels.op.plugins import failures, load_plugins
from nanovllm.kernels.op.selection import explain, rank

CPU = torch.device("cpu")

PROVIDER = """
from nanovllm.kernels import softmax

@softmax.provider("{name}")
def mine(x):
    return (x.double() - x.double().amax(-1, keepdim=True)).exp().to(x.dtype) if "{name}" == "wrong" else x.softmax(-1)
"""

OP = '''
import torch
from nanovllm.kernels import Cost, Inputs, op

@op(
    arguments={{"x": "[..., n]"}},
    inputs=Inputs(lambda t, rows, n: {{"x": t.normal(rows, n)}}, small=[(1, 1), (0, 3), (3, 5)], decode=[(2, 64)]),
    cost=lambda x: Cost(2 * x.numel() * x.element_size()),
)
def {name}(x: torch.Tensor) -> torch.Tensor:
    """Twice x."""
    return 2 * x

@{name}.provider("sum")
def by_adding(x: torch.Tensor) -> torch.Tensor:
    return x + x
'''


@pytest.fixture(autouse=True)
def untouched(monkeypatch):
    """Whatever a test registers or loads is forgotten after it; no plugin that is installed here takes part."""
    monkeypatch.delenv("NANOVLLM_KERNELS", raising=False)
    monkeypatch.setattr(plugins, "entry_points", lambda group: ())
    monkeypatch.setattr(plugins, "_loaded", {})
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    modules = set(sys.modules)
    with registry.temporary():
        yield
    for name in set(sys.modules) - modules:
        if name.startswith(("nanovllm_kernel_plugin_", "plugin_module")):
            del sys.modules[name]


@pytest.fixture
def plugin(tmp_path):
    """Writes a plugin file and gives its path."""

    def write(text: str, name: str = "my_kernels.py") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a plugin module that can be imported, and gives its name."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))

    def write(text: str, name: str = "plugin_module") -> str:
        (tmp_path / "site").mkdir(exist_ok=True)
        (tmp_path / "site" / f"{name}.py").write_text(text)
        return name

    return write


@pytest.fixture
def installed(module, monkeypatch):
    """Installs a distribution that names a plugin module, as pip would have it on disk."""
    from importlib.metadata import entry_points

    def install(text: str, value: str = "plugin_module") -> str:
        name = module(text)
        info = Path(sys.path[0]) / "plugin_distribution-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-distribution\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[nanovllm.kernels]\nfrom_the_plugin = {value}\n")
        monkeypatch.setattr(plugins, "entry_points", entry_points)
        return name

    return install


def cli(*args: str, fails: bool = False):
    done = CliRunner().invoke(app, ["kernels", *args])
    if fails:
        assert done.exit_code != 0
        return done
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_a_file_is_preferred_where_it_is_asked_for_and_only_there(plugin):
    path = plugin(PROVIDER.format(name="mine"))
    kernels = resolve_kernels(CPU, plugins=[path])
    assert kernels.providers["softmax"] == "mine"
    assert all(provider == "native" for name, provider in kernels.providers.items() if name != "softmax")
    torch.testing.assert_close(kernels.softmax(torch.ones(2, 4)), torch.full((2, 4), 0.25))
    assert resolve_kernels(CPU).providers["softmax"] == "native"
    assert resolve_kernels(CPU, use_custom_kernels=False, plugins=[path]).providers["softmax"] == "native"


def test_what_the_user_names_goes_before_a_plugin(plugin, monkeypatch):
    path = plugin(PROVIDER.format(name="mine"))
    assert resolve_kernels(CPU, priority={"softmax": ["native"]}, plugins=[path]).providers["softmax"] == "native"
    monkeypatch.setenv("NANOVLLM_KERNELS", "softmax=native")
    assert resolve_kernels(CPU, plugins=[path]).providers["softmax"] == "native"
    monkeypatch.setenv("NANOVLLM_KERNELS", "softmax=mine")
    assert resolve_kernels(CPU, plugins=[path]).providers["softmax"] == "mine"


def test_a_provider_that_cannot_run_here_is_passed_over_and_is_an_error_where_it_is_named(plugin):
    path = plugin(
        PROVIDER.format(name="mine").replace('"mine")', '"mine", support=lambda device: "it needs a fish")', 1)
    )
    assert resolve_kernels(CPU, plugins=[path]).providers["softmax"] == "native"
    with pytest.raises(ValueError, match="'mine'.*not available.*it needs a fish"):
        resolve_kernels(CPU, priority={"softmax": ["mine"]}, plugins=[path])


def test_a_module_and_a_single_name(module):
    name = module(PROVIDER.format(name="mine"))
    assert load_plugins(name) == [name]
    assert all_ops()["softmax"].providers["mine"].origin == name
    assert resolve_kernels(CPU, plugins=[name]).providers["softmax"] == "mine"


def test_a_module_that_was_imported_before_it_is_named(module):
    name = module(PROVIDER.format(name="mine"))
    __import__(name)
    assert resolve_kernels(CPU).providers["softmax"] == "native"
    assert resolve_kernels(CPU, plugins=[name]).providers["softmax"] == "mine"


def test_a_provider_that_a_plugin_adds_as_an_object_is_preferred_too(plugin):
    path = plugin(
        "from nanovllm.kernels import Provider, all_ops\n"
        "all_ops()['softmax'].add(Provider('mine', lambda x: x.softmax(-1)))\n"
    )
    assert resolve_kernels(CPU, plugins=[path]).providers["softmax"] == "mine"


def test_an_installed_plugin_is_loaded_always_and_runs_where_it_is_named(installed, monkeypatch):
    name = installed(PROVIDER.format(name="theirs"))
    assert resolve_kernels(CPU).providers["softmax"] == "native"
    assert all_ops()["softmax"].providers["theirs"].origin == name
    assert resolve_kernels(CPU, priority={"softmax": ["theirs"]}).providers["softmax"] == "theirs"
    assert resolve_kernels(CPU, plugins=[name]).providers["softmax"] == "theirs"
    monkeypatch.setenv("NANOVLLM_KERNELS", "softmax=theirs")
    assert resolve_kernels(CPU).providers["softmax"] == "theirs"


@pytest.mark.parametrize("value", ["plugin_module_that_is_not_there", "plugin_module:nothing"])
def test_an_installed_plugin_that_fails_stops_nobody(installed, value):
    installed(PROVIDER.format(name="theirs"), value)
    assert resolve_kernels(CPU).providers["softmax"] == "native"
    assert list(failures()) == [value.partition(":")[0]]
    assert "theirs" not in all_ops()["softmax"].providers


def test_what_fails_half_way_is_taken_back_whole(plugin, caplog):
    text = PROVIDER.format(name="mine") + OP.format(name="half_way") + "\nraise OSError('no more fish')\n"
    path = plugin(text)
    before = {name: dict(declared.providers) for name, declared in all_ops().items()}
    assert load_plugins([path]) == []
    assert {name: dict(declared.providers) for name, declared in all_ops().items()} == before
    assert failures() == {path: "OSError: no more fish"}
    assert [r.message for r in caplog.records] == [f"kernel plugin {path}: OSError: no more fish"]
    assert not [m for m in sys.modules if m.startswith("nanovllm_kernel_plugin_my_kernels")]


@pytest.mark.parametrize(
    "text, reason",
    [
        ("def f(:", "SyntaxError"),
        ("import no_such_module_at_all", "ModuleNotFoundError: No module named 'no_such_module_at_all'"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        (PROVIDER.format(name="native"), "ValueError: op 'softmax' already has a provider 'native'"),
        (PROVIDER.format(name="triton"), "ValueError: op 'softmax' already has a provider 'triton'"),
        (OP.format(name="softmax"), "ValueError: op 'softmax' is declared twice"),
        (PROVIDER.format(name="mine").replace("mine(x)", "mine(y)"), "expected the parameters (x), not (y)"),
        (OP.format(name="odd").replace('{"x": "[..., n]"}', '{"y": "[..., n]"}'), "unknown argument 'y'"),
    ],
)
def test_why_it_failed(plugin, text, reason):
    path = plugin(text)
    assert resolve_kernels(CPU, plugins=[path]).providers["softmax"] == "native"
    assert reason in failures()[path]


def test_a_path_or_module_that_is_not_there(tmp_path):
    missing = str(tmp_path / "nothing.py")
    assert load_plugins([missing, "no_such_plugin"]) == []
    assert "FileNotFoundError" in failures()[missing] and missing in failures()[missing]
    assert "a file is named with its path and .py" in failures()["no_such_plugin"]


def test_one_that_was_mended_is_loaded_the_next_time(plugin):
    path = plugin("raise ValueError('not yet')")
    assert load_plugins([path]) == []
    plugin(PROVIDER.format(name="mine"))
    assert load_plugins([path]) == [path] and not failures()


def test_one_plugin_fails_and_the_next_is_loaded(plugin):
    broken, good = plugin("1 / 0", "broken.py"), plugin(PROVIDER.format(name="mine"))
    assert load_plugins([broken, good]) == [good]
    with pytest.raises(ValueError, match="ZeroDivisionError"):  # the reason is where the missing name is noticed
        resolve_kernels(CPU, priority={"softmax": ["theirs"]}, plugins=[broken, good])


def test_loading_twice_runs_once_however_the_path_is_written(plugin, monkeypatch, tmp_path):
    path = plugin(PROVIDER.format(name="mine"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for written in (path, "my_kernels.py", "./my_kernels.py", "~/my_kernels.py", Path(path)):
        assert load_plugins([written]) == [path]
    assert not failures()
    (module_name,) = [m for m in sys.modules if m.startswith("nanovllm_kernel_plugin_my_kernels")]
    assert all_ops()["softmax"].providers["mine"].fn.__module__ == module_name


def test_a_file_that_was_edited_is_loaded_anew(plugin, caplog):
    path = plugin(PROVIDER.format(name="mine"))
    old = resolve_kernels(CPU, plugins=[path])
    stat = Path(path).stat()
    plugin(PROVIDER.format(name="mine").replace("x.softmax(-1)", "x.softmax(+0)"))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # of the same size and time, as a quick edit may be
    x = torch.ones(2, 4)
    assert resolve_kernels(CPU, plugins=[path]).softmax(x)[0, 0] == 0.5 and old.softmax(x)[0, 0] == 0.25
    plugin(PROVIDER.format(name="renamed"))
    assert resolve_kernels(CPU, plugins=[path]).providers["softmax"] == "renamed"
    assert "mine" not in all_ops()["softmax"].providers and not caplog.records
    plugin("def f(:")
    assert resolve_kernels(CPU, plugins=[path]).providers["softmax"] == "native"
    assert "SyntaxError" in failures()[path] and "SyntaxError" in caplog.text
    assert "renamed" not in all_ops()["softmax"].providers
    plugin(PROVIDER.format(name="mine"))
    assert resolve_kernels(CPU, plugins=[path]).providers["softmax"] == "mine" and not failures()
    Path(path).unlink()
    assert load_plugins([path]) == [] and "FileNotFoundError" in failures()[path]


def test_a_plain_call_runs_an_edited_file_too(plugin, monkeypatch):
    monkeypatch.setenv("NANOVLLM_KERNELS", "softmax=mine")
    for sum_over, first in (("-1", 0.25), ("0", 0.5)):
        load_plugins([plugin(PROVIDER.format(name="mine").replace("softmax(-1)", f"softmax({sum_over})"))])
        assert all_ops()["softmax"](torch.ones(2, 4))[0, 0] == first


def test_an_edited_op_is_declared_anew(plugin, caplog):
    text = OP.format(name="twice_or_thrice")
    for factor in (2, 3):
        load_plugins([plugin(text.replace("2 * x\n", f"{factor} * x\n"))])
        compiled = torch.compile(lambda x: torch.ops.nanovllm.twice_or_thrice(x), fullgraph=True, backend="eager")
        assert compiled(torch.ones(2)).tolist() == [factor] * 2 == all_ops()["twice_or_thrice"](torch.ones(2)).tolist()
    load_plugins([plugin("")])
    assert "twice_or_thrice" not in all_ops() and not hasattr(torch.ops.nanovllm, "twice_or_thrice")
    assert not [r for r in caplog.records if r.name.startswith("nanovllm")]


def test_two_files_of_one_name_and_two_providers_of_one_name(plugin, tmp_path, caplog):
    (tmp_path / "other").mkdir()
    first, second = plugin(PROVIDER.format(name="mine")), plugin(PROVIDER.format(name="yours"), "other/my_kernels.py")
    third = plugin(PROVIDER.format(name="mine"), "third.py")
    assert load_plugins([first, second, third]) == [first, second]
    assert {"mine", "yours"} <= set(all_ops()["softmax"].providers)
    for said in (failures()[third], caplog.text):
        assert f"already has a provider 'mine', from {first}; give yours another name" in said
    assert f"kernel plugin {third}" in caplog.text
    (row,) = [r for r in cli("list", "--device", "cpu", "--kernel-plugin", third, "--json") if r["provider"] == third]
    assert first in row["reason"]
    fourth, fifth = (plugin(OP.format(name="declared_by_two"), f"{name}.py") for name in ("fourth", "fifth"))
    assert load_plugins([fourth, fifth]) == [fourth]
    assert f"'declared_by_two' is declared twice, before by {fourth}" in failures()[fifth]


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
    options = ("softmax", "--device", "cpu", "--kernel-plugin", path, "--json")
    for command in (("list",), ("verify", "--provider", "mine", "--provider", "native")):
        (row,) = [r for r in cli(*command, *options) if r["provider"] == "mine"]
        assert reason in row["reason"]
    assert sum(said in r.message for r in caplog.records) == 1
    with pytest.raises(
        ValueError, match=f"kernel_priority names 'mine', which is not available for 'softmax': .*{reason}"
    ):
        resolve_kernels(CPU, priority={"softmax": ["mine"]}, plugins=[path])


@pytest.mark.parametrize("value, reason", FAILING)
def test_an_accepts_function_that_fails_is_a_reason_and_an_error_of_a_call(plugin, monkeypatch, value, reason):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    path = plugin(failing("accepts", value))
    options = ("softmax", "--device", "cpu", "--kernel-plugin", path, "--json")
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


def test_nothing_done_is_an_error(plugin, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
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
        for arguments in (("softmax", "--provider", "mine", "--provider", "native"), ("softmax",)):
            assert cli(command, *arguments, *options, "--json")


@pytest.mark.parametrize("written", [".", "..", "/", ""])
def test_what_is_neither_a_file_nor_a_module(written):
    assert load_plugins([written]) == []
    reason = f"ValueError: {written!r} is neither a Python file, whose name ends in .py, nor the name of a module"
    assert failures()[written] == reason
    done = cli("why", "softmax", "--device", "cpu", "--kernel-plugin", written, fails=True)
    assert str(done.exception) == f"plugin {written} failed: {reason}"


def test_list_and_why_show_that_a_plugin_is_preferred(plugin, monkeypatch, tmp_path):
    path = plugin(PROVIDER.format(name="mine"))
    declared = all_ops()["softmax"]
    origins = load_plugins([path])
    assert rank(declared, CPU, origins)[0].name == "mine"
    assert explain(declared, CPU, origins) == f"it comes from the plugin {path}"
    monkeypatch.chdir(tmp_path)
    for written in (path, "my_kernels.py"):
        options = ("--device", "cpu", "--kernel-plugin", written, "--json")
        ranks = {r["provider"]: r["rank"] for r in cli("list", *options) if r["op"] == "softmax"}
        assert ranks["mine"] == 1 and ranks["native"] == 2
        assert cli("why", "softmax", *options)["runs"] == "mine"


def test_the_command_line_shows_a_failure_in_list_and_stops_elsewhere(plugin):
    path = plugin("raise OSError('no more fish')")
    options = ("--device", "cpu", "--kernel-plugin", path, "--json")
    assert {"op": "", "provider": path, "reason": "OSError: no more fish"}.items() <= cli("list", *options)[-1].items()
    for command in ("why", "bench"):
        assert "no more fish" in str(cli(command, "softmax", *options, fails=True).exception)


def test_a_new_op_has_what_ours_have(plugin, monkeypatch):
    path = plugin(OP.format(name="twice_as_much"))
    options = ("--device", "cpu", "--kernel-plugin", path, "--json")
    rows = [r for r in cli("list", *options) if r["op"] == "twice_as_much"]
    assert [(r["provider"], r["reason"]) for r in rows] == [("sum", None), ("native", None)]
    bench = cli("bench", "twice_as_much", *options)["measurements"]
    assert {m["provider"] for m in bench} == {"native", "sum"} and all(
        m["us"] > 0 and m["shape"] == [2, 64] for m in bench
    )
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # verify stays in this process
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


def test_a_new_op_without_annotations_works_but_for_torch_compile(plugin, caplog):
    path = plugin(OP.format(name="bare").replace("bare(x: torch.Tensor) -> torch.Tensor", "bare(x)"))
    assert load_plugins([path]) == [path]
    assert "'bare' is not in torch.ops.nanovllm" in caplog.text
    assert all_ops()["bare"](torch.ones(2)).tolist() == [2, 2]


def test_verify_fails_for_a_wrong_plugin(plugin, monkeypatch):
    path = plugin(PROVIDER.format(name="wrong"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    options = ("--device", "cpu", "--kernel-plugin", path, "--provider", "wrong", "--json", "--seed", "0")
    done = cli("verify", "softmax", *options, fails=True)
    (row,) = json.loads(done.stdout)
    assert done.exit_code == 1 and row["failures"]


def test_a_provider_that_nobody_has_is_not_verified_as_right(plugin, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    done = cli("verify", "softmax", "--device", "cpu", "--provider", "mien", fails=True)
    assert "--provider mien: expected one of" in str(done.exception)


def test_a_model_runs_with_a_plugin_and_without_one_that_fails(plugin, tmp_path):
    from nanovllm import LLM, SamplingParams

    (tmp_path / "model").mkdir()
    config = {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128, "rope_theta": 1e4, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    good = plugin(
        "from nanovllm.kernels import silu_and_mul\n"
        "calls = []\n"
        "@silu_and_mul.provider('mine')\n"
        "def mine(gate_up):\n"
        "    calls.append(len(gate_up))\n"
        "    return silu_and_mul.native(gate_up)\n"
    )
    broken = plugin("1 / 0", "broken.py")
    llm = LLM(
        tmp_path / "model",
        load_format="dummy",
        device="cpu",
        dtype="float32",
        max_model_len=64,
        kernel_plugins=[broken, good],
    )
    assert llm.kernels.providers["silu_and_mul"] == "mine" and "silu_and_mul" in str(llm.kernels)
    calls = sys.modules[all_ops()["silu_and_mul"].providers["mine"].fn.__module__].calls
    calls.clear()
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(output["token_ids"]) == 4
    assert calls == [3, 1] + [1, 1] * 3  # three prompt tokens, of which the last layer has the last; then three more
    assert failures() == {broken: "ZeroDivisionError: division by zero"}


def test_a_provider_object_says_where_it_comes_from():
    assert Provider("it", print).origin is None
    assert all(p.origin is None for declared in all_ops().values() for p in declared.providers.values())
