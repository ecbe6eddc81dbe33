"""Every architecture's peculiarities: greedy tokens are those of transformers in float32, whatever the engine does."""

import random
from contextlib import nullcontext

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.fast.policy import FastPolicy, PiggybackSizes
from nanovllm.kernels.cpu.build import cpu_support
from nanovllm.models.packed_decoder import PackedDecoderForCausalLM
from tests import tiny
from tests.engine.fast.replayed import BACKEND, lengths_on_the_device
from tests.models.variants import LONG_FROM, VARIANTS
from tests.providers import references

NUM_TOKENS = 10
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SHARED_OPS = ("attention_decode_shared", "qk_norm_rope_attention_shared")
PIGGYBACK = dict(piggyback_prefill=True, piggyback=PiggybackSizes((32, 48), min_tokens=4, min_full_speed_tokens=64))
MODES = {
    "plain": dict(),
    "reference": dict(fast_policy=FastPolicy.off(), enable_prefix_caching=False, use_custom_kernels=False),
    # Too few blocks for all: sequences are preempted. Prompts are longer than a step.
    "crowded": dict(async_scheduling=True, num_kvcache_blocks=6, max_num_batched_tokens=24, max_num_seqs=4),
    "padded": dict(fast_policy=FastPolicy(padding=True, prefill_graphs=True)),
    "graphs": dict(fast_policy=FastPolicy(graph_backend=BACKEND), max_num_seqs=3),
    "grouped": dict(),
    "piggybacked": dict(max_num_batched_tokens=64, fast_policy=FastPolicy(**PIGGYBACK)),
}
IN_EVERY_MODE = ("smollm3-windows", "phi3-partial", "gemma2", "gemma3", "experts-some-layers")


def prompts():
    rng = random.Random(5)
    shared, *rest = ([rng.randrange(199) for _ in range(n)] for n in (33, 3, 17, 40))
    return [*rest, shared, *(shared + [n] for n in range(2))]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """name -> (directory, prompts, what transformers writes after each), made once for all tests."""
    known = {}

    def of(name):
        if name not in known:
            architecture, entries = VARIANTS[name]
            directory = tmp_path_factory.mktemp(name)
            theirs = tiny.save(directory, architecture, **entries)
            theirs.generation_config.eos_token_id = None
            # A prompt that becomes longer than the context of training makes transformers begin anew.
            asked = [p for p in prompts() if name != "phi3-long" or len(p) > LONG_FROM]
            known[name] = directory, asked, [tiny.greedy(theirs, p, NUM_TOKENS) for p in asked]
        return known[name]

    return of


def grouped():
    """Within the block there are providers of the ops for shared prefixes, so that an engine looks for these."""
    return references("grouped", *SHARED_OPS)


def check(name, mode, made):
    directory, asked, expected = made(name)
    arguments = dict(
        device="cpu", dtype="float32", skip_tokenizer_init=True, kvcache_block_size=16, num_kvcache_blocks=40,
        max_model_len=64,
    ) | MODES[mode]  # fmt: skip
    providers = {"grouped": grouped, "graphs": lengths_on_the_device}.get(mode)
    with providers() if providers else nullcontext() as priority:
        llm = LLM(directory, **arguments, **({"kernel_priority": priority} if priority else {}))
        for _ in range(2 if mode == "crowded" else 1):  # the second time prefixes are found
            outputs = llm.generate(asked, GREEDY, use_tqdm=False)
            assert [o["token_ids"] for o in outputs] == expected
    llm.engine.scheduler.check()
    assert len({t for tokens in expected for t in tokens}) > 6
    return llm.engine


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_tokens(name, made):
    model = check(name, "plain", made).runner.model
    if cpu_support(torch.device("cpu")) is None:  # the layers run as one op where it computes what they do
        assert isinstance(model, PackedDecoderForCausalLM) == (not name.startswith(("gemma", "experts")))
    assert check(name, "crowded", made).scheduler.num_preemptions > 0


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("plain", "crowded")])
@pytest.mark.parametrize("name", IN_EVERY_MODE)
def test_modes(name, mode, made):
    engine = check(name, mode, made)
    if mode == "graphs" and BACKEND is not None:
        assert engine.runner.fast.decoder.graphs.keys


@pytest.mark.parametrize("name, told", [("phi3-long", True), ("phi3-short", False), ("phi3-window", False)])
def test_which_frequencies_of_long_rope_are_used_is_said(name, told, made, caplog):
    with caplog.at_level("INFO", "nanovllm"):
        check(name, "plain", made)
    said = f"LongRoPE: max_model_len=64 is beyond the {LONG_FROM} tokens of the original training"
    assert (said in caplog.text) is told


def test_by_default_a_server_has_the_frequencies_of_long_rope_for_short_contexts(tmp_path, caplog):
    """As vLLM: `auto` is then the original training's length, and the model's own is named."""
    architecture, config = VARIANTS["phi3-long"]
    tiny.save(tmp_path, architecture, **config)
    caplog.set_level("INFO", "nanovllm")
    options = dict(max_model_len="auto", skip_tokenizer_init=True, num_kvcache_blocks=20, kvcache_block_size=16)
    runner = LLM(tmp_path, **options).engine.runner
    assert runner.max_model_len == LONG_FROM and "is beyond" not in caplog.text
    longest = runner.limits.model_len
    assert longest > LONG_FROM and f"pass up to {longest} for long contexts" in caplog.text
    assert f"max_model_len is {LONG_FROM}, the original training's; the model's limit is {longest}" in caplog.text


def test_layers_of_every_kind_are_run_before_a_capture(made):
    """A kernel for a window is another than one for full attention."""
    for name, kinds in ("smollm3-windows", 2), ("gemma3", 3), ("qwen2-windows", 2), ("mistral-window", 2):
        paged = check(name, "plain", made).runner.paged
        layers = paged.model.config.layers
        with paged.few_layers():
            assert len(paged.caches) == kinds and set(layers[:kinds]) == set(layers)
        assert len(paged.caches) == len(layers)
