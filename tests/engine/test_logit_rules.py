"""Bias and bad words: the tokens are those of a slow reference in every engine mode, and other requests keep theirs."""

import math
import random

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.fast.policy import FastPolicy, PiggybackSizes
from nanovllm.engine.logit_rules import LogitChange, LogitRules, bad_word_token_ids
from tests import tiny
from tests.engine.fast.replayed import ReplayedFunctions, lengths_on_the_device

TOKENIZER = tiny.tokenizer()
VOCAB = len(TOKENIZER)
RNG = random.Random(5)
PROMPTS = [[RNG.randrange(VOCAB) for _ in range(n)] for n in (5, 40, 70, 16, 33, 9)]

SIZES = PiggybackSizes(totals=(8, 20, 40), row_multiple=2, min_tokens=2, min_tokens_at_once=4, max_pieces=3)
ALL = FastPolicy(
    piggyback_prefill=True, prefill_graphs=True, warm_up=True, min_shared_rows=2, min_saved_bytes=1, piggyback=SIZES,
    prefill_sizes=(4, 8, 24, 40), graph_backend=ReplayedFunctions, capture_sampling=True, padding=True,
)  # fmt: skip
MODES = {
    "plain": dict(fast_policy=FastPolicy.off()),
    "plain, asynchronous": dict(fast_policy=FastPolicy.off(), async_scheduling=True),
    "device state": dict(fast_policy=FastPolicy.off(device_state=True), async_scheduling=True),
    "all": dict(fast_policy=ALL),
    "all, asynchronous": dict(fast_policy=ALL, async_scheduling=True),
    "preempted": dict(fast_policy=ALL, async_scheduling=True, num_kvcache_blocks=14),
}


@pytest.fixture(scope="module")
def directory(llama_directory):
    return llama_directory


@pytest.fixture(scope="module")
def reference():
    return tiny.model("llama", seed=3, vocab_size=VOCAB)


def make(directory, **arguments):
    defaults = dict(
        device="cpu", dtype="float32", kvcache_block_size=16, num_kvcache_blocks=60, max_model_len=128,
        max_num_seqs=8, max_num_batched_tokens=40,
    )  # fmt: skip
    return LLM(directory, **defaults | arguments)


@torch.no_grad()
def greedy(reference, prompt, num_tokens, bias, bad_words):
    """What vLLM's documentation says, step by step: the last token of a word is banned after the others."""
    output = []
    for _ in range(num_tokens):
        logits = reference(torch.tensor([prompt + output])).logits[0, -1].float()
        for token, value in bias.items():
            logits[token] += value
        for word in bad_words:
            n = len(word) - 1
            if len(output) >= n and output[len(output) - n :] == word[:-1]:
                logits[word[-1]] = -math.inf
        output.append(int(logits.argmax()))
    return output


def text_of(token_ids):
    return TOKENIZER.decode(token_ids, clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module")
def cases(reference):
    """(prompt, parameters, greedy tokens): with bad words of one to four tokens that would be said, and a bias."""
    made = []
    for i, prompt in enumerate(PROMPTS):
        length = 12 + 3 * i
        plain = greedy(reference, prompt, length, {}, [])
        words = []
        for start, n in ((3, 1), (5, 2), (7, 3), (8, 4)):  # what the request would write, as far as it is text
            text = text_of(plain[start : start + n])
            if "\ufffd" not in text and text.strip() and not text[0].isspace():
                words.append(text)
        bias = {plain[0]: -100, plain[-1]: 1.5, 17: 0.25}
        expected = greedy(reference, prompt, length, bias, bad_word_token_ids(words, TOKENIZER, VOCAB))
        assert expected != plain
        params = SamplingParams(
            temperature=0, max_tokens=length, ignore_eos=True, bad_words=words, logit_bias=bias
        )  # fmt: skip
        made.append((prompt, params, expected))
    assert sum(len(params.bad_words) for _, params, _ in made) >= 6
    return made


@pytest.fixture(scope="module")
def words_of_several_tokens(reference):
    """(prompt, words, greedy tokens) where words of two and three tokens each change the output."""
    found = []
    for seed in range(200):
        prompt = [random.Random(seed).randrange(VOCAB) for _ in range(6)]
        plain = greedy(reference, prompt, 14, {}, [])
        words = [text_of(plain[3:5]), text_of(plain[6:9])]
        ids = [TOKENIZER.encode(word, add_special_tokens=False) for word in words]
        if ids != [plain[3:5], plain[6:9]]:
            continue
        expected = greedy(reference, prompt, 14, {}, bad_word_token_ids(words, TOKENIZER, VOCAB))
        assert expected[4] != plain[4]
        found.append((prompt, words, expected))
        if len(found) == 3:
            return found
    raise AssertionError("no greedy output has words of several tokens")


def run(directory, prompts, params, **arguments):
    with lengths_on_the_device() as kernels:
        llm = make(directory, kernel_priority=kernels, **arguments)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.check()
    return [[c.token_ids for c in o.outputs] for o in outputs], llm


@pytest.mark.parametrize("mode", MODES)
def test_tokens_in_every_mode(directory, reference, cases, words_of_several_tokens, mode):
    prompts = [prompt for prompt, _, _ in cases]
    params = [p for _, p, _ in cases]
    expected = [tokens for _, _, tokens in cases]
    for prompt, words, tokens in words_of_several_tokens:
        prompts.append(prompt)
        params.append(SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, bad_words=words))
        expected.append(tokens)
    for prompt in PROMPTS[:2]:  # beside requests that use neither
        prompts.append(prompt)
        params.append(SamplingParams(temperature=0, max_tokens=25, ignore_eos=True))
        expected.append(tiny.greedy(reference, prompt, 25))
    got, llm = run(directory, prompts, params, **MODES[mode])
    assert [tokens for (tokens,) in got] == expected
    assert (llm.engine.scheduler.num_preemptions > 0) == (mode == "preempted")


