"""The account of what a load must do, against numbers worked out by hand and by counting one by one."""

from dataclasses import replace

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.bench.instrument import Instrument, cold_bytes
from nanovllm.bench.workload_cost import ModelShape, request_work, workload_work
from nanovllm.bench.workloads import Item
from nanovllm.hardware.roofline import Work, op_floor, share_of_limit
from nanovllm.kernels.op.selection import decorated_kernels
from nanovllm.model_config import ModelConfig, MoeConfig
from tests import tiny

# By hand: q 2 x 3, k and v 1 x 3: 4 x (2 x 6 + 2 x 3) = 72; gate, up, down: 3 x 4 x 6 = 72; norms 4 + 4 + 3 + 3.
SMALL = ModelShape(
    hidden=4, intermediate=6, layers=2, heads=2, kv_heads=1, head_dim=3, vocab=5, tied=False, qk_norm=True,
    attention_bias=False, mlp_bias=False, weight_bytes=2, kv_bytes=2,
)  # fmt: skip


def test_sizes_by_hand():
    assert SMALL.matrix_parameters == 144
    assert SMALL.layer_parameters == 144 + 14
    assert SMALL.parameters == 2 * 158 + 4 + 2 * 20
    assert SMALL.step_bytes == 2 * (2 * 158 + 4 + 20)
    assert SMALL.token_kv_bytes == 2 * 2 * 3 * 2
    assert SMALL.head_flops == 40


def test_a_request_by_hand():
    # Three prompt tokens, three of output: two decode steps, which read 3 and 4 earlier tokens; 5 tokens are written.
    work = request_work(SMALL, 3, 3)
    assert work.bytes == (3 + 4 + 5) * 24
    # Five tokens through the first layer, attending to 1 + 2 + 3 + 4 + 5 tokens: 4 flops for each of 2 x 3 query
    # elements. Of the second, whose result is wanted of the last three, the first two need k and v alone: 2 x 4 x 3
    # elements. 3 heads.
    assert work.flops == (2 * 144 * 5 + 4 * 6 * 15) + (2 * 144 * 3 + 4 * 6 * 12 + 2 * 24 * 2) + 3 * 40
    whole = workload_work(SMALL, [Item([1, 2, 3], 3), Item([1, 2, 3], 3)])
    assert whole == Work(3 * SMALL.step_bytes + 2 * work.bytes, 2 * work.flops)


@pytest.mark.parametrize("windows", [(None, 3), (3, None), (1, 1), (2, 50)])
def test_windows_counted_one_by_one(windows):
    """Each token attends to itself and at most window - 1 tokens before it, which a decode step reads."""
    shape = replace(SMALL, windows=windows)
    seen = [[min(t + 1, window or t + 1) for t in range(9)] for window in windows]
    keys_and_values = 2 * SMALL.hidden * 2 * SMALL.kv_heads * SMALL.head_dim
    flops = 3 * SMALL.head_flops
    for t in range(8):  # six tokens of a prompt, and two of three that are written
        flops += 2 * SMALL.matrix_parameters + 4 * 2 * 3 * seen[0][t]
        flops += 2 * SMALL.matrix_parameters + 4 * 2 * 3 * seen[1][t] if t >= 5 else keys_and_values
    reads = sum(row[t] - 1 for row in seen for t in (6, 7))
    assert request_work(shape, 6, 3) == Work(reads * 12 + 8 * 24, flops)
    alike = request_work(replace(SMALL, windows=(50, 50)), 6, 3)
    assert alike == request_work(SMALL, 6, 3)
    shared = [Item([0] * 6, 3), Item([0] * 6, 3)]
    assert workload_work(shape, shared, 4).bytes <= workload_work(SMALL, shared, 4).bytes


def test_experts_by_hand():
    """Two experts of four are a token's, in the first layer of two: 3 x 4 x 5 elements each, and a router of 4 x 4."""
    model = replace(SMALL, moe=MoeConfig(4, 2, 5, True), sparse=(True, False))
    assert model.parameters == SMALL.parameters + 4 * 60 + 16 - 72
    assert model.step_bytes == SMALL.step_bytes + 2 * (16 - 72)
    # One token reads 2 experts, two read 4 x (1 - 1 / 4) on average, very many read all.
    assert [model.expert_bytes(n, 1) for n in (0, 1, 2, 100)] == [0, 2 * 60 * 2, 2 * 60 * 3, 2 * 60 * 4]
    last = replace(model, sparse=(False, True))
    assert last.expert_bytes(100, 1) == last.expert_bytes(1, 1) == 2 * 60 * 2
    # Of every token a router of 16 and 2 experts, in place of 72.
    assert model.run_flops(5) == SMALL.run_flops(5) + 2 * 5 * (16 + 120 - 72)
    # Steps of 6, 2 and 1 tokens.
    items = [Item([1, 2, 3], 3), Item([1, 2, 3], 2)]
    plain = sum(request_work(model, 3, n).bytes for n in (3, 2)) + 3 * model.step_bytes
    assert workload_work(model, items).bytes == plain + sum(model.expert_bytes(n, n) for n in (6, 2, 1))


