import pytest

from benchmarks import random_gguf
from nanovllm.bench.job import Job
from nanovllm.bench.workloads import Item
from nanovllm.weights.gguf import read_config

pytest.importorskip("llama_cpp")


def test_prompts_share_batches_and_each_request_gets_its_tokens(tmp_path):
    from nanovllm.bench.engines.llama_cpp import LlamaCppEngine

    path = tmp_path / "m.gguf"
    random_gguf.write(path, "smollm2-135m", "Q8_0")
    engine = LlamaCppEngine(Job("llama.cpp", "", str(path), (), shape=read_config(path), temperature=0.0))
    items = [Item([seq + 1] * length, output) for seq, (length, output) in enumerate([(200, 3), (200, 1), (200, 4)])]
    try:
        run = engine.run(items)
    finally:
        engine.close()
    assert [r.num_output for r in run.requests] == [3, 1, 4]
    first = [r.first_token for r in run.requests]
    assert first[0] == first[1] < first[2]  # a batch has 512 tokens: the third prompt ends in the next one
    assert first[2] < min(run.requests[0].total, run.requests[2].total) <= run.seconds
