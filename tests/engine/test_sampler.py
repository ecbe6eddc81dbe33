"""The sampler: metadata from rows, the penalty state over several steps, bans, and log-probabilities."""

import math
import random

import pytest
import torch

from nanovllm.engine.logit_rules import LogitChange
from nanovllm.engine.logprobs import compute_logprobs
from nanovllm.engine.sampler import Sampler, SamplingMetadata, SamplingRow
from nanovllm.kernels.ops.sample import sample
from nanovllm.sampling_params import SamplingParams
from tests.devices import DEVICES

VOCAB = 40
GREEDY = SamplingParams(temperature=0)


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def build(rows, device):
    return SamplingMetadata.build(rows, device)


def make_sampler(device, max_num_seqs=8, vocab=VOCAB, op=sample):
    return Sampler(max_num_seqs, vocab, device, op)


def random_logits(rows, device, vocab=VOCAB, seed=0):
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3).to(device)


def banned(*token_ids):
    return [LogitChange(token_id) for token_id in token_ids]


def forbidden_op(*_):
    raise AssertionError("a greedy batch needs no sampling kernel")


# ------------------------------------------------------------------------------------------------ metadata


def test_metadata_carries_every_row(device):
    rows = [
        SamplingRow(SamplingParams(temperature=0.5, top_k=3), seed=7, position=10, seq_slot=2, changes=banned(1, 5)),
        SamplingRow(SamplingParams(top_p=0.9, repetition_penalty=1.2), seed=2**64 - 1, position=2**40, seq_slot=0),
        SamplingRow(
            SamplingParams(min_p=0.1, presence_penalty=0.5, frequency_penalty=-0.5, logprobs=2),
            -5,
            0,
            7,
            [LogitChange(3, 1.5, after=9)],
        ),
    ]
    meta = build(rows, device)
    expected = {
        "temperature": (torch.float32, [0.5, 1, 1]),
        "top_k": (torch.int32, [3, 0, 0]),
        "top_p": (torch.float32, [1, 0.9, 1]),
        "min_p": (torch.float32, [0, 0, 0.1]),
        "seeds": (torch.int64, [7, -1, -5]),
        "positions": (torch.int64, [10, 2**40, 0]),
        "seq_slots": (torch.int64, [2, 0, 7]),
    }
    for name, (dtype, values) in expected.items():
        got = getattr(meta, name)
        assert got.device.type == device and torch.equal(got.cpu(), torch.tensor(values, dtype=dtype)), name
    assert [p.tolist() for p in meta.penalties] == [[1, pytest.approx(1.2), 1], [0, 0, 0.5], [0, 0, -0.5]]
    changes = [[0, 0, 2], [1, 5, 3], [-1, -1, 9], [-math.inf, -math.inf, 1.5]]
    assert [t.tolist() for t in meta.changes[:4]] == changes and meta.changes.conditional
    assert not meta.all_greedy and meta.max_logprobs == 2


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_what_no_row_needs_is_none(count, device):
    plain = build([SamplingRow(SamplingParams(), i, i, i) for i in range(count)], device)
    assert plain.top_k is plain.top_p is plain.min_p is plain.penalties is plain.changes is plain.max_logprobs is None
    assert len(plain.seeds) == count and plain.all_greedy == (count == 0)
    greedy = build([SamplingRow(SamplingParams(temperature=0, top_k=5, top_p=0.1, min_p=0.5), 0, 0, 0)] * count, device)
    assert greedy.top_k is greedy.top_p is greedy.min_p is None and greedy.all_greedy


def test_extreme_values_fit_the_device_types(device):
    params = SamplingParams(temperature=1e300, top_k=10**15, logprobs=0)
    meta = build([SamplingRow(params, 0, 0, 0)], device)
    assert meta.temperature.isfinite().all() and meta.top_k.item() == 2**31 - 1 and meta.max_logprobs == 0


# ------------------------------------------------------------------------------------------------ sampling


def test_greedy_batches_need_no_kernel_and_take_the_lowest_tie(device):
    logits = random_logits(3, device)
    logits[1, [4, 9, 30]] = 50.0
    out = make_sampler(device, op=forbidden_op)(logits, build([SamplingRow(GREEDY, 0, 0, i) for i in range(3)], device))
    assert torch.equal(out.token_ids, logits.argmax(-1)) and out.token_ids[1] == 4 and out.logprobs is None
    assert out.token_ids.dtype == torch.int64 and out.token_ids.device.type == device