def test_a_prompt_alone_reads_no_cache():
    assert request_work(SMALL, 7, 1).bytes == 7 * 24


@pytest.mark.parametrize("shared", [0, 5])
def test_a_workload_counted_one_by_one(shared):
    items = [Item([0] * (shared + n), out) for n, out in ((1, 4), (6, 1), (3, 2), (3, 2))]
    reads = writes = flops = 0
    steps = max(i.num_output for i in items)
    keys_and_values = 2 * SMALL.hidden * 2 * SMALL.kv_heads * SMALL.head_dim

    def of_layer(t):
        return 2 * SMALL.matrix_parameters + 4 * 2 * 3 * (t + 1)

    for t in range(shared):  # the shared prefix is computed once
        writes += 1
        flops += (SMALL.layers - 1) * of_layer(t) + keys_and_values
    for item in items:
        for t in range(shared, len(item.prompt) + item.num_output - 1):
            writes += 1
            sampled_from = t >= len(item.prompt) - 1
            flops += (SMALL.layers - 1) * of_layer(t) + (of_layer(t) if sampled_from else keys_and_values)
            if t >= len(item.prompt):
                reads += t - shared
        flops += item.num_output * SMALL.head_flops
    reads += shared * (steps - 1)
    expected = Work(steps * SMALL.step_bytes + (reads + writes) * SMALL.token_kv_bytes, flops)
    assert workload_work(SMALL, items, shared) == expected


@pytest.mark.parametrize("shared", [0, 5])
def test_products_with_quantised_activations_counted_one_by_one(shared):
    """Of steps of more than three tokens, half of the layers' elements; attention and the head never."""
    asked = []

    def quantised(num_tokens):
        asked.append(num_tokens)
        return SMALL.layers * SMALL.matrix_parameters // 2 if num_tokens > 3 else 0

    items = [Item([0] * (shared + n), out) for n, out in ((1, 4), (2, 1), (3, 3), (3, 3), (1, 2))]
    keys_and_values = 2 * SMALL.hidden * 2 * SMALL.kv_heads * SMALL.head_dim
    prompts = shared + 10
    # The last layer's products of all prompts' tokens but the five that are sampled from are keys and values alone.
    flops = prompts * 2 * SMALL.matrix_parameters + 5 * 2 * SMALL.matrix_parameters + (prompts - 5) * keys_and_values
    flops += 4 * 2 * SMALL.layers * SMALL.matrix_parameters  # a decode step of 4 tokens; those of 3 and 1 are too small
    work = workload_work(SMALL, items, shared, quantised)
    assert work.fp8_flops == flops // 2
    assert replace(work, fp8_flops=0) == workload_work(SMALL, items, shared)
    assert sorted(asked) == [1, 3, 4, prompts]


def test_no_more_is_quantised_than_there_is():
    """Rows that fill up a tile are no work."""
    items = [Item([1, 2, 3], 3)]
    whole = workload_work(SMALL, items, quantised=lambda n: SMALL.token_parameters)
    assert workload_work(SMALL, items, quantised=lambda n: 2 * SMALL.token_parameters) == whole
    attention = 4 * 2 * 3 * (15 + 12)
    assert whole.fp8_flops == whole.flops - attention - 3 * SMALL.head_flops


@pytest.mark.parametrize(
    "architecture, tied, bias",
    [("qwen3", False, False), ("llama", True, True), *((name, False, False) for name in ("qwen2", "gemma2", "gemma3"))],
)
def test_sizes_are_those_of_the_real_model(architecture, tied, bias):
    made = tiny.model(architecture, tie_word_embeddings=tied, **({"attention_bias": True} if bias else {}))
    config = ModelConfig.from_dict({**made.config.to_dict(), "architectures": [type(made).__name__]})
    shape = ModelShape.of(config, weight_bytes=4)
    assert shape.parameters == sum(p.numel() for p in made.parameters())
    assert shape.kv_bytes == 4 and ModelShape.of(config, 2, 1).token_kv_bytes * 4 == shape.token_kv_bytes


def test_published_sizes():
    from nanovllm.models.model_presets import preset

    shape = ModelShape.of(ModelConfig.from_dict(preset("qwen3-0.6b")), 2)
    assert shape.token_kv_bytes == 114_688
    assert shape.parameters == 596_049_920  # as the model's card has it
    shape = ModelShape.of(ModelConfig.from_dict(preset("qwen3-30b-a3b")), 2)
    assert shape.parameters == 30_532_122_624
    # One token reads the 3.3 billion parameters that the card calls active, without the embedding.
    assert shape.step_bytes + shape.expert_bytes(1, 1) == 2 * (3_353_032_704 - 151_936 * 2048)


