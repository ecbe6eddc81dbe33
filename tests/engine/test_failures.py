"""Forward passes that raise and interrupts at any line: the engine stays clean, and serves the next requests."""

import inspect
import random
import sys
import threading
import traceback
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch

import nanovllm
from nanovllm import SamplingParams
from nanovllm.frontend.progress import ProgressBar
from nanovllm.kernels import KernelError
from nanovllm.kernels.op.registry import temporary
from nanovllm.kernels.ops import sample
from tests import tiny
from tests.engine import small_engine
from tests.engine.simulated_engine import assert_clean, drain
from tests.engine.small_engine import generate, random_prompts
from tests.own_thread import in_own_thread
from tests.providers import registered

pytestmark = pytest.mark.any_device

make = partial(small_engine.make, num_kvcache_blocks=24, max_num_seqs=6, enforce_eager=True, skip_tokenizer_init=False)
PROMPTS = random_prompts([1, 5, 16, 17, 40, 70, 33, 2])
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(reference):
    return [[tiny.greedy(reference, p, 10)] for p in PROMPTS]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_engine_survives_a_forward_pass_that_raises(directory, expected, asynchronous):
    calls, llm = 0, None

    def failing(*args, **kwargs):
        nonlocal calls
        calls += llm is not None  # on a GPU an engine samples when it starts, too
        if calls == 4:
            llm.engine.runner.paged.caches[0].k.fill_(torch.nan)  # a failed kernel may leave anything
            raise RuntimeError("out of memory")
        return sample.native(*args, **kwargs)

    with registered("sample", failing):  # without graphs, which would call it only when they are captured
        priority = {"sample": ["mine"]}
        llm = make(directory, async_scheduling=asynchronous, kernel_priority=priority, enforce_eager=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert_clean(llm.engine)
    assert generate(llm, PROMPTS, GREEDY) == expected


@pytest.mark.parametrize("plugin", [True, False])
def test_an_error_after_a_wrong_kernel_of_a_plugin_names_the_kernel(directory, tmp_path, plugin):
    """The kernel returns nothing. Without the plugin a function of the engine fails, and no kernel is named."""
    file = tmp_path / "forgets.py"
    file.write_text(
        "from nanovllm.kernels import silu_and_mul\n\n@silu_and_mul.provider('forgets')\ndef f(gate_up):\n    pass\n"
    )
    with temporary():
        llm = make(directory, device="cpu", kernel_plugins=[str(file)] if plugin else ())
        if not plugin:
            llm.engine.runner.paged.model = None
        with pytest.raises(KernelError if plugin else (AttributeError, TypeError)) as raised:
            llm.generate([[1, 2]], GREEDY, use_tqdm=False)
    said = "\n".join((str(raised.value), *getattr(raised.value, "__notes__", ())))  # notes are of Python 3.11
    assert (f"provider 'forgets' of {file}" in said and "is a `return` missing?" in said) == plugin
    assert (f"silu_and_mul by forgets, of {file}. Compare" in said) == plugin == ("kernels" in said)
    assert (f"`nanovllm kernels verify silu_and_mul --kernel-plugin {file}`" in said) == plugin
    if plugin and sys.version_info >= (3, 11):  # the frames of the layers above the kernel say nothing
        files = {Path(frame.filename).name for frame in traceback.extract_tb(raised.value.__traceback__)}
        assert "llm.py" in files and not files & {"decoder.py", "custom_mlp.py", "module.py"}


PACKAGE = Path(nanovllm.__file__).parent
FILES = (PACKAGE / "llm.py", PACKAGE / "frontend" / "step_loop.py", *(PACKAGE / "engine").rglob("*.py"))
TRACED = {str(file): file.name for file in FILES}


def generate_all(llm):
    """Preempts, and uses what is off the beaten track."""
    params = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, stop=["never said"], n=2),
        SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, repetition_penalty=1.2, logprobs=1),
        SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=1),
    ]
    return generate(llm, random_prompts([20, 18, 30, 2]), params)


