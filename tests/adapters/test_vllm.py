"""vLLM's plugin on stand-ins of vLLM's interfaces; test_vllm_real.py runs it in vLLM itself where that is installed."""

import importlib
import logging
import os
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from nanovllm.adapters import vllm as plugin
from tests.adapters import vllm_stand_in

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    tomllib = None


@pytest.fixture
def platform(monkeypatch):
    monkeypatch.setenv(plugin.VARIABLE, "")
    return vllm_stand_in.install(monkeypatch)


def priority(platform, **additional_config):
    config = SimpleNamespace(additional_config=additional_config)
    found = platform.get_default_ir_op_priority(config)
    return found.rms_norm, found.fused_add_rms_norm


def sizes(platform, *ends, largest=512, **additional_config):
    """A configuration as vLLM's platform leaves it, with the ends of compile ranges that a user gave."""
    compilation = SimpleNamespace(max_cudagraph_capture_size=largest, compile_ranges_endpoints=list(ends) or None)
    config = SimpleNamespace(additional_config=additional_config, compilation_config=compilation)
    platform.get_default_ir_op_priority(config)
    platform.check_and_update_config(config)
    return config


def lowered(config, start, end):
    """The provider of each op in the code that vLLM compiles for a range of sizes."""
    module, name = plugin.OUR_PASS_MANAGER.rsplit(".", 1)
    manager = getattr(importlib.import_module(module), name)()
    manager.configure(config)
    x, weight = torch.randn(3, 32), torch.randn(32)
    graph = {"fused_add_rms_norm": (x, x, weight, 1e-6), "nanovllm_silu_and_mul": (x,)}
    vllm_stand_in.IrOp.registry["fused_add_rms_norm"].set_default(["nanovllm", "native"])  # as vLLM's workers do
    vllm_stand_in.RANGE[:] = start, end
    manager(graph)
    assert manager.configured
    return manager.lowered


def replaced():
    return set(vllm_stand_in.CustomOp.registry)


OPS = ("rms_norm", "add_rms_norm", "silu_and_mul", "rotary_embedding")
LAYERS = {"SiluAndMul", "RotaryEmbedding", "Llama3RotaryEmbedding", "YaRNScalingRotaryEmbedding"}


def test_it_does_nothing_unless_it_is_asked(platform):
    plugin.register()
    assert priority(platform) == (["native"], ["native"]) and not replaced()
    assert set(vllm_stand_in.IrOp.registry["rms_norm"].impls) == {"native"}


def test_what_is_served_is_a_part_of_the_configuration(platform, monkeypatch):
    """vLLM keeps compiled code under its hash, and would run code that was compiled without the layers."""
    monkeypatch.setenv(plugin.VARIABLE, "silu_and_mul")
    plugin.register()
    config = SimpleNamespace(additional_config={"other": 1})
    platform.get_default_ir_op_priority(config)
    assert config.additional_config == {"other": 1, "nanovllm": {"ops": ["silu_and_mul"]}}
    config.additional_config = theirs = object()  # an object with a hash of its own
    platform.get_default_ir_op_priority(config)
    assert config.additional_config is theirs


def test_the_environment_asks(platform, monkeypatch, caplog):
    monkeypatch.setenv(plugin.VARIABLE, "1")
    with caplog.at_level(logging.INFO, "vllm.plugins.nanovllm"):
        plugin.register()
        plugin.register()  # vLLM may call it again
    assert "nanovllm serves add_rms_norm, silu_and_mul" in caplog.text
    assert priority(platform) == (["native"], ["nanovllm", "native"]) and replaced() == {"SiluAndMul"}


def test_some_ops(platform, monkeypatch):
    monkeypatch.setenv(plugin.VARIABLE, "rms_norm")
    plugin.register()
    assert priority(platform) == (["nanovllm", "native"], ["native"]) and not replaced()


def test_the_configuration_asks(platform, monkeypatch):
    plugin.register()
    assert priority(platform, nanovllm={"ops": ["silu_and_mul", "add_rms_norm"]}) == (
        ["native"],
        ["nanovllm", "native"],
    )
    assert replaced() == {"SiluAndMul"}
    # Processes that vLLM starts from here have it from the environment.
    assert os.environ[plugin.VARIABLE] == "add_rms_norm,silu_and_mul"


def test_switched_off_in_the_environment_is_off(platform, monkeypatch):
    monkeypatch.setenv(plugin.VARIABLE, "0")
    plugin.register()
    assert priority(platform, nanovllm=True) == (["native"], ["native"])


