"""Decode buckets on any machine; captured against eager steps on a GPU."""

import random
from types import SimpleNamespace

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.engine.fast.cuda_graphs import CudaGraphs, GraphTable
from nanovllm.engine.fast.mask_thread import ThreadedMaskBuilder
from nanovllm.engine.fast.policy import FastPolicy, can_capture, enabled_paths, samples_in_graphs
from nanovllm.engine.fast.step_shape import DecodeBuckets, batch_buckets, context_buckets
from nanovllm.engine.step import StepKind
from nanovllm.kernels import all_ops
from tests.engine.test_token_masks import row


@pytest.mark.parametrize("max_num_seqs", [1, 2, 3, 7, 8, 9, 16, 17, 100, 256, 511, 512, 513, 1000])
def test_every_batch_size_has_a_bucket(max_num_seqs):
    sizes = batch_buckets(max_num_seqs)
    assert sizes == sorted(set(sizes)) and sizes[-1] == max_num_seqs
    buckets = DecodeBuckets(max_num_seqs, 4096)
    for n in range(1, max_num_seqs + 1):
        rows, _ = buckets.fit(n, 1)
        assert n <= rows <= max(n + 31, n * 9 // 8 + 8)


@pytest.mark.parametrize("max_model_len", [1, 100, 512, 513, 4096, 5000])
def test_every_context_length_has_a_bucket(max_model_len):
    lengths = context_buckets(max_model_len)
    assert lengths == sorted(set(lengths)) and lengths[-1] == max_model_len
    buckets = DecodeBuckets(4, max_model_len)
    for length in range(1, max_model_len + 1):
        assert length <= buckets.fit(1, length)[1] <= max(512, 2 * length)


def test_each_form_of_the_weights_runs_before_its_steps_are_captured():
    """Beside small batches and the largest, the largest one in front of each change."""

    def first(max_num_seqs, changes):
        buckets = DecodeBuckets(max_num_seqs, 4096, by_context=False, form_changes=changes)
        return {shape.rows for shape in buckets.first_shapes()}

    small = {1, 2, 4, 8, 16, 32, 48, 64}
    assert first(1024, ()) == small | {1024}
    assert first(1024, (17, 513)) == small | {512, 1024}
    assert first(1024, (1, 100)) == small | {96, 1024} and first(1024, (128,)) == small | {112, 1024}
    assert first(512, (10**9,)) == small | {512}


class Chosen:
    """Kernels of which no more is known than their providers."""

    def __init__(self, **providers):
        self.providers = dict(attention_decode="triton", attention_prefill="triton") | providers

    def provider(self, name):
        provider = self.providers[name]
        return SimpleNamespace(name=provider, capturable=provider not in ("flashinfer", "planned"))


@pytest.mark.parametrize("provider, captured", [("native", True), ("triton", True), ("flashinfer", False)])
def test_what_the_host_plans_is_not_captured(provider, captured):
    """A capture would record the reference instead, at the largest context length."""
    assert can_capture(Chosen(attention_decode=provider)) is captured


@pytest.mark.parametrize("provider, captured", [("native", False), ("triton", True), ("cpu", True), ("planned", False)])
def test_graphs_hold_sampling_that_is_compiled_and_can_be_captured(provider, captured):
    assert samples_in_graphs(Chosen(sample=provider)) is captured


GPU = torch.device("cuda")


def enabled(policy=None, layer_mib=1, device=GPU, prefix_caching=True, kernels=None, **arguments):
    policy = FastPolicy.of(EngineConfig("m", fast_policy=policy, **arguments))
    return enabled_paths(policy, kernels or Chosen(), device, layer_mib * 2**20, prefix_caching)


@pytest.mark.parametrize(
    "asked, eager, decode, prefill, layer_mib, piggybacks",
    [
        (None, False, "triton", "triton", 256, True),
        (None, False, "triton", "triton", 255, False),  # too few weights
        (None, False, "native", "triton", 256, False),
        (None, True, "triton", "triton", 256, False),
        (None, False, "triton", "planned", 256, False),
        (True, False, "triton", "planned", 1, False),  # a capture would fail, when the first prompt is piggybacked
        (True, False, "triton", "triton", 1, True),
        (True, True, "triton", "planned", 1, True),
        (False, False, "triton", "triton", 256, False),
    ],
)
def test_prompts_are_piggybacked_where_that_can_be_captured_and_is_worth_it(
    asked, eager, decode, prefill, layer_mib, piggybacks
):
    kernels = Chosen(attention_decode=decode, attention_prefill=prefill)
    for name in ("piggyback_prefill", "ride_prompts"):
        paths = enabled(layer_mib=layer_mib, kernels=kernels, enforce_eager=eager, **{name: asked})
        assert paths.piggyback_prefill is piggybacks


@pytest.mark.parametrize(
    "options, decode, prefill",
    [
        ({}, (True, True), (True, True)),
        (dict(enforce_eager=True), (False, True), (False, False)),
        (dict(enforce_eager=True, capture_prefill=True), (False, True), (False, True)),
        (dict(capture_prefill=False), (True, True), (False, False)),
        (dict(device=torch.device("cpu")), (False, False), (False, False)),
        (dict(device=torch.device("cpu"), capture_prefill=True), (False, False), (False, True)),
        (dict(policy=FastPolicy(padding=False)), (False, False), (False, False)),
        (dict(policy=FastPolicy(device_state=False)), (False, True), (True, True)),
        (dict(kernels=Chosen(attention_decode="flashinfer"), capture_prefill=True), (False, True), (False, False)),
        (dict(kernels=Chosen(attention_prefill="flashinfer"), capture_prefill=True), (True, True), (False, False)),
    ],
)
def test_what_is_captured_and_padded(options, decode, prefill, monkeypatch):
    monkeypatch.delenv("NANOVLLM_CHECK", raising=False)
    paths = enabled(**options)
    assert (paths.decode_graphs, paths.decode_padding) == decode
    assert (paths.prefill_graphs, paths.prefill_padding) == prefill


@pytest.mark.gpu
def test_captured_steps_with_piggybacked_prompts_equal_eager_ones():
    """Two kinds of attention at the same time, in bfloat16, beside 1 to 60 decodes."""
    rng = random.Random(4)
    prompts = [[rng.randrange(151936) for _ in range(rng.randint(1, 600))] for _ in range(60)]
    params = [
        SamplingParams(temperature=0.8, ignore_eos=True, max_tokens=rng.randint(1, 300), seed=i) for i in range(60)
    ]
    outputs = []
    for enforce_eager in (False, True, False):
        llm = LLM(
            "qwen3-0.6b", load_format="dummy", enforce_eager=enforce_eager, capture_prefill=True,
            piggyback_prefill=True,
            max_num_seqs=64, max_model_len=1024, num_kvcache_blocks=300,
        )  # fmt: skip
        decode, kinds = llm.engine.runner.fast.decode, []
        llm.engine.runner.fast.decode = lambda step, decode=decode, kinds=kinds: (
            kinds.append(step.kind),
            decode(step),
        )[1]
        outputs.append([o["token_ids"] for o in llm.generate(prompts, params, use_tqdm=False)])
        assert kinds.count(StepKind.PIGGYBACKED) > 50
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_captured_graph_applies_the_masks_of_its_step(dtype):
    """It reads the masks and the rows, which differ from step to step, in the memory that it was captured with."""
    pytest.importorskip("triton")
    from nanovllm.kernels.triton.sampling.token_bitmask import apply_token_bitmask

    builder, static = ThreadedMaskBuilder(torch.device("cuda"), 4), torch.empty(4, 100, dtype=dtype, device="cuda")
    graphs, launches = GraphTable(CudaGraphs(torch.device("cuda", 0))), []
    steps = [  # the tokens that rows may have, and the launches of a step: a graph is captured after a first call
        ({0: {1, 2}, 3: {98}}, 2), ({1: {4, 50}, 2: {40}}, 0), ({2: {0, 99}}, 2), ({3: {31, 32}, 0: {5}}, 0),
        ({1: {63, 64}}, 0),
    ]  # fmt: skip
    for step, (tokens, new) in enumerate(steps):
        logits = torch.randn(4, 100, generator=torch.Generator().manual_seed(step)).to("cuda", dtype)
        masks = builder.start([row(i, sorted(some)) for i, some in tokens.items()]).to_device()
        expected = logits.clone()
        all_ops()["apply_token_bitmask"].native(expected, *masks)
        static.copy_(logits)
        launches.clear()

        def launch(masks=masks):
            launches.append(masks)
            apply_token_bitmask(static, *masks)

        graphs.replay_or_call(len(tokens), launch)
        assert len(launches) == new and torch.equal(static, expected)
        for i, finite in enumerate(static.isfinite().cpu()):
            assert set(finite.nonzero().flatten().tolist()) == tokens.get(i, set(range(100)))
