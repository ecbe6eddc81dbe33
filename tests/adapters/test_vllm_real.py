"""The plugin in vLLM itself, as far as a CPU goes: its configuration, IR ops, layers and their lowering."""

import json
import os
import sys
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch

if os.environ.get("NANOVLLM_TEST_VLLM") != "1":
    pytest.skip("NANOVLLM_TEST_VLLM=1 runs it, where vLLM is installed", allow_module_level=True)
platforms = pytest.importorskip("vllm.platforms")
from vllm import ir
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.activation import SiluAndMul
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms.interface import PlatformEnum, UnspecifiedPlatform

from nanovllm.adapters import vllm as plugin

OPS = [op for op in plugin.ALL_OPS if op != "attention_decode"]
ALL = {"ops": OPS}


class Cuda(UnspecifiedPlatform):
    """Says that it is CUDA; its tensors are on the CPU."""

    _enum = PlatformEnum.CUDA
    device_type = device_name = "cuda"
    has_device_capability = classmethod(lambda cls, least, device_id=0: True)
    check_and_update_config = import_kernels = import_ir_kernels = classmethod(lambda cls, *args: None)


@pytest.fixture(autouse=True)
def platform(monkeypatch):
    monkeypatch.setattr(platforms, "_current_platform", Cuda())
    monkeypatch.setenv(plugin.VARIABLE, "")
    library = None
    if not hasattr(torch.ops._C, "silu_and_mul"):  # without vLLM's compiled extension
        library = torch.library.Library("_C", "FRAGMENT")
        library.define("silu_and_mul(Tensor! out, Tensor x) -> ()")
    yield
    plugin.take_back()
    if library is not None:
        library._destroy()


def priorities(config):
    return config.kernel_config.ir_op_priority.rms_norm, config.kernel_config.ir_op_priority.fused_add_rms_norm


def test_the_configuration_asks_and_users_priorities_go_first():
    plugin.register()
    plain = VllmConfig()
    assert priorities(plain) == (["native"], ["native"])
    config = VllmConfig(additional_config={"nanovllm": ALL})
    assert priorities(config) == (["nanovllm", "native"],) * 2
    assert config.compute_hash() != plain.compute_hash()


def test_the_environment_asks_and_compiled_code_is_kept_apart(monkeypatch):
    hashes = {VllmConfig().compute_hash()}
    for ops in ("silu_and_mul", "rotary_embedding"):  # which change no priority
        monkeypatch.setenv(plugin.VARIABLE, ops)
        plugin.register()
        hashes.add(VllmConfig().compute_hash())
        plugin.take_back()
    assert len(hashes) == 3


def test_steps_above_the_captured_sizes_have_a_compile_range_of_their_own():
    plugin.register()
    config = VllmConfig(additional_config={"nanovllm": ALL})
    assert config.additional_config["nanovllm"] == {**ALL, "largest": 0}  # no model, so no CUDA graphs
    hashes = {config.compute_hash()}
    for largest in (256, 512):
        config.compilation_config.max_cudagraph_capture_size = largest
        config.compilation_config.compile_ranges_endpoints = None
        platforms.current_platform.check_and_update_config(config)
        config._set_compile_ranges()
        ranges = config.compilation_config.get_compile_ranges()
        assert [(r.start, r.end) for r in ranges][:2] == [
            (1, largest), (largest + 1, config.scheduler_config.max_num_batched_tokens)
        ]  # fmt: skip
        hashes.add(config.compute_hash())
    assert len(hashes) == 3


def test_attention_is_registered_and_chosen(monkeypatch):
    stand_in = ModuleType("vllm.vllm_flash_attn")  # FlashAttention itself is compiled

    def compiled(name):
        if name.startswith("__"):
            raise AttributeError(name)  # such as __file__, which `inspect` asks of all modules
        return lambda *args, **kwargs: None

    stand_in.__getattr__ = compiled
    for name in ("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface"):
        monkeypatch.setitem(sys.modules, name, stand_in)
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadata
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    flash = AttentionBackendEnum.FLASH_ATTN
    own = flash.get_class()
    if len(own.get_kv_cache_shape(1, 64, 1, 64)) != 4:
        assert plugin.serve(["attention_decode"]) == [] and flash.get_class() is own
        return
    assert plugin.serve(["attention_decode"]) == ["attention_decode"]
    ours = flash.get_class()
    impl, builder = ours.get_impl_cls(), ours.get_builder_cls()
    assert issubclass(ours, own) and ours.get_preferred_block_size(16) == 64
    assert issubclass(impl, own.get_impl_cls()) and issubclass(builder, own.get_builder_cls())
    layer = impl(4, 64, 0.125, 2, None, None, "auto")
    two = torch.ones(2, dtype=torch.int32)
    metadata = FlashAttentionMetadata(
        2, 1, torch.arange(3, dtype=torch.int32), 1, two, two[:, None], two.long(), False, 0, None, None, None
    )
    assert not layer.may_decode(metadata)
    metadata.nanovllm_decodes = True
    assert layer.may_decode(metadata)
    call = layer.call(torch.zeros(2, 4, 64), torch.zeros(3, 64, 2, 128).transpose(1, 2), metadata)
    assert call.kv.k_cache.shape == (3, 64, 2, 64) and call.kv.max_context_len == 64 and call.soft_cap is None
    plugin.take_back()
    assert flash.get_class() is own


