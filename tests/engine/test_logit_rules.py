"""Bias and bad words: the tokens are those of a slow reference, and other requests keep theirs."""

import math
import random

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.fast.policy import FastPolicy
from nanovllm.engine.logit_rules import LogitChange, LogitRules, bad_word_token_ids
from tests import tiny
from tests.engine.fast.replayed import lengths_on_the_device
from tests.engine.fast.test_policy import POLICIES

TOKENIZER = tiny.tokenizer()
VOCAB = len(TOKENIZER)
RNG = random.Random(5)
PROMPTS = [[RNG.randrange(VOCAB) for _ in range(n)] for n in (5, 40, 70, 16, 33, 9)]

MODES = {"plain": dict(fast_policy=FastPolicy.off()), "all": dict(fast_policy=POLICIES["all"], async_scheduling=True)}


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
    with lengths_on_the_device() as kernels:
        outputs = make(directory, kernel_priority=kernels, **MODES[mode]).generate(prompts, params, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == expected


def test_bad_words_are_not_in_the_output(directory):
    (out,) = make(directory).generate(
        [PROMPTS[0]], SamplingParams(bad_words=["e", "th", "a b"], max_tokens=100, n=4, seed=0), use_tqdm=False
    )
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
