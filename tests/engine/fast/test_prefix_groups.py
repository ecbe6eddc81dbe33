"""Groups of sequences that share leading blocks: against a search through all choices, under random load, and
through the engine.
"""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams
from nanovllm.engine.fast.decode_state import DecodeState
from nanovllm.engine.fast.policy import FastPolicy
from nanovllm.engine.fast.prefix_groups import PrefixGroups, find_groups
from nanovllm.engine.fast.step_shape import DecodeBuckets
from nanovllm.engine.step import StepKind
from nanovllm.kernels import Provider, all_ops
from nanovllm.kernels.ops.paged_kv import PagedKV
from nanovllm.kernels.ops.shared_prefixes import check_shared
from tests import tiny
from tests.engine.fast import test_decode_state as decode_state_tests
from tests.engine.simulation import Simulation

ALWAYS = FastPolicy(min_shared_rows=2, min_saved_bytes=1)
"""Whatever is shared is worth it."""


# ------------------------------------------------------------------------------------------------ what the groups are


def best_saving(prefixes):
    """(most blocks saved, fewest groups that save so many) by disjoint choices of `prefixes`: (blocks, rows)."""
    if not prefixes:
        return 0, 0
    (blocks, rows), others = prefixes[0], prefixes[1:]
    saved, count = best_saving([p for p in others if not p[1] & rows])
    return min(best_saving(others), (saved + blocks * (len(rows) - 1), count + 1), key=lambda x: (-x[0], x[1]))


def every_prefix(tables, limits):
    found = {}
    for row, table in enumerate(tables):
        for blocks in range(1, limits[row] + 1):
            found.setdefault(tuple(table[:blocks]), set()).add(row)
    longest = {
        frozenset(rows): len(prefix) for prefix, rows in sorted(found.items(), key=lambda x: len(x[0])) if len(rows) > 1
    }
    return [(blocks, rows) for rows, blocks in longest.items()]


def check_groups(groups, tables, limits):
    seen = set()
    for blocks, rows in groups:
        assert blocks > 0 and len(rows) > 1 and rows.tolist() == sorted(set(rows.tolist()))
        assert not seen & set(rows.tolist())
        seen |= set(rows.tolist())
        assert all(
            blocks <= limits[row] and list(tables[row][:blocks]) == list(tables[rows[0]][:blocks]) for row in rows
        )


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=4, max_size=4), st.integers(0, 4)), min_size=1, max_size=8)
)
def test_the_groups_save_most(rows):
    """Block 0 among them, whose bytes are zero."""
    tables, limits = np.array([table for table, _ in rows], np.int32), np.array([limit for _, limit in rows])
    before = tables.copy()
    groups = find_groups(tables, limits)
    check_groups(groups, tables, limits)
    saved, count = best_saving(every_prefix(tables.tolist(), limits.tolist()))
    assert (sum(group.saved for group in groups), len(groups)) == (saved, count)
    assert [g.saved for g in groups] == sorted((g.saved for g in groups), reverse=True)
    assert [(g.blocks, g.rows.tolist()) for g in find_groups(tables, limits, 1)] == [
        (g.blocks, g.rows.tolist()) for g in groups[:1]
    ]
    assert (tables == before).all()


def test_block_numbers_of_several_bytes():
    """Rows that differ in one byte of a block's number alone, and in nothing but the limit."""
    tables = np.array(
        [[256, 7, 1], [256, 7, 65537], [1, 7, 1], [0, 256, 1], [256, 7, 65537], [0, 1, 1], [1 << 24, 7, 1]], np.int32
    )
    groups = find_groups(tables, np.array([3, 3, 3, 3, 3, 3, 3]))
    assert [(g.blocks, g.rows.tolist()) for g in groups] == [(2, [0, 1, 4]), (1, [3, 5])]
    groups = find_groups(tables, np.array([1, 3, 3, 0, 3, 3, 3]))
    assert [(g.blocks, g.rows.tolist()) for g in groups] == [(3, [1, 4])]
    assert find_groups(tables[:0], np.zeros(0, int)) == [] and find_groups(tables, np.zeros(7, int)) == []


def test_a_common_system_prompt_and_longer_prefixes_of_some():
    """One block of all, or eight blocks of four pairs each: pairs save more, until there are enough who share the
    one.
    """
    tables = np.arange(200 * 9, dtype=np.int32).reshape(200, 9) + 1
    tables[:, 0] = 0
    for pair in range(0, 8, 2):
        tables[pair + 1, :8] = tables[pair, :8]
    limits = np.full(200, 8)
    assert [g.rows.tolist() for g in find_groups(tables[:30], limits[:30])] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    (group,) = find_groups(tables, limits)
    assert group.blocks == 1 and len(group.rows) == 200


