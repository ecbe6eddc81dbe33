"""`apply`: what it takes, what its report says, when modules run their own code, and that everything comes back."""

import copy
import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from nanovllm.adapters.transformers import OPS, apply, undo
from nanovllm.kernels import all_ops
from tests.adapters.models import prompts, put_in, tiny
from tests.providers import registered


@pytest.fixture
def model():
    return tiny("Qwen3").requires_grad_(False)


def logits(model, **given):
    with torch.no_grad():
        return model(**(given or prompts())).logits


def counted(op):
    """A provider of an op that counts its calls, and its count."""
    calls = []

    def provider(*args, **kwargs):
        calls.append(args)
        return all_ops()[op].native(*args, **kwargs)

    return provider, calls


@pytest.mark.parametrize("op", sorted(set(OPS) - {"gelu_and_mul", "rotary_embedding", "attention_decode", "sample"}))
def test_every_op_runs(op, model):
    provider, calls = counted(op)
    with registered(op, provider):
        # What it needs around it: a fused product stands before an activation, a norm of heads before a rotation.
        around = {"linear_silu_and_mul": "silu_and_mul", "qk_norm_rope": "rotary_embedding"}.get(op)
        with apply(model, ops={op: "mine"} | ({around: "native"} if around else {})):
            logits(model)
    assert calls


def test_a_report_names_modules_ops_and_providers(model):
    report = apply(model, ops=OPS, exclude=["lm_head", "Qwen3MLP"])
    rows = {(row.module, row.op): row for row in report.replaced}
    assert rows["Qwen3RMSNorm", "rms_norm"].count == 9 and rows["Qwen3RMSNorm", "rms_norm"].provider == "native"
    assert rows["Linear", "linear"].count == 2  # the output projections: others are packed or excluded
    assert not any(row.module == "Qwen3MLP" for row in report.rows)
    assert "Qwen3DecoderLayer" in str(report) and "add_rms_norm" in str(report)
    shown: list[str] = []
    report._repr_pretty_(SimpleNamespace(text=shown.append), False)  # as a notebook calls it
    assert shown == [str(report)]
    report.undo()


def test_on_a_cpu_only_what_is_asked_for_is_replaced(model, caplog):
    if torch.cuda.is_available():
        pytest.skip("the model could be on a GPU")
    with apply(model) as report:
        assert not report.replaced and "PyTorch reference" in report.left[0].why
        assert "nothing was replaced" in str(report) and "nothing was replaced" in caplog.text
    with apply(model, ops="rms_norm") as report:
        assert [row.op for row in report.replaced] == ["rms_norm"]


def state(model):
    """Everything that `apply` may touch."""
    attributes = {name: dict(m.__dict__) for name, m in model.named_modules()}
    for given in attributes.values():
        for slot in ("_parameters", "_modules", "_buffers"):
            given[slot] = dict(given[slot])
    values = {name: p.clone() for name, p in model.named_parameters()}
    return attributes, values, vars(model.config).copy()


def test_undo_restores_the_model_bit_for_bit(model):
    attributes, values, config = state(model)
    apply(model, ops=OPS)
    undo(model)
    after, values_after, config_after = state(model)
    assert after == attributes and config_after == config
    assert all(torch.equal(values[name], values_after[name]) for name in values)
    # Each parameter has memory of its own again, so that a checkpoint is no larger.
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
    with pytest.raises(ValueError, match="was not applied"):
        undo(model)


