"""Threads that share an engine: one of them runs the steps, each gets what it asked for, and aborts come from
anywhere.
"""

import gc
import threading
import time
import weakref

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.frontend.step_loop import StepLoop, Waiter
from tests.engine.simulated_engine import Broken, assert_clean, drain, simulated_engine
from tests.engine.simulation import DOCUMENTS, expected_output

SECONDS = 120
"""A wait that lasts longer is a hang."""


def endless(max_tokens=40, **others):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1, **others)


def run(loop, engine, *requests):
    """What `generate` does."""
    waiter = Waiter(requests)
    engine.queue(*requests)
    try:
        loop.wait(waiter, lambda: waiter.over)
        waiter.raise_if_lost()
    finally:
        for request in requests:
            engine.abort(request)
        waiter.close()


class Thread(threading.Thread):
    """Keeps what its function raised."""

    def __init__(self, function, *args):
        super().__init__(daemon=True)
        self.function, self.args, self.error = function, args, None
        self.start()

    def run(self):
        try:
            self.function(*self.args)
        except BaseException as error:
            self.error = error

    def end(self):
        self.join(SECONDS)
        assert not self.is_alive(), "a thread waits for ever"
        return self.error


def between_steps(engine, call):
    """Call before every step is launched."""
    execute = engine.runner.execute

    def hooked(step):
        call()
        return execute(step)

    engine.runner.execute = hooked


def no_step_before(engine, *requests):
    """Until all these requests are queued, no step is launched."""
    queue, missing, there = engine.queue, set(requests), threading.Event()

    def queued(*new, **arguments):
        queue(*new, **arguments)
        missing.difference_update(new)
        if not missing:
            there.set()

    engine.queue = queued
    between_steps(engine, lambda: there.wait(SECONDS))


@pytest.fixture
def engine():
    made = simulated_engine(num_blocks=16, asynchronous=True)
    yield made
    drain(made)
    assert_clean(made)


def test_a_thread_goes_on_when_its_own_requests_end(engine):
    """While another one still runs the steps."""
    loop, order = StepLoop(engine), []
    long, short = engine.make_request([1, 2], endless(50)), engine.make_request([1, 3], endless(3))
    started, went_on = threading.Event(), threading.Event()
    no_step_before(engine, short)
    between_steps(engine, lambda: (started.set(), went_on.wait(SECONDS) if short.finished else None))
    first = Thread(lambda: (run(loop, engine, long), order.append("long")))
    assert started.wait(SECONDS)
    second = Thread(lambda: (run(loop, engine, short), order.append("short"), went_on.set()))
    assert first.end() is second.end() is None and order == ["short", "long"]
    assert [r.num_output_tokens for r in (long, short)] == [50, 3]


def test_the_next_thread_runs_the_steps_when_the_first_is_done(engine):
    loop = StepLoop(engine)
    requests = [engine.make_request([1, 2], endless(n)) for n in (3, 30, 10)]
    runners, started = set(), threading.Event()
    no_step_before(engine, *requests)
    between_steps(engine, lambda: (runners.add(threading.current_thread()), started.set()))
    threads = [Thread(run, loop, engine, requests[0])]
    assert started.wait(SECONDS)
    threads += [Thread(run, loop, engine, request) for request in requests[1:]]
    assert [thread.end() for thread in threads] == [None] * 3 and 2 <= len(runners) <= 3
    assert [r.num_output_tokens for r in requests] == [3, 30, 10]


def test_many_threads(engine):
    """Every request gets the tokens it would get alone."""
    loop = StepLoop(engine)

    def client(number):
        for i in range(6):
            prompt = DOCUMENTS[number % 2][: 3 + 5 * i + number]
            requests = [engine.make_request(prompt, SamplingParams(max_tokens=9, seed=s)) for s in (number, i)]
            run(loop, engine, *requests)
            for request, seed in zip(requests, (number, i)):
                assert request.output()["token_ids"] == expected_output(prompt, seed, request.params, 64)[0]

    threads = [Thread(client, number) for number in range(8)]
    assert [thread.end() for thread in threads] == [None] * 8


@pytest.mark.parametrize("when", ["launch", "read"])
def test_a_failure_reaches_every_thread_that_lost_a_request(engine, when):
    loop, steps = StepLoop(engine), []
    requests = [engine.make_request([1, 2, n], endless()) for n in range(3)]

    def fail_later():
        steps.append(None)
        if all(r.num_output_tokens for r in requests) and engine.runner.fail_next is None and len(steps) < 1000:
            engine.runner.fail_next, steps[:] = when, [None] * 1000

    no_step_before(engine, *requests)
    between_steps(engine, fail_later)
    errors = [thread.end() for thread in [Thread(run, loop, engine, request) for request in requests]]
    own = [error for error in errors if isinstance(error, Broken)]
    others = [error for error in errors if isinstance(error, RuntimeError)]
    assert len(own) == 1 and len(others) == 2
    assert all("a step that computed this request" in str(e) and isinstance(e.__cause__, Broken) for e in others)