def test_a_mixed_batch_calls_the_op_and_keeps_greedy_rows_greedy(device):
    logits = random_logits(4, device)
    params = [GREEDY, SamplingParams(temperature=2.0), SamplingParams(top_k=2), GREEDY]
    meta = build([SamplingRow(p, 11, i, i) for i, p in enumerate(params)], device)
    out = make_sampler(device)(logits, meta)
    expected = sample(logits, meta.temperature, meta.top_k, meta.top_p, meta.min_p, meta.seeds, meta.positions)
    assert torch.equal(out.token_ids, expected)
    assert out.token_ids[[0, 3]].tolist() == logits[[0, 3]].argmax(-1).tolist()


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(repetition_penalty=1.5)])
def test_banned_tokens_are_never_sampled_and_logits_are_left_alone(params, device):
    sampler = make_sampler(device, max_num_seqs=64)
    logits = random_logits(64, device)
    best_two = logits.topk(2).indices.tolist()
    for slot in range(64):
        sampler.admit(slot, [1], [], params)
    before = logits.clone()
    rows = [SamplingRow(params, i, 0, i, banned(*best_two[i]) if i % 2 else ()) for i in range(64)]
    tokens = sampler(logits, build(rows, device)).token_ids.tolist()
    assert torch.equal(logits, before)
    assert all(tokens[i] not in best_two[i] for i in range(1, 64, 2))
    assert any(tokens[i] in best_two[i] for i in range(0, 64, 2))


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0, repetition_penalty=1.3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changes_are_added_before_penalties_where_the_last_token_is_the_one_named(params, dtype, device):
    sampler = make_sampler(device)
    logits = random_logits(3, device).to(dtype)
    for slot in range(3):
        sampler.admit(slot, [7, 8], [9], params)
    last_tokens = torch.tensor([11, 12, 13, 0], device=device)
    changes = [LogitChange(4, 2.5), LogitChange(5, -math.inf, after=12), LogitChange(7, 50.0, after=13)]
    rows = [SamplingRow(params, 0, 0, slot, changes) for slot in range(3)]
    expected = logits.float().clone()
    expected[:, 4] += 2.5
    expected[1, 5] = -math.inf
    expected[2, 7] += 50
    expected = [penalised(row, [7, 8], [9], params) for row in expected.tolist()]
    before = logits.clone()
    tokens = sampler(logits, build(rows, device), last_tokens).token_ids
    assert tokens.tolist() == torch.tensor(expected).argmax(-1).tolist() and tokens[2] == 7
    assert torch.equal(logits, before)
    with pytest.raises(RuntimeError, match="pass last_tokens"):
        sampler(logits, build(rows, device))


# ------------------------------------------------------------------------------------------------ penalty state


def penalised(logits, prompt, output, params):
    """A slow reference in Python floats."""
    result = []
    for token, x in enumerate(logits):
        if token in prompt or token in output:
            x = x / params.repetition_penalty if x > 0 else x * params.repetition_penalty
        result.append(x - params.frequency_penalty * output.count(token) - params.presence_penalty * (token in output))
    return result


def test_penalty_state_follows_sequences_over_steps_and_slots(device):
    """Sequences come, go, are preempted and resumed in other slots; greedy tokens equal the reference's."""
    rng = random.Random(0)
    choices = [
        GREEDY,
        SamplingParams(temperature=0, repetition_penalty=1.4),
        SamplingParams(temperature=0, presence_penalty=1.5),
        SamplingParams(temperature=0, frequency_penalty=0.7),
        SamplingParams(temperature=0, repetition_penalty=0.8, presence_penalty=-0.5, frequency_penalty=1.1),
    ]
    sampler = make_sampler(device, max_num_seqs=6)
    running = {}  # slot -> (prompt, output, params)
    repeats = 0
    for step in range(60):
        for slot in range(6):
            if slot not in running and rng.random() < 0.5:
                sequence = ([rng.randrange(VOCAB) for _ in range(rng.randrange(1, 6))], [], rng.choice(choices))
                running[slot] = sequence
                sampler.admit(slot, *sequence)
            elif slot in running and rng.random() < 0.1:
                sequence = running.pop(slot)
                if rng.random() < 0.5:  # preempted: it resumes, with its output, in any free slot
                    slot = rng.choice([s for s in range(6) if s not in running])
                    running[slot] = sequence
                    sampler.admit(slot, *sequence)
        slots = [s for s in running if rng.random() < 0.8]
        rng.shuffle(slots)
        if not slots:
            continue
        # Nearly the same logits at every step, so that penalties decide.
        logits = random_logits(1, device).expand(len(slots), VOCAB) + random_logits(len(slots), device, seed=step) / 10
        meta = build([SamplingRow(running[s][2], 0, step, s) for s in slots], device)
        tokens = sampler(logits, meta).token_ids.tolist()
        for slot, row, token in zip(slots, logits.tolist(), tokens):
            prompt, output, params = running[slot]
            expected = penalised(row, prompt, output, params)
            assert expected[token] == pytest.approx(max(expected), abs=1e-5)
            repeats += token in output
            output.append(token)
    assert repeats  # or the counts would not have mattered


