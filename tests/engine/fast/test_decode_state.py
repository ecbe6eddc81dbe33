"""The decode state: every row of every step of random load is what the step means, whatever came and went before."""

import random

import numpy as np
import pytest
import torch

from nanovllm.engine.fast.decode_rows import advance_rows
from nanovllm.engine.fast.decode_state import DecodeState, SamplingMode
from nanovllm.engine.paged_model import PagedModel
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import ScheduledSequence, ScheduledStep, StepKind
from nanovllm.layers.attention import LayerCache
from nanovllm.sampling_params import SamplingParams
from tests.devices import DEVICES
from tests.engine.simulation import Device, Simulation, random_load

MAX_SEQS = 6
PADDING = 99


def paged_model(device="cpu", max_blocks=8, block_size=4, max_num_seqs=MAX_SEQS):
    """A cache without a model."""
    cache = LayerCache(*torch.zeros(2, PADDING + 1, block_size, 1, 1, device=device))
    return PagedModel(None, [cache], max_num_seqs, max_blocks * block_size)


def make_state(device="cpu", kind=DecodeState, **sizes):
    paged = paged_model(device, **sizes)
    state = kind(paged)
    state.last_tokens = paged.last_tokens
    return state


def make(blocks, length, prompt_len=1, seed=0, **params):
    seq = Sequence(0, list(range(100, 100 + length)), SamplingParams(**params), seed)
    seq.prompt_len = prompt_len
    seq.block_table = list(blocks)
    return seq


def step_of(*entries):
    """entries: (sequence, seq_slot, start)"""
    return ScheduledStep.of(tuple(ScheduledSequence(seq, start, 1, True, slot, False) for seq, slot, start in entries))


def is_padding(state, row):
    batch = state.batch(row + 1, 1)
    return (
        batch.metadata.slot_mapping[row] == PADDING * state.block_size
        and batch.metadata.context_lens[row] == 1
        and batch.positions[row] == 0
        and batch.metadata.block_table[row, 0] == PADDING  # it has one token: what follows is not read
        and state.sampling_arguments(row + 1, True)[0][row] == 0
    )


# ------------------------------------------------------------------------------------------------ by hand


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_is_what_its_sequence_needs(device):
    state = make_state(device)
    known = make([3, 1], 6, seed=2**64 - 1, temperature=0.5, top_k=7, top_p=0.75, min_p=0.25)
    pending = make([5], 3, seed=5, temperature=1e300)
    state.last_tokens[4] = 77
    assert state.place(step_of((known, 2, 5), (pending, 4, 3))).tolist() == [0, 1]
    batch = state.batch(3, 16)
    m = batch.metadata
    assert batch.token_ids[:2].tolist() == [105, 77] and batch.positions[:2].tolist() == [5, 3]
    assert m.slot_mapping[:2].tolist() == [1 * 4 + 1, 5 * 4 + 3] and m.context_lens[:2].tolist() == [6, 4]
    assert m.block_table[:2].tolist() == [[3, 1] + [PADDING] * 6, [5] + [PADDING] * 7]
    assert (m.num_decodes, m.max_context_len, m.cu_seqlens_q) == (3, 16, None)
    temperature, top_k, top_p, min_p, seeds, draws = state.sampling_arguments(2, True)
    assert temperature.tolist() == [0.5, torch.finfo(torch.float32).max] and top_k.tolist() == [7, 0]
    assert top_p.tolist() == [0.75, 1] and min_p.tolist() == [0.25, 0]
    assert seeds.tolist() == [-1, 5] and draws.tolist() == [6, 4]
    assert state.sampling_arguments(2, False)[1:4] == (None, None, None)
    assert state.max_context_len == 6 and state.sampling_mode is SamplingMode.FILTERED
    assert is_padding(state, 2)


class SendingState(DecodeState):
    """Remembers which rows were sent, and can be interrupted before it sends."""

    interrupted = False

    def send(self, rows):
        if self.interrupted:
            raise KeyboardInterrupt
        self.__dict__.setdefault("sent", []).append(rows)
        super().send(rows)


