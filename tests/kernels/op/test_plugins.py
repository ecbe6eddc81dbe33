"""Kernels from outside the package: files, modules and installed distributions."""

import json
import os
import re
import sys
from pathlib import Path

import pytest
import torch

from nanovllm.kernels import Provider, all_ops, resolve_kernels
from nanovllm.kernels.op.plugins import failures, load_plugins
from nanovllm.kernels.op.selection import why_selected
from tests.kernels.op.plugin_texts import OP, PROVIDER, cli

pytestmark = pytest.mark.usefixtures("untouched")
CPU = torch.device("cpu")


def test_a_file_is_preferred_where_it_is_asked_for_and_only_there(plugin):
    path = plugin(PROVIDER.format(name="mine"))
    kernels = resolve_kernels(CPU, plugins=[path])
    assert kernels.providers["softmax"] == "mine"
    of_a_cpu = {op for op, declared in all_ops().items() if {"cpu", "onednn"} & declared.providers.keys()}
    others = kernels.providers.keys() - of_a_cpu - {"softmax"}
    assert {kernels.providers[op] for op in others} == {"native"}
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


def test_a_path_or_module_that_is_not_there(tmp_path):
    missing = str(tmp_path / "nothing.py")
    with pytest.raises(ValueError, match=f"^kernel plugin {re.escape(missing)}: there is no such file$"):
        load_plugins([missing])
    with pytest.raises(ValueError, match="^kernel plugin no_such_plugin: .*; a file is named with its path and .py$"):
        load_plugins(["no_such_plugin"])


def test_one_that_was_named_and_serves_nothing_says_why(plugin, caplog):
    path = plugin(PROVIDER.format(name="mine").replace('"mine")', '"mine", support=lambda device: "no fish")', 1))
    resolve_kernels(CPU, plugins=[path])
    assert caplog.messages == [f"kernel plugin {path} has no kernel that can run here: softmax, mine: no fish"]
    because = why_selected(all_ops()["softmax"], CPU, [path])
    assert because == "mine, which is preferred as it is a plugin's, cannot run here: no fish"
    path = plugin(PROVIDER.format(name="mine"))
    for choice, reason in (
        ({"use_custom_kernels": False}, "use_custom_kernels=False selects the reference of every op"),
        ({"priority": {"softmax": ["native"]}}, "softmax, mine: you named `native` for it"),
    ):
        resolve_kernels(CPU, plugins=[path], **choice)
        assert caplog.messages[-1] == f"kernel plugin {path} serves no op: {reason}"
    resolve_kernels(CPU, plugins=[path])
    assert len(caplog.messages) == 3
    resolve_kernels(CPU, plugins=[plugin("x = 1", "empty.py")])
    assert "empty.py serves no op: it registers no provider and declares no op" in caplog.messages[-1]


def test_a_fused_op_stays_if_the_plugins_kernel_of_a_part_cannot_run(plugin, caplog):
    usual = resolve_kernels(CPU).providers
    assert usual["decoder_step"] == "cpu"
    text = PROVIDER.format(name="mine").replace("softmax", "silu_and_mul").replace("(x)", "(gate_up)")
    path = plugin(text.replace('"mine")', '"mine", support=lambda device: "no fish")', 1))
    assert resolve_kernels(CPU, plugins=[path]).providers == usual
    assert caplog.messages == [f"kernel plugin {path} has no kernel that can run here: silu_and_mul, mine: no fish"]
    reference = {"silu_and_mul": ["native"]}
    not_used = "so fused ops with it are not used: decoder_step (cpu)"
    resolve_kernels(CPU, plugins=[path], priority=reference)
    assert caplog.messages[-1] == f"`native`, which you named for silu_and_mul, runs, {not_used}"
    path = plugin(text)
    assert resolve_kernels(CPU, plugins=[path]).providers["decoder_step"] == "native"
    assert caplog.messages[-1] == f"your provider of silu_and_mul runs, {not_used}"
    for plugins in ([path], []):
        resolve_kernels(CPU, plugins=plugins, priority=reference)
        assert caplog.messages[-1] == f"`native`, which you named for silu_and_mul, runs, {not_used}"