# ------------------------------------------------------------------------------------------------ under load


class Watched(PrefixGroups):
    """Compares what it keeps with a search through all choices whenever rows change hands."""

    updates, found = 0, 0

    def update(self, num_rows, positions):
        super().update(num_rows, positions)
        self.updates += 1
        seqs = self.state.seqs
        tables = [seq.block_table for seq in seqs]
        limits = [int(p) // self._block_size for p in positions[:num_rows]]
        check_groups(self.groups, tables, limits)
        saved, count = best_saving(every_prefix(tables, limits))
        assert (sum(g.saved for g in self.groups), len(self.groups)) == (saved, count)
        assert self.worthwhile == (saved > 0)
        self.found += count


class SharingDevice(decode_state_tests.StateDevice):
    def __init__(self, block_size, max_blocks):
        super().__init__(block_size, max_blocks)
        paged = decode_state_tests.paged_model(block_size=block_size, max_blocks=max_blocks)
        prefixes = Watched(paged, 1, ALWAYS.min_shared_rows, ALWAYS.min_saved_bytes)
        self.state = prefixes.state = DecodeState(paged, prefixes=prefixes)
        self.state.last_tokens = paged.last_tokens
        self.shared = 0

    def execute(self, step):
        tokens = super().execute(step)
        state = self.state
        if step.kind is StepKind.DECODE and state.prefixes.worthwhile:
            # `super` has advanced the state: the step's tokens are the last of these lengths but one.
            m = state.batch(decode_state_tests.MAX_SEQS, 1, shared=True).metadata
            n = state.num_rows
            lens = m.context_lens - (torch.arange(len(m.context_lens)) < n).int()
            cache = torch.empty(decode_state_tests.PADDING + 1, state.block_size, 1, 1)
            shared = m.shared
            check_shared(PagedKV(cache, cache, m.block_table, lens, 100), shared)
            assert not shared.shared_lens[n:].any() and shared.shared_lens.any()
            self.shared += 1
        return tokens


@pytest.mark.parametrize("seed", range(40))
def test_groups_follow_arrivals_and_departures(seed):
    rng = random.Random(seed)
    block_size = rng.randint(1, 4)
    max_blocks = -(-24 // block_size)
    sim = Simulation(
        block_size=block_size, max_model_len=24, num_blocks=max_blocks + rng.randint(0, 14),
        max_num_seqs=rng.randint(2, decode_state_tests.MAX_SEQS), budget=rng.randint(8, 30), steps_ahead=rng.randint(0,
        1),
    )  # fmt: skip
    sim.device = SharingDevice(block_size, max_blocks)
    for i in range(14):
        prompt = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6][: rng.randint(1, 12)] + [rng.randint(0, 1)] * rng.randint(0, 2)
        params = SamplingParams(max_tokens=rng.randint(1, 20), ignore_eos=rng.random() < 0.7)
        seq = sim.add(prompt, params, seed=i, stop_at=rng.choice((None, None, 3)))
        for _ in range(rng.randint(0, 5)):
            sim.step(abort=seq if rng.random() < 0.05 else None)
    sim.drain()
    prefixes = sim.device.state.prefixes
    assert sim.device.steps > prefixes.updates > 0
    if seed == 0:
        assert sim.device.shared and prefixes.found


def four_tables(min_rows=2, min_saved_bytes=1):
    """Four rows with blocks of four tokens of a byte each."""
    paged = decode_state_tests.paged_model(max_num_seqs=4, max_blocks=3)
    prefixes = PrefixGroups(paged, 1, min_rows, min_saved_bytes)
    for row, blocks in enumerate(([5, 6, 7], [5, 6, 8], [1, 2], [5, 3])):
        prefixes.set_table(row, np.array(blocks))
    return prefixes


def test_few_rows_and_small_savings_are_left_alone():
    for min_rows, min_bytes, groups, worthwhile in ((4, 8, 1, True), (4, 9, 1, False), (5, 8, 0, False)):
        prefixes = four_tables(min_rows, min_bytes)
        prefixes.update(4, np.array([9, 7, 6, 7]))
        assert len(prefixes.groups) == groups and prefixes.worthwhile is worthwhile


def test_groups_are_sent_where_they_changed():
    prefixes = four_tables()
    positions = np.array([9, 10, 6, 7])
    prefixes.update(3, positions)
    m = prefixes.tensors(4)
    assert m.groups[0].tolist() == [0, 2, 8] and not m.groups[1:].any()
    assert m.group_rows[:2].tolist() == [0, 1] and m.shared_lens.tolist() == [8, 8, 0, 0]
    before = prefixes._device.clone()
    prefixes._device.fill_(-7)
    prefixes.update(3, positions + 1)
    assert (prefixes._device == -7).all()  # nothing had changed
    prefixes.reset()
    assert not prefixes.worthwhile
    prefixes.update(3, positions)
    assert torch.equal(prefixes._device, before)
    prefixes.update(4, positions)
    assert [(g.blocks, g.rows.tolist()) for g in prefixes.groups] == [(1, [0, 1, 3])]  # two blocks of two save as much
    prefixes.update(4, np.array([9, 7, 6, 7]))  # the second computes a token of its second block
    assert (
        m.groups[0].tolist() == [0, 3, 4]
        and m.group_rows[:3].tolist() == [0, 1, 3]
        and m.shared_lens.tolist() == [4, 4, 0, 4]
    )


def test_captures_of_steps_that_share():
    assert DecodeBuckets(256, 4096).shared_sizes == []
    assert DecodeBuckets(256, 4096, False, 16).shared_sizes == [16 * i for i in range(1, 17)]
    assert DecodeBuckets(11, 4096, False, 16).shared_sizes == []
    assert DecodeBuckets(20, 4096, False, 16).shared_sizes == [16, 20]


# ------------------------------------------------------------------------------------------------ through the engine

SHARED_OPS = ("attention_decode_shared", "qk_norm_rope_attention_shared")
FUSED = ("qk_norm_rope_store", "qk_norm_rope_attention")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny.save(path, "qwen3", vocab_size=300)
    return path


@pytest.fixture
def recorded():
    """The references as providers that say when they were called, and check what they are told of groups."""
    calls = []

    def make(name):
        def fn(*args, **kwargs):
            given = all_ops()[name].signature.bind(*args, **kwargs).arguments
            if name in SHARED_OPS:
                check_shared(given["kv"], given["shared"])
                assert given["shared"].groups[:, 2].any()
            calls.append(name)
            return all_ops()[name].native(*args, **kwargs)

        return fn

    names = [*SHARED_OPS, *FUSED]
    for name in names:
        all_ops()[name].providers["recorded"] = Provider("recorded", make(name))
    yield calls
    for name in names:
        del all_ops()[name].providers["recorded"]


def make(directory, fast_policy=ALWAYS, **arguments):
    defaults = dict(fast_policy=fast_policy,
        device="cpu", dtype="float32", kvcache_block_size=16, num_kvcache_blocks=100, max_model_len=160,
        max_num_seqs=20,
        max_num_batched_tokens=200, skip_tokenizer_init=True,
    )  # fmt: skip
    return LLM(directory, **defaults | arguments)


def generate(llm, prompts, params):
    outputs = [[c.token_ids for c in o.outputs] for o in llm.generate(prompts, params, use_tqdm=False)]
    llm.engine.scheduler.check()
    assert llm.engine.scheduler.blocks.num_free_blocks == llm.engine.scheduler.blocks.num_blocks
    return outputs


def workload(seed=0):
    rng = random.Random(seed)
    draw = lambda n: [rng.randrange(300) for _ in range(n)]  # noqa: E731
    system, topic = draw(40), draw(30)
    prompts = [system + draw(5), system + topic + draw(3), draw(20), system + topic + draw(9), draw(50), system[:33]]
    params = [
        SamplingParams(temperature=0, n=n, max_tokens=length, ignore_eos=True)
        for n, length in zip((1, 2, 3, 1, 1, 3), (9, 14, 8, 20, 28, 19))
    ]
    return prompts, params


@pytest.mark.parametrize(
    "options", [{}, dict(num_kvcache_blocks=17), dict(async_scheduling=True, max_num_batched_tokens=50)], ids=str
)
@pytest.mark.parametrize("names", [SHARED_OPS[:1], SHARED_OPS[1:], (*SHARED_OPS, *FUSED)], ids=str)
def test_tokens_are_those_without_sharing(directory, recorded, names, options):
    prompts, params = workload()
    expected = generate(make(directory, **options), prompts, params)
    assert not recorded
    llm = make(directory, kernel_priority={name: ["recorded"] for name in names}, **options)
    assert generate(llm, prompts, params) == expected
    used = set(recorded)
    assert used & set(SHARED_OPS) == {names[-1] if len(names) == 1 else SHARED_OPS[1]}
    if len(names) > 1:
        assert used >= set(FUSED)  # mixed steps, and those where nothing is shared any more
    if options.get("num_kvcache_blocks") == 17:
        assert llm.engine.scheduler.num_preemptions > 0


def test_aborts_and_steps_that_fail_leave_the_groups_right(directory, recorded, monkeypatch):
    prompts, params = workload(1)
    expected = generate(make(directory), prompts, params)
    llm = make(directory, kernel_priority={name: ["recorded"] for name in SHARED_OPS})
    engine, prefixes = llm.engine, llm.engine.runner.fast.decoder.state.prefixes
    requests = [engine.add_request(p, q) for p, q in zip(prompts, params)]
    steps = 0
    while engine.has_unfinished:
        engine.step()
        steps += 1
        if steps == 8:
            assert prefixes.worthwhile
            engine.abort(requests[3])
    for i, request in enumerate(requests):
        tokens = [c.token_ids for c in request.output().outputs]
        assert tokens == expected[i] if i != 3 else all(t == e[: len(t)] for t, e in zip(tokens, expected[i]))

    def interrupted():
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(prefixes, "_send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, prompts, params)
    assert not prefixes.worthwhile
    assert generate(llm, prompts, params) == expected


def test_a_continued_run_looks_at_nothing(directory, recorded, monkeypatch):
    llm = make(directory, kernel_priority={SHARED_OPS[0]: ["recorded"]})
    prefixes, updates = llm.engine.runner.fast.decoder.state.prefixes, []
    update = prefixes.update
    monkeypatch.setattr(prefixes, "update", lambda *args: updates.append(args) or update(*args))
    prompt = workload()[0][0]
    generate(llm, [prompt], SamplingParams(temperature=0, n=6, max_tokens=40, ignore_eos=True))
    assert len(updates) == 1 and recorded.count(SHARED_OPS[0]) == 2 * 39


def test_without_a_kernel_or_a_prefix_cache_nothing_is_kept(directory, recorded):
    priority = {SHARED_OPS[0]: ["recorded"]}
    for options in (
        {},
        dict(kernel_priority=priority, enable_prefix_caching=False),
        dict(kernel_priority=priority, fast_policy=FastPolicy(prefix_groups=False)),
        # Named by the user, the plain op counts: a fused one that was not named does not stand in for it.
        dict(kernel_priority={"attention_decode": ["native"]}),
    ):
        assert make(directory, **options).engine.runner.fast.decoder.state.prefixes is None


def test_small_savings_are_left_alone(directory, recorded):
    """By default: 16 rows, and 32 MiB of a layer's cache."""
    llm = make(directory, FastPolicy(), kernel_priority={SHARED_OPS[0]: ["recorded"]})
    prompts, params = workload()
    generate(llm, prompts, params)
    assert not recorded


@pytest.mark.gpu
def test_steps_that_share_are_captured_when_they_first_come(tmp_path):
    """From 80 sequences of one long prefix down to 16, while the step before is still running."""
    tiny.save(tmp_path, "qwen3", vocab_size=300, head_dim=64, max_position_embeddings=1024)
    rng = random.Random(2)
    draw = lambda n: [rng.randrange(300) for _ in range(n)]  # noqa: E731
    system = draw(400)
    prompts = [system + draw(1 + i % 20) for i in range(80)]
    params = [
        SamplingParams(temperature=(0, 0.9)[i % 2], seed=i, ignore_eos=True, max_tokens=10 + i // 4) for i in range(80)
    ]
    outputs = []
    for enforce_eager in (True, False):
        llm = make(
            tmp_path, FastPolicy(min_saved_bytes=1), device="cuda", max_num_seqs=80, max_model_len=512,
            num_kvcache_blocks=1000, max_num_batched_tokens=1024,
            enforce_eager=enforce_eager, capture_prefill=True,
        )  # fmt: skip
        llm.generate([prompts[0]], SamplingParams(max_tokens=1), use_tqdm=False)  # its blocks are there to be shared
        outputs.append(generate(llm, prompts, params))
    assert outputs[0] == outputs[1]
    fast = llm.engine.runner.fast
    captured = {shape.rows for shape in fast.decoder.graphs.shapes if shape.shared}
    assert captured == set(fast.buckets.shared_sizes) == {16, 32, 48, 64, 80}
