"""Single decisions of the scheduler, by hand."""

import pytest

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams
from tests.engine.simulation import Simulation

ENDLESS = SamplingParams(max_tokens=100, ignore_eos=True)


def parts(step):
    return [(p.seq.seq_id, p.start, p.num_tokens, p.samples) for p in step.parts]


def test_first_come_first_served_under_the_token_budget():
    sim = Simulation(budget=8, num_blocks=32, caching=False)
    for n in (3, 4, 6):
        sim.add([1] * n, ENDLESS)
    assert parts(sim.step()) == [(2, 0, 1, False), (0, 0, 3, True), (1, 0, 4, True)]
    # Those that run come first; the third goes on with what is left of its prompt.
    assert parts(sim.step()) == [(0, 3, 1, True), (1, 4, 1, True), (2, 1, 5, True)]
    assert parts(sim.step()) == [(0, 4, 1, True), (1, 5, 1, True), (2, 6, 1, True)]


def test_the_last_admitted_is_preempted_and_keeps_its_output():
    sim = Simulation(block_size=2, num_blocks=4, max_model_len=8, budget=8, caching=False)
    first, second = (sim.add([1, 2, i], ENDLESS, seed=i) for i in range(2))
    sim.step()
    assert sim.blocks.num_free_blocks == 0
    sim.step()  # both fill their second block
    assert sim.scheduler.num_preemptions == 0
    assert parts(sim.step()) == [(0, 4, 1, True)]
    assert sim.scheduler.num_preemptions == 1
    assert second.status is SequenceStatus.WAITING and second.num_output_tokens == 2 and second.seq_slot == -1
    while not first.finished:
        sim.step()
    step = sim.step()
    assert parts(step) == [(1, 0, 5, True)] and step.parts[0].admitted
    sim.drain()


def test_a_preempted_sequence_goes_before_later_arrivals():
    sim = Simulation(block_size=2, num_blocks=4, max_model_len=8, budget=8, caching=False)
    for seed in range(3):
        sim.add([1, 2, seed], SamplingParams(max_tokens=3, ignore_eos=True), seed)
    order = []
    while sim.scheduler.has_unfinished:
        order += [p.seq.seq_id for p in sim.step().parts if p.admitted]
    assert sim.scheduler.num_preemptions and order == [0, 1, 1, 2]


def test_the_blocks_of_a_finished_sequence_are_found_as_far_as_its_tokens_are_known():
    sim = Simulation(block_size=2, steps_ahead=1)
    seq = sim.add([1, 2, 3], ENDLESS)
    sim.step()
    sim.step()  # the fourth token is computed, and only now known
    sim.abort(seq)
    assert len(seq.token_ids) == 4
    again = sim.add([*seq.token_ids, 5], ENDLESS)
    sim.step()
    assert again.num_cached_tokens == 4


def test_a_preempted_prompt_finds_its_blocks_again():
    sim = Simulation(block_size=2, num_blocks=6, max_model_len=8, budget=8)
    first = sim.add([1, 2, 1, 2, 1], ENDLESS)
    second = sim.add([3, 4, 3, 4, 3], ENDLESS)
    while not sim.scheduler.num_preemptions:
        sim.step()
    sim.abort(first)
    step = sim.step()
    assert step.parts[0].seq is second and step.parts[0].start > 0 == second.num_cached_tokens
    sim.drain()


def test_a_sequence_that_was_never_added_can_be_ended():
    sim = Simulation()
    seq = Sequence(0, [1, 2], ENDLESS, 0)
    sim.scheduler.finish(seq, "abort")
    sim.scheduler.check()
    assert seq.finished and not sim.scheduler.has_unfinished


def test_abort_of_a_preempted_sequence_whose_token_is_in_flight():
    sim = Simulation(block_size=2, num_blocks=4, max_model_len=8, budget=8, caching=False, steps_ahead=1)
    sim.add([1, 2, 0], ENDLESS)
    second = sim.add([1, 2, 1], ENDLESS)
    sim.step()
    sim.step()
    sim.step(abort=second)
    assert "abort while waiting with a token in flight" in sim.seen
    sim.drain()
    assert second.num_output_tokens == 1


