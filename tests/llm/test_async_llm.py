"""AsyncLLM: requests as asynchronous iterators over the same engine."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest

from nanovllm import LLM, AsyncLLM, SamplingParams
from nanovllm.async_llm import EngineDeadError, RequestFailed
from nanovllm.config import EngineConfig
from nanovllm.frontend.core_messages import StartRequest
from nanovllm.frontend.engine_client import ThreadClient
from tests import tiny
from tests.engine.slow_engine import slow_client

pytestmark = pytest.mark.any_device

SIZES = dict(max_model_len=128, max_num_seqs=8, num_kvcache_blocks=64, kvcache_block_size=16, seed=0)
SECONDS = 120
"""A wait that lasts longer is a hang."""
PROMPTS = ["hello there", "one two three four", "abc", "the quick brown fox"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    tiny.save_with_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def engine(path):
    made = AsyncLLM(client=slow_client(path, **SIZES))
    yield made
    made.close()


@pytest.fixture(scope="module")
def llm(path):
    return LLM(path, **SIZES)


async def until(condition):
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, "it does not come true"
        await asyncio.sleep(0.001)


async def collect(engine, prompt, params, request_id=None, begun=None):
    """(texts, token ids, finish reasons) of all completions, joined from the pieces, and the number of outputs.

    begun: the prompt is added to it with the first output.
    """
    texts, token_ids, reasons, count = [""] * params.n, [[] for _ in range(params.n)], [None] * params.n, 0
    async for output in engine.generate(prompt, params, request_id):
        count += 1
        if begun is not None:
            begun.add(prompt)
        for piece in output.outputs:
            assert reasons[piece.index] is None, "a piece after the end"
            texts[piece.index] += piece.text
            token_ids[piece.index] += piece.token_ids
            reasons[piece.index] = piece.finish_reason
    return texts, token_ids, reasons, count


async def idle(engine):
    """Wait until the engine has applied all aborts, and check that nothing is left."""
    await until(lambda: not engine.client.engine.has_unfinished)
    assert engine.num_unfinished == 0
    engine.client.engine.check()


def test_the_pieces_are_what_generate_returns(engine, llm):
    """Concurrent requests, several completions each, with stop strings and log-probabilities."""
    all_params = [
        SamplingParams(temperature=0.8, max_tokens=20, seed=3, n=3),
        SamplingParams(temperature=0, max_tokens=30),
        SamplingParams(temperature=1.0, max_tokens=40, seed=4, stop=["e", "qz"], logprobs=2, n=2),
        SamplingParams(temperature=0.5, max_tokens=9, seed=5, min_tokens=9, bad_words=["hello"], logit_bias={7: 3.0}),
    ]

    async def run():
        begun, held = set(), engine.client.engine
        held.hold(0)
        tasks = [asyncio.create_task(collect(engine, p, s, None, begun)) for p, s in zip(PROMPTS, all_params)]
        await until(lambda: engine.num_unfinished == 4)
        held.hold(4)
        await until(lambda: len(begun) == 4)  # none of them has ended
        held.go()
        found = await asyncio.gather(*tasks)
        await idle(engine)
        return found

    found = asyncio.run(run())
    for output, (texts, token_ids, reasons, count) in zip(llm.generate(PROMPTS, all_params, use_tqdm=False), found):
        assert texts == [c.text for c in output.outputs]
        assert reasons == [c.finish_reason for c in output.outputs]
        assert token_ids == [c.token_ids for c in output.outputs]
        assert count > 1


def test_log_probabilities_and_prompt_log_probabilities(engine, llm):
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1)

    async def run():
        return [output async for output in engine.generate(PROMPTS[1], params)]

    outputs = asyncio.run(run())
    (expected,) = llm.generate(PROMPTS[1], params, use_tqdm=False)
    assert [row for o in outputs for row in o.outputs[0].logprobs] == expected.outputs[0].logprobs
    assert outputs[0].prompt_logprobs == expected.prompt_logprobs
    assert all(o.prompt_logprobs is None for o in outputs[1:])
    assert outputs[-1].finished and outputs[-1].metrics.total_time > 0


def test_an_iterator_that_is_left_ends_the_request(engine):
    params = SamplingParams(max_tokens=None, ignore_eos=True, n=2)

    async def leave():
        async for _ in engine.generate(PROMPTS[0], params):
            break
        await idle(engine)
        engine.client.engine.hold()
        task = asyncio.create_task(collect(engine, PROMPTS[1], params))
        await until(lambda: engine.stats.num_running)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        engine.client.engine.go()
        gc.collect()
        await asyncio.sleep(0)  # the event loop closes iterators that were dropped
        await idle(engine)

    asyncio.run(leave())


def test_abort_by_id_from_another_thread(engine):
    params = SamplingParams(max_tokens=None, ignore_eos=True)

    async def run():
        engine.client.engine.hold()
        task = asyncio.create_task(collect(engine, PROMPTS[0], params, "mine"))
        await until(lambda: engine.stats.num_running)
        with pytest.raises(ValueError, match="request_id='mine'"):
            await collect(engine, "x", params, "mine")
        threading.Thread(target=lambda: (engine.abort("mine"), engine.client.engine.go())).start()
        _, _, reasons, _ = await asyncio.wait_for(task, SECONDS)
        assert reasons == ["abort"]
        engine.abort("mine")  # not known any more: nothing happens
        await idle(engine)

    asyncio.run(run())


def test_two_event_loops_share_the_engine(engine, llm):
    params = SamplingParams(temperature=0, max_tokens=25)
    found = {}

    def run(prompt):
        found[prompt] = asyncio.run(collect(engine, prompt, params))[0][0]

    threads = [threading.Thread(target=run, args=(p,)) for p in PROMPTS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    expected = llm.generate(PROMPTS, params, use_tqdm=False)
    assert found == {p: o["text"] for p, o in zip(PROMPTS, expected)}


def test_a_slow_consumer_gets_merged_pieces(engine):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)

    async def run():
        outputs = []
        async for output in engine.generate(PROMPTS[0], params):
            outputs.append(output)
            while not outputs[1:] and engine.num_unfinished:
                await asyncio.sleep(0.01)
        return outputs

    outputs = asyncio.run(run())
    assert len(outputs) < 5 and sum(len(o.outputs[0].token_ids) for o in outputs) == 40


def test_what_cannot_be_served_is_refused(engine):
    async def run(prompt, params):
        return await collect(engine, prompt, params)

    for prompt, params, said in [
        ("", SamplingParams(), "the prompt is empty"),
        ([1] * 500, SamplingParams(), "max_model_len=128"),
        ("x", SamplingParams(logprobs=50), "logprobs=50"),
    ]:
        with pytest.raises(ValueError, match=said):
            asyncio.run(run(prompt, params))
    with pytest.raises(TypeError, match="exactly one"):
        AsyncLLM()
    assert engine.num_unfinished == 0


def test_a_request_that_cannot_be_sent_is_forgotten(engine, monkeypatch):
    def fail(message):
        raise OverflowError("cannot be encoded")

    async def run():
        with monkeypatch.context() as patched, pytest.raises(OverflowError):
            patched.setattr(engine.client, "start", fail)
            await collect(engine, "abc", SamplingParams(), "lost")
        assert engine.num_unfinished == 0 and not engine.runs("lost")

    asyncio.run(run())


def test_an_abort_may_overtake_its_request(engine, monkeypatch):
    """Another thread aborts what is known by its id and not yet sent: the engine must not compute it to its end."""
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    start = engine.client.start

    def abort_first(message):
        engine.abort("early")
        start(message)

    async def run():
        with monkeypatch.context() as patched:
            patched.setattr(engine.client, "start", abort_first)
            stream = engine.add("abc", params, "early")
        assert (await stream.next()).outputs[0].finish_reason == "abort"
        assert stream.request.num_output_tokens == 0 and not engine.client.engine.scheduler.running
        await idle(engine)

    asyncio.run(run())


def test_a_failed_step_and_a_closed_engine(path):
    engine = AsyncLLM(client=slow_client(path, **SIZES))
    inner = engine.client.engine
    execute = inner.runner.execute

    def fail(step):
        inner.runner.execute = execute
        raise ArithmeticError("a kernel failed in /some/file.py")

    async def run():
        inner.runner.execute = fail
        with pytest.raises(RequestFailed) as caught:
            await collect(engine, "abc", SamplingParams(max_tokens=5))
        assert "/some/file" not in str(caught.value)
        assert (await collect(engine, "abc", SamplingParams(max_tokens=5, ignore_eos=True)))[2] == ["length"]
        await idle(engine)
        inner.hold()
        endless = asyncio.create_task(collect(engine, "abc", SamplingParams(max_tokens=None, ignore_eos=True)))
        await until(lambda: engine.stats.num_running)
        threading.Timer(0.2, inner.go).start()
        engine.close()
        with pytest.raises(EngineDeadError):
            await endless
        with pytest.raises(EngineDeadError):
            await collect(engine, "abc", SamplingParams())

    asyncio.run(run())


def test_no_request_is_taken_by_a_thread_that_ends(path, monkeypatch):
    class Fatal(BaseException):
        """What no step survives."""

    def fail(*_, **__):
        raise Fatal

    client = ThreadClient(EngineConfig(str(path), **SIZES))
    told, alive, ended = [], [], threading.Event()
    client.listen(told.append, lambda reason: (alive.append(client.alive), ended.set()))
    with monkeypatch.context() as patched:
        patched.setattr(client.engine.maker, "make", lambda *_, **__: 1 / 0)
        client.start(StartRequest(1, [5], {}, 0))  # it loses one request, not a thread
    assert [(key, kind) for key, kind, _ in told[0].failed] == [(1, "lost")]
    client.engine.runner.execute = fail
    client.start(StartRequest(2, [5], {}, 0))
    assert ended.wait(SECONDS) and alive == [False]


def test_token_ids_without_a_tokenizer(path):
    client = ThreadClient(LLM(path, skip_tokenizer_init=True, **SIZES).engine.config)
    engine = AsyncLLM(client=client)
    texts, token_ids, reasons, _ = asyncio.run(collect(engine, [5, 6, 7], SamplingParams(max_tokens=4)))
    assert texts == [""] and len(token_ids[0]) == 4 and reasons == ["length"]
    engine.close()


def test_an_engine_is_freed_when_it_is_closed_and_deleted(path):
    """Without a collection, so that a second engine finds the GPU's memory free."""
    engine = AsyncLLM(path, **SIZES)
    model = weakref.ref(engine.client.engine.runner.model)
    gc.collect()
    gc.disable()
    try:
        asyncio.run(leave_a_request(engine))
        engine.close()
        del engine
        assert model() is None
    finally:
        gc.enable()


