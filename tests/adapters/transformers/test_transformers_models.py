"""Models of transformers with the ops put in: the same logits and tokens as without, whatever the cache and padding."""

import pytest
import torch

pytest.importorskip("transformers")

from nanovllm.adapters.transformers import OPS, apply
from tests.adapters.models import ARCHITECTURES, prompts, put_in, shared, tiny

# Of logits of about 6.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-2, torch.bfloat16: 0.25}


def logits(model, given):
    with torch.no_grad():
        return model(**given).logits[given["attention_mask"].bool()]


def generate(model, given, **options):
    return model.generate(**given, max_new_tokens=8, do_sample=False, **options)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits(architecture):
    model, given = shared(architecture), [prompts(padding) for padding in (None, "left", "right")]
    expected = [logits(model, one) for one in given]
    with put_in(model) as report:
        got = [logits(model, one) for one in given]
    used = {row.op for row in report.replaced}
    assert used >= {"rms_norm", "add_rms_norm", "linear", "attention_dense"}
    assert used & {"qk_norm_rope", "rotary_embedding"} and used & {"silu_and_mul", "gelu_and_mul"}
    for mine, theirs, one in zip(got, expected, given):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=TOLERANCE[torch.float32])
        assert torch.equal(logits(model, one), theirs)  # bit for bit


STATIC = {"cache_implementation": "static", "disable_compile": True}
GENERATED = [("Qwen3", {}), ("Gemma3", STATIC), ("Mistral", {"num_beams": 2})]
MORE = [(architecture, {}) for architecture in ARCHITECTURES if architecture != "Qwen3"]


@pytest.mark.parametrize(
    "architecture, options", GENERATED + [pytest.param(*one, marks=pytest.mark.slow) for one in MORE], ids=str
)
def test_greedy_tokens(architecture, options):
    """More tokens than the windows are wide, so that caches of sliding windows roll over."""
    model = shared(architecture)
    given = prompts("left")
    expected = generate(model, given, **options)
    with put_in(model):
        assert torch.equal(generate(model, given, **options), expected)


@pytest.mark.parametrize("architecture, dtype", [("Qwen3", torch.bfloat16), ("Gemma2", torch.float16)], ids=str)
def test_half_precision(architecture, dtype):
    model = shared(architecture, dtype)
    given = prompts("left")
    expected = logits(model, given)
    with put_in(model) as report:
        got = logits(model, given)
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE[dtype])
    fused = {row.op: row.why for row in report.left}
    assert ("add_rms_norm" in fused) == architecture.startswith("Gemma")  # 1 + weight is no 16-bit number


def steps(model, chunks, mask, cache):
    """The logits of the last token of each chunk, given one after the other."""
    results, end = [], 0
    for chunk in chunks:
        end += chunk.shape[1]
        with torch.no_grad():
            out = model(chunk, attention_mask=mask[:, :end], past_key_values=cache)
        results.append(out.logits[:, -1])
    return torch.stack(results)


@pytest.mark.parametrize(
    "architecture, kind, padding",
    [("Llama", "dynamic", "left"), ("Llama", "dynamic", "right"), ("Gemma3", "static", "left")],
)
def test_chunks_of_a_prompt_and_of_a_draft(architecture, kind, padding):
    """With padding on the right, the chunks after the prompt stand behind slots that nobody sees."""
    from transformers import DynamicCache, StaticCache

    model = shared(architecture)
    given = prompts(padding)
    generator = torch.Generator().manual_seed(5)
    more = [torch.randint(1, 99, (3, n), generator=generator) for n in (1, 4, 1)]
    mask = torch.cat((given["attention_mask"], torch.ones(3, 6, dtype=torch.int64)), 1)
    chunks = [given["input_ids"], *more]

    def run():
        cache = DynamicCache(config=model.config) if kind == "dynamic" else StaticCache(model.config, max_cache_len=16)
        results = steps(model, chunks, mask, cache)
        return results if padding == "left" else results[1:]  # the last token of the prompt is padding

    expected = run()
    with put_in(model):
        torch.testing.assert_close(run(), expected, rtol=0, atol=TOLERANCE[torch.float32])


@pytest.mark.triton
@pytest.mark.parametrize("architecture, options", [("Qwen3", {}), ("Gemma2", {}), ("Qwen3", STATIC)], ids=str)
def test_the_kernels(architecture, options):
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = tiny(architecture, num_hidden_layers=1).requires_grad_(False).to(device)
    given = {name: x.to(device) for name, x in prompts("left").items()}

    def run():
        out = model.generate(
            **given, max_new_tokens=2, do_sample=False, output_logits=True, return_dict_in_generate=True, **options
        )
        return torch.stack(out.logits), out.sequences

    expected = run()
    with apply(model, ops=dict.fromkeys(OPS, "triton")) as report:
        got = run()
    assert {row.provider for row in report.replaced} == {"triton"}
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=1e-3)
    assert torch.equal(got[1], expected[1])