@pytest.fixture(scope="module")
def seeded(directory, words_of_several_tokens):
    """Seeded requests, with n > 1, penalties and filters, and what the plain engine says to them."""
    words = [word for _, some, _ in words_of_several_tokens for word in some]
    kinds = [
        dict(bad_words=words, temperature=0.9),
        dict(logit_bias={7: 4.0, 9: -100}, top_k=30, n=2),
        dict(bad_words=[*words, "a", "e"], logit_bias={7: 2.0}, repetition_penalty=1.2, frequency_penalty=0.3),
        dict(temperature=0.8, top_p=0.9),
        dict(temperature=0.7, n=2),
        dict(temperature=0, logit_bias={7: 3.0}, min_tokens=5, stop_token_ids=[7, 9]),
    ]
    params = [SamplingParams(**kind, seed=i, max_tokens=20) for i, kind in enumerate(kinds)]
    return params, run(directory, PROMPTS, params, **MODES["plain"])[0]


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "plain"])
def test_draws_in_every_mode(directory, seeded, mode):
    params, expected = seeded
    assert run(directory, PROMPTS, params, **MODES[mode])[0] == expected


@pytest.mark.gpu
def test_cuda_graphs_give_the_same_tokens(directory, seeded):
    graphs = FastPolicy(piggyback_prefill=True, prefill_graphs=True, piggyback=SIZES, prefill_sizes=(4, 8, 24, 40))
    outputs = []
    for policy in (FastPolicy.off(), graphs):
        llm = make(directory, device="cuda", fast_policy=policy)
        outputs.append([[c.token_ids for c in o.outputs] for o in llm.generate(PROMPTS, seeded[0], use_tqdm=False)])
        del llm
    assert outputs[0] == outputs[1]


def test_other_requests_of_the_batch_keep_their_draws(directory, seeded):
    params, expected = seeded
    plain = [i for i, p in enumerate(params) if not p.changes_logits]
    alone, _ = run(directory, [PROMPTS[i] for i in plain], [params[i] for i in plain], **MODES["plain"])
    assert alone == [expected[i] for i in plain]


def test_bad_words_are_not_in_the_output(directory):
    (out,) = make(directory).generate(
        [PROMPTS[0]], SamplingParams(bad_words=["e", "th", "a b"], max_tokens=100, n=4, seed=0), use_tqdm=False
    )
    assert all(" e " not in c.text and " th " not in c.text and "a b" not in c.text.split("  ") for c in out.outputs)
    banned = {tuple(word) for word in bad_word_token_ids(["e", "th"], TOKENIZER, VOCAB)}
    assert banned == {(TOKENIZER.encode(text)[0],) for text in ("e", "th", " e")} | {tuple(TOKENIZER.encode(" th"))}
    single = {word[0] for word in banned if len(word) == 1}
    assert not any(single & set(c.token_ids) for c in out.outputs)


def test_log_probabilities_are_those_before_the_bias(directory):
    llm = make(directory)
    kind = dict(temperature=0, max_tokens=1, logprobs=2)
    plain, biased = (
        llm.generate([PROMPTS[0]], SamplingParams(**kind, logit_bias=bias), use_tqdm=False)[0].outputs[0]
        for bias in ({}, {5: 100})
    )
    assert biased.token_ids == [5] and set(plain.logprobs[0]) <= set(biased.logprobs[0]) | {5}
    assert biased.cumulative_logprob == biased.logprobs[0][5].logprob < plain.cumulative_logprob


def test_what_the_device_has_to_compare():
    rules = LogitRules({3: 1.0}, [[5], [6, 7], [6, 7, 8]])
    always = [LogitChange(3, 1.0), LogitChange(5)]
    assert list(rules.changes([6, 7], 2, False)) == always  # a prompt's tokens do not count
    assert list(rules.changes([9, 6, 7], 1, False)) == [*always, LogitChange(8)]
    assert list(rules.changes([9, 6], 1, True)) == [*always, LogitChange(7, after=6), LogitChange(8, after=7)]
    assert list(rules.changes([9], 1, True)) == [*always, LogitChange(7, after=6)]


def test_words_outside_of_the_vocabulary_are_left_out():
    with_space = bad_word_token_ids(["q"], TOKENIZER, VOCAB)
    assert with_space == [TOKENIZER.encode("q"), TOKENIZER.encode(" q")]
    assert bad_word_token_ids(["q"], TOKENIZER, max(with_space[0])) in ([], [with_space[1]])


@pytest.mark.parametrize(
    "params, words",
    [
        (dict(logit_bias={VOCAB: 1}), f"logit_bias: {VOCAB} is outside the vocabulary of {VOCAB}"),
        (dict(bad_words=["a"]), "bad_words need a tokenizer, and this engine has none; use logit_bias"),
    ],
)
def test_what_cannot_be_served(directory, params, words):
    llm = make(directory, skip_tokenizer_init=True)
    with pytest.raises(ValueError) as error:
        llm.generate([[1]], SamplingParams(**params), use_tqdm=False)
    assert str(error.value) == words
