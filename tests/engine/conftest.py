"""Fixtures that tests of the engine share."""

import pytest

from tests import tiny
from tests.engine.simulated_engine import assert_clean
from tests.engine.small_engine import make


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    """A tiny Qwen3 with its tokenizer."""
    path = tmp_path_factory.mktemp("model")
    tiny.save_with_tokenizer(path, "qwen3", max_position_embeddings=1024)
    return path


@pytest.fixture(scope="session")
def reference():
    """The same model of transformers."""
    return tiny.model("qwen3", vocab_size=len(tiny.tokenizer()))


@pytest.fixture(scope="session")
def shared(directory):
    return make(directory, num_kvcache_blocks=24, max_num_seqs=6, enforce_eager=True, skip_tokenizer_init=False)


@pytest.fixture
def llm(shared):
    """An engine that a test leaves without requests."""
    yield shared
    assert_clean(shared.engine)
