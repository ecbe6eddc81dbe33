"""A model split over 2, 3 or 4 ranks writes the tokens of one rank, whatever the engine does to the batch, and however
its checkpoint is quantised. All is in one file, whose tests share the start of the ranks.
"""

import random
from contextlib import nullcontext

import pytest

from nanovllm import SamplingParams
from nanovllm.distributed.group import SINGLE
from nanovllm.engine.fast.policy import FastPolicy, PiggybackSizes
from nanovllm.kernels.op.expansion_plan import ExpansionPlan, ExpansionRule
from nanovllm.layers.packed_weight import PackedWeight
from nanovllm.weights.weight_forms import WeightForms
from tests import tiny
from tests.distributed.spmd import engine
from tests.engine.fast.replayed import BACKEND, lengths_on_the_device
from tests.weights.quantised_files import FORMATS, write

MODELS = {
    "kv1-tied": ("qwen3", dict(num_attention_heads=4, num_key_value_heads=1, vocab_size=331, tie_word_embeddings=True)),
    "kv2": ("qwen3", dict(num_attention_heads=8, num_key_value_heads=2)),
    "kv3-tied": ("llama", dict(num_attention_heads=12, num_key_value_heads=3, head_dim=8, tie_word_embeddings=True)),
    "bias": ("llama", dict(num_key_value_heads=4, attention_bias=True, mlp_bias=True, vocab_size=197)),
    "moe": ("qwen3_moe", dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, norm_topk_prob=True)),
    "three": ("llama", dict(hidden_size=72, num_attention_heads=9, num_key_value_heads=3, head_dim=8,
                            intermediate_size=81)),
    "qwen2": ("qwen2", dict(num_key_value_heads=1)),
    "phi3": ("phi3", dict(hidden_size=64, num_key_value_heads=1, partial_rotary_factor=0.5, sliding_window=30)),
    "smollm3": ("smollm3", dict(no_rope_layers=[0, 1], use_sliding_window=True, sliding_window=30, mlp_bias=True)),
    "gemma2": ("gemma2", dict(sliding_window=30, attn_logit_softcapping=3.0, final_logit_softcapping=2.0)),
    "gemma3": ("gemma3", dict(sliding_window=30, layer_types=["sliding_attention", "full_attention"], vocab_size=331)),
}  # fmt: skip
# Too few blocks for all: sequences are preempted. Prompts are longer than a step.
CROWDED = dict(num_kvcache_blocks=11, max_num_batched_tokens=32)
MODES = {
    "plain": dict(),
    "reference": dict(fast_policy=FastPolicy.off(), enable_prefix_caching=False),
    "asynchronous": dict(async_scheduling=True, **CROWDED),
    "graphs": dict(
        fast_policy=FastPolicy(graph_backend=BACKEND, prefill_graphs=True, capture_sampling=True, padding=True),
        kernel_priority={name: ["reads_lengths"] for name in ("attention_decode", "attention_prefill")},
    ),
    "padded": dict(fast_policy=FastPolicy(padding=True, prefill_graphs=True)),
    "piggybacked": dict(
        max_num_batched_tokens=64,
        fast_policy=FastPolicy(
            piggyback_prefill=True, piggyback=PiggybackSizes((32, 48), min_tokens=4, min_full_speed_tokens=64)
        ),
    ),
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    made = {}
    for name, (architecture, overrides) in MODELS.items():
        made[name] = tmp_path_factory.mktemp(name)
        tiny.save(made[name], architecture, **overrides)
    return made


def served(group, directory, arguments):
    """The tokens of two rounds of requests; some are aborted in the midst, and the second round finds prefixes."""
    with lengths_on_the_device() if "kernel_priority" in arguments else nullcontext():
        made = engine(group, directory, **arguments)
    fast = made.runner.fast
    assert bool(fast.decoder and fast.decoder.graphs and fast.prefill) == ("kernel_priority" in arguments)
    rng = random.Random(7)
    shared = [rng.randrange(197) for _ in range(40)]
    prompts = [[rng.randrange(197) for _ in range(n)] for n in (1, 17, 60)] + [shared + [n] for n in range(3)]
    told = []
    for _ in range(2):
        requests = []
        for i, prompt in enumerate(prompts):
            drawn = dict(temperature=1.0, top_p=0.9) if i % 2 else dict(temperature=0.0)
            if i == 3:
                drawn.update(n=2, repetition_penalty=1.2, logprobs=1)
            params = SamplingParams(max_tokens=12, ignore_eos=True, **drawn)
            requests.append(made.make_request(prompt, params))
        made.queue(*requests, offline=True)
        steps = 0
        while made.has_unfinished:
            made.step()
            steps += 1
            if steps in (4, 7):
                made.abort(requests[steps - 3])
            made.check()
        told += [seq.seq.output_token_ids for request in requests for seq in request.completions]
    return told, made.scheduler.num_preemptions


@pytest.mark.parametrize(
    "name, size",
    [
        ("kv1-tied", 2), ("kv2", 4), ("kv3-tied", 2), ("bias", 2), ("phi3", 2), ("gemma3", 2), ("moe", 2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [
            ("kv1-tied", 4), ("kv2", 2), ("kv3-tied", 4), ("bias", 4), ("qwen2", 2), ("smollm3", 2), ("gemma2", 2),
            ("phi3", 4), ("moe", 4),
        ]),
    ],
)  # fmt: skip
def test_architectures(pool, directories, name, size):
    want, preempted = served_alone(directories[name], "asynchronous")
    got, preempted_too = pool.run(size, served, directories[name], MODES["asynchronous"])
    assert got == want and preempted == preempted_too > 0
    assert len(set(map(tuple, want))) > 10  # sequences differ


def test_three_ranks(pool, directories):
    want = served_alone(directories["three"], "plain")
    assert pool.run(3, served, directories["three"], MODES["plain"]) == want


@pytest.mark.parametrize("mode", MODES)
def test_modes(pool, directories, mode):
    assert pool.run(2, served, directories["kv2"], MODES[mode]) == served_alone(directories["kv2"], mode)


def served_alone(directory, mode):
    # The C++ kernels of a CPU round in another order.
    return served(SINGLE, directory, MODES["padded" if mode == "graphs" else mode] | dict(use_custom_kernels=False))


def answered(group, path):
    made = engine(group, path, use_custom_kernels=False, skip_tokenizer_init=False)
    request = made.add_request("The capital of France is", SamplingParams(temperature=0, max_tokens=24))
    while made.has_unfinished:
        made.step()
    return request.completions[0].seq.output_token_ids


@pytest.mark.slow
def test_smollm2_on_three_ranks(pool, smollm2_path):
    want = answered(SINGLE, smollm2_path)
    assert pool.run(3, answered, smollm2_path) == want and len(want) > 4


# Quantised checkpoints: each rank reads its part of every tensor.
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
# With one KV head both ranks have a copy; with a head of 32 rows no rank has whole fp8 blocks of it.
QUANTISED_HEADS = {
    "one kv head": dict(num_key_value_heads=1),
    "two kv heads": dict(),
    "three": dict(num_attention_heads=6, num_key_value_heads=2),
}


def prompts():
    rng = random.Random(7)
    return [[rng.randrange(96) for _ in range(n)] for n in (1, 17, 40, 5)]


def served_packed(group, directory, form=None, expansion=None):
    """(the tokens of a few requests, how many layers have packed weights)."""
    policy = FastPolicy(weight_forms=WeightForms(packed=True, expansion=expansion))
    made = engine(group, directory, use_custom_kernels=False, fast_policy=policy, quantization=form)
    requests = [made.add_request(prompt, GREEDY) for prompt in prompts()]
    while made.has_unfinished:
        made.step()
    packed = [m for m in made.runner.model.modules() if isinstance(m, PackedWeight)]
    if expansion is not None:
        wanted = [{rule.num_tokens.start, rule.num_tokens.stop} for rule in expansion.rules]
        assert packed and all(m.form_changes in wanted for m in packed)
    tokens = [seq.seq.output_token_ids for request in requests for seq in request.completions]
    return tokens, len(packed)


@pytest.mark.parametrize(
    "name, heads",
    [
        ("fp8-block", "two kv heads"), ("fp8-tensor", "one kv head"), ("fp8-channel", "two kv heads"),
        ("awq", "one kv head"), ("gptq", "two kv heads"), ("gptq-act-order", "two kv heads"),
        ("gptq-asymmetric", "one kv head"), ("w4a16-asymmetric", "two kv heads"), ("w8a8", "three"),
        ("mixed", "two kv heads"),
    ],
)  # fmt: skip
def test_tokens_of_two_ranks(pool, tmp_path, name, heads):
    reference = write(tmp_path, FORMATS[name], **QUANTISED_HEADS[heads])
    tokens, packed = served_packed(SINGLE, tmp_path)
    assert tokens[1] == tiny.greedy(reference, prompts()[1], GREEDY.max_tokens)
    got, packed_too = pool.run(2, served_packed, tmp_path)
    assert got == tokens
    # What a part would cut is dequantised: the columns of down and output projections.
    assert packed_too == packed or (name in ("fp8-block", "gptq-act-order") and packed_too >= packed - 4)


@pytest.mark.parametrize("form", ["fp8", "int4"])
def test_weights_that_are_quantised_while_they_are_loaded(pool, tmp_path, form):
    heads = dict(num_attention_heads=8, num_key_value_heads=8, head_dim=32)
    tiny.save(tmp_path, "qwen3", hidden_size=128, intermediate_size=512, **heads)
    alone = served_packed(SINGLE, tmp_path, form)
    assert pool.run(2, served_packed, tmp_path, form) == alone and alone[1] == 8


def test_copies_of_packed_weights(pool, tmp_path):
    reference = write(tmp_path, FORMATS["awq"], num_key_value_heads=1)
    expansion = ExpansionPlan([ExpansionRule(("linear_int4",), 2**30, range(3, 30))], 2**30)
    alone = served_packed(SINGLE, tmp_path, expansion=expansion)
    assert alone[0][1] == tiny.greedy(reference, prompts()[1], GREEDY.max_tokens)
    assert pool.run(2, served_packed, tmp_path, None, expansion) == alone and alone[1] == 8


def test_blocks_of_a_gguf_file(pool, tmp_path):
    gguf_files = pytest.importorskip("tests.weights.gguf_files")
    path = gguf_files.tiny(tmp_path, "llama", "Q4_0")
    alone = served_packed(SINGLE, path)
    assert pool.run(2, served_packed, path) == alone and alone[1] == 9


@pytest.mark.parametrize("name", ["awq", "fp8-block"])
def test_a_tensor_of_several_shards_is_cut_for_each_rank(pool, tmp_path, name):
    reference = write(tmp_path, FORMATS[name], "phi3", num_key_value_heads=1, partial_rotary_factor=0.5)
    tokens, _ = served_packed(SINGLE, tmp_path)
    assert tokens[1] == tiny.greedy(reference, prompts()[1], GREEDY.max_tokens)
    assert pool.run(2, served_packed, tmp_path)[0] == tokens
