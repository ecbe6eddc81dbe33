"""`attn_implementation="nanovllm"`: what reaches the op, and what is left to PyTorch."""

import logging
from contextlib import ExitStack

import pytest
import torch

transformers = pytest.importorskip("transformers")

from nanovllm.adapters.transformers import apply, register_attention
from nanovllm.adapters.transformers.attn_implementation import is_sliding_window, plan_mask
from nanovllm.adapters.transformers.compiled import STAND_IN
from nanovllm.kernels import all_ops, attention_dense
from nanovllm.kernels.extra.attention_dense import dense_mask
from tests.adapters.models import prompts, tiny
from tests.providers import references, registered


@pytest.fixture(autouse=True)
def registered_attention(caplog):
    register_attention()
    caplog.set_level(logging.WARNING, logger="nanovllm")


def with_attention(architecture, name, **changes):
    model = tiny(architecture, **changes).requires_grad_(False)
    model.set_attn_implementation(name)
    return model


def logits(model, given, **more):
    with torch.no_grad():
        out = model(**given, **more).logits
    return out[given["attention_mask"].bool()] if "attention_mask" in given else out


class Calls:
    """A provider of `attention_dense` that keeps what it is called with."""

    def __init__(self):
        self.made = []

    def __call__(self, *args):
        self.made.append(args)
        return attention_dense.native(*args)


@pytest.fixture
def calls():
    calls = Calls()
    with registered("attention_dense", lambda *args: calls(*args)), attention_dense.use("mine"):
        yield calls


@pytest.mark.parametrize("architecture, padding", [("Llama", None), ("Llama", "right"), ("Gemma2", "left")])
def test_a_model_made_with_it(architecture, padding, calls, caplog):
    given = prompts(padding)
    expected = logits(with_attention(architecture, "eager"), given)
    got = logits(with_attention(architecture, "nanovllm"), given)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)
    assert len(calls.made) == 2 and "leaves attention" not in caplog.text
    *_, tokens, window, soft_cap = calls.made[0]
    assert (tokens is None) == (padding is None)
    assert (window, soft_cap) == ((6, 5.0) if architecture == "Gemma2" else (None, None))


def test_every_step_of_generate_uses_the_op(calls, caplog):
    model = with_attention("Qwen3", "nanovllm")
    for options in ({}, {"cache_implementation": "static", "disable_compile": True}):
        calls.made.clear()
        model.generate(**prompts("left"), max_new_tokens=5, do_sample=False, **options)
        assert len(calls.made) == 2 * 5
    assert "leaves attention" not in caplog.text


def test_from_the_config():
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(tiny("Llama").config, attn_implementation="nanovllm")
    assert model.config._attn_implementation == "nanovllm"


def test_a_mask_that_it_cannot_take_is_left_to_pytorch_with_one_warning(calls, caplog):
    model, given = with_attention("Llama", "nanovllm"), prompts()
    backwards = torch.ones(3, 1, 9, 9, dtype=torch.bool).triu()
    own = {"attention_mask": backwards}
    with torch.no_grad():
        got = model(given["input_ids"], **own).logits
        assert not calls.made and caplog.text.count("leaves attention to PyTorch: a mask of bool [3, 1, 9, 9]") == 1
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(got, model(given["input_ids"], **own).logits, rtol=0, atol=2e-5)


def test_packed_sequences_are_left_to_pytorch(calls):
    """Without a mask, positions that start again are sequences of their own."""
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1]])
    given = {"input_ids": prompts()["input_ids"][:1], "position_ids": positions, "use_cache": False}
    results = []
    for name in ("nanovllm", "sdpa"):
        with torch.no_grad():
            results.append(with_attention("Llama", name)(**given).logits)
    assert not calls.made
    torch.testing.assert_close(*results, rtol=0, atol=2e-5)


def test_gradients_are_pytorchs(calls):
    model = tiny("Llama")
    model.set_attn_implementation("nanovllm")
    model(**prompts("left"), labels=prompts()["input_ids"]).loss.backward()
    assert not calls.made and model.model.layers[0].self_attn.q_proj.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("window", [None, 3, 7])
