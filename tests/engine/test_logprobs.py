"""Log-probabilities of tokens against float64, the dicts that requests get, and an engine against transformers."""

import time

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.engine.logprobs import LogprobsTensors, compute_logprobs
from tests import tiny
from tests.devices import DEVICES
from tests.engine.small_engine import generate, make, random_prompts

VOCAB = 40


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def random_logits(rows, device):
    return (torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(0)) * 3).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [0, 1, 5, VOCAB, VOCAB + 9])
def test_logprobs_match_float64(k, dtype, device):
    logits = (random_logits(7, device) * 5 + 100).to(dtype)
    tokens = torch.tensor([0, 5, 39, 7, 7, 1, 2], device=device)
    got = compute_logprobs(logits, tokens, k)
    expected = logits.double().log_softmax(-1)
    k = min(k, VOCAB)
    assert got.token_ids.shape == got.logprobs.shape == (7, 1 + k) and got.ranks.shape == (7,)
    assert (got.token_ids.dtype, got.logprobs.dtype, got.ranks.dtype) == (torch.int64, torch.float32, torch.int64)
    assert torch.equal(got.token_ids[:, 0], tokens)
    torch.testing.assert_close(got.logprobs.double(), expected.gather(-1, got.token_ids), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got.logprobs[:, 1:].double(), expected.topk(k).values, rtol=1e-5, atol=1e-5)
    assert torch.equal(got.ranks, (logits > logits.gather(-1, tokens[:, None])).sum(-1) + 1)


def test_prompt_logprobs_of_no_tokens(device):
    logits, tokens = random_logits(0, device), torch.zeros(0, dtype=torch.int64, device=device)
    assert compute_logprobs(logits, tokens, 4).logprobs.shape == (0, 5)


def test_a_row_becomes_a_dict_with_the_own_token_first():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 2.0]])
    expected = logits.double().log_softmax(-1)[0].tolist()
    rare = compute_logprobs(logits, torch.tensor([0]), 3).cpu().row(0, 3)
    assert list(rare)[0] == 0 and set(rare) == {0, 1, 3, 4}
    assert {i: r.rank for i, r in rare.items()} == {0: 5, 1: 1, 3: 1, 4: 3}
    assert all(r.logprob == pytest.approx(expected[i], abs=1e-6) and r.decoded_token is None for i, r in rare.items())
    common = compute_logprobs(logits, torch.tensor([4]), 3)
    assert {i: r.rank for i, r in common.row(0, 3).items()} == {4: 3, 1: 1, 3: 1}
    # A request that wants fewer than the batch's most, down to its own token alone.
    assert len(common.row(0, 1)) == 2 and list(common.row(0, 0)) == [4]


def test_the_ranks_of_many_take_linear_time():
    """A dictionary of the whole vocabulary, with many equal values."""
    values = torch.arange(100_000, 0, -1) // 3
    tensors = LogprobsTensors(torch.arange(100_000)[None], -1.0 / values[None], torch.tensor([1]))
    start = time.process_time()
    row = tensors.row(0, 99_999)
    assert time.process_time() - start < 10  # 0.1 s; a search for each would take a minute
    assert len(row) == 100_000 and [row[i].rank for i in (1, 2, 3, 4, 5)] == [1, 2, 2, 2, 5]


# ------------------------------------------------------------------------------------------------ an engine


def close(record, token, row, k):
    """One position's record: its token and the k best, as log_softmax says."""
    best = row.topk(k).indices.tolist()
    assert list(record)[0] == token and set(record) == {token, *best}
    for candidate, entry in record.items():
        assert entry.logprob == pytest.approx(float(row[candidate]), abs=1e-4)
        assert entry.rank == int((row > row[candidate]).sum()) + 1


@pytest.mark.parametrize("k", [0, 1, 5])
def test_logprobs_are_the_log_softmax_of_the_raw_logits(llm, reference, k):
    prompts = random_prompts([7, 41, 90])
    params = SamplingParams(temperature=0.7, top_k=50, seed=3, max_tokens=8, logprobs=k, presence_penalty=1.0)
    for prompt, out in zip(prompts, llm.generate(prompts, params, use_tqdm=False)):
        rows = tiny.logprobs(reference, prompt + out["token_ids"])
        assert len(out["logprobs"]) == len(out["token_ids"]) == 8 and out.prompt_logprobs is None
        for i, (token, record) in enumerate(zip(out["token_ids"], out["logprobs"])):
            close(record, token, rows[len(prompt) + i - 1], k)
            assert all(entry.decoded_token == llm.tokenizer.decode([t]) for t, entry in record.items())


def test_logprobs_of_different_widths_in_one_batch(llm):
    prompts = random_prompts([5, 5, 5])
    params = [SamplingParams(max_tokens=3, logprobs=k, ignore_eos=True) for k in (None, 0, 4)]
    outs = llm.generate(prompts, params, use_tqdm=False)
    assert outs[0]["logprobs"] is None and all(len(out["token_ids"]) == 3 for out in outs)
    assert [len(r) for r in outs[1]["logprobs"]] == [1, 1, 1] and all(len(r) in (4, 5) for r in outs[2]["logprobs"])


@pytest.mark.parametrize("length", [1, 16, 90])
def test_prompt_logprobs_over_chunks_and_cached_prefixes(llm, reference, length):
    (prompt,) = random_prompts([length], seed=length)
    generate(llm, [prompt], SamplingParams(max_tokens=1))  # its prefix is in the cache now
    out = llm.generate(
        [*random_prompts([60]), prompt, prompt[: length // 2 + 1]],
        [
            SamplingParams(max_tokens=20),
            SamplingParams(max_tokens=5, prompt_logprobs=2, temperature=0),
            SamplingParams(max_tokens=20),
        ],
        use_tqdm=False,
    )[1]
    rows = tiny.logprobs(reference, prompt)
    assert len(out.prompt_logprobs) == length and out.prompt_logprobs[0] is None
    for i in range(1, length):
        close(out.prompt_logprobs[i], prompt[i], rows[i - 1], 2)
    assert out["token_ids"] == tiny.greedy(reference, prompt, 5)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_prompt_logprobs_survive_preemption(directory, reference, asynchronous):
    llm = make(directory, num_kvcache_blocks=8, max_num_seqs=4, async_scheduling=asynchronous)
    prompts = random_prompts([30, 31, 32, 33])
    params = SamplingParams(max_tokens=40, prompt_logprobs=1, ignore_eos=True, temperature=0)
    outs = llm.generate(prompts, params, use_tqdm=False)
    assert llm.engine.scheduler.num_preemptions
    for prompt, out in zip(prompts, outs):
        rows = tiny.logprobs(reference, prompt)
        for i in range(1, len(prompt)):
            close(out.prompt_logprobs[i], prompt[i], rows[i - 1], 1)
        assert out["token_ids"] == tiny.greedy(reference, prompt, 40)


def test_prompt_logprobs_of_several_completions_are_computed_once(llm):
    (prompt,) = random_prompts([40])
    params = SamplingParams(n=3, prompt_logprobs=0, logprobs=0, max_tokens=4, ignore_eos=True)
    (out,) = llm.generate([prompt], params, use_tqdm=False)
    assert len(out.prompt_logprobs) == 40 and all(r is not None for r in out.prompt_logprobs[1:])
    assert [len(c.logprobs) for c in out.outputs] == [4, 4, 4]
    request = llm.engine.make_request(prompt, SamplingParams(n=3, prompt_logprobs=0))
    assert [c.seq.params.prompt_logprobs for c in request.completions] == [0, None, None]
