"""`LLM.close`, and an LLM as a context manager."""

import gc
import weakref

import pytest

from nanovllm import SamplingParams
from tests.llm.small_llm import GREEDY, make

pytestmark = pytest.mark.any_device


def test_the_end_of_a_with_block_frees_the_engine(directory):
    gc.disable()  # nothing may be left for the collector: a GPU's memory would stay taken until it runs
    try:
        with make(directory) as llm:
            engine = weakref.ref(llm.engine)
            (output,) = llm.generate("hello", GREEDY, use_tqdm=False)
        assert output["text"] and engine() is None
    finally:
        gc.enable()
    assert repr(llm) == "<LLM that is closed>"
    llm.close()  # again, without effect
    for call in (lambda: llm.generate("hello"), lambda: llm.kernels, llm.is_finished, llm.reset_prefix_cache):
        with pytest.raises(RuntimeError, match="this LLM is closed; make a new one"):
            call()


def test_an_error_in_the_block_is_raised(directory):
    with pytest.raises(ZeroDivisionError), make(directory) as llm:
        1 / 0  # noqa: B018
    assert repr(llm) == "<LLM that is closed>"


def test_an_open_stream_goes_on(directory):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with make(directory) as llm:
        whole = "".join(llm.stream("hello", params))
        stream = llm.stream("hello", params)
        begin = next(stream)
        engine = weakref.ref(llm.engine)
    assert begin + "".join(stream) == whole
    del stream
    gc.collect()
    assert engine() is None