def test_an_error_leaves_the_model_as_it_was(model):
    expected, before = logits(model), state(model)[0]
    with pytest.raises(ValueError, match="names 'nope', but the providers of 'linear' are"):
        apply(model, ops={"rms_norm": "native", "linear": "nope"})
    assert state(model)[0] == before and torch.equal(logits(model), expected)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            {"ops": ["rmsnorm"]},
            r"^ops: unknown op 'rmsnorm'; did you mean 'rms_norm'\? The ops of a",
        ),
        ({"ops": {"softmax": "native"}}, "^ops: unknown op 'softmax'; known are rms_norm, add_rms_norm"),
        ({"ops": {"rms_norm": "tritn"}}, "^ops names 'tritn', but the providers of 'rms_norm' are native"),
        ({"ops": {"rms_norm": 3}}, "^ops: 'rms_norm' is given 3; must be the names of providers"),
        ({"exclude": ["lm_tail"]}, "no module and no class of modules 'lm_tail'"),
        ({"exclude": ["lm_heads"]}, "no class of modules 'lm_heads'; did you mean 'lm_head'"),
        ({"exclude": [3]}, "^exclude: expected names of modules, of classes of them or of ops, not 3"),
        ({"exclude": 3}, "^exclude: expected names of modules, of classes of them or of ops, not 3"),
        ({"ops": 3}, "^ops: expected names of ops, or a mapping from these to providers, not 3"),
        ({"ops": []}, "^ops: names no op; leave it out, or name some of rms_norm"),
    ],
)
def test_wrong_names(arguments, message, model):
    with pytest.raises((ValueError, TypeError), match=message):
        apply(model, **arguments)
    assert apply(model, ops=OPS).replaced  # nothing stayed behind


def test_an_attention_function_that_was_chosen_stays(model):
    """As "eager", which gives the weights of attention."""
    model.set_attn_implementation("eager")
    with apply(model, ops=OPS) as report:
        assert [row.why for row in report.left if row.op == "attention_dense"] == [
            'attn_implementation="eager" was chosen'
        ]
        with torch.no_grad():
            assert len(model(**prompts(), output_attentions=True).attentions) == 2


def test_a_soft_cap_that_sdpa_leaves_out_is_not_put_back():
    model = tiny("Gemma2").requires_grad_(False)
    model.config._attn_implementation_internal = "sdpa"
    with apply(model, ops=OPS) as report:
        (why,) = {row.why for row in report.left if row.op == "attention_dense"}
    assert "leaves out the soft cap" in why and model.config._attn_implementation == "sdpa"


def test_wrong_models(model, caplog):
    with pytest.raises(TypeError, match="expected a torch.nn.Module"):
        apply("Qwen/Qwen3-0.6B")
    apply(model, ops=OPS)
    with pytest.raises(ValueError, match="applied to it before; call undo"):
        apply(model)
    with pytest.raises(ValueError, match='on the device "meta"'), torch.device("meta"):
        apply(nn.Linear(3, 3))
    report = apply(nn.Sequential(nn.Conv1d(1, 1, 1), nn.LayerNorm(4)), ops=OPS)
    assert not report.rows and "no module of the model computes anything" in str(report)
    assert "nothing was replaced in Sequential" in caplog.text


def test_a_part_of_a_patched_model_is_refused(model):
    with apply(model, ops=OPS), pytest.raises(ValueError, match="applied to a model that contains it; undo that first"):
        apply(model.model, ops=OPS)
    apply(model.model, ops=OPS)


def test_the_report_says_what_ops_are_missing(model):
    report = apply(model, ops=["attention_decode", "rms_norm"])
    assert [row.why for row in report.left] == ["it needs add_rms_norm, attention_dense, too"]
    report.undo()
    assert "computes anything that gelu_and_mul computes" in str(apply(model, ops="gelu_and_mul"))


def test_training_runs_the_models_own_code():
    """The same gradients, with no op called; the report says that it will be so."""
    model = tiny("Qwen3")
    own = copy.deepcopy(model)
    provider, calls = counted("rms_norm")
    with registered("rms_norm", provider):
        report = apply(model, ops={**dict.fromkeys(OPS, "native"), "rms_norm": "mine"})
        assert "Parameters require gradients" in str(report)
        for one in (model, own):
            one(**prompts(), labels=prompts()["input_ids"]).loss.backward()
        assert not calls
        model.train()
        logits(model)
        assert not calls
        model.eval()
        logits(model)
        assert calls
    for (name, got), wanted in zip(model.named_parameters(), own.parameters()):
        torch.testing.assert_close(got.grad, wanted.grad, msg=name)