def test_an_installed_plugin_fails_and_one_that_is_named_is_loaded(plugin, installed):
    installed("1 / 0")
    good = plugin(PROVIDER.format(name="mine"))
    assert load_plugins([good]) == [good]
    with pytest.raises(ValueError, match="ZeroDivisionError"):  # the reason is where the missing name is noticed
        resolve_kernels(CPU, priority={"softmax": ["theirs"]}, plugins=[good])


def test_loading_twice_runs_once_however_the_path_is_written(plugin, monkeypatch, tmp_path):
    path = plugin(PROVIDER.format(name="mine"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for written in (path, "my_kernels.py", "./my_kernels.py", "~/my_kernels.py", Path(path)):
        assert load_plugins([written]) == [path]
    assert path not in failures()
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
    with pytest.raises(ValueError, match="SyntaxError"):
        resolve_kernels(CPU, plugins=[path])
    assert "SyntaxError" in failures()[path]
    assert "renamed" not in all_ops()["softmax"].providers
    plugin(PROVIDER.format(name="mine"))
    assert resolve_kernels(CPU, plugins=[path]).providers["softmax"] == "mine" and path not in failures()
    Path(path).unlink()
    with pytest.raises(ValueError, match="there is no such file"):
        load_plugins([path])


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


def test_two_files_of_one_name_and_two_providers_of_one_name(plugin, tmp_path):
    (tmp_path / "other").mkdir()
    first, second = plugin(PROVIDER.format(name="mine")), plugin(PROVIDER.format(name="yours"), "other/my_kernels.py")
    third = plugin(PROVIDER.format(name="mine"), "third.py")
    with pytest.raises(ValueError) as error:
        load_plugins([first, second, third])
    assert {"mine", "yours"} <= set(all_ops()["softmax"].providers)
    for said in (failures()[third], str(error.value)):
        assert f"already has a provider 'mine', from {first}; give yours another name" in said
    assert f"kernel plugin {third}" in str(error.value)
    done = cli("list", "--device", "cpu", "--kernel-plugin", third, fails=True)
    assert first in str(done.exception)
    fourth, fifth = (plugin(OP.format(name="declared_by_two"), f"{name}.py") for name in ("fourth", "fifth"))
    with pytest.raises(ValueError, match="is declared twice"):
        load_plugins([fourth, fifth])
    assert f"'declared_by_two' is declared twice, before by {fourth}" in failures()[fifth]


def test_a_model_runs_with_a_plugin_and_not_with_one_that_fails(plugin, tmp_path):
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
    arguments = dict(load_format="dummy", device="cpu", dtype="float32", max_model_len=64)
    missing = str(tmp_path / "missing.py")
    by_zero = "line 1, `1 / 0`: ZeroDivisionError: division by zero"
    for named, reason in ((broken, by_zero), (missing, "there is no such file")):
        with pytest.raises(ValueError, match=f"^kernel plugin {re.escape(named)}: {reason}$"):
            LLM(tmp_path / "model", **arguments, kernel_plugins=[good, named])
    llm = LLM(tmp_path / "model", **arguments, kernel_plugins=[good])
    assert llm.kernels.providers["silu_and_mul"] == "mine" and "silu_and_mul" in str(llm.kernels)
    calls = sys.modules[all_ops()["silu_and_mul"].providers["mine"].fn.__module__].calls
    calls.clear()
    (output,) = llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True), use_tqdm=False)
    assert len(output["token_ids"]) == 4
    assert calls == [3, 1] + [1, 1] * 3  # three prompt tokens, of which the last layer has the last; then three more


def test_a_provider_object_says_where_it_comes_from(warm_python):
    assert Provider("it", print).origin is None
    code = (  # in a process of its own: other tests register providers of plugins
        "from nanovllm.kernels import all_ops\n"
        "print({p.origin for declared in all_ops().values() for p in declared.providers.values()})"
    )
    assert warm_python.run("-c", code).stdout == "{None}\n"
