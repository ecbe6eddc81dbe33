"""How prompts are spread over decode steps: piggybacked ones end in time, others go at once, and no request waits."""

import random
from collections import OrderedDict

import pytest

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.fast.piggyback import PendingPrompt, Piggyback, PromptTokens
from nanovllm.engine.fast.step_shape import DecodeBuckets
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import StepKind
from nanovllm.sampling_params import SamplingParams


def test_rows_and_piggybacked_tokens_fill_one_of_the_totals():
    sizes = Piggyback(512)
    assert sizes.padded_rows(1) == sizes.padded_rows(16) == 16 and sizes.padded_rows(17) == 32
    assert Piggyback(20).padded_rows(17) == 20
    assert sizes.token_counts(16) == [240, 368] and sizes.token_counts(224) == [32, 160]
    assert sizes.token_counts(225) == [159] and sizes.token_counts(352) == [32] and sizes.token_counts(353) == []
    for rows in range(1, 600):
        for tokens in sizes.token_counts(rows):
            assert tokens >= sizes.sizes.min_tokens and rows + tokens in sizes.sizes.totals


@pytest.mark.parametrize("max_num_seqs", [1, 11, 20, 256, 260, 300, 512, 1000])
def test_rows_beside_piggybacked_prompts_are_a_captured_batch_size(max_num_seqs):
    """Else sampling would have no graph, and attention would not have been compiled before the capture."""
    piggyback = Piggyback(max_num_seqs)
    buckets = DecodeBuckets(max_num_seqs, 1000, by_context=False, piggyback=piggyback)
    for num_decodes in range(1, max_num_seqs + 1):
        rows = piggyback.padded_rows(num_decodes)
        counts = piggyback.token_counts(rows)
        assert num_decodes <= rows and (rows in buckets.batch_sizes or not counts)
        assert {(rows, tokens) for tokens in counts} <= set(buckets.piggybacked_sizes)


def prompt_tokens(max_num_seqs, decode_ends, deadline, prompts):
    pending = [PendingPrompt(*prompt) for prompt in prompts]
    return Piggyback(max_num_seqs).prompt_tokens(decode_ends, deadline, pending, most=16384)


@pytest.mark.parametrize(
    "decode_ends, deadline, prompts, expected",
    [
        ([100] * 16, 100, [(2400, 90)], PromptTokens(piggybacked=240)),  # 10 steps
        ([100] * 16, 100, [(2401, 90)], PromptTokens(piggybacked=368)),
        ([100] * 16, 100, [(3680, 90)], PromptTokens(piggybacked=368)),
        ([100] * 16, 100, [(3681, 90)], PromptTokens(full_speed=3681)),
        # It would end after the others; no fewer than 1,024 tokens go at once.
        ([100] * 16, 100, [(700, 100)], PromptTokens(full_speed=1024)),
        ([100] * 16, 100, [(700, 5000)], PromptTokens(full_speed=1024)),
        ([100] * 16, 100, [(60000, 100)], PromptTokens(full_speed=16384)),
        # The first becomes a row, and there is one.
        ([100] * 15, 100, [(1200, 90), (1200, 90)], PromptTokens(piggybacked=240)),
        ([100] * 16, 100, [(1200, 90), (1200, 90)], PromptTokens(piggybacked=368)),  # it takes 16 of the other's tokens
        ([100] * 16, 100, [(1200, 90), (1200, 85)], PromptTokens(piggybacked=240)),
        ([100] * 16, 100, [(1840, 90), (1840, 90)], PromptTokens(full_speed=1840)),
        ([100] * 208, 100, [(480, 90)], PromptTokens(piggybacked=48)),
        ([5] * 16 + [100] * 208, 100, [(496, 88)], PromptTokens(piggybacked=32)),  # 5 steps of 32 tokens, 7 of 48
        ([5] * 16 + [100] * 208, 100, [(497, 88)], PromptTokens(piggybacked=160)),
        ([50] * 16 + [100] * 224, 100, [(320, 40)], PromptTokens()),  # no room until the first ones end
        ([50] * 16 + [100] * 224, 100, [(320, 41)], PromptTokens(piggybacked=144)),
        ([100] * 512, 100, [(1000, 10)], PromptTokens(full_speed=1024)),
        ([], 5, [(2000, 0)], PromptTokens(full_speed=2000)),  # nothing ends before the deadline
        # Nobody decodes yet: the first of them sets the end.
        ([], None, [(500, 100), (3312, 92), (600, 50)], PromptTokens(full_speed=3812)),
        ([], None, [(500, 100), (3312, 91), (600, 50)], PromptTokens(full_speed=1024)),
        ([], None, [(500, 100)] * 100, PromptTokens(full_speed=16384)),  # equal ones have no time to be piggybacked
        # Those that decode are waited for by others.
        ([900] * 16, None, [(2000, 100), (500, 90)], PromptTokens(full_speed=2000)),
        ([100] * 16, 100, [(2000, 300), (2400, 200)], PromptTokens(full_speed=2000)),  # then the first ends last
        ([100] * 16, 100, [(1, 99)] * 16, PromptTokens(piggybacked=240)),
        ([100] * 16, 100, [(1, 98)] * 33, PromptTokens(full_speed=1024)),  # no more than 16 on a step
    ],
)
def test_tokens_of_prompts_by_hand(decode_ends, deadline, prompts, expected):
    assert prompt_tokens(512, decode_ends, deadline, prompts) == expected


