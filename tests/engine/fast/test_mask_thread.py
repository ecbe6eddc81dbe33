"""Masks that a thread makes while the host reads the step before; `test_mask_gate.py` has the device wait for them."""

import pytest

from nanovllm import SamplingParams
from nanovllm.engine.fast.policy import FastPolicy
from nanovllm.kernels import all_ops
from tests.engine.fast.replayed import ReplayedFunctions
from tests.engine.fast.test_policy import REPLAYED, SMALL
from tests.engine.simulated_engine import assert_clean
from tests.engine.small_engine import generate, make, random_prompts
from tests.providers import registered

POLICIES = {
    "eager": FastPolicy.off(device_state=True, mask_thread=True),
    "graphs": FastPolicy.off(device_state=True, mask_thread=True, **SMALL, **REPLAYED),
}
PROMPTS = random_prompts([3, 20, 9, 33, 4, 17])
PARAMS = [
    SamplingParams(temperature=0.8, seed=1, max_tokens=30, structured_outputs={"regex": "([a-f]{3} )*"}),
    SamplingParams(temperature=0.9, seed=2, max_tokens=25, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=3, max_tokens=28, structured_outputs={"json": {"type": "array"}}, n=3),
    SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, allowed_token_ids=[60, 61, 62]),
    SamplingParams(temperature=0.9, seed=4, max_tokens=30, structured_outputs={"regex": "[xyz]*"}, bad_words=["x"]),
    SamplingParams(temperature=0.9, seed=5, max_tokens=16, structured_outputs={"choice": ["yes", "no"]}, logprobs=2),
]


def engine(directory, policy, asynchronous=True, **arguments):
    return make(
        directory, num_kvcache_blocks=40, max_num_seqs=8, skip_tokenizer_init=False, async_scheduling=asynchronous,
        fast_policy=policy, **arguments,
    )  # fmt: skip


@pytest.fixture(scope="module")
def expected(directory):
    return generate(engine(directory, FastPolicy.off(), asynchronous=False), PROMPTS, PARAMS)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_tokens(directory, expected, policy, asynchronous):
    llm = engine(directory, POLICIES[policy], asynchronous)
    for _ in range(2):
        assert generate(llm, PROMPTS, PARAMS) == expected
    assert_clean(llm.engine)


def test_masks_are_applied_by_graphs(directory):
    """One for each number of masks, captured when it comes for the first time."""
    calls, captured = [], []

    def counted(*args):
        calls.append(args[1].shape[0])
        return all_ops()["apply_token_bitmask"].native(*args)

    class Backend(ReplayedFunctions):
        def capture(self, fn):
            graph = super().capture(fn)
            captured.append(graph)
            return graph

    graphs = {**SMALL, **REPLAYED, "graph_backend": Backend}
    with registered("apply_token_bitmask", counted):
        policy = FastPolicy.off(device_state=True, mask_thread=True, **graphs)
        llm = engine(directory, policy, kernel_priority={"apply_token_bitmask": ["mine"]})
    at_start = len(captured)
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=9, structured_outputs={"regex": "[a-f]{30}"})
    for n, new in ((1, 1), (3, 1), (3, 0), (1, 0), (2, 1)):
        captured_before, calls[:] = len(captured), []
        generate(llm, PROMPTS[:n], params)
        assert len(captured) == captured_before + new > at_start
        # Once for the prompts, once for each decode, each number of rows.
        assert set(calls) == {n}


@pytest.mark.parametrize("policy", POLICIES)
def test_requests_end_while_their_masks_are_filled(directory, expected, policy):
    llm = engine(directory, POLICIES[policy])
    for aborted in range(1, 12):
        requests = [llm.engine.add_request(p, q) for p, q in zip(PROMPTS, PARAMS)]
        for step in range(40):
            if step == aborted:
                for request in requests[2:4]:
                    llm.engine.abort(request)
            llm.engine.step()
            llm.engine.check()
        while llm.engine.has_unfinished:
            llm.engine.step()
        assert_clean(llm.engine)
        for i in (0, 1, 4, 5):
            assert [c.seq.output_token_ids for c in requests[i].completions] == expected[i]
        for i in (2, 3):
            for completion, whole in zip(requests[i].completions, expected[i]):
                output = completion.seq.output_token_ids
                assert output == whole[: len(output)]


@pytest.mark.parametrize("failing_call", [1, 2, 7])
@pytest.mark.parametrize("policy", POLICIES)
def test_an_end_that_fails_loses_its_requests_alone(directory, expected, policy, failing_call):
    calls = []

    def failing(*args):
        calls.append(args)
        if len(calls) == failing_call:
            raise RuntimeError("no more fish")
        return all_ops()["apply_token_bitmask"].native(*args)

    with registered("apply_token_bitmask", failing, capturable=False):
        llm = engine(directory, POLICIES[policy], kernel_priority={"apply_token_bitmask": ["mine"]})
    with pytest.raises(RuntimeError, match="no more fish"):
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert_clean(llm.engine)
    assert generate(llm, PROMPTS, PARAMS) == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_a_step_that_is_given_up_fails_no_later_one(directory, expected, policy):
    """It was launched with masks that fail. Its requests are lost already when that is seen."""
    llm = engine(directory, POLICIES[policy])
    fails = []

    def raises(_):
        if not fails:
            fails.append(True)
            raise RuntimeError("no more fish")

    short = llm.engine.add_request([5, 6], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    short.listener = raises
    lost = llm.engine.add_request(PROMPTS[0], PARAMS[0])
    with pytest.raises(RuntimeError, match="no more fish"):
        while llm.engine.has_unfinished:
            llm.engine.step()
    assert lost.finished and lost.num_output_tokens == 4
    assert_clean(llm.engine)
    assert generate(llm, PROMPTS, PARAMS) == expected


PROGRAM = """
import atexit, sys
from nanovllm import LLM, SamplingParams
from nanovllm.engine.fast.policy import FastPolicy

llm = LLM(sys.argv[1], device="cpu", async_scheduling=True, max_model_len=64, fast_policy=FastPolicy(mask_thread=True))
params = SamplingParams(structured_outputs={"regex": "yes, yes"})
atexit.register(lambda: print(llm.generate("x", params, use_tqdm=False)[0].outputs[0].text))
"""


def test_a_program_that_ends_still_fills_masks(directory, warm_python):
    """Python's threads take no work any more when the functions of atexit run, nor while a last step does."""
    done = warm_python.run("-c", PROGRAM, str(directory))
    assert done.stdout == "yes, yes\n", done.stderr