def test_the_penalty_state_is_there_from_the_first_penalty_until_it_is_released(device):
    sampler, params = make_sampler(device), SamplingParams(temperature=0, presence_penalty=1)
    row = build([SamplingRow(params, 0, 0, 0)], device)
    sampler.admit(0, [1], [], SamplingParams(top_k=5))
    with pytest.raises(RuntimeError, match="admit"):
        sampler(random_logits(1, device), row)
    sampler.admit(0, [1], [], params)
    sampler(random_logits(1, device), row)
    sampler.release_penalty_state()
    with pytest.raises(RuntimeError, match="admit"):
        sampler(random_logits(1, device), row)


def test_rows_that_are_computed_in_chunks_are_those_computed_alone(device):
    """Of 2**20 tokens two rows are a chunk."""
    vocab, num_rows = 1 << 20, 5
    params = SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.4, logprobs=4)
    sampler = make_sampler(device, vocab=vocab)
    logits = random_logits(num_rows, device, vocab)
    best = logits.topk(3).indices.tolist()
    for slot in range(num_rows):
        sampler.admit(slot, best[slot][:1], best[slot][1:2], params)
    rows = [SamplingRow(params, 0, 0, slot) for slot in range(num_rows)]
    together = sampler(logits, build(rows, device))
    for slot, row in enumerate(rows):
        sampler.admit(slot, best[slot][:1], best[slot][1:2], params)
        alone = sampler(logits[slot : slot + 1], build([row], device))
        assert alone.token_ids == together.token_ids[slot] and alone.token_ids[0] != best[slot][0]
        assert all(torch.equal(a[0], b[slot]) for a, b in zip(alone.logprobs, together.logprobs))


def test_logprobs_are_of_the_raw_logits(device):
    params = SamplingParams(temperature=0.1, top_k=1, repetition_penalty=5.0, logprobs=3)
    sampler = make_sampler(device)
    sampler.admit(0, list(range(20)), [], params)
    logits = random_logits(1, device)
    out = sampler(logits, build([SamplingRow(params, 0, 0, 0, banned(2))], device))
    expected = compute_logprobs(logits, out.token_ids, 3)
    assert all(torch.equal(a, b) for a, b in zip(out.logprobs, expected))


# ------------------------------------------------------------------------------------------------ on the device


@pytest.mark.gpu
def test_a_step_never_waits_for_the_device_and_can_be_captured():
    params = [
        SamplingParams(temperature=0.8, top_k=50, top_p=0.9, repetition_penalty=1.1, logprobs=5),
        SamplingParams(min_p=0.1, frequency_penalty=0.3),
        GREEDY,
    ]
    rows = [SamplingRow(p, 3, 8, i, banned(0, 1)) for i, p in enumerate(params)]
    sampler = make_sampler("cuda", vocab=32_000)
    logits = random_logits(3, "cuda", 32_000)

    def step():
        for slot, p in enumerate(params):
            sampler.admit(slot, [1, 2, 3], [4, 4], p)
        meta = build(rows, "cuda")
        return meta, sampler(logits, meta)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        meta, eager = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for slot, p in enumerate(params):
        sampler.admit(slot, [1, 2, 3], [4, 4], p)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sampler(logits, meta)
    graph.replay()
    assert torch.equal(captured.token_ids, eager.token_ids)
    assert all(torch.equal(a, b) for a, b in zip(captured.logprobs, eager.logprobs))


def test_an_interrupt_while_the_penalty_state_is_made(monkeypatch):
    sampler = Sampler(2, 10, torch.device("cpu"), lambda logits, *_: logits.argmax(-1))
    params = SamplingParams(repetition_penalty=1.5)
    zeros, calls = torch.zeros, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return zeros(*args, **kwargs)

    monkeypatch.setattr(torch, "zeros", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sampler.admit(0, [1], [2], params)
    sampler.admit(0, [1], [2], params)
    assert len(calls) == 4