def test_a_failure_leaves_alone_who_lost_nothing():
    engine = simulated_engine(max_num_seqs=1)
    loop = StepLoop(engine)
    runs, waits = (engine.add_request([1, 2, n], endless()) for n in range(2))
    engine.step()
    engine.runner.fail_next = "launch"
    run(loop, engine, waits)  # runs the steps of both
    assert waits.num_output_tokens == 40 and runs.output()["finish_reason"] == "abort"
    assert isinstance(runs.failure, Broken) and waits.failure is None
    engine.runner.execute = None  # nothing runs any more, so nothing can be lost: this must not go on for ever
    engine.add_request([1], endless())
    with pytest.raises(TypeError):
        run(loop, engine, engine.make_request([1], endless()))


def test_a_step_inside_of_a_step_is_an_error(engine):
    """As a signal handler or a finalizer might start one, which would wait for itself."""
    loop, errors = StepLoop(engine), []

    def nested():
        for call in (engine.step, lambda: run(loop, engine, engine.make_request([1], endless()))):
            with pytest.raises(RuntimeError) as error:
                call()
            errors.append(str(error.value))

    between_steps(engine, nested)
    request = engine.make_request([1, 2], endless(2))
    run(loop, engine, request)
    assert request.num_output_tokens == 2
    assert "inside of a step" in errors[0] and "this thread is already in generate" in errors[1]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_abort_inside_of_a_step_waits_for_its_end(asynchronous):
    """The garbage collector may close an abandoned stream anywhere."""
    for call in ("execute", "update", "register", "grow", "free"):
        engine = simulated_engine(num_blocks=16, asynchronous=asynchronous)
        owner = {"execute": engine.runner, "update": engine.scheduler}.get(call, engine.scheduler.blocks)
        requests = [engine.add_request(DOCUMENTS[0][: 9 + n], endless()) for n in range(4)]
        original, calls = getattr(owner, call), []

        def hooked(*args, original=original, calls=calls, requests=requests, engine=engine):
            calls.append(None)
            if len(calls) in (1, 5, 9):
                engine.abort(requests[len(calls) // 4])
            return original(*args)

        setattr(owner, call, hooked)
        while engine.has_unfinished:
            engine.step()
            engine.check()
        assert_clean(engine)
        assert [r.output()["finish_reason"] for r in requests][3:] == ["length"]
        assert requests[3].output()["token_ids"] == expected_output(DOCUMENTS[0][:12], 1, endless(), 64)[0]


def test_aborting_many_that_wait_takes_time_in_proportion():
    def seconds(count):
        engine = simulated_engine(max_num_seqs=1)
        requests = [engine.add_request([1], endless()) for _ in range(count)]
        engine.step()
        for request in requests[1::2] + requests[2::2]:
            engine.abort(request)
        began = time.process_time()
        engine.step()
        took = time.process_time() - began
        assert [r.finished for r in requests] == [False] + [True] * (count - 1)
        drain(engine)
        return took

    few, many = (min(seconds(count) for _ in range(3)) for count in (1_000, 10_000))
    assert many < 30 * few  # 10 times; 100 times when each is searched for


def test_an_abort_before_the_request_started(engine):
    request = engine.make_request([1, 2], endless(n=2))
    engine.abort(request)
    engine.queue(request)
    assert engine.has_unfinished and not engine.step()
    assert request.finished and [c.finish_reason for c in request.output().outputs] == ["abort"] * 2


# ------------------------------------------------------------------------------------------------ an LLM with a
# tokenizer


@pytest.fixture(scope="module")
def llm(llama_directory):
    made = LLM(
        llama_directory, device="cpu", kvcache_block_size=16, num_kvcache_blocks=40, max_model_len=128, max_num_seqs=8
    )
    yield made
    assert_clean(made.engine)


def test_streams_and_generate_in_threads(llm):
    prompts = [f"number {i}" for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = [o["text"] for o in llm.generate(prompts, params, use_tqdm=False)]
    got = {}

    def generate(i):
        got[i] = llm.generate(prompts[i], params, use_tqdm=i == 0)[0]["text"]

    def stream(i):
        got[i] = "".join(llm.stream(prompts[i], params))

    threads = [Thread(generate if i % 2 else stream, i) for i in range(6)]
    assert [thread.end() for thread in threads] == [None] * 6
    assert [got[i] for i in range(6)] == expected


def test_streams_closed_in_the_midst_of_a_step(llm):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = llm.generate("hello", params, use_tqdm=False)[0]["text"]
    streams = [llm.stream(f"number {i}", params) for i in range(3)]
    for stream in streams:
        next(stream)
    execute = llm.engine.runner.execute
    llm.engine.runner.execute = lambda step: ([streams.pop().close() for _ in streams[:1]], execute(step))[1]
    try:
        assert llm.generate("hello", params, use_tqdm=False)[0]["text"] == expected and not streams
    finally:
        del llm.engine.runner.execute


def test_nothing_keeps_an_engine_that_is_not_used_any_more():
    """Not a cycle through a failure's traceback either: GPU memory must be free at once."""
    engine = simulated_engine()
    loop = StepLoop(engine)
    references = [weakref.ref(thing) for thing in (engine, engine.runner, loop)]
    gc.collect()
    gc.disable()
    try:
        run(loop, engine, engine.make_request([1, 2], endless(3)))
        waiting = engine.make_request([1, 3], endless(3))
        engine.runner.fail_next = "launch"
        with pytest.raises(Broken):
            run(loop, engine, engine.make_request([1, 2], endless(3)), waiting)
        del engine, loop, waiting
        assert [reference() for reference in references] == [None] * 3
    finally:
        gc.enable()