def test_vllm_loads_it_by_the_entry_point(monkeypatch, tmp_path):
    from vllm import plugins

    (tmp_path / "stand_in-1.dist-info").mkdir()
    (tmp_path / "stand_in-1.dist-info" / "METADATA").write_text("Name: stand-in\nVersion: 1\n")
    text = "[vllm.general_plugins]\nnanovllm = nanovllm.adapters.vllm:register\n"
    (tmp_path / "stand_in-1.dist-info" / "entry_points.txt").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugins.envs, "VLLM_PLUGINS", ["nanovllm"], raising=False)
    monkeypatch.setattr(plugins, "plugins_loaded", False)
    monkeypatch.setenv(plugin.VARIABLE, "rms_norm")
    plugins.load_general_plugins()
    assert priorities(VllmConfig()) == (["nanovllm", "native"], ["native"])


def test_layers_of_vllm_run_our_kernels_and_lower_to_them():
    from torch._functorch.aot_autograd import aot_module_simplified
    from vllm.compilation.passes.ir.lowering_pass import VllmIRLoweringPass

    from nanovllm.adapters.vllm_ir import vllms_own

    plugin.register()
    config = VllmConfig(additional_config={"nanovllm": ALL})
    graphs = []
    with set_current_vllm_config(config), torch.no_grad(), config.kernel_config.ir_op_priority.set_priority():
        gate, norm = SiluAndMul(), RMSNorm(32)
        rope = RotaryEmbedding(16, 16, 64, 10000.0, True, torch.float32)

        def layers(x, positions, q, k):
            y = gate(x)  # vLLM's own passes take the form of `norm(x, residual)` that works in place
            both = ir.ops.fused_add_rms_norm(norm(y), y, norm.weight.data, 1e-6)
            return (*both, *rope(positions, q, k))

        x, positions = torch.randn(3, 64), torch.tensor([1, 7, 63])
        q, k = torch.randn(3, 64), torch.randn(3, 32)
        y = gate.forward_native(x)
        native = {name: op.impls["native"].impl_fn for name, op in ir.op.IrOp.registry.items()}
        first = native["rms_norm"](y, norm.weight, 1e-6)
        wanted = (*native["fused_add_rms_norm"](first, y, norm.weight, 1e-6), *rope.forward_native(positions, q, k))
        for got, right in zip(norm(first.clone(), y.clone()), wanted):
            torch.testing.assert_close(got, right)
        lowering, uuids = VllmIRLoweringPass(config), []

        def lowered(graph, _):
            with nullcontext() if not graphs else vllms_own():  # the second time a range above the captured sizes
                lowering(graph.graph)
                uuids.append(lowering.uuid())
            graph.recompile()
            graphs.append(graph.graph)
            return graph.forward

        def backend(graph, inputs):
            return aot_module_simplified(graph, inputs, fw_compiler=lowered)

        for function in (layers, *[torch.compile(layers, backend=backend, fullgraph=True)] * 2):
            torch._dynamo.reset()
            for got, right in zip(function(x, positions, q.clone(), k.clone()), wanted):
                torch.testing.assert_close(got, right)
    ours, vllms = [{str(node.target) for node in g.nodes if node.op == "call_function"} for g in graphs]
    assert {t for t in ours if "nanovllm" in t} == {f"nanovllm.{op}.default" for op in OPS}
    assert {t for t in vllms if "nanovllm" in t} == {"nanovllm.rotary_embedding.default"}  # no IR op of vLLM
    assert len(set(uuids)) == 2


class NoGpu(UnspecifiedPlatform):
    device_type = device_name = "cpu"
    check_and_update_config = classmethod(lambda cls, config: None)


def test_without_a_gpu_it_says_why(monkeypatch):
    said = []
    monkeypatch.setattr(plugin.logger, "warning", lambda text, *values: said.append(text % values))
    monkeypatch.setattr(platforms, "_current_platform", NoGpu())
    monkeypatch.setenv(plugin.VARIABLE, "1")
    plugin.register()
    assert said == ["NANOVLLM_VLLM is set, but nanovllm serves nothing: " + plugin.unsupported()]
    assert priorities(VllmConfig()) == (["native"], ["native"])


def test_ops_are_measured_beside_vllms(tmp_path, capsys):
    from benchmarks import vllm_ops

    file = tmp_path / "rows.json"
    given = ["--device", "cpu", "--tokens", "3", "--calls", "1", "--rounds", "1", "--json", str(file)]
    assert vllm_ops.main(given) == 0
    rows = json.loads(file.read_text())
    assert {row["op"] for row in rows} == {*OPS, "rms_norm of heads"}
    assert all(row["difference"] < 0.02 and row["us"].keys() == {"Inductor", "nanovllm"} for row in rows)
    assert "CPU, vLLM" in capsys.readouterr().out