PROGRAM = """
import asyncio, os, sys
from nanovllm import AsyncLLM, SamplingParams
from nanovllm.weights.tokenizer import load_tokenizer

load_tokenizer(sys.argv[1])  # imports much
by_transformers = "sympy" in sys.modules  # by version 5.17 with torch 2.11

children = []
while len(children) < 4 and (child := os.fork()):  # each runs and ends as a program of its own, but for its imports
    children.append(child)
if len(children) == 4:
    sys.exit(str([os.waitpid(child, 0)[1] for child in children]))
engine = AsyncLLM(sys.argv[1], device="cpu", max_model_len=512, num_kvcache_blocks=256,
                  kernel_priority={"decoder_step": ["native"]})

async def main():
    params = SamplingParams(max_tokens=450, ignore_eos=True, repetition_penalty=1.1)
    streams = [engine.add([5] * 40, params) for _ in range(8)]
    await streams[0].next()
    await asyncio.sleep(0.05)

asyncio.run(main())
assert by_transformers or "sympy" not in sys.modules  # takes half a second, which no start of an engine needs
"""


def test_a_program_that_leaves_its_engine_open_ends_without_an_abort(path):
    """A thread that runs PyTorch while the interpreter ends aborts the process: half of these programs did."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore:This process", "-c", PROGRAM, str(path)], stderr=subprocess.PIPE, text=True
    )
    assert done.stderr == "[0, 0, 0, 0]\n"


async def leave_a_request(engine):
    engine.add(PROMPTS[0], SamplingParams(max_tokens=None, ignore_eos=True))
    await asyncio.sleep(0.05)