def leave_streams(llm):
    streams = [
        llm.stream(p, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)) for p in ("hello", "world")
    ]
    for stream in streams:
        next(stream)
    for stream in streams:
        stream.close()


def at_lines(call, visit):
    """Call with `visit(file, line)` before every line of the engine and of `LLM`."""

    def at_line(frame, event, _):
        if event == "line":
            visit(frame.f_code.co_filename, frame.f_lineno)
        return at_line

    def at_call(frame, *_):
        return at_line if frame.f_code.co_filename in TRACED else None

    def traced():
        sys.settrace(at_call)
        call()

    in_own_thread(traced)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("call", [generate_all, leave_streams])
def test_an_interrupt_at_any_line_leaves_the_engine_clean(directory, call, asynchronous):
    """A sample of the lines, denser where the bookkeeping is; another one in every mode."""
    arguments = dict(num_kvcache_blocks=5, max_model_len=64, max_num_seqs=3, max_num_batched_tokens=20)
    llm = make(directory, async_scheduling=asynchronous, **arguments)
    expected = generate_all(llm)
    assert llm.engine.scheduler.num_preemptions
    times, reached = Counter(), 0
    llm.engine.scheduler.reset()  # without cached prefixes every time, so that the same lines are reached
    at_lines(lambda: call(llm), lambda file, line: times.update([(file, line)]))
    drain(llm.engine)
    rng = random.Random(f"{call.__name__} {asynchronous}")
    shares = {"llm.py": 0.25, "step_loop.py": 0.5, "llm_engine.py": 0.1, "scheduler.py": 0.1, "block_manager.py": 0.1}
    shares |= {"reentrancy_guard.py": 0.5, "decode_state.py": 0.03, "decode_runner.py": 0.03}
    chosen = [where for where in times if rng.random() < shares.get(TRACED[where[0]], 0.01)]
    assert len(chosen) > 20
    for where in chosen:
        left = rng.randint(1, times[where])

        def interrupt(*here, where=where):
            nonlocal left
            left -= here == where
            if left == 0 and here == where:
                raise KeyboardInterrupt

        llm.engine.scheduler.reset()
        try:
            at_lines(lambda: call(llm), interrupt)
        except KeyboardInterrupt:
            reached += 1
        assert_clean(llm.engine)
        assert generate_all(llm) == expected, where
    assert reached > 0.9 * len(chosen)


def test_an_interrupt_takes_the_progress_bar_back(directory):
    def call():
        llm.generate([[1, 2]], SamplingParams(temperature=0, max_tokens=2), use_tqdm=True)

    llm = make(directory)
    call()
    others = set(threading.enumerate())
    lines = []
    at_lines(call, lambda file, line: lines.append((file, line)))
    code, first = inspect.getsourcelines(ProgressBar.__exit__)
    end = range(first, first + len(code))  # of the bar; an interrupt just there may leave it
    for where in sorted({where for where in lines if TRACED[where[0]] == "llm.py" and where[1] not in end}):

        def interrupt(*here, where=where):
            if here == where:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            at_lines(call, interrupt)
        for thread in set(threading.enumerate()) - others:  # the bar has a thread that draws it
            thread.join(60)
            assert not thread.is_alive(), where
        assert_clean(llm.engine)


def test_streams_of_others_end_with_an_error_when_a_forward_pass_raises(directory):
    fails = []

    def failing(*args, **kwargs):
        if fails:
            raise RuntimeError(fails.pop())
        return sample.native(*args, **kwargs)

    with registered("sample", failing, capturable=False):
        llm = make(directory, kernel_priority={"sample": ["mine"]})
    stream = llm.stream("hello", SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    fails.append("broken")
    with pytest.raises(RuntimeError):
        llm.generate("other", SamplingParams(max_tokens=2), use_tqdm=False)
    with pytest.raises(RuntimeError, match="the output is incomplete"):
        list(stream)
    assert_clean(llm.engine)
