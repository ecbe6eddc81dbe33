"""An engine computes on its own device, whichever is current where it is called, and beside an engine on another
one.
"""

import threading
from contextlib import contextmanager

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine import model_runner
from nanovllm.engine.fast import decode_runner, paths
from nanovllm.hardware import devices
from tests import tiny

PROMPTS = [[1, 2, 3], list(range(40)), [5] * 17]
PARAMS = [SamplingParams(temperature=0.8, seed=i, max_tokens=40 + i, ignore_eos=True) for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny.save_with_tokenizer(path, "qwen3")
    return path


def make(directory, device):
    return LLM(
        directory, device=device, dtype="float32", kvcache_block_size=16, num_kvcache_blocks=64, max_model_len=128,
        max_num_seqs=4, max_num_batched_tokens=64, skip_tokenizer_init=True,
    )  # fmt: skip


def generate(llm):
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def test_the_engine_allocates_launches_and_records_on_its_device(directory, monkeypatch):
    current, seen = [], []

    @contextmanager
    def on_device(device):
        current.append(device)
        yield
        current.pop()

    def watch(owner, name):
        inner = getattr(owner, name)
        monkeypatch.setattr(
            owner, name, lambda *args, **kwargs: (seen.append((name, *current)), inner(*args, **kwargs))[1]
        )

    monkeypatch.setattr(model_runner, "on_device", on_device)
    for owner, name in (
        (model_runner, "load_model"), (paths, "DecodeState"), (model_runner, "StepResult"), (decode_runner,
        "StepResult"),
    ):  # fmt: skip
        watch(owner, name)
    watch(model_runner.kv_cache, "allocate")
    llm = make(directory, "cpu")
    for name in ("hidden", "_set_up_admitted"):
        watch(llm.engine.runner, name)
    watch(llm.engine.runner.fast, "decode")
    generate(llm)
    assert {call[0] for call in seen} == {
        "load_model", "allocate", "DecodeState", "hidden", "_set_up_admitted", "decode", "StepResult",
    }  # fmt: skip
    assert all(call[1:] == (torch.device("cpu"),) for call in seen) and not current


@pytest.mark.gpu
def test_on_device_makes_the_gpu_current_and_puts_back_what_was():
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    with torch.cuda.device(0):
        with devices.on_device(last):
            assert torch.cuda.current_device() == last.index
        assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_engines_on_two_gpus_give_the_tokens_of_each_alone(directory):
    """Their steps in turns from one thread, with a wrong GPU current, and each from a thread of its own."""
    llms = [make(directory, f"cuda:{i}") for i in range(2)]
    alone = []
    for i, llm in enumerate(llms):
        with torch.cuda.device(i):
            alone.append(generate(llm))
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
    threads = [threading.Thread(target=lambda i=i: found.update({i: generate(llms[i])})) for i in range(2)]
    for thread in threads:  # in a new thread GPU 0 is current
        thread.start()
    for thread in threads:
        thread.join()
    assert [found.get(i) for i in range(2)] == alone