def test_taken_back(platform, monkeypatch):
    monkeypatch.setenv(plugin.VARIABLE, ",".join(OPS))
    plugin.register()
    plugin.take_back()
    assert priority(platform) == (["native"], ["native"]) and not replaced()
    assert platform.get_pass_manager_cls() == plugin.PASS_MANAGER
    assert vllm_stand_in.IrOp.registry["nanovllm_silu_and_mul"].get_priority() == ["native"]
    assert all(set(op.impls) == {"native"} for op in vllm_stand_in.IrOp.registry.values())
    plugin.register()
    assert priority(platform) == (["nanovllm", "native"],) * 2 and replaced() == LAYERS


@pytest.mark.parametrize(
    "changes, said",
    [({"gpu": False}, "its kernels need an NVIDIA GPU, and vLLM found none"), ({"capability": 75}, "this GPU has 7.5")],
)
def test_where_it_cannot_run_it_says_why(platform, monkeypatch, caplog, changes, said):
    for name, value in changes.items():
        monkeypatch.setattr(platform, name, value, raising=False)
    plugin.register()
    assert not caplog.text  # not asked
    monkeypatch.setenv(plugin.VARIABLE, "1")
    plugin.register()
    assert said in caplog.text and priority(platform) == (["native"], ["native"]) and not replaced()


def test_a_wrong_name_is_said_and_harms_nothing(platform, monkeypatch, caplog):
    monkeypatch.setenv(plugin.VARIABLE, "rms_norm,softmax")
    plugin.register()
    assert "expected 0, 1, or any of rms_norm, add_rms_norm" in caplog.text and not replaced()
    with pytest.raises(ValueError, match="additional_config: nanovllm.ops=3: expected 0, 1, or any of"):
        plugin.ops_asked_for({"ops": 3}, "additional_config: nanovllm")


def test_another_version_of_vllm_loses_the_op_only(platform, monkeypatch, caplog):
    monkeypatch.delattr(sys.modules["vllm.model_executor.layers.activation"], "SiluAndMul")
    assert plugin.serve(OPS) == ["rms_norm", "add_rms_norm", "rotary_embedding"]
    assert "does not serve silu_and_mul in this vLLM: ImportError" in caplog.text


def test_steps_that_no_graph_captures_keep_vllms_own_ops(platform, monkeypatch):
    monkeypatch.setenv(plugin.VARIABLE, "1")
    plugin.register()
    assert platform.get_pass_manager_cls() == plugin.OUR_PASS_MANAGER
    config = sizes(platform)
    assert config.checked and config.compilation_config.compile_ranges_endpoints == [512]
    ours = dict.fromkeys(("fused_add_rms_norm", "nanovllm_silu_and_mul"), "nanovllm")
    vllms = dict.fromkeys(ours, "native")
    assert lowered(config, 1, 512) == lowered(config, 512, 512) == ours
    assert lowered(config, 513, 8192) == lowered(config, 256, 8192) == lowered(config, 1024, 1024) == vllms
    assert all(op.get_priority() == ["nanovllm", "native"] for op in map(vllm_stand_in.IrOp.registry.get, ours))
    assert sizes(platform, 64, 512).compilation_config.compile_ranges_endpoints == [64, 512]
    assert sizes(platform, 64).compilation_config.compile_ranges_endpoints == [64, 512]
    # Without CUDA graphs the host launches every compiled step.
    config = sizes(platform, largest=None)
    assert config.compilation_config.compile_ranges_endpoints is None and lowered(config, 1, 8192) == vllms


def test_the_largest_captured_size_is_in_the_names_of_compiled_code(platform):
    plugin.serve()
    assert sizes(platform, other=1).additional_config == {
        "other": 1, "nanovllm": {"ops": ["add_rms_norm", "silu_and_mul"], "largest": 512},
    }  # fmt: skip
    from nanovllm.adapters.vllm_passes import PassManager

    names = set()
    for largest in (256, 512):
        manager = PassManager()
        manager.configure(sizes(platform, largest=largest))
        names.add(manager.uuid())
    assert len(names) == 2 and all("vLLM's passes" in name for name in names)


@pytest.mark.parametrize("said", ["all_sizes", "add_rms_norm,all_sizes,silu_and_mul"])
def test_all_sizes(platform, monkeypatch, said):
    monkeypatch.setenv(plugin.VARIABLE, said)
    plugin.register()
    assert platform.get_pass_manager_cls() == plugin.PASS_MANAGER
    config = sizes(platform)
    assert config.compilation_config.compile_ranges_endpoints is None
    assert config.additional_config == {"nanovllm": {"ops": ["add_rms_norm", "silu_and_mul", "all_sizes"]}}
    assert replaced() == {"SiluAndMul"}