@pytest.mark.parametrize("max_tokens, max_model_len", [(2, 16), (100, 5)])
def test_a_sequence_at_its_end_computes_nothing_more_while_its_last_token_is_in_flight(max_tokens, max_model_len):
    sim = Simulation(steps_ahead=1, max_model_len=max_model_len)
    sim.add([1, 2, 3], SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    assert parts(sim.step()) == [(0, 0, 3, True)]
    assert parts(sim.step()) == [(0, 3, 1, True)]
    assert sim.step() is None  # only reads
    assert "dropped a token" not in sim.seen


def test_a_run_of_decodes_goes_on_until_something_changes():
    sim = Simulation(block_size=2, num_blocks=32, max_model_len=32, max_num_seqs=3, budget=16)
    first, second = (sim.add([1, 2, i], ENDLESS, seed=i) for i in range(2))
    assert [sim.step().continues for _ in range(5)] == [False, False, True, True, True]
    assert parts(sim.step()) == [(0, 7, 1, True), (1, 7, 1, True)]
    third = sim.add([1, 2, 3, 4], ENDLESS)
    assert [sim.step().continues for _ in range(3)] == [False, False, True]
    sim.abort(second)
    step = sim.step()
    assert not step.continues and [p[0] for p in parts(step)] == [0, 2]
    assert sim.step().continues and third.num_computed_tokens == 8 and first.num_computed_tokens == 13
    sim.drain()


def test_a_run_ends_where_a_sequence_does():
    sim = Simulation(steps_ahead=1, num_blocks=32, max_model_len=32, budget=16)
    for n in (4, 6):
        sim.add([1, 2, n], SamplingParams(max_tokens=n, ignore_eos=True))
    steps = []
    while (step := sim.step()) is not None:
        steps.append((len(step.parts), step.continues))
    assert steps == [(2, False), (2, False), (2, True), (2, True), (1, False), (1, False)]


def test_blocks_are_reserved_ahead_but_none_beyond_the_end():
    sim = Simulation(block_size=4, num_blocks=200, max_model_len=90, max_num_seqs=3, budget=16)
    short = sim.add([1, 2], SamplingParams(max_tokens=9, ignore_eos=True))
    long, longest = (sim.add([1, 2, i], ENDLESS) for i in (3, 4))
    sim.step()
    assert [len(seq.block_table) for seq in (short, long, longest)] == [1, 1, 1]  # prompts reserve nothing
    sim.step()
    # 10 of the 11 tokens of the first are computed; the others have computed 4 and are to have room for 32 more.
    assert [len(seq.block_table) for seq in (short, long, longest)] == [3, 9, 9]
    tables = {len(long.block_table)}
    while not long.finished:
        sim.step()
        tables.add(len(long.block_table))
    # Where the short one ends there is a new run; after it only what is needed makes them grow, by 32 tokens, and at
    # the end by less.
    assert tables == {9, 11, 20, 23, 0}
    sim.drain()


def test_nobody_is_preempted_for_a_reserved_block():
    for num_blocks, reserved, free in ((44, [7, 2], 36), (12, [2, 2], 9)):
        sim = Simulation(block_size=2, num_blocks=num_blocks, max_model_len=16, max_num_seqs=2, budget=16)
        seqs = [sim.add([1, 2, i], SamplingParams(max_tokens=12, ignore_eos=True), i) for i in (3, 4)]
        sim.step()
        sim.step()
        # They share their first block, so 41 of 44 were free: enough for the 5 that the first may need yet, not for as
        # many of the second beside the 16 for each that stay free, room for 32 tokens.
        assert [len(seq.block_table) for seq in seqs] == reserved and sim.blocks.num_free_blocks == free
        sim.drain()
    sim = Simulation(block_size=2, num_blocks=9, max_model_len=16, max_num_seqs=3, budget=16, caching=False)
    for i in range(3):
        sim.add([1, 2, i], SamplingParams(max_tokens=4, ignore_eos=True), i)
    sim.drain()
    assert sim.scheduler.num_preemptions == 0


def test_a_reserved_block_is_registered_when_it_is_full():
    sim = Simulation(block_size=4, num_blocks=60, max_model_len=40, max_num_seqs=2, budget=16)
    first = sim.add([1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True))
    while first.num_computed_tokens < 17:
        sim.step()
    assert len(first.block_table) == 8 and first.num_registered_blocks == 4
    second = sim.add(first.token_ids[:17], SamplingParams(max_tokens=2, ignore_eos=True))
    sim.step()
    assert second.num_cached_tokens == 16
    sim.drain()


def test_requests_of_one_step_share_a_prefix():
    sim = Simulation(budget=100, num_blocks=32)
    for seed in range(3):
        sim.add([1, 2, 3, 4, 5], seed=seed)
    assert sorted(parts(sim.step())) == [(0, 0, 5, True), (1, 4, 1, True), (2, 4, 1, True)]
    sim.drain()


def test_no_part_of_a_step_of_single_tokens_shares_the_block_that_another_completes():
    sim = Simulation(budget=5, num_blocks=32, block_size=2)
    sim.add([1, 2, 3, 4, 5, 6], seed=1)
    sim.add([1, 2, 3, 4, 5, 6, 1], seed=2)
    assert parts(sim.step()) == [(0, 0, 5, False)]
    # The first prompt's last token completes a block; the second one waits for it.
    assert sorted(parts(sim.step())) == [(0, 5, 1, True), (1, 4, 3, True)]
    sim.drain()


def test_a_whole_cached_prompt_computes_its_last_block_again():
    sim = Simulation(num_blocks=32)
    sim.add([1, 2, 3, 4])
    sim.drain()
    again = sim.add([1, 2, 3, 4])
    assert parts(sim.step()) == [(1, 2, 2, True)]
    assert again.num_cached_tokens == 2
    sim.drain()


def test_a_cache_too_small_for_one_sequence_is_refused():
    with pytest.raises(AssertionError, match="lone sequence"):
        Scheduler(BlockManager(3, 4), 1, 8, 13)
