"""Which rows a step asks the model for, the memory that a start accounts for, and an engine's end."""

import gc
import random
import threading
import weakref
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm import LLM, SamplingParams
from nanovllm.engine import model_runner
from nanovllm.engine.batch import Batch
from nanovllm.engine.fast import decode_runner
from nanovllm.engine.fast.policy import FastPolicy
from nanovllm.engine.logprobs import PROMPT_LOGPROBS_ROWS
from nanovllm.engine.model_setup import run_largest_steps
from nanovllm.hardware import devices
from tests.engine import small_engine

pytestmark = pytest.mark.any_device

make = partial(small_engine.make, max_model_len=700, max_num_seqs=20, max_num_batched_tokens=None)


def watch_logits(paged):
    """The numbers of rows whose logits are computed from now on."""
    sizes, logits = [], paged.logits
    paged.logits = lambda hidden, out=None: (sizes.append(len(hidden)), logits(hidden, out))[1]
    return sizes


def test_a_long_prompt_takes_several_steps_on_a_cpu(directory):
    """A step's buffers are in proportion to its tokens: a process stays within 300 MB beside file and cache."""
    llm = make(directory, device="cpu")
    paged = llm.engine.runner.paged
    sizes, hidden = [], paged.hidden
    paged.hidden = lambda batch, *rest: (sizes.append(len(batch.token_ids)), hidden(batch, *rest))[1]
    llm.generate([[5] * 600], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert sizes == [512, 88]


def wanting(rows, num_tokens):
    empty = np.empty(0, np.int32)
    rows = np.asarray(rows, np.int64)
    return Batch(
        np.zeros((3, num_tokens), np.int64), empty, empty[None], 0, (num_tokens,), (num_tokens,), rows, rows, ()
    )


def test_wanted_rows_are_padded_to_a_size_that_decodes_have(directory):
    fast = make(directory, enforce_eager=True, fast_policy=FastPolicy(padding=True)).engine.runner.fast
    for wanted, count in (([], 0), ([2], 1), ([0, 1, 6], 4), (range(1, 7), 8), (range(1, 18), 20), (range(1, 31), 30)):
        rows = fast.pad(wanting(wanted, 99)).logits_rows
        assert rows.dtype == np.int64 and rows.tolist() == [*wanted] + [0] * (count - len(wanted))


def test_prompt_logprobs_need_the_logits_of_few_rows_at_a_time(directory):
    """Of a prompt of many rows the values are those of a prompt that is computed in pieces."""
    prompt = [random.Random(0).randrange(331) for _ in range(2 * PROMPT_LOGPROBS_ROWS + 50)]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=2)
    outputs = []
    for budget in (1024, 100):
        llm = make(directory, max_num_batched_tokens=budget, enforce_eager=True)
        sizes = watch_logits(llm.engine.runner.paged)
        outputs.append(llm.generate([prompt], params, use_tqdm=False)[0])
        assert max(sizes) <= PROMPT_LOGPROBS_ROWS
    first, second = outputs
    assert first["token_ids"] == second["token_ids"]
    assert first.prompt_logprobs[0] is None and len(first.prompt_logprobs) == len(prompt)
    for a, b in zip(first.prompt_logprobs[1:], second.prompt_logprobs[1:]):
        assert [(i, x.rank) for i, x in a.items()] == [(i, x.rank) for i, x in b.items()]
        assert all(x.logprob == pytest.approx(b[i].logprob, abs=1e-4) for i, x in a.items())


def test_the_largest_steps_use_penalties_and_prompt_logprobs(directory):
    """So their memory is in the profiled peak."""
    runner = make(directory, max_num_batched_tokens=1024).engine.runner
    sampler, seen = runner.sampler, []
    admit = sampler.admit
    sampler.admit = lambda slot, prompt, output, params: (seen.append(params), admit(slot, prompt, output, params))
    sizes = watch_logits(runner.paged)
    with torch.inference_mode():
        run_largest_steps(runner.paged, sampler, runner.limits)
    sampler.release_penalty_state()
    assert seen[0].uses_penalties and sizes == [PROMPT_LOGPROBS_ROWS, 20]