def test_prompts_that_lack_a_seq_slot_are_expected_to_wait_for_one():
    """Through the only free one go four, each in 17 steps and 200 more; for five there is no time."""
    assert prompt_tokens(20, [1000] * 19, 1000, [(4000, 200)] * 4) == PromptTokens(piggybacked=236)
    assert prompt_tokens(20, [1000] * 19, 1000, [(4000, 200)] * 5) == PromptTokens(full_speed=8000)
    assert prompt_tokens(20, [2] + [1000] * 19, 1000, [(472, 996)]) == PromptTokens(piggybacked=236)
    assert prompt_tokens(20, [3] + [1000] * 19, 1000, [(472, 996)]) == PromptTokens(full_speed=1024)


def go(scheduler, token=2):
    """Run a step in which the first sequence samples `token`."""
    step = scheduler.schedule()
    scheduler.update(step, ([token] + [2] * len(step.sampling))[: len(step.sampling)])
    return step


def run(lengths, outputs, piggyback, offline=True, slots=512):
    """(steps with piggybacked prompts, all steps, tokens of prompts in each step at full speed) of sequences that
    all have their full output.
    """
    blocks = BlockManager(2000, 256, enable_prefix_caching=False)
    sizes = Piggyback(slots)
    scheduler = Scheduler(blocks, slots, 16384, 4096, (), sizes if piggyback else None, 32)
    for i in sorted(range(len(lengths)), key=lambda i: -outputs[i]):
        seq = Sequence(i, [1] * lengths[i], SamplingParams(max_tokens=outputs[i], ignore_eos=True), 0)
        seq.offline = offline
        scheduler.add(seq)
    piggybacked, steps, at_once = 0, 0, []
    while scheduler.has_unfinished:
        step = scheduler.schedule()
        if steps % 50 == 0:  # it looks at every block
            scheduler.check()
        steps += 1
        if step.kind is StepKind.PIGGYBACKED:
            piggybacked += 1
            counts = sizes.token_counts(sizes.padded_rows(len(step.sampling_parts)))
            assert all(part.decodes for part in step.sampling_parts)
            assert sum(piece.num_tokens for piece in step.pieces) <= counts[-1]
            assert len(step.pieces) <= sizes.sizes.max_pieces
        elif step.kind is StepKind.MIXED:
            at_once.append(sum(part.num_tokens for part in step.parts if part.num_tokens > 1))
        scheduler.update(step, [2] * len(step.sampling))
    return piggybacked, steps, at_once


def test_prompts_are_piggybacked_and_all_end_no_later():
    rng = random.Random(0)
    lengths = [rng.randint(100, 1024) for _ in range(256)]
    outputs = [rng.randint(100, 1024) for _ in range(256)]
    _, steps, at_once = run(lengths, outputs, piggyback=False)
    assert len(at_once) >= 9 and steps >= max(outputs)
    piggybacked, steps, at_once = run(lengths, outputs, piggyback=True)
    assert piggybacked > 800 and at_once and sum(at_once) < 5000
    assert steps <= max(outputs) + 1


def test_where_slots_are_short_all_end_no_later():
    lengths, outputs = [100] * 19 + [3000] * 5, [1000] * 19 + [198] * 5
    assert run(lengths, outputs, True, slots=20)[1] <= run(lengths, outputs, False, slots=20)[1] + 1


