"""`LLM.generate`: every form of a prompt, completions, cached prefixes, progress."""

import math
import random
import re
import sys
import time

import numpy as np
import pytest
import torch

from nanovllm import SamplingParams
from tests.llm.small_llm import GREEDY, PROMPTS, TOKENIZER, greedy_text, make
from tests.notebook import outputs_of_cell

pytestmark = pytest.mark.any_device


def test_every_form_of_a_prompt(llm, reference):
    ids = [TOKENIZER.encode(p) for p in PROMPTS]
    prompts = [
        PROMPTS[0], ids[1], {"prompt": PROMPTS[2]}, {"prompt_token_ids": ids[0]}, {"prompt": "what was said",
        "prompt_token_ids": ids[1]},
        tuple(ids[2]), np.array(ids[0]), torch.tensor(ids[1]),
    ]  # fmt: skip
    outs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [o.prompt for o in outs] == [PROMPTS[0], None, PROMPTS[2], None, "what was said", None, None, None]
    order = [0, 1, 2, 0, 1, 2, 0, 1]
    assert [o.prompt_token_ids for o in outs] == [ids[i] for i in order]
    assert all(type(t) is int for o in outs for t in o.prompt_token_ids)
    expected = [greedy_text(reference, p)[0] for p in PROMPTS]
    assert [o["token_ids"] for o in outs] == [expected[i] for i in order]