def test_the_matrix_products_of_a_real_run_are_those_of_the_account(tmp_path):
    """What an instrumented engine counts as it runs, against the formulas."""
    tiny.save(tmp_path, "qwen3", seed=1)
    instrument = Instrument()
    with decorated_kernels(instrument.decorate):
        llm = LLM(tmp_path, skip_tokenizer_init=True, device="cpu", num_kvcache_blocks=8, max_model_len=128)
    instrument.attach(llm.engine)
    with instrument.costing():
        llm.generate([[1] * 9, [2] * 5], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
    shape = ModelShape.of(llm.engine.model_config, 4)
    linear = {c: w for c, w in instrument.costs.items() if c.op.startswith(("linear", "gated_mlp"))}
    tokens, sampled_from = 9 + 5 + 2 * 3, 2 * 4
    in_layers = sum(w.flops for c, w in linear.items() if c.module != "lm_head")
    qkv = shape.hidden * shape.head_dim * (shape.heads + 2 * shape.kv_heads)
    rest = shape.matrix_parameters - qkv
    of_last, of_others = qkv * tokens + rest * sampled_from, (qkv + rest) * tokens
    assert in_layers == 2 * (of_last + (shape.layers - 1) * of_others)
    # The account leaves out the queries of the last layer as well, which one product gives with keys and values.
    queries = shape.hidden * shape.head_dim * shape.heads
    account = sum(request_work(shape, n, 4).flops for n in (9, 5)) - 2 * 4 * shape.head_flops
    attended = sum((shape.layers - 1) * sum(range(1, n + 4)) + sum(range(n, n + 4)) for n in (9, 5))
    attention = 4 * shape.heads * shape.head_dim * attended
    assert in_layers == account - attention + 2 * queries * (tokens - sampled_from)
    assert sum(w.flops for c, w in linear.items() if c.module == "lm_head") == 2 * 4 * shape.head_flops
    # Each step reads all weights of the layers and the head; what is beyond is activations.
    steps = 4
    weights = 4 * (shape.layers * shape.matrix_parameters + shape.vocab * shape.hidden)
    assert sum(w.bytes for w in linear.values()) > steps * weights
    assert {c.phase for c in linear} == {"prefill", "decode"}


def test_shares():
    share = share_of_limit(Work(bytes=100, flops=300), seconds=2.0, bandwidth=100.0, matmul=200.0)
    assert (share.mbu, share.mfu, share.limit) == (0.5, 0.75, 0.75)
    # Of 300 flops 200 at twice the rate: 0.5 and 0.5 seconds.
    assert share_of_limit(Work(100, 300, fp8_flops=200), 2.0, 100.0, 200.0, 400.0).mfu == 0.5


def test_the_floor_of_an_op():
    assert op_floor(Work(100, 10), bandwidth=10.0, matmul=10.0) == 10.0
    assert op_floor(Work(100, 500), bandwidth=10.0, matmul=10.0) == 50.0
    assert op_floor(Work(100, 500, fp8_flops=500), bandwidth=10.0, matmul=10.0, fp8_matmul=20.0) == 25.0
    # 60 of the bytes may be in the cache already, or still; but all of them pass it.
    assert op_floor(Work(100), 10.0, 10.0, cache_bytes=60, cache_bandwidth=50.0) == 4.0
    assert op_floor(Work(100), 10.0, 10.0, cache_bytes=200, cache_bandwidth=50.0) == 2.0
    # Not what is known to come from memory.
    assert op_floor(Work(100), 10.0, 10.0, cache_bytes=60, cache_bandwidth=50.0, cold_bytes=70) == 7.0


def test_what_comes_from_memory():
    weight, x, q = torch.ones(8, 4), torch.ones(2, 4), torch.ones(3, 2, 4)
    assert cold_bytes("linear", {"x": x, "weight": weight, "bias": None}, Work(500)) == 128
    assert cold_bytes("add_rms_norm_linear", {"x": x, "norm_weight": torch.ones(4), "weight": weight}, Work(500)) == 128
    assert cold_bytes("rms_norm", {"x": x, "weight": torch.ones(4)}, Work(500)) == 0
    assert cold_bytes("embedding", {"token_ids": None, "weight": weight}, Work(500)) == 0
    assert cold_bytes("attention_decode", {"q": q}, Work(1000)) == 1000 - 2 * 96
    k, v = torch.ones(1, 1, 8), torch.ones(1, 1, 8)
    for op in ("qk_norm_rope_attention", "qk_norm_rope_attention_shared"):
        assert cold_bytes(op, {"q": q, "k": k, "v": v}, Work(1000)) == 1000 - 2 * (96 + 32 + 32)