def test_other_processes_serve_all_sizes_too(platform):
    plugin.register()
    assert priority(platform, nanovllm={"ops": ["all_sizes"]})[1] == ["nanovllm", "native"]
    assert os.environ[plugin.VARIABLE] == "add_rms_norm,silu_and_mul,all_sizes"


def test_without_ops_of_that_kind_the_ranges_are_vllms(platform):
    plugin.serve(["rotary_embedding"])
    assert platform.get_pass_manager_cls() == plugin.PASS_MANAGER
    assert sizes(platform).additional_config == {"nanovllm": {"ops": ["rotary_embedding"]}}


def test_a_platform_with_passes_of_its_own_has_all_sizes_served(platform, monkeypatch, caplog):
    monkeypatch.setattr(type(platform), "get_pass_manager_cls", classmethod(lambda cls: "theirs.Manager"))
    assert plugin.serve() == ["add_rms_norm", "silu_and_mul"]
    assert "serves steps of all sizes in this vLLM: ValueError: the platform's pass manager is theirs" in caplog.text
    assert platform.get_pass_manager_cls() == "theirs.Manager"
    assert sizes(platform).compilation_config.compile_ranges_endpoints is None


def test_a_layer_that_somebody_else_replaced_stays(platform, caplog):
    class Theirs(vllm_stand_in.SiluAndMul):
        pass

    vllm_stand_in.SiluAndMul.register_oot(Theirs)
    assert "silu_and_mul" not in plugin.serve(OPS)
    assert vllm_stand_in.CustomOp.registry["SiluAndMul"] is Theirs and "is replaced already" in caplog.text


def test_norms_compute_what_vllms_do(platform):
    plugin.serve(OPS)
    x, residual, weight = torch.randn(3, 32), torch.randn(3, 32), torch.randn(32)
    for name, arguments in (("rms_norm", (x,)), ("fused_add_rms_norm", (x, residual))):
        impls = vllm_stand_in.IrOp.registry[name].impls
        got, wanted = (impls[p].impl_fn(*arguments, weight, 1e-6) for p in ("nanovllm", "native"))
        torch.testing.assert_close(got, wanted)
        takes = impls["nanovllm"].supports_args
        assert takes(*arguments, weight, 1e-6) and not takes(*arguments, None, 1e-6)
        assert not takes(*arguments, weight, 1e-6, 16) and not takes(*arguments, weight.half(), 1e-6)


def test_layers_compute_what_vllms_do(platform):
    plugin.serve(OPS)
    layer, x = vllm_stand_in.SiluAndMul(), torch.randn(3, 32)
    assert type(layer).__module__ == plugin.__name__ and isinstance(layer, vllm_stand_in.SiluAndMul)
    torch.testing.assert_close(layer(x), layer.forward_native(x))
    rope = vllm_stand_in.Llama3RotaryEmbedding(16, 16, 64, 10000.0, True, torch.bfloat16)
    positions, q, k = torch.tensor([0, 5, 63]), torch.randn(3, 64).bfloat16(), torch.randn(3, 32).bfloat16()
    for got, wanted in zip(rope(positions, q, k), rope.forward_native(positions, q, k)):
        torch.testing.assert_close(got, wanted)
    assert rope(positions, q) == "vLLM's kernel"  # no keys
    assert vllm_stand_in.RotaryEmbedding(16, 8, 64, 1e4, True, torch.float32)(positions, q, k) == "vLLM's kernel"


def test_custom_ops_switch_a_layer_off(platform):
    plugin.serve(OPS)
    vllm_stand_in.CustomOp.custom_ops = ["none", "-silu_and_mul"]
    layer = vllm_stand_in.SiluAndMul()
    assert layer._forward_method == layer.forward_native
    assert not layer.enabled() and vllm_stand_in.RotaryEmbedding(8, 8, 4, 1e4, True, torch.float32).enabled()


@pytest.mark.skipif(tomllib is None, reason="needs Python 3.11 to read pyproject.toml")
def test_the_entry_point():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    value = project["entry-points"]["vllm.general_plugins"]["nanovllm"]
    assert EntryPoint("nanovllm", value, "vllm.general_plugins").load() is plugin.register