@pytest.mark.parametrize("piggyback", [None, Piggyback(8)])
def test_a_prompt_whose_whole_does_not_fit_is_not_begun(piggyback):
    """Its first piece would: it would be preempted, and begin again, for as long as the other runs."""
    scheduler = Scheduler(BlockManager(20, 16, False), 8, 16384, 320, (), piggyback)
    computed = 0
    for length, output in ((16, 200), (300, 10)):
        seq = Sequence(length, [1] * length, SamplingParams(max_tokens=output, ignore_eos=True), 0)
        seq.offline = True
        scheduler.add(seq)
        computed += sum(go(scheduler).num_tokens for _ in range(2))
    while scheduler.has_unfinished:
        computed += go(scheduler).num_tokens
        scheduler.check()
    assert scheduler.num_preemptions == 0 and computed == 16 + 199 + 300 + 9


def add_offline(scheduler, length, outputs):
    for i, output in enumerate(outputs):
        seq = Sequence(i, [1] * length, SamplingParams(max_tokens=output), 0)
        seq.offline = True
        scheduler.add(seq)


def test_equal_requests_and_streams_are_not_piggybacked():
    assert run([300] * 100, [200] * 100, True) == run([300] * 100, [200] * 100, False)
    lengths, outputs = [300] * 100, list(range(100, 200))
    assert run(lengths, outputs, True)[0] > 50
    assert run(lengths, outputs, True, offline=False) == run(lengths, outputs, False, offline=False)


def test_a_stream_lets_all_prompts_go_at_once():
    scheduler = Scheduler(BlockManager(500, 256, False), 512, 16384, 4096, (), Piggyback(512))
    add_offline(scheduler, 1000, range(500, 100, -20))
    go(scheduler)
    assert all(go(scheduler).kind is StepKind.PIGGYBACKED for _ in range(2))
    scheduler.add(Sequence(20, [1] * 1000, SamplingParams(max_tokens=10), 0))
    step = go(scheduler)
    assert step.kind is not StepKind.PIGGYBACKED and step.num_tokens > 10_000


def test_after_an_early_end_nothing_is_piggybacked():
    scheduler = Scheduler(BlockManager(500, 256, False), 512, 16384, 4096, (7,), Piggyback(512))

    add_offline(scheduler, 1000, range(500, 100, -20))
    go(scheduler)
    assert [go(scheduler).kind, go(scheduler, 7).kind] == [StepKind.PIGGYBACKED] * 2
    step = go(scheduler)
    assert step.kind is not StepKind.PIGGYBACKED and step.num_tokens > 10_000
    while scheduler.has_unfinished:
        assert go(scheduler).kind is not StepKind.PIGGYBACKED
    add_offline(scheduler, 1000, range(500, 100, -20))
    go(scheduler)
    assert go(scheduler).kind is StepKind.PIGGYBACKED  # the next ones are believed again


def test_many_short_prompts_are_piggybacked_on_several_steps():
    lengths, outputs = [2000] + [4] * 64, [300] + [20] * 64
    piggybacked, steps, at_once = run(lengths, outputs, True)
    assert piggybacked == 64 // Piggyback(512).sizes.max_pieces and at_once == [2000] and steps == 300


@pytest.mark.parametrize("offline", [False, True])
def test_prompts_do_not_wait_for_the_end_of_a_stream(offline):
    """`generate` returns with its own last token, however long a stream beside it will be."""
    scheduler = Scheduler(BlockManager(500, 256, False), 512, 16384, 4096, (), Piggyback(512))
    for i, output in enumerate((3000, *[100] * 40)):
        seq = Sequence(i, [1] * 500, SamplingParams(max_tokens=output, ignore_eos=True), 0)
        seq.offline = offline or i > 0
        scheduler.add(seq)
        if i == 0:
            go(scheduler)
    step = scheduler.schedule()
    assert (step.kind is StepKind.PIGGYBACKED) is offline
    assert offline or step.num_tokens == 16384


class Unlooked(OrderedDict):
    def __iter__(self):
        yield next(super().__iter__())
        raise AssertionError("the whole queue is looked at")


def test_where_slots_are_short_prompts_go_at_once_and_a_long_queue_is_not_looked_at():
    scheduler = Scheduler(BlockManager(500, 256, False), 8, 256, 4096, (), Piggyback(8))
    add_offline(scheduler, 100, range(2000, 0, -100))
    scheduler.waiting = Unlooked(scheduler.waiting)
    assert [go(scheduler).num_tokens for _ in range(3)] == [256, 256, 256] and len(scheduler.running) == 8
