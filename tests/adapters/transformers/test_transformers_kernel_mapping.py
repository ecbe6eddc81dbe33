"""Our layers as the package `kernels` asks for them. Without the package, a stand-in has its rules."""

import enum
import importlib.util
import inspect
import sys
from types import MethodType, ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from nanovllm.adapters.transformers import kernel_mapping
from tests.adapters.models import prompts, shared, tiny


class Mode(enum.Flag):
    INFERENCE = enum.auto()
    TRAINING = enum.auto()
    TORCH_COMPILE = enum.auto()


@pytest.fixture
def mapping(monkeypatch):
    if importlib.util.find_spec("kernels") is not None:
        return kernel_mapping(("cpu", "cuda"))
    module = ModuleType("kernels")
    module.Mode = Mode
    with monkeypatch.context() as patch:  # transformers looks for the package, too
        patch.setitem(sys.modules, "kernels", module)
        return kernel_mapping(("cpu", "cuda"))


def layers(mapping):
    return [repo.load() for devices in mapping.values() for modes in devices.values() for repo in modes.values()]


def test_layers_are_stateless(mapping):
    """`kernels` refuses a layer that has a constructor, or members besides two marks."""
    known = {name for name, _ in inspect.getmembers(nn.Module)}
    for layer in layers(mapping):
        assert layer.__init__ is nn.Module.__init__
        assert {name for name, _ in inspect.getmembers(layer)} - known <= {"can_torch_compile", "has_backward"}
        assert layer.can_torch_compile and not layer.has_backward


def test_a_norm_of_a_model_computes_the_same(mapping):
    model, given = shared("Llama"), prompts("left")
    (layer,) = {repo.load() for repo in mapping["RMSNorm"]["cpu"].values()}
    expected = model(**given).logits
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            assert list(inspect.signature(layer.forward).parameters) == list(
                inspect.signature(type(module).forward).parameters
            )
            module.forward = MethodType(layer.forward, module)
    got = model(**given).logits
    for module in model.modules():
        module.__dict__.pop("forward", None)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)


class OwnNorm(nn.Module):
    """A norm that says when its own code runs."""

    def __init__(self, layer):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(4)), 1e-6
        self.forward = MethodType(layer.forward, self)

    def forward(self, hidden_states):
        return self.weight * hidden_states * float("inf")


def test_what_the_op_is_not_for_runs_the_own_code(mapping):
    """Gradients, and weights of another dtype: under autocast projections give 16 bits to the norms of heads."""
    norm = OwnNorm(*{repo.load() for repo in mapping["RMSNorm"]["cpu"].values()})
    x = torch.ones(2, 4)
    with torch.no_grad():
        assert norm(x).isfinite().all() and norm(x.bfloat16()).isinf().all()
    assert norm(x).isinf().all()
    norm.requires_grad_(False)
    assert norm(x).isfinite().all() and norm(x.requires_grad_()).isinf().all()


def test_one_device(mapping, monkeypatch):
    kernels = importlib.util.find_spec("kernels")
    if kernels is None:
        monkeypatch.setitem(sys.modules, "kernels", SimpleNamespace(Mode=Mode))
    assert kernel_mapping("cpu").keys() == mapping.keys() and {*kernel_mapping("cpu")["RMSNorm"]} == {"cpu"}


def test_the_activation(mapping):
    (layer,) = {repo.load() for repo in mapping["SiluAndMul"]["cpu"].values()}
    x = torch.randn(3, 8)
    torch.testing.assert_close(layer()(x), nn.functional.silu(x[:, :4]) * x[:, 4:])


def test_the_package_itself(mapping):
    kernels = pytest.importorskip("kernels")

    @kernels.use_kernel_forward_from_hub("RMSNorm")
    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.ones(4)), 1e-6

        def forward(self, hidden_states):
            raise AssertionError("not exchanged")

    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        norm = kernels.kernelize(Norm(), device="cpu", mode=kernels.Mode.INFERENCE)
    with torch.no_grad():
        assert norm(torch.ones(2, 4)).sum() == pytest.approx(8, rel=1e-4)


def test_the_package_exchanges_the_norms_of_a_model(mapping, monkeypatch):
    """With the versions of transformers and `kernels` that take each other, models register their norms by name."""
    kernels = pytest.importorskip("kernels")
    from transformers.utils import is_kernels_available

    if not is_kernels_available():
        pytest.skip("this transformers does not take this version of kernels")
    model, given, calls = tiny("Qwen3").requires_grad_(False), prompts("left"), []
    expected = model(**given).logits
    norms = sum(type(module).__name__ == "Qwen3RMSNorm" for module in model.modules())
    (layer,) = {repo.load() for repo in mapping["RMSNorm"]["cpu"].values()}
    own = layer.forward

    def forward(self, hidden_states):
        calls.append(self)
        return own(self, hidden_states)

    monkeypatch.setattr(layer, "forward", forward)
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        model = kernels.kernelize(model, device="cpu", mode=kernels.Mode.INFERENCE)
    got = model(**given).logits
    assert len({id(module) for module in calls}) == norms > 0
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.raises(ImportError):
        kernel_mapping()