@pytest.mark.parametrize("policy", [FastPolicy(), FastPolicy.off()], ids=["fast", "plain"])
def test_an_engine_is_freed_when_it_is_deleted(directory, policy):
    """Without a collection, so that a second engine finds the GPU's memory free."""
    llm = make(directory, fast_policy=policy, capture_prefill=True, max_num_batched_tokens=64)
    params = [
        SamplingParams(max_tokens=5, logprobs=1),
        SamplingParams(max_tokens=7, prompt_logprobs=1, presence_penalty=1),
    ]
    llm.generate([[1, 2, 3], list(range(100))], params, use_tqdm=False)
    runner = llm.engine.runner
    freed = [
        weakref.ref(x) for x in (llm.engine, runner, runner.model, runner.paged, runner.fast, runner.paged.caches[0].k)
    ]
    gc.collect()
    gc.disable()
    try:
        del llm, runner
        assert [ref() for ref in freed] == [None] * len(freed)
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.alone
def test_a_second_engine_starts_in_the_same_process(directory):
    """Each takes 60 % of the GPU's memory."""
    for _ in range(2):
        gc.disable()
        try:
            llm = LLM("qwen3-0.6b", load_format="dummy", gpu_memory_utilization=0.6, max_num_seqs=32)
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5), use_tqdm=False)
            before = torch.cuda.memory_allocated()
            del llm
            assert torch.cuda.memory_allocated() < before / 10
        finally:
            gc.enable()


PROMPTS = [[1, 2, 3], list(range(40)), [5] * 17]
PARAMS = [SamplingParams(temperature=0.8, seed=i, max_tokens=40 + i, ignore_eos=True) for i in range(len(PROMPTS))]


def tokens(llm):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


READ_ON_THE_HOST = {"detach", "to", "resolve_conj", "resolve_neg"}
"""What `Tensor.numpy` calls when a result is read."""


@pytest.mark.skipif(torch.cuda.is_available(), reason="takes a minute, and needs no GPU")
def test_the_engine_allocates_launches_and_records_on_its_device(directory, monkeypatch):
    """Whichever device is current where it is called: every operation of PyTorch, and every result's event."""
    current, seen = [], []

    @contextmanager
    def on_device(device):
        current.append(device)
        yield
        current.pop()

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((func.overloadpacket.__name__, *current))
            return func(*args, **(kwargs or {}))

    def result(*args, own=model_runner.StepResult, **kwargs):
        seen.append(("result", *current))
        return own(*args, **kwargs)

    monkeypatch.setattr(model_runner, "on_device", on_device)
    monkeypatch.setattr(model_runner, "StepResult", result)
    monkeypatch.setattr(decode_runner, "StepResult", result)
    cpu = torch.device("cpu")
    with Operations():
        llm = make(directory, device="cpu", max_model_len=128)
        assert seen and all(where == [cpu] for _, *where in seen)
        penalised = SamplingParams(temperature=0.8, max_tokens=40, ignore_eos=True, repetition_penalty=1.1)
        llm.generate(PROMPTS, [*PARAMS[1:], penalised], use_tqdm=False)
    elsewhere = {name for name, *where in seen if where != [cpu]}
    assert elsewhere <= READ_ON_THE_HOST and ("result", cpu) in seen and not current


@pytest.mark.gpu
def test_on_device_makes_the_gpu_current_and_puts_back_what_was():
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    with torch.cuda.device(0):
        with devices.on_device(last):
            assert torch.cuda.current_device() == last.index
        assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@pytest.mark.several_gpus
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_engines_on_two_gpus_give_the_tokens_of_each_alone(directory):
    """Their steps in turns from one thread, with a wrong GPU current, and each from a thread of its own."""
    llms = [make(directory, device=f"cuda:{i}", max_model_len=128) for i in range(2)]
    alone = []
    for i, llm in enumerate(llms):
        with torch.cuda.device(i):
            alone.append(tokens(llm))
    assert alone[0] == alone[1]

    for current in range(2):
        with torch.cuda.device(current):
            requests = [[llm.engine.add_request(*pair) for pair in zip(PROMPTS, PARAMS)] for llm in llms]
            while any(llm.engine.has_unfinished for llm in llms):
                for llm in llms:
                    llm.engine.step()
            for expected, of_one in zip(alone, requests):
                assert [request.completions[0].seq.output_token_ids for request in of_one] == expected
            assert torch.cuda.current_device() == current

    found = {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: tokens(llms[i])})) for i in range(2)]
    for thread in threads:  # in a new thread GPU 0 is current
        thread.start()
    for thread in threads:
        thread.join()
    assert [found.get(i) for i in range(2)] == alone
