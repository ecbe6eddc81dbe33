"""Words of messages that depend on a number."""

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.wording import are, brief, counted
from tests import tiny


@pytest.mark.parametrize(
    "said, text",
    [
        (counted(0, "token"), "0 tokens"),
        (counted(1, "prompt token"), "1 prompt token"),
        (counted(2, "prompt token"), "2 prompt tokens"),
        (counted(1.0, "second", "g"), "1 second"),
        (counted(1234, "tile", ","), "1,234 tiles"),
        (brief({"a": 1}), "{'a': 1}"),
        (brief("x" * 78), repr("x" * 78)),
        (brief("x" * 79), "'" + "x" * 76 + "..."),
        (brief([1, 2, 3], 8), "[1, 2..."),
        (are(1), "is"),
        (are(2), "are"),
    ],
)
def test_what_is_counted(said, text):
    assert said == text


def test_messages_of_one_thing(tmp_path):
    tiny.save(tmp_path)
    llm = LLM(tmp_path, max_model_len=1, device="cpu", use_custom_kernels=False, skip_tokenizer_init=True)
    with pytest.raises(ValueError, match=r"^the prompt has 1 token, but max_model_len=1 allows 0"):
        llm.generate([[1]], SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match=r"^1 prompt but 2 sampling_params"):
        llm.generate([[1]], [SamplingParams()] * 2)
