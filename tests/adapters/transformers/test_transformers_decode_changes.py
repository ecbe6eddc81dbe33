"""What may change around the decode loop while a model is patched: layers, adapters, hooks, modes, caches."""

import gc
import threading
import time
import weakref
from contextlib import nullcontext

import pytest
import torch

transformers = pytest.importorskip("transformers")

from nanovllm.adapters.transformers import apply, selected
from nanovllm.adapters.transformers.selected import on_device
from nanovllm.adapters.transformers.stack import STACK
from tests.adapters.models import prompts, put_in, shared, tiny

STEPS = 7
STATIC = {"cache_implementation": "static", "disable_compile": True}


def generate(model, given, **options):
    out = model.generate(
        **given, max_new_tokens=STEPS + 1, do_sample=False, output_logits=True, return_dict_in_generate=True, **options
    )
    return torch.stack(out.logits)


def same(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("order, in_place", [([1, 0, 2], True), ([0, 2, 1], False), ([0, 1], True)], ids=str)
def test_other_layers_in_the_list(order, in_place, steps):
    model, other = (tiny("Qwen3", num_hidden_layers=3).requires_grad_(False) for _ in range(2))
    with put_in(model):
        for one in (model, other):
            layers = [one.model.layers[i] for i in order]
            if in_place:
                one.model.layers._modules.clear()
                one.model.layers.extend(layers)
            else:
                one.model.layers = torch.nn.ModuleList(layers)
        given, options = prompts(), {"use_cache": True}
        results = []
        for one in (model, other):
            cache = transformers.DynamicCache()
            with torch.no_grad():
                one(**given, past_key_values=cache, **options)
                mask = torch.ones(3, 10, dtype=torch.int64)
                results.append(one(given["input_ids"][:, :1], attention_mask=mask, past_key_values=cache).logits)
    same(*results)
    assert not any(steps)


class Adapted(torch.nn.Module):
    """As the adapters of PEFT: it has the weight of the layer within as an attribute."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.more = torch.nn.Parameter(torch.randn(base.out_features, base.in_features) * 0.1, requires_grad=False)

    weight = property(lambda self: self.base.weight)
    bias = property(lambda self: self.base.bias)

    def forward(self, x):
        return self.base(x) + torch.nn.functional.linear(x, self.more)


@pytest.mark.parametrize(
    "name, options",
    [("self_attn.q_proj", {}), ("self_attn.o_proj", STATIC), ("mlp.up_proj", STATIC), ("mlp.down_proj", {})],
    ids=str,
)
def test_an_adapter_that_is_added_later(name, options):
    model = tiny("Qwen3").requires_grad_(False)
    owner, _, last = name.rpartition(".")
    parent = model.model.layers[1].get_submodule(owner)
    base = getattr(parent, last)
    adapted = Adapted(base)
    plain = generate(model, prompts(), **options)
    setattr(parent, last, adapted)
    expected = generate(model, prompts(), **options)
    setattr(parent, last, base)
    with put_in(model):
        same(generate(model, prompts(), **options), plain)
        setattr(parent, last, adapted)
        same(generate(model, prompts(), **options), expected)
        setattr(parent, last, base)
        base.weight.data += adapted.more  # merged in place
        torch.testing.assert_close(generate(model, prompts(), **options)[0], expected[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["self_attn.v_proj", "mlp.gate_proj", "self_attn.q_norm"])
def test_a_hook_that_is_added_later(name):
    model = tiny("Qwen3").requires_grad_(False)
    seen = []
    with put_in(model), torch.no_grad():
        hook = model.model.layers[0].get_submodule(name).register_forward_hook(lambda *given: seen.append(given[2]))
        model(**prompts())
        hook.remove()
    assert len(seen) == 1


def test_the_loop_runs_after_outputs_were_wanted_once(steps):
    """transformers leaves its hooks in the model, before `apply` and after it."""
    model = tiny("Qwen3").requires_grad_(False)
    expected = generate(model, prompts(), **STATIC)
    seen = {**STATIC, "output_hidden_states": True, "return_dict_in_generate": True, "do_sample": False}
    states = model.generate(**prompts(), **seen, max_new_tokens=4).hidden_states
    for _ in range(2):
        with put_in(model), torch.no_grad():
            assert len(model(**prompts(), output_hidden_states=True).hidden_states) == 3
            steps.clear()
            same(generate(model, prompts(), **STATIC), expected)
            assert sum(steps) == STEPS
            steps.clear()
            got = model.generate(**prompts(), **seen, max_new_tokens=4).hidden_states
            assert not any(steps)
        for step, wanted in zip(got, states, strict=True):
            torch.testing.assert_close(step, wanted, rtol=0, atol=1e-4)


def test_inference_mode_at_some_steps():
    model = shared("Qwen3")

    def run():
        cache, results = transformers.StaticCache(model.config, max_cache_len=16), []
        for i, mode in enumerate((torch.no_grad, torch.inference_mode, torch.no_grad, torch.inference_mode)):
            with mode():
                ids = torch.full((2, 3 if i == 0 else 1), 5 + i)
                mask = torch.ones(2, 3 + i, dtype=torch.int64)
                results.append(model(ids, attention_mask=mask, past_key_values=cache).logits[:, -1].clone())
        return torch.stack(results)

    expected = run()
    with put_in(model):
        same(run(), expected)


def test_beams_do_not_capture_every_step(captured):
    model = shared("Qwen3")
    given = prompts(batch=4)
    two = {name: x[:2] for name, x in given.items()}
    options = {**STATIC, "do_sample": False, "max_new_tokens": STEPS + 1}
    expected = model.generate(**two, **options, num_beams=2)
    with put_in(model, captures=True):
        model.generate(**given, **options)
        assert len(captured) == 1
        assert torch.equal(model.generate(**two, **options, num_beams=2), expected)
    assert len(captured) <= 2  # the first step of the new cache; then its tensors are others at each step


def test_caches_take_turns(captured):
    """Each has its own graph; `reset` keeps it."""
    model = shared("Qwen3")

    def run():
        caches, results = [transformers.StaticCache(model.config, max_cache_len=n) for n in (16, 16, 20)], []
        for _ in range(2):
            for step in range(5):
                for i, cache in enumerate(caches):
                    ids = torch.full((2, 3 if step == 0 else 1), 7 * i + step + 1)
                    mask = torch.ones(2, 3 + step, dtype=torch.int64)
                    with torch.no_grad():
                        results.append(model(ids, attention_mask=mask, past_key_values=cache).logits[:, -1])
            for cache in caches:
                cache.reset()
        return torch.stack(results)

    expected = run()
    with put_in(model, captures=True):
        same(run(), expected)
    assert len(captured) == 3


def test_nothing_is_held_after_undo_while_a_cache_lives(captured):
    model = tiny("Qwen3").requires_grad_(False)
    cache = transformers.StaticCache(model.config, max_cache_len=16)
    report = put_in(model, captures=True)
    for step in range(5):
        with torch.no_grad():
            model(torch.full((2, 3 if step == 0 else 1), 5), past_key_values=cache)
    stack = weakref.ref(model.model.__dict__[STACK])
    assert len(captured) == 1
    gc.collect()
    gc.disable()
    try:
        report.undo()
        assert stack() is None
    finally:
        gc.enable()


def test_a_capture_of_the_caller_has_no_other_within(captured, monkeypatch, steps):
    model = shared("Qwen3")
    with put_in(model, captures=True):
        monkeypatch.setattr("nanovllm.adapters.transformers.stack.capturing", lambda x: True)
        generate(model, prompts(), **STATIC)
    assert not captured and not any(steps)


def test_threads_with_a_cache_each(captured):
    model = shared("Qwen3")
    given = [prompts(padding) for padding in (None, "left")] * 2
    expected = [generate(model, one, **STATIC) for one in given]
    got = [None] * len(given)
    with put_in(model, captures=True):

        def work(i):
            got[i] = generate(model, given[i], **STATIC)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(given))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for a, b in zip(got, expected):
        same(a, b)


class Stream:
    """Stands for a stream of CUDA: the streams that it has waited for."""

    device = "cuda:0"

    def __init__(self, *given):
        self.awaited = []

    def wait_stream(self, other):
        self.awaited.append(other)


def test_one_capture_at_a_time(monkeypatch):
    """In threads, since captures share a stream; and the caller's stream waits for it after a failure, too."""
    callers, open_captures, together = Stream(), [], []

    class Graph:
        def capture_begin(self, **options):
            assert options == {"capture_error_mode": "thread_local"}
            open_captures.append(self)
            together.append(len(open_captures))

        def capture_end(self):
            open_captures.remove(self)

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: callers)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    model = shared("Qwen3")
    with put_in(model):
        stack = model.model.__dict__[STACK]
        threads = [threading.Thread(target=stack.capture, args=(None, lambda: time.sleep(0.02))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert together == [1, 1, 1] and len(callers.awaited) == 3

        def fails():
            raise RuntimeError("no memory")

        for given in ((fails, lambda: None), (None, fails)):
            with pytest.raises(RuntimeError, match="no memory"):
                stack.capture(*given)
        assert len(callers.awaited) == 5 and not open_captures


def test_a_gpu_that_is_not_the_current_one(monkeypatch):
    """Triton launches on the current device, so it is made the one of the tensors."""
    entered = []

    class Device:
        def __init__(self, device):
            self.device = device

        def __enter__(self):
            entered.append(self.device)

        def __exit__(self, *error):
            entered.append(None)

    monkeypatch.setattr(torch.cuda, "device", Device)
    for count, wanted in ((1, []), (2, [torch.device("cuda:1"), None])):
        monkeypatch.setattr(selected.torch.cuda, "device_count", lambda count=count: count)
        entered.clear()
        assert on_device(torch.device("cuda:1"), lambda x, y=0: x + y)(1, y=2) == 3
        assert entered == wanted


@pytest.mark.gpu
@pytest.mark.several_gpus
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_model_on_the_second_gpu():
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    model = tiny("Qwen3", **sizes).requires_grad_(False).to("cuda:1")
    given = {name: x.to("cuda:1") for name, x in prompts("left").items()}
    expected = [generate(model, given, **options) for options in ({}, STATIC)]
    with apply(model):
        got = [generate(model, given, **options) for options in ({}, STATIC)]
        assert model.model.__dict__[STACK].num_replays
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3 * float(b.abs().max()))