def test_hidden_states_and_hooks_see_what_they_saw(model):
    seen = []
    model.model.layers[0].post_attention_layernorm.register_forward_hook(lambda *given: seen.append(given[2]))
    given = prompts()
    with torch.no_grad():
        expected = model(**given, output_hidden_states=True).hidden_states
        with apply(model, ops=OPS):
            got = model(**given, output_hidden_states=True).hidden_states
    assert len(seen) == 2
    torch.testing.assert_close(seen[1], seen[0], rtol=0, atol=1e-5)
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_modules_are_recognised_by_what_they_compute(model):
    class Odd(type(model.model.norm)):
        """By its name and attributes a norm like the others, but it computes something else."""

        def forward(self, hidden_states):
            return super().forward(hidden_states) + 1

    class Renamed(nn.Module):
        """A norm whose names say nothing."""

        def __init__(self, weight):
            super().__init__()
            self.weight, self.tiny = nn.Parameter(weight, requires_grad=False), 1e-5

        def forward(self, x):
            return nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.tiny)

    model.model.norm.__class__ = Odd
    model.model.layers[0].input_layernorm = Renamed(torch.rand(32))
    with apply(model, ops="rms_norm") as report:
        assert {row.module: row.count for row in report.replaced} == {"Qwen3RMSNorm": 7, "Renamed": 1}


def test_weights_that_are_moved_are_noticed(model):
    """After `model.to(...)` packed weights are stale: the module's own code runs."""
    with apply(model, ops=OPS):
        model.double().float()
        with torch.no_grad():
            model.model.layers[0].mlp.gate_proj.weight.mul_(2)
        got = logits(model)
    torch.testing.assert_close(got, logits(model), rtol=0, atol=1e-4)


def test_a_deep_copy_has_weights_of_its_own(model):
    expected = logits(model)
    apply(model, ops=OPS)
    other = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.zero_()
    torch.testing.assert_close(logits(other), expected, rtol=0, atol=1e-4)
    undo(other)
    assert torch.equal(logits(other), expected) and not any("forward" in m.__dict__ for m in other.modules())
    assert "forward" in model.model.norm.__dict__ and not logits(model).any()


def test_a_new_checkpoint_may_be_loaded(model):
    other = tiny("Qwen3", seed=1)
    with apply(model, ops=OPS):
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(logits(model), logits(other), rtol=0, atol=1e-4)
    assert torch.equal(logits(model), logits(other))


def test_device_map():
    """accelerate wraps the forward of modules; the ops are put within."""
    accelerate = pytest.importorskip("accelerate")
    model = tiny("Llama").requires_grad_(False)
    expected = logits(model)
    parts = {"": "cpu"}
    accelerate.dispatch_model(model, parts, force_hooks=True)
    provider, calls = counted("rms_norm")
    with registered("rms_norm", provider), apply(model, ops={**dict.fromkeys(OPS, "native"), "rms_norm": "mine"}):
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-4)
        assert calls
    assert torch.equal(logits(model), expected)


def test_offloaded_weights_are_left(model, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    expected = logits(model)
    accelerate.disk_offload(model.model.layers[1], str(tmp_path), execution_device="cpu")
    with apply(model, ops=OPS) as report:
        assert any("offloaded" in row.why for row in report.left)
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-4)


@pytest.fixture(autouse=True)
def logs(caplog):
    caplog.set_level(logging.WARNING, logger="nanovllm")


class OtherLinear(nn.Linear):
    """As bitsandbytes, quanto and PEFT have them: what it computes is its own affair."""

    def forward(self, x):
        return super().forward(x) * 0.5


@pytest.mark.parametrize("architecture", ["Llama", "Gemma2"])
def test_linear_layers_of_other_classes_are_left_and_named(architecture):
    model = tiny(architecture).requires_grad_(False)
    for module in list(model.modules()):
        if type(module) is nn.Linear and module is not model.lm_head:
            module.__class__ = OtherLinear
    expected = model(**prompts()).logits
    with put_in(model) as report:
        torch.testing.assert_close(model(**prompts()).logits, expected, rtol=0, atol=2e-5)
    left = {(row.module, row.op): row for row in report.left}
    assert left["OtherLinear", "linear"].count == 14 and "no plain linear layer" in left["OtherLinear", "linear"].why
    assert "no plain linear layer" in left[f"{architecture}Attention", "rotary_embedding"].why
    assert ("attention_dense", 2) in {(row.op, row.count) for row in report.replaced}
    with apply(model, ops="rms_norm") as report:
        assert not any(row.module == "OtherLinear" for row in report.left)
