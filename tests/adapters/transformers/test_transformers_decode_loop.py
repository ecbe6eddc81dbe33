"""Decode steps on a static cache by one loop over the layers: when it runs, and that nothing else changes."""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from nanovllm.adapters.transformers import OPS, apply
from nanovllm.adapters.transformers.stack import STACK, Stack
from nanovllm.kernels import all_ops
from tests.adapters.models import prompts, put_in, shared, tiny
from tests.providers import registered

ATOL = 2e-5  # of logits of about 6
STEPS = 7
MINE = {"attention_decode": "mine"}


class Calls:
    """A provider of `attention_decode` that counts its calls: one for each layer in the loop."""

    def __init__(self):
        self.count = 0

    def __call__(self, *args, **kwargs):
        self.count += 1
        return all_ops()["attention_decode"].native(*args, **kwargs)


@pytest.fixture
def calls():
    provider = Calls()
    with registered("attention_decode", lambda q, kv, scale, window=None, soft_cap=None: provider(
        q, kv, scale, window, soft_cap
    )):  # fmt: skip
        yield provider


def generate(model, given, **options):
    out = model.generate(
        **given, max_new_tokens=STEPS + 1, do_sample=False, cache_implementation="static", disable_compile=True,
        output_logits=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    return out.sequences, torch.stack(out.logits)


def same(got, expected):
    torch.testing.assert_close(got[1], expected[1], rtol=0, atol=ATOL)
    assert torch.equal(got[0], expected[0])


@pytest.mark.parametrize("architecture, padding", [("Llama", None), ("Qwen3", "left"), ("Phi3", "left")])
def test_generate(architecture, padding, calls):
    model = shared(architecture)
    given = prompts(padding)
    expected = generate(model, given)
    with put_in(model, **MINE) as report:
        (row,) = (row for row in report.replaced if row.op == "attention_decode")
        assert "all 2 layers in one loop" in row.why and row.provider == "mine"
        same(generate(model, given), expected)
    assert calls.count == 2 * STEPS
    same(generate(model, given), expected)
    assert calls.count == 2 * STEPS


@pytest.mark.parametrize("padding, options", [(None, {}), ("left", {"num_beams": 2})], ids=str)
def test_a_cache_that_grows(padding, options, steps):
    model = shared("Qwen3")
    given = prompts(padding)
    expected = model.generate(**given, max_new_tokens=STEPS + 1, do_sample=False, **options)
    with put_in(model):
        assert torch.equal(model.generate(**given, max_new_tokens=STEPS + 1, do_sample=False, **options), expected)
    assert steps == [False] + [True] * STEPS


def test_drafts_on_a_cache_that_grows(steps):
    model, helper = tiny("Qwen3").requires_grad_(False), tiny("Qwen3", seed=1).requires_grad_(False)
    given = prompts(batch=1)
    expected = model.generate(**given, max_new_tokens=STEPS + 1, do_sample=False)
    with apply(model, ops=OPS):
        got = model.generate(**given, max_new_tokens=STEPS + 1, do_sample=False, assistant_model=helper)
    assert torch.equal(got, expected)


def test_half_precision(calls):
    model = tiny("Qwen3", torch.bfloat16).requires_grad_(False)
    given = prompts("left")
    expected = generate(model, given)[1][:2]
    with put_in(model, **MINE):
        got = generate(model, given)[1][:2]
    assert calls.count
    torch.testing.assert_close(got, expected, rtol=0, atol=0.25)


@pytest.mark.parametrize("length", [40, 64])  # in blocks of one token, and of 64
def test_steps_around_a_draft_and_a_crop(length, calls):
    """The loop and the modules' own forwards take turns on one cache."""
    model = shared("Qwen3")
    ids = torch.randint(1, 99, (2, 20), generator=torch.Generator().manual_seed(5))

    def run():
        cache, results = transformers.StaticCache(model.config, max_cache_len=length), []

        def feed(first, last):
            mask = torch.ones(2, last, dtype=torch.int64)
            with torch.no_grad():
                results.append(model(ids[:, first:last], attention_mask=mask, past_key_values=cache).logits[:, -1])

        for first, last in ((0, 6), (6, 7), (7, 8), (8, 12), (12, 13)):
            feed(first, last)
        if hasattr(cache.layers[0], "crop"):
            cache.crop(-5)
        else:  # older versions of transformers
            for layer in cache.layers:
                layer.cumulative_length.sub_(5)
        for first in (8, 9):
            feed(first, first + 1)
        return torch.stack(results)

    expected = run()
    with put_in(model, **MINE):
        torch.testing.assert_close(run(), expected, rtol=0, atol=ATOL)
    assert calls.count == 2 * 5


def test_a_captured_step_is_replayed(calls, captured):
    """As on a GPU, with a graph that calls what it has captured: every input of a step is in a buffer."""
    model = shared("Qwen3")
    for padding in (None, "left"):
        given = prompts(padding)
        expected = generate(model, given)
        with put_in(model, captures=True, **MINE):
            for _ in range(2):  # the second cache has the shape of the first: it is captured at once
                same(generate(model, given), expected)
            assert model.model.__dict__[STACK].num_replays == STEPS - 2 + STEPS
    assert [warm_up is not None for warm_up in captured] == [True, False] * 2


def test_a_capture_that_fails_is_no_error(calls, monkeypatch, caplog):
    model = shared("Qwen3")
    expected = generate(model, prompts())

    def capture(stack, warm_up, fn):
        raise RuntimeError("no memory")

    monkeypatch.setattr(Stack, "capture", capture)
    with put_in(model, captures=True, **MINE):
        same(generate(model, prompts()), expected)
    assert caplog.text.count("not captured as a CUDA graph: no memory") == 1 and calls.count == 2 * STEPS


def hook(model):
    model.model.layers[1].mlp.register_forward_hook(lambda *given: None)


def other_module(model):
    model.model.layers[1].self_attn.o_proj = torch.nn.Sequential(model.model.layers[1].self_attn.o_proj)


def other_weight(model):
    model.model.layers[1].mlp.down_proj.weight.data = model.model.layers[1].mlp.down_proj.weight.data * 2


def fewer_layers(model):
    model.config.num_hidden_layers = 1


def other_forward(model):
    norm = model.model.layers[0].input_layernorm
    norm.forward = lambda x: type(norm).forward(norm, x) * 2


@pytest.mark.parametrize("change", [hook, other_module, other_weight, fewer_layers, other_forward])
def test_what_is_changed_after_it_is_noticed(change, calls):
    model, other = (tiny("Qwen3").requires_grad_(False) for _ in range(2))
    with put_in(model, **MINE):
        change(model)
        change(other)
        same(generate(model, prompts()), generate(other, prompts()))
    assert not calls.count


def test_a_configuration_that_wants_outputs(calls):
    """transformers adds hooks at the first forward, and once."""
    model = tiny("Qwen3").requires_grad_(False)
    model.config.output_hidden_states = True
    with put_in(model, **MINE), torch.no_grad():
        assert not any(module._forward_hooks for module in model.modules())
        assert len(model(**prompts()).hidden_states) == 3


def test_gradients_run_the_modules_own_code(calls):
    model = tiny("Qwen3")
    cache = transformers.StaticCache(model.config, max_cache_len=16)
    with put_in(model, **MINE):
        for width in (5, 1):
            model(torch.ones(2, width, dtype=torch.int64), past_key_values=cache).logits.sum().backward()
            for layer in cache.layers:
                layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
    assert not calls.count and model.model.norm.weight.grad is not None


@pytest.mark.parametrize(
    "architecture, why",
    [
        ("Mistral", "its static caches have the length of a window"),
        ("Qwen2", "its layers differ"),
        ("Gemma", "its norms multiply by 1 + weight"),
        ("Gemma2", "its layers have norms of results"),
        ("Qwen3Moe", "a part of its layers was left alone"),
    ],
)
def test_layers_that_are_left(architecture, why):
    with apply(shared(architecture), ops=OPS) as report:
        (row,) = (row for row in report.left if row.op == "attention_decode")
    assert why in row.why


def test_a_model_that_does_more_than_to_call_its_layers():
    model = tiny("Llama").requires_grad_(False)

    class More(type(model.model)):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            self.layers[0](out.last_hidden_state, position_embeddings=self.rotary_emb(
                out.last_hidden_state, torch.arange(out.last_hidden_state.shape[1])[None]
            ))  # fmt: skip
            return out

    model.model.__class__ = More
    with apply(model, ops=OPS) as report:
        (row,) = (row for row in report.left if row.op == "attention_decode")
    assert "does more than to call the layers" in row.why


def test_an_excluded_layer_is_in_no_loop():
    model = shared("Llama")
    with apply(model, ops=OPS, exclude=["model"]) as report:
        assert not [row for row in report.rows if row.op == "attention_decode"]
    with apply(model, ops=OPS, exclude=["model.layers.1.mlp.down_proj"]) as report:
        (row,) = (row for row in report.left if row.op == "attention_decode")
    assert "excluded" in row.why


@pytest.mark.gpu
@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["Qwen3", "Llama"])
def test_graphs_on_a_gpu(architecture, dtype, padding):
    """Two texts, so that two caches are captured; the usual providers, then the loop alone, beside the model's own."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    model = tiny(architecture, dtype, **sizes).requires_grad_(False).to("cuda")
    given = {name: x.cuda() for name, x in prompts(padding).items()}
    others = given | {"input_ids": given["input_ids"].flip(0) * given["attention_mask"]}
    expected = [generate(model, one) for one in (given, others)]
    replays = []
    for cuda_graphs in (True, False):
        with apply(model, cuda_graphs=cuda_graphs) as report:
            (row,) = (row for row in report.replaced if row.op == "attention_decode")
            assert ("CUDA graph" in row.why) == cuda_graphs
            got = [generate(model, one) for one in (given, others)]
            replays.append(model.model.__dict__[STACK].num_replays)
        for (got_tokens, logits), (tokens, wanted) in zip(got, expected):
            if dtype == torch.float32:
                torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-3 * float(wanted.abs().max()))
            else:  # a token may differ where logits are close, so rows are compared until the first that does
                same_so_far = (got_tokens == tokens)[:, -STEPS - 1 :].long().cumprod(1).bool().T
                same_so_far = torch.cat((torch.ones_like(same_so_far[:1]), same_so_far[:-1]))
                assert same_so_far[3].any()  # the fourth logits are of a replay
                error = (logits - wanted)[same_so_far].abs().max()
                assert error < 0.06 * float(wanted.abs().max())
    assert replays == [STEPS - 2 + STEPS, 0]


@pytest.mark.slow
def test_a_compiled_step_is_one_graph_of_the_modules(steps):
    """transformers compiles the model's call, in which the loop is not used."""
    from torch._dynamo.utils import counters

    model = tiny("Qwen3").requires_grad_(False)
    given = prompts("left")
    expected = generate(model, given)[0]
    config = transformers.CompileConfig(fullgraph=True, backend="eager", mode=None, dynamic=False)
    config._compile_all_devices = True  # a CPU, too
    with apply(model, ops=OPS):
        torch._dynamo.reset()
        counters.clear()
        got = model.generate(
            **given, max_new_tokens=STEPS + 1, do_sample=False, cache_implementation="static", compile_config=config
        )
    assert torch.equal(got, expected) and not any(steps)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