def test_nothing_is_sent_while_nothing_changes():
    state = make_state(kind=SendingState)
    first, second = make([3], 2), make([5], 1)
    step = step_of((first, 2, 1), (second, 4, 0))
    assert state.place(step).tolist() == [0, 1]
    for _ in range(2):
        state.advance(torch.tensor([1, 2]))
        state.advance_mirror()
        step = step.next()
        assert state.place(step).tolist() == [0, 1] and state.sent == [[0, 1]]
    first.block_table.append(7)
    state.advance(torch.tensor([1, 2]))
    state.advance_mirror()
    step = step.next()
    state.place(step)
    assert state.sent == [[0, 1], [0]]
    assert state.batch(2, 16).metadata.slot_mapping.tolist() == [28, 23]
    assert state.batch(2, 16).token_ids.tolist() == [1, 2]


@pytest.mark.parametrize("anew", [False, True])
def test_blocks_reserved_ahead_go_with_what_has_to_be_sent(anew):
    state = make_state(kind=SendingState)
    first, second, third = make([3], 3), make([5], 1), make([6], 1)
    step = step_of((first, 2, 2), (second, 4, 0), (third, 1, 0))
    state.place(step)
    for position in (1, 2):
        second.block_table.append(7 + position)  # nobody needs them yet, so nobody hears of them
        state.advance(torch.tensor([1, 2, 3]))
        state.advance_mirror()
        step = step_of((first, 2, 2 + position), (second, 4, position), (third, 1, position)) if anew else step.next()
        if position == 2:
            first.block_table.append(7)
        state.place(step)
        assert state.sent == ([[0, 1, 2]] if position == 1 else [[0, 1, 2], [0, 1]])
    batch = state.batch(3, 16)
    assert batch.metadata.block_table[:3, :3].tolist() == [[3, 7, PADDING], [5, 8, 9], [6, PADDING, PADDING]]
    assert batch.token_ids.tolist() == [1, 2, 3] and batch.metadata.slot_mapping.tolist() == [28, 22, 26]


def test_after_a_failure_no_row_is_what_it_was():
    """A row that was to become padding when the step failed would go on writing to blocks that others have by then."""
    state = make_state(kind=SendingState)
    seqs = [make([i], 2) for i in range(5)]
    state.place(step_of(*((seq, i, 1) for i, seq in enumerate(seqs))))
    state.advance(torch.arange(5))
    state.advance_mirror()
    state.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        state.place(step_of((seqs[3], 3, 1)))  # sent, since the row was advanced
    state.interrupted = False
    state.reset()
    assert state.place(step_of((seqs[4], 4, 1))).tolist() == [0]
    assert state.batch(1, 9).token_ids.tolist() == [101] and state.num_rows == 1
    assert all(is_padding(state, row) for row in range(1, MAX_SEQS))


@pytest.mark.parametrize(
    "params, mode",
    [
        (dict(temperature=0, top_k=3), SamplingMode.GREEDY),
        (dict(), SamplingMode.PLAIN),
        (dict(min_p=0.1), SamplingMode.FILTERED),
        (dict(temperature=0, frequency_penalty=0.1), SamplingMode.GENERAL),
        (dict(logprobs=0), SamplingMode.GENERAL),
    ],
)
def test_the_most_demanding_row_decides(params, mode):
    state = make_state()
    greedy, other = make([3], 3, temperature=0), make([5], 3, **params)
    state.place(step_of((greedy, 0, 2), (other, 1, 2)))
    assert state.sampling_mode is mode
    state.place(step_of((greedy, 0, 2)))
    assert state.sampling_mode is SamplingMode.GREEDY


def test_bans_end_where_min_tokens_is_reached():
    state = make_state()
    seq = make([3, 4], 3, prompt_len=2, min_tokens=3, stop_token_ids=[1])
    seq.stop_ids = frozenset({1})
    step = step_of((seq, 0, 2))  # the output's second token follows
    modes = []
    for _ in range(3):
        state.place(step)
        modes.append(state.sampling_mode)
        state.advance(torch.tensor([9]))
        state.advance_mirror()
        step = step.next()
    assert modes == [SamplingMode.GENERAL, SamplingMode.GENERAL, SamplingMode.PLAIN]