def test_a_plan_is_the_mask_of_sdpa(window):
    """Query by query and slot by slot, for a prompt, a chunk and a step, with padding on either side."""
    from transformers.masking_utils import causal_mask_function, sdpa_mask, sliding_window_causal_mask_function

    function = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    for q_length, offset in ((7, 0), (3, 4), (1, 6)):
        for mask in ([[0, 0, 1, 1, 1, 1, 1]], [[1, 1, 1, 1, 1, 1, 1]], [[1, 1, 1, 1, 1, 0, 0]]):
            mask = torch.tensor(mask, dtype=torch.bool)
            given = dict(q_offset=offset, mask_function=function, attention_mask=mask, local_size=window)
            wanted = sdpa_mask(1, q_length, 7, **given, allow_is_causal_skip=False)[:, 0]
            plan = plan_mask(1, q_length, 7, **given)
            if plan.dtype == torch.bool:  # a window that has padding on the right within it
                assert window == 3 and not mask[0, -1]
                continue
            plan = plan[:, 0, 0]
            got = dense_mask(plan[:, :q_length], 7, plan[:, q_length:] if plan.shape[1] > q_length else None, window)
            assert torch.equal(got, wanted), (q_length, mask)


def test_masks_that_are_no_window():
    from transformers import masking_utils as m

    assert is_sliding_window(m.sliding_window_causal_mask_function(4))
    others = [
        m.causal_mask_function,
        m.bidirectional_mask_function,
        m.chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int64)),
        m.sliding_window_bidirectional_mask_function(4),
        m.and_masks(m.sliding_window_causal_mask_function(4), m.causal_mask_function),
        m.or_masks(m.sliding_window_overlay(4), m.causal_mask_function),
    ]
    assert not any(map(is_sliding_window, others))


def test_wrong_calls():
    model = with_attention("Llama", "nanovllm")
    attend, x = model.model.layers[0].self_attn, torch.zeros(1, 4, 2, 16)
    from nanovllm.adapters.transformers.attn_implementation import attention

    with pytest.raises(ValueError, match="no attention sinks"):
        attention(attend, x, x[:, :2], x[:, :2], None, s_aux=torch.zeros(4))
    with pytest.raises(ValueError, match="this plan of nanovllm is for 1 sequences and 5 numbers each"):
        attention(attend, x, x[:, :2], x[:, :2], torch.zeros(1, 1, 1, 5, dtype=torch.int32))


class Graphs:
    """A backend of torch.compile that keeps the graphs, and runs them as they are."""

    def __init__(self):
        self.nodes = []

    def __call__(self, graph, example):
        self.nodes += [str(node.target) for node in graph.graph.nodes]
        return graph


OPERATORS = ("rms_norm", "add_rms_norm", "qk_norm_rope", "silu_and_mul", "attention_dense", "embedding")


@pytest.mark.parametrize("padded", [True, False])
def test_a_compiled_model_is_one_graph_with_the_ops_in_it(padded):
    model, given, graphs = tiny("Qwen3").requires_grad_(False), prompts("left"), Graphs()
    if not padded:  # and no mask
        given = {"input_ids": given["input_ids"]}
    expected = logits(model, given, use_cache=False)
    names = (*OPERATORS, "rotary_embedding", "attention_decode")
    providers = {name: all_ops()[name].native for name in names}
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(registered(name, lambda *args, _fn=providers[name]: _fn(*args)))
        with apply(model, ops=dict.fromkeys(names, "mine")):
            compiled = torch.compile(model, fullgraph=True, backend=graphs)
            got = logits(compiled, given, use_cache=False)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)
    assert all(any(f"nanovllm.{name}" in node for node in graphs.nodes) for name in OPERATORS), graphs.nodes


@pytest.mark.parametrize("padded", [True, False])
def test_a_compiled_model_keeps_its_own_code_but_for_the_attention(padded, monkeypatch):
    """Inductor fuses the rest itself, unless the user names ops."""
    model, given, graphs = tiny("Qwen3", num_hidden_layers=1).requires_grad_(False), prompts("left"), Graphs()
    if not padded:
        given = {"input_ids": given["input_ids"]}
    expected = logits(model, given, use_cache=False)
    with references("mine", *OPERATORS, "rotary_embedding", "attention_decode", "linear"):
        monkeypatch.setenv("NANOVLLM_KERNELS", "*=mine,native")
        with apply(model) as report:
            assert "Under torch.compile the attention alone" in " ".join(report.notes)
            assert {"rms_norm", "silu_and_mul", "linear"} <= {row.op for row in report.replaced}
            got = logits(torch.compile(model, fullgraph=True, backend=graphs), given, use_cache=False)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)
    ops = {node.split(".")[1] for node in graphs.nodes if node.startswith("nanovllm.")}
    assert ops == {"attention_dense"}


