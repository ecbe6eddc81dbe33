import pytest

from nanovllm import SamplingParams
from tests import tiny
from tests.llm.small_llm import TOKENIZER, assert_clean, make


@pytest.fixture(scope="session")
def directory(llama_directory):
    return llama_directory


@pytest.fixture(scope="session")
def reference():
    return tiny.model("llama", seed=3, vocab_size=len(TOKENIZER))


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def shared(request, directory):
    return make(directory, async_scheduling=request.param)


@pytest.fixture
def llm(shared):
    """An engine that every test must leave empty, and able to serve."""
    yield shared
    assert_clean(shared)
    assert shared.generate("x", SamplingParams(max_tokens=1), use_tqdm=False)[0].finished
