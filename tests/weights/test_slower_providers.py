"""A GPU on which the fastest kernels for packed weights cannot run says so, once for a model."""

import pytest
import torch

from nanovllm.config import EngineConfig
from nanovllm.kernels import Provider, all_ops, resolve_kernels
from nanovllm.kernels.op.measured_order import DIRECTORY_VARIABLE, save_table
from nanovllm.weights.checkpoint import locate
from nanovllm.weights.loader import load_model
from nanovllm.weights.packed_layers import warn_of_slower_providers
from tests import tiny

WHY_NOT = "nvcc, the CUDA compiler, is not on PATH; install the CUDA toolkit"


@pytest.fixture
def without_nvcc(monkeypatch, tmp_path):
    """A GPU seems to be here, and its fastest kernels seem to need a compiler."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test 9")
    found = {op: {"order": ["cuda", "native"], "relative": {}} for op in ("linear_int8", "linear_packed_add_rms_norm")}
    save_table("nvidia-test-9", found, "2020-01-02", tmp_path)
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    for op in found:
        monkeypatch.setitem(all_ops()[op].providers, "cuda", Provider("cuda", print, lambda device: WHY_NOT))


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_ops_the_reason_and_the_results_are_named(without_nvcc, tmp_path, caplog, quantization):
    tiny.save(tmp_path)
    checkpoint = locate(EngineConfig(str(tmp_path), quantization=quantization))
    kernels = resolve_kernels(torch.device("cpu"), False)
    model = load_model(checkpoint, kernels, torch.float32, torch.device("cpu"), 16, keep_packed=True)
    assert not [record for record in caplog.records if "slower" in record.getMessage()], "on a CPU nothing is said"
    warn_of_slower_providers(model, kernels, torch.device("cuda", 0))
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    if quantization is None:
        assert not said
        return
    (line,) = said
    for words in ("linear_int8 runs on native, not on cuda", "linear_packed_add_rms_norm runs on native", WHY_NOT):
        assert words in line
    assert "equal results within rounding" in line
