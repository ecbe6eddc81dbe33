"""What `generate` compiles of a patched model: the state that it keeps, and what is no part of a pickle."""

import io

import pytest
import torch

transformers = pytest.importorskip("transformers")

from nanovllm.adapters.transformers import apply
from nanovllm.adapters.transformers.compiled import STAND_IN
from tests.adapters.models import prompts, tiny
from tests.providers import references

STATIC = {"max_new_tokens": 5, "do_sample": False, "cache_implementation": "static"}


@pytest.fixture(autouse=True)
def usual_providers(monkeypatch):
    """Without names of ops `apply` replaces what has a kernel: on a CPU, these."""
    names = "rms_norm", "silu_and_mul", "rotary_embedding", "attention_dense", "attention_decode"
    with references("mine", *names):
        monkeypatch.setenv("NANOVLLM_KERNELS", "*=mine,native")
        yield


def config():
    torch._dynamo.reset()
    made = transformers.CompileConfig(fullgraph=True, backend="eager", mode=None, dynamic=False)
    made._compile_all_devices = True  # a CPU, too
    return made


class WithState(transformers.Qwen3ForCausalLM):
    """Its forward keeps a tensor from call to call, as multimodal models keep `rope_deltas`."""

    bias = None

    def forward(self, input_ids=None, **more):
        out = super().forward(input_ids=input_ids, **more)
        if input_ids.shape[1] > 1:
            self.bias = 40.0 * torch.nn.functional.one_hot(input_ids[:, :1] % 97, 99)
        else:
            self.bias = self.bias.roll(1, -1)
        out.logits = out.logits + self.bias
        return out


def test_a_compiled_step_reads_and_sets_what_the_model_keeps():
    model = tiny("Qwen3", num_hidden_layers=1).requires_grad_(False)
    model.__class__ = WithState
    given = [prompts(), {name: tensor.roll(2, 0) for name, tensor in prompts("left").items()}]
    expected = [model.generate(**g, **STATIC, disable_compile=True) for g in given]
    bias = model.bias
    with apply(model) as report:
        assert report.replaced
        compiled = config()
        got = [model.generate(**g, **STATIC, compile_config=compiled) for g in given]
        assert model.__dict__[STAND_IN].of(model) is not None
    assert all(map(torch.equal, got, expected)) and torch.equal(model.bias, bias)


def test_modules_without_replaced_code_are_not_copied():
    """Rotations of the type "dynamic" keep the length for which their frequencies are."""
    model = tiny("Qwen3").requires_grad_(False)
    with apply(model):
        made = model.__dict__[STAND_IN].of(model)
        assert made is not model and made.model.layers[0] is not model.model.layers[0]
        assert made.model.rotary_emb is model.model.rotary_emb and made.lm_head is model.lm_head
        assert not [name for name, module in made.named_modules() if "forward" in module.__dict__]
        model.model.rotary_emb.max_seq_len_cached = 300
        assert model.__dict__[STAND_IN].of(model) is made


def test_a_pickle_has_the_method_of_the_class():
    model = tiny("Qwen3", num_hidden_layers=1).requires_grad_(False)
    try:
        torch.save(model, io.BytesIO())
    except AttributeError:  # the package `kernels` puts local classes into it
        pytest.skip("the model itself cannot be pickled")
    expected = model.generate(**prompts(), **STATIC)
    file = io.BytesIO()
    with apply(model):
        torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert loaded.get_compiled_call.__func__ is type(loaded).get_compiled_call
    with apply(loaded):
        assert torch.equal(loaded.generate(**prompts(), **STATIC, compile_config=config()), expected)


def test_a_call_that_transformers_does_not_compile_is_that_of_the_model(monkeypatch):
    model = tiny("Qwen3").requires_grad_(False)
    with apply(model):
        monkeypatch.setattr(type(model), "get_compiled_call", lambda self, config: self.__call__)
        assert model.get_compiled_call(None).__self__ is model
