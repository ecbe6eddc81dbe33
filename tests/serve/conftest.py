import pytest

pytest.importorskip("uvicorn", reason='pip install "nanovllm[serve]"')

from nanovllm import LLM
from tests import tiny
from tests.serve.running import SIZES, RunningServer


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    directory = tmp_path_factory.mktemp("served")
    tiny.save_with_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def server(model_path):
    with RunningServer(model_path) as running:
        yield running
        running.assert_idle()


@pytest.fixture(scope="module")
def llm(model_path):
    return LLM(model_path, **SIZES)
