"""The engine behind messages: a grammar that takes long to compile holds up nothing else."""

import threading
import time

import pytest

from nanovllm import SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.frontend.core import STREAMED_STEP_TOKENS, EngineCore, for_streams
from nanovllm.frontend.core_messages import AbortRequest, StartRequest, params_to_send
from tests import tiny
from tests.waiting import wait_until

pytest.importorskip("llguidance", reason='pip install "nanovllm[structured]"')
PLAIN = params_to_send(SamplingParams(max_tokens=5, ignore_eos=True))
GRAMMAR = params_to_send(SamplingParams(max_tokens=5, n=2, structured_outputs={"regex": "[ab]{9}"}))


class SlowMaker:
    """Makes requests as another maker does, those with a grammar when `go` is set."""

    def __init__(self, maker):
        self.maker, self.go = maker, threading.Event()

    def __getattr__(self, name):
        return getattr(self.maker, name)

    def make(self, prompt, params, **arguments):
        if params.structured_outputs is not None:
            assert self.go.wait(120)
        return self.maker.make(prompt, params, **arguments)


@pytest.fixture
def core(tmp_path):
    tiny.save_with_tokenizer(tmp_path)
    told = []
    made = EngineCore(EngineConfig(str(tmp_path), device="cpu", num_kvcache_blocks=16, max_model_len=64), told.append)
    made.engine.maker = SlowMaker(made.engine.maker)
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made, told
    made.engine.maker.go.set()
    made.close()
    thread.join()
    made.release()
    made.engine.check()


def ends(told):
    return {end.key: end.reason for outputs in told for end in outputs.ended}


def failed(told):
    return {key: (kind, said) for outputs in told for key, kind, said in outputs.failed}


def test_others_run_while_a_grammar_is_compiled(core):
    core, told = core
    core.start(StartRequest(1, [5, 6], GRAMMAR, 1, None))
    core.start(StartRequest(2, [5, 6], PLAIN, 2, None))
    wait_until(lambda: ends(told))
    (key,) = ends(told)
    core.engine.maker.go.set()
    wait_until(lambda: len(ends(told)) == 3)
    assert ends(told)[key] == "length"
    assert not core.engine.maker.has_new_grammar(SamplingParams(**GRAMMAR))


@pytest.mark.parametrize("completion, reasons", [(None, ["abort", "abort"]), (1, ["length", "abort"])])
def test_an_abort_comes_while_the_grammar_is_compiled(core, completion, reasons):
    core, told = core
    core.start(StartRequest(1, [5, 6], GRAMMAR, 1, None))
    core.abort(AbortRequest(1, completion))
    core.engine.maker.go.set()
    wait_until(lambda: len(ends(told)) == 2)
    assert [ends(told)[key] for key in sorted(ends(told))] == reasons


def test_a_grammar_that_does_not_compile_and_an_engine_that_was_closed(core):
    core, told = core
    core.engine.maker.go.set()
    wrong = GRAMMAR | {"structured_outputs": {"regex": "(?=a)b"}}
    core.start(StartRequest(1, [5, 6], wrong, 1, None))
    wait_until(lambda: failed(told))
    assert failed(told)[1][0] == "refused" and "regex" in failed(told)[1][1]
    core.start(StartRequest(2, [5, 6], GRAMMAR | {"nonsense": 1}, 1, None))
    assert failed(told)[2][0] == "refused"


def test_a_grammar_whose_check_is_forgotten_is_new(core):
    """More checks are remembered than compiled grammars, but the first ones are forgotten first, however much used."""
    maker = core[0].engine.maker
    maker.go.set()
    used = SamplingParams(**GRAMMAR)
    for i in range(300):
        maker.make([5, 6], used)
        maker.make([5, 6], SamplingParams(structured_outputs={"regex": f"a{{{i}}}b"}))
        if maker.has_new_grammar(used):
            return
    pytest.fail("its check was forgotten")


def test_the_time_without_work_is_no_step(core):
    core, told = core
    for key in (1, 2):
        time.sleep(0.3)
        before, begun = len(told), time.perf_counter()
        core.start(StartRequest(key, [5, 6], PLAIN, 1, None))
        wait_until(lambda ended=key: len(ends(told)) == ended)
        assert 0 < sum(outputs.stats.step_seconds for outputs in told[before:]) < time.perf_counter() - begun


@pytest.mark.parametrize("given, on_gpu, used", [
    (None, True, STREAMED_STEP_TOKENS), (None, False, None), (16384, True, 16384), (64, False, 64),
])  # fmt: skip
def test_steps_of_streams_are_shorter_on_a_gpu_unless_the_configuration_says(given, on_gpu, used):
    config = EngineConfig("model", max_num_batched_tokens=given, max_num_seqs=48)
    streamed = for_streams(config, on_gpu)
    assert (streamed.max_num_batched_tokens, streamed.max_num_seqs) == (used, 48)
