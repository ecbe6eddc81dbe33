"""A GPU waits for masks at a gate."""

import gc
import time

import numpy as np
import pytest
import torch

from nanovllm.engine.fast.policy import FastPolicy
from nanovllm.hardware.stream_gate import StreamGate, stream_gate
from tests.engine.fast.gates import fill_slowly, interrupt_while_it_generates
from tests.engine.fast.test_mask_thread import PARAMS, PROMPTS, engine
from tests.engine.simulated_engine import assert_clean
from tests.engine.small_engine import generate


def pinned_word(value=0):
    return torch.full((1,), value, dtype=torch.int32, pin_memory=True)


@pytest.mark.gpu
@pytest.mark.parametrize("start", [0, -2])
def test_a_stream_waits_until_the_gate_is_open(start):
    word = pinned_word()
    gate = StreamGate(word, torch.device("cuda", 0))
    stream, out = torch.cuda.Stream(), torch.zeros(4, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()  # the gate's own wait is for 0, and the zeros are of another stream
    word[0] = start
    with torch.cuda.stream(stream):
        out[0].add_(0)  # the first launch of a kernel may wait for the device
    torch.cuda.synchronize()
    events = []
    with torch.cuda.stream(stream):
        for i in range(4):
            gate.launch_wait((start + 1 + i) % 2**32)
            out[i].add_(1)
            events.append(torch.cuda.Event())
            events[-1].record()
    for i in range(4):
        time.sleep(0.02)
        assert not events[i].query()
        gate.open((start + 1 + i) % 2**32)
        events[i].synchronize()
    assert out.tolist() == [1] * 4


def on_gpu(directory, mask_gate=stream_gate):
    policy = FastPolicy(mask_gate=mask_gate, min_shared_rows=2)
    return engine(directory, policy, device="cuda", dtype="bfloat16")


@pytest.fixture(scope="module")
def on_gpu_expected(directory):
    llm = on_gpu(directory, lambda word, device: None)
    found = generate(llm, PROMPTS, PARAMS)
    assert found == generate(llm, PROMPTS, PARAMS)
    return found


@pytest.mark.gpu
def test_a_gpu_that_waits_gives_the_same_tokens(directory, on_gpu_expected):
    made = []
    llm = on_gpu(directory, lambda word, device: made.append(stream_gate(word, device)) or made[-1])
    for _ in range(3):
        assert generate(llm, PROMPTS, PARAMS) == on_gpu_expected
    (gate,) = made
    assert isinstance(gate, StreamGate)
    # Slow masks: the GPU has long computed the logits.
    fill_slowly(llm, lambda: time.sleep(0.05))
    assert generate(llm, PROMPTS, PARAMS) == on_gpu_expected


@pytest.mark.gpu
def test_a_gpu_whose_masks_fail_or_are_interrupted(directory, on_gpu_expected):
    llm = on_gpu(directory)
    assert generate(llm, PROMPTS, PARAMS) == on_gpu_expected
    for call in (2, 5):
        requests = [llm.engine.add_request(p, q) for p, q in zip(PROMPTS, PARAMS)]
        constraint, calls = requests[3].completions[0].seq.constraint, []
        restrict = constraint.restrict

        def failing(*args, calls=calls, restrict=restrict, call=call):
            calls.append(args)
            return 1 / 0 if len(calls) == call else restrict(*args)

        constraint.restrict = failing
        with pytest.raises(ZeroDivisionError):
            while llm.engine.has_unfinished:
                llm.engine.step()
        assert generate(llm, PROMPTS, PARAMS) == on_gpu_expected
    assert interrupt_while_it_generates(llm, PROMPTS, PARAMS, np.linspace(0.005, 0.1, 20).tolist())
    assert generate(llm, PROMPTS, PARAMS) == on_gpu_expected
    assert_clean(llm.engine)
    # The engine goes while a step is in flight; another one takes its memory.
    llm.engine.add_request(PROMPTS[0], PARAMS[0])
    for _ in range(4):
        llm.engine.step()
    fill_slowly(llm, lambda: time.sleep(0.3))
    llm.engine.step()
    del llm
    gc.collect()
    torch.cuda.synchronize()
    assert generate(on_gpu(directory), PROMPTS, PARAMS) == on_gpu_expected