def advanced(advance, device, n, ring, steps=3):
    """Everything that three steps of random rows leave behind, and what they left for the host."""
    generator = torch.Generator().manual_seed(n)
    draw = lambda high, *shape: torch.randint(high, shape, generator=generator)  # noqa: E731
    ints = draw(2**40, 7, 700)
    ints[1] = draw(40 * 16, 700)
    ints[5] = torch.randperm(700, generator=generator)
    ints[6] = draw(2, 700)
    table, lens, last = draw(1000, 700, 37).int(), draw(600, 700).int(), torch.zeros(701, dtype=torch.int64)
    ints, lens, table, last, count = (t.to(device) for t in (ints, lens, table, last, torch.tensor([6])))
    host = torch.full((4, 700), -1, pin_memory=device == "cuda")
    for step in range(steps):
        tokens = torch.arange(n, device=device) + step
        advance(tokens, ints[:, :n], lens[:n], table[:n], last, 16, *((host, count) if ring else ()))
    if device == "cuda":
        torch.cuda.synchronize()
    return [t.cpu() for t in (ints, lens, table, last, count, host)]


def test_the_reference_leaves_the_tokens_in_one_cell_after_the_other():
    *_, count, host = advanced(advance_rows, "cpu", 5, True)
    assert count == 9 and (host[1] == -1).all() and (host[:, 5:] == -1).all()
    assert [host[cell, :5].tolist() for cell in (2, 3, 0)] == [[step + i for i in range(5)] for step in range(3)]
    *_, count, host = advanced(advance_rows, "cpu", 5, False)
    assert count == 6 and (host == -1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("n", [1, 5, 128, 512, 700])
def test_the_kernel_advances_as_the_reference_does(n, ring):
    from nanovllm.kernels.triton.sampling import advance

    expected = advanced(advance_rows, "cpu", n, ring)
    assert all(torch.equal(a, b) for a, b in zip(expected, advanced(advance.advance_rows, "cuda", n, ring)))


# ------------------------------------------------------------------------------------------------ under load


class StateDevice(Device):
    """Takes what every row computes from a DecodeState, and compares it with what the step means."""

    def __init__(self, block_size, max_blocks):
        super().__init__(block_size)
        self.state = make_state(kind=SendingState, block_size=block_size, max_blocks=max_blocks)
        self.steps = 0

    def execute(self, step):
        state = self.state
        if not step.continues:
            for part in step.parts:
                if part.admitted:
                    state.forget(part.seq_slot)
        if step.kind is StepKind.DECODE:
            self.steps += 1
            rows = state.place(step).tolist()
            assert sorted(rows) == list(range(len(step.parts))) and state.num_rows == len(rows)
            batch = state.batch(MAX_SEQS, 1)
            seeds, draws = state.sampling_arguments(MAX_SEQS, False)[4:]
            for row, part in zip(rows, step.parts):
                truth = self._truth(part.seq).upto(part.start + 1).tokens
                assert batch.token_ids[row] == truth[part.start] and batch.positions[row] == part.start
                assert batch.metadata.slot_mapping[row] == self.cell(part.seq, part.start)
                assert batch.metadata.context_lens[row] == part.start + 1 == draws[row]
                num_blocks = part.start // self.block_size + 1
                assert batch.metadata.block_table[row, :num_blocks].tolist() == part.seq.block_table[:num_blocks]
                assert seeds[row] == part.seq.seed and state.seqs[row] is part.seq
            assert all(is_padding(state, row) for row in range(len(rows), MAX_SEQS))
        tokens = super().execute(step)
        if step.kind is StepKind.DECODE:
            drawn = np.full(min(MAX_SEQS, len(rows) + 1), 12345)  # a padding row draws something too
            drawn[rows] = tokens
            state.advance(torch.from_numpy(drawn))
            state.advance_mirror()
            assert state.tokens()[rows].tolist() == tokens
        else:
            for part, token in zip((p for p in step.parts if p.samples), tokens):
                state.last_tokens[part.seq_slot] = token
        return tokens


@pytest.mark.parametrize("seed", range(60))
def test_every_row_under_random_load(seed):
    rng = random.Random(seed)
    block_size = rng.randint(1, 4)
    max_blocks = -(-24 // block_size)
    sim = Simulation(
        block_size=block_size, max_model_len=24, num_blocks=max_blocks + rng.randint(0, 10),
        max_num_seqs=rng.randint(1, MAX_SEQS), budget=rng.randint(2, 30), steps_ahead=rng.randint(0, 1),
    )  # fmt: skip
    sim.device = StateDevice(block_size, max_blocks)
    random_load(sim, rng)
    assert sim.device.steps
