"""What callers of `generate` ask for, on a patched model: the same as without the ops, with steps that are captured."""

import io

import pytest
import torch

transformers = pytest.importorskip("transformers")

from nanovllm.adapters.transformers import apply, undo
from tests.adapters.models import prompts, put_in, shared, tiny

NEW = 8
CACHES = {"dynamic": {}, "static": {"cache_implementation": "static", "disable_compile": True}}
GREEDY = {"max_new_tokens": NEW, "do_sample": False}


def scores(model, cache):
    out = model.generate(
        **prompts("left"), **GREEDY, **cache, output_scores=True, output_logits=True, return_dict_in_generate=True
    )
    return [out.sequences, *out.scores, *out.logits]


def sampled(model, cache):
    torch.manual_seed(5)
    options = {"do_sample": True, "top_k": 5, "temperature": 0.7, "repetition_penalty": 1.2, "num_return_sequences": 3}
    return [model.generate(**prompts("left"), max_new_tokens=NEW, **options, **cache)]


def beams(model, cache):
    options = {"num_beams": 3, "num_return_sequences": 2, "output_scores": True, "return_dict_in_generate": True}
    out = model.generate(**prompts("left"), **GREEDY, **options, **cache)
    return [out.sequences, out.sequences_scores]


def streamed(model, cache):
    class Streamer:
        def __init__(self):
            self.got = []

        def put(self, tokens):
            self.got.append(tokens.clone())

        def end(self):
            self.got.append(torch.tensor(-1))

    streamer = Streamer()
    return [model.generate(**prompts(batch=1), **GREEDY, streamer=streamer, **cache), *streamer.got]


def stopped(model, cache):
    """By a criterion, and by tokens that end rows at different steps."""

    class Third(transformers.StoppingCriteria):
        def __call__(self, ids, scores, **kwargs):
            return ids[:, -1] % 3 == 0

    criteria = transformers.StoppingCriteriaList([Third()])
    first = model.generate(**prompts("left"), **GREEDY, stopping_criteria=criteria, **cache)
    whole = model.generate(**prompts("left"), **GREEDY, **cache)
    return [first, model.generate(**prompts("left"), **GREEDY, eos_token_id=int(whole[0, -4]), **cache)]


def processed(model, cache):
    """By a processor that has a state."""

    class Changing(transformers.LogitsProcessor):
        calls = 0

        def __call__(self, ids, scores):
            self.calls += 1
            return scores.masked_fill(torch.arange(scores.shape[1]) % (self.calls + 1) == 0, -100.0)

    processors = transformers.LogitsProcessorList([Changing()])
    return [model.generate(**prompts("left"), **GREEDY, logits_processor=processors, **cache)]


def continued(model, cache):
    """On a cache of the caller, after more tokens; then on the same one, emptied."""
    results = []
    for padding in (None, "left"):
        given = prompts(padding)
        if cache:
            own = transformers.StaticCache(config=model.config, max_cache_len=64)
            options = {"past_key_values": own, "disable_compile": True}
        else:
            options = {"past_key_values": transformers.DynamicCache(config=model.config)}
        ids, mask = given["input_ids"], given["attention_mask"]
        for _ in range(2):
            ids = torch.cat((model.generate(ids, attention_mask=mask, **GREEDY, **options), torch.full((3, 4), 7)), 1)
            mask = torch.cat((mask, torch.ones(3, NEW + 4, dtype=torch.int64)), 1)
            results.append(ids)
        if cache:
            own.reset()
            results.append(model.generate(**given, **GREEDY, **options))
    return results


def of_several_shapes(model, cache):
    shapes = (1, 1), (2, 3), (1, 1), (4, 20)
    return [model.generate(**prompts(batch=batch, length=n), **GREEDY, **cache) for batch, n in shapes]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    "ask",
    [scores, sampled, beams, streamed, stopped, processed, continued, of_several_shapes],
    ids=lambda f: f.__name__,
)
def test_the_results_are_the_same(ask, cache, captured, steps):
    model = shared("Qwen3")
    expected = ask(model, CACHES[cache])
    with put_in(model, captures=True, exclude=["sample"]):  # which gives other tokens for a seed
        got = ask(model, CACHES[cache])
    assert any(steps) and (captured or cache == "dynamic" or ask is beams)  # beams replace the tensors of the cache
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_a_pickled_model_runs_its_own_code(captured):
    options = CACHES["static"]
    model = tiny("Qwen3").requires_grad_(False)
    expected = model.generate(**prompts("left"), **GREEDY, **options)
    try:
        torch.save(model, io.BytesIO())
    except AttributeError:  # the package `kernels` puts local classes into it
        pytest.skip("the model itself cannot be pickled")
    with put_in(model, captures=True):
        model.generate(**prompts("left"), **GREEDY, **options)
        file = io.BytesIO()
        torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    with pytest.raises(ValueError, match="was not applied"):
        undo(loaded)
    assert torch.equal(loaded.generate(**prompts("left"), **GREEDY, **options), expected)
    with put_in(loaded, captures=True) as report:
        assert "attention_decode" in {row.op for row in report.replaced}
        assert torch.equal(loaded.generate(**prompts("left"), **GREEDY, **options), expected)


def test_a_saved_model_is_the_model(tmp_path):
    model = tiny("Qwen3").requires_grad_(False)
    model.save_pretrained(tmp_path / "own")
    with put_in(model):
        model.save_pretrained(tmp_path / "patched")
    for file in (tmp_path / "own").iterdir():
        assert file.read_bytes() == (tmp_path / "patched" / file.name).read_bytes()


@pytest.mark.gpu
def test_decode_steps_that_transformers_compiles():
    """By Inductor, with CUDA graphs, in whose memory no tensor of ours may stay."""
    from torch._dynamo.utils import counters

    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    model = tiny("Qwen3", torch.float32, **sizes).requires_grad_(False).to("cuda")
    given = {name: x.cuda() for name, x in prompts("left").items()}
    options = {"cache_implementation": "static", "output_logits": True, "return_dict_in_generate": True}
    expected = model.generate(**given, **GREEDY, **options, disable_compile=True)
    with apply(model) as report:
        assert report.replaced
        torch._dynamo.reset()
        counters.clear()
        got = model.generate(**given, **GREEDY, **options)
        assert counters["stats"]["unique_graphs"] and not counters["graph_break"]
    assert torch.equal(got.sequences, expected.sequences)
    for a, b in zip(got.logits, expected.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-3 * float(b.abs().max()))