def test_positions_that_a_caller_gives_may_be_of_packed_sequences():
    """Compiled code cannot ask, so its mask is transformers'."""
    model, ids = tiny("Qwen3", num_hidden_layers=1).requires_grad_(False), torch.arange(3, 13)[None]
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    own = logits(model, {"input_ids": ids, "position_ids": positions}, use_cache=False)
    with apply(model, ops=["attention_dense", *OPERATORS, "attention_decode"]):
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        got = logits(compiled, {"input_ids": ids, "position_ids": positions}, use_cache=False)
        apart = logits(compiled, {"input_ids": ids}, use_cache=False)
    torch.testing.assert_close(got, own, rtol=0, atol=2e-5)
    assert not torch.allclose(apart, own, atol=1e-2)


def test_a_compiled_model_whose_tokens_see_later_ones_keeps_its_mask():
    model, ids = tiny("Qwen3", num_hidden_layers=1).requires_grad_(False), torch.arange(3, 13)[None]
    causal = logits(model, {"input_ids": ids}, use_cache=False)
    model.config.is_causal = False
    own = logits(model, {"input_ids": ids}, use_cache=False)
    assert not torch.allclose(own, causal, atol=1e-2)
    names = (*OPERATORS, "rotary_embedding", "attention_decode")
    with references("mine", *names), apply(model, ops=dict.fromkeys(names, "mine")) as report:
        assert "attention_decode" in {row.op for row in report.replaced}
        got = logits(torch.compile(model, backend="eager"), {"input_ids": ids}, use_cache=False)
    torch.testing.assert_close(got, own, rtol=0, atol=2e-5)


def test_a_step_that_generate_compiles_is_one_graph_with_the_ops_in_it():
    model, given, graphs = tiny("Qwen3", num_hidden_layers=1).requires_grad_(False), prompts("left"), Graphs()
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(**given, **options, disable_compile=True)
    # A function, since the configuration is copied with what is in it.
    keep = lambda graph, example: graphs(graph, example)  # noqa: E731
    config = transformers.CompileConfig(fullgraph=True, backend=keep, mode=None, dynamic=False)
    config._compile_all_devices = True  # a CPU, too
    with references("mine", *OPERATORS, "rotary_embedding") as providers, apply(model, ops=providers):
        torch._dynamo.reset()
        got = model.generate(**given, **options, compile_config=config)
    assert torch.equal(got, expected)
    assert any("nanovllm.attention_dense" in node for node in graphs.nodes), graphs.nodes


def test_a_step_that_generate_compiles_checks_no_replaced_forward(monkeypatch):
    """Each would be checked before every call. A module that is put in later is compiled, too."""
    model, given, graphs, checked = tiny("Qwen3").requires_grad_(False), prompts("left"), Graphs(), []
    options = {"max_new_tokens": 4, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(**given, **options, disable_compile=True)
    keep = lambda graph, example: graphs(graph, example)  # noqa: E731

    def generate():
        torch._dynamo.reset()
        config = transformers.CompileConfig(fullgraph=True, backend=keep, mode=None, dynamic=False)
        config.options = {"guard_filter_fn": lambda entries: [bool(checked.append(e.name)) or True for e in entries]}
        config._compile_all_devices = True
        return model.generate(**given, **options, compile_config=config)

    with references("mine", *OPERATORS, "rotary_embedding", "attention_decode", "linear"):
        monkeypatch.setenv("NANOVLLM_KERNELS", "*=mine,native")
        with apply(model):
            assert torch.equal(generate(), expected)
            assert any("nanovllm.attention_dense" in node for node in graphs.nodes), graphs.nodes
            assert checked and not [name for name in checked if "].forward" in name and "_modules" in name]
            keeps, mlp = model.__dict__[STAND_IN], model.model.layers[1].mlp
            made = keeps.of(model)
            assert made is keeps.of(model) and made.lm_head.weight is model.lm_head.weight
            hook = mlp.register_forward_hook(lambda *_: None)
            assert keeps.of(model) is None
            hook.remove()
            mlp.down_proj = torch.nn.Linear(56, 32).eval()
            assert keeps.of(model).model.layers[1].mlp.down_proj.weight is mlp.down_proj.weight
    assert "get_compiled_call" not in model.__dict__
