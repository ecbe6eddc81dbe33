import random

import pytest

from nanovllm.bench.workloads import WORKLOADS, Workload, parse_length, select


def test_std256_is_nano_vllms_published_benchmark():
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    outputs = [random.randint(100, 1024) for _ in range(256)]
    items = WORKLOADS["std256"].draw(0, 151936)
    assert [i.prompt for i in items] == prompts and [i.num_output for i in items] == outputs
    assert sum(outputs) == 133_966 and {i.arrival for i in items} == {0.0}


def test_a_draw_is_what_was_declared():
    for name, workload in WORKLOADS.items():
        items = workload.draw(3, vocab_size=50)
        assert items == workload.draw(3, vocab_size=50) != workload.draw(4, vocab_size=50), name
        assert len(items) == workload.num_requests and all(0 <= t < 50 for i in items for t in i.prompt), name
        assert max(len(i.prompt) + i.num_output for i in items) <= workload.max_len, name


def test_a_shared_prefix_is_shared_and_the_rest_is_not():
    items = WORKLOADS["shared-prefix"].draw(0, 151936)
    assert len({tuple(i.prompt[:1024]) for i in items}) == 1 and len({tuple(i.prompt[1024:]) for i in items}) == 256
    assert {len(i.prompt) for i in items} == {1088}


def test_no_prompt_begins_like_one_of_another_workload_or_of_a_warm_up():
    """It would be found in the prefix cache of an engine that measures one after the other."""
    owner = {}
    for name, workload in WORKLOADS.items():
        for seed in (0, 1, 1_000_000):
            for item in workload.draw(seed, 151936):
                assert owner.setdefault(tuple(item.prompt[:16]), (name, seed)) == (name, seed)


def test_arrivals_have_the_asked_rate():
    arrivals = [i.arrival for i in Workload("x", 4000, 1, 1, rate=20.0).draw(0, 100)]
    assert arrivals == sorted(arrivals) and arrivals[0] == 0
    assert arrivals[-1] / 3999 == pytest.approx(1 / 20, rel=0.06)  # four standard errors


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="did you mean 'std256'"):
        select(["std255"])
    with pytest.raises(ValueError, match="num_requests=0"):
        Workload("x", 0, 1, 1)
    with pytest.raises(ValueError, match="input_len=.9, 3.: expected at least 1, and bounds in rising order"):
        Workload("x", 1, (9, 3), 1)
    with pytest.raises(ValueError, match="rate=0"):
        Workload("x", 1, 1, 1, rate=0)
    with pytest.raises(ValueError, match="'many': expected a number of tokens"):
        parse_length("many")
    assert parse_length("12") == 12 and parse_length("3-9") == (3, 9)
    assert [w.name for w in select(["bs8", "bs1", "bs8"])] == ["bs8", "bs1"]