@pytest.mark.parametrize("prompt", ["hello world", TOKENIZER.encode("hello world"), {"prompt": "hello world"}])
def test_a_lone_prompt_needs_no_list(llm, reference, prompt):
    (out,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert out["token_ids"] == greedy_text(reference, "hello world")[0]


def test_the_repr_says_which_model_runs_where(llm):
    assert repr(llm) == f"<LLM {llm.engine.config.model!r} on {llm.device_name}>"
    assert str(llm.engine.runner.device) in repr(llm) or torch.cuda.get_device_name() in repr(llm)
    assert repr(type(llm).__new__(type(llm))) == "<LLM that was not started>"


def test_no_prompts(llm):
    assert llm.generate([], use_tqdm=False) == [] == llm.generate([])


def test_outputs_come_in_the_order_of_the_prompts(llm):
    prompts = [[i, i + 1] for i in range(20)]
    lengths = [random.Random(i).randint(1, 30) for i in range(20)]
    outs = llm.generate(prompts, [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths], use_tqdm=False)
    assert [o.prompt_token_ids for o in outs] == prompts and [len(o["token_ids"]) for o in outs] == lengths
    assert len({o.request_id for o in outs}) == 20
    assert all(isinstance(o.request_id, str) and o.request_id.isdecimal() for o in outs), "as vLLM's"


def test_default_parameters_and_one_for_each(llm):
    assert len(llm.generate("x", use_tqdm=False)[0]["token_ids"]) <= 64
    with pytest.raises(ValueError, match="3 prompts but 2 sampling_params"):
        llm.generate(PROMPTS, [GREEDY] * 2, use_tqdm=False)


def test_outputs_have_the_keys_of_nano_vllm_and_the_attributes_of_vllm(llm, reference):
    began = time.perf_counter()
    out = llm.generate(PROMPTS, GREEDY, use_tqdm=False)[1]
    took = time.perf_counter() - began
    token_ids, text = greedy_text(reference, PROMPTS[1])
    assert out["text"] == out.outputs[0].text == text and out["token_ids"] == out.outputs[0].token_ids == token_ids
    assert out.outputs[0].finish_reason == "length" and out.outputs[0].stop_reason is None and out.outputs[0].index == 0
    assert out.prompt == PROMPTS[1] and out.prompt_token_ids == TOKENIZER.encode(PROMPTS[1]) and out.finished
    assert 0 < out.metrics.time_to_first_token <= out.metrics.total_time <= took + 0.1  # seconds


def test_what_draws_the_progress_bar_is_imported_before_the_times_of_requests_begin(llm, monkeypatch):
    imported = []

    class Finder:
        @staticmethod
        def find_spec(name, *_):
            if name == "rich.progress":
                imported.append(time.time())

    monkeypatch.delitem(sys.modules, "rich.progress", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
    (out,) = llm.generate(["hello"], GREEDY)
    assert imported and out.metrics.arrival_time >= imported[0]


def test_cached_prompt_tokens_are_counted(llm):
    prompt = random.Random(11).choices(range(900), k=50)
    (first,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    (again,) = llm.generate([prompt], GREEDY, use_tqdm=False)
    assert (first.metrics.num_cached_tokens, again.metrics.num_cached_tokens) == (0, 48)
    assert first["token_ids"] == again["token_ids"]


def test_cached_prompts_are_shared_among_those_of_the_same_salt(llm):
    ids = random.Random(12).choices(range(900), k=50)
    prompts = [
        {"prompt_token_ids": ids} | ({"cache_salt": salt} if salt else {}) for salt in ("a", "b", None, "b", "a")
    ]
    outs = [llm.generate([prompt], GREEDY, use_tqdm=False)[0] for prompt in prompts]
    assert [out.metrics.num_cached_tokens for out in outs] == [0, 0, 0, 48, 48]
    assert all(out["token_ids"] == outs[0]["token_ids"] for out in outs)


def test_log_probabilities_have_a_limit(llm, directory):
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(ValueError) as error:
            llm.generate("x", SamplingParams(**{name: 21}), use_tqdm=False)
        assert str(error.value) == (
            f"{name}=21: this engine reports at most 20 for a token; lower it, or pass max_logprobs=21 to LLM"
        )
    for most in (21, -1):
        (out,) = make(directory, max_logprobs=most).generate("x", SamplingParams(logprobs=21, max_tokens=1), False)
        assert len(out["logprobs"][0]) in (21, 22)


def test_minus_one_asks_for_the_log_probabilities_of_all_tokens(llm, directory):
    for name in ("logprobs", "prompt_logprobs"):
        with pytest.raises(ValueError) as error:
            llm.generate("x", SamplingParams(**{name: -1}), use_tqdm=False)
        limit = "this engine reports at most 20 for a token; ask for 20, or pass max_logprobs=-1 to LLM"
        assert str(error.value) == f"{name}=-1: {limit}"
    all_tokens = SamplingParams(logprobs=-1, prompt_logprobs=-1, max_tokens=2, ignore_eos=True)
    (out,) = make(directory, max_logprobs=-1).generate("x y", all_tokens, use_tqdm=False)
    size = llm.engine.model_config.vocab_size
    rows = [*out["logprobs"], *out.prompt_logprobs[1:]]
    assert len(rows) > 2
    for row in rows:
        assert row.keys() == set(range(size))
        assert sum(math.exp(entry.logprob) for entry in row.values()) == pytest.approx(1, abs=1e-4)


def test_a_text_that_cannot_fit_is_not_tokenised(llm):
    began = time.process_time()
    for call in (lambda text: llm.generate(text), lambda text: llm.chat([{"role": "user", "content": text}])):
        with pytest.raises(
            ValueError, match="the prompt has 200000.. characters, but max_model_len=128 allows 127 tok"
        ):
            call("ab " * 6_666_667)
    assert time.process_time() - began < 3  # 0.1 s; half a minute if it is tokenised


def test_cached_prompt_tokens_are_those_of_the_prompt_after_a_preemption(directory):
    llm = make(directory, num_kvcache_blocks=8, max_num_seqs=4)
    prompts = [[i] * 20 for i in range(4)]
    outs = llm.generate(prompts, SamplingParams(max_tokens=60, ignore_eos=True), use_tqdm=False)
    assert llm.engine.scheduler.num_preemptions
    assert max(o.metrics.num_cached_tokens for o in outs) <= 20


def test_several_completions(llm, reference):
    (out,) = llm.generate("hello", SamplingParams(n=4, seed=5, max_tokens=10), use_tqdm=False)
    assert [c.index for c in out.outputs] == [0, 1, 2, 3] and len({tuple(c.token_ids) for c in out.outputs}) == 4
    assert all(c.text == TOKENIZER.decode(c.token_ids, skip_special_tokens=True) for c in out.outputs)
    (again,) = llm.generate("hello", SamplingParams(n=2, seed=5, max_tokens=10), use_tqdm=False)
    assert [c.token_ids for c in again.outputs] == [c.token_ids for c in out.outputs[:2]]
    (greedy,) = llm.generate(
        "hello", SamplingParams(n=3, temperature=0, max_tokens=10, ignore_eos=True), use_tqdm=False
    )
    assert [c.token_ids for c in greedy.outputs] == [greedy_text(reference, "hello", 10)[0]] * 3


def test_more_completions_than_sequences_that_run(llm):
    (out,) = llm.generate("hello", SamplingParams(n=20, max_tokens=5, ignore_eos=True), use_tqdm=False)
    assert [len(c.token_ids) for c in out.outputs] == [5] * 20


def test_the_progress_bar_says_tokens_a_second(llm, capsys):
    llm.generate(PROMPTS, SamplingParams(max_tokens=4, ignore_eos=True))
    out, err = capsys.readouterr()
    assert out == "" and "3/3" in err and "prompt" in err and "tok/s" in err
    llm.generate(PROMPTS, SamplingParams(max_tokens=4), use_tqdm=False)
    assert capsys.readouterr() == ("", "")


def test_the_progress_bar_in_a_notebook_is_one_output_without_escape_codes(llm, capsys, monkeypatch, recwarn):
    shown = outputs_of_cell(monkeypatch)
    llm.generate(PROMPTS, SamplingParams(max_tokens=4, ignore_eos=True))
    (states,) = shown
    assert "0/3" in states[0] and re.search(r"3/3 .* prompt [\d.]+ tok/s, output [\d.]+ tok/s$", states[-1])
    assert capsys.readouterr() == ("", "") and not recwarn.list and not any("\x1b" in s or "\n" in s for s in states)
