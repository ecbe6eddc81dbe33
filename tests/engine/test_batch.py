"""From a scheduled step to arrays: small cases by hand, and every step of random load against the simulated device."""

import random

import numpy as np
import pytest
import torch

from nanovllm.engine.batch import Batch, DeviceBatch, resolve_tokens, to_device_together
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import ScheduledSequence
from nanovllm.sampling_params import SamplingParams
from tests.devices import DEVICES
from tests.engine.simulation import Device, Simulation, random_load


def make(token_ids, blocks, prompt_len=None, **params):
    seq = Sequence(0, list(token_ids), SamplingParams(**params), seed=0)
    seq.prompt_len = len(token_ids) if prompt_len is None else prompt_len
    seq.block_table = list(blocks)
    return seq


def build(*parts, block_size=4):
    """parts: (sequence, start, number of tokens, samples), in seq_slots 0, 1, ..."""
    scheduled = [ScheduledSequence(seq, s, n, samples, i, False) for i, (seq, s, n, samples) in enumerate(parts)]
    return Batch.build(scheduled, block_size)


# ------------------------------------------------------------------------------------------------ by hand


def test_decodes_come_first_then_runs_of_tokens():
    decode = make([10, 11, 12, 13, 14, 15], [3, 1])
    pending = make([20, 21], [5])
    chunk = make([30, 31, 32, 33, 34, 35, 36, 37, 38, 39], [7, 2, 9])
    batch = build((decode, 5, 1, True), (pending, 2, 1, True), (chunk, 3, 4, False))
    assert batch.tokens.tolist() == [
        [15, -2, 33, 34, 35, 36],
        [5, 2, 3, 4, 5, 6],
        [1 * 4 + 1, 5 * 4 + 2, 7 * 4 + 3, 2 * 4, 2 * 4 + 1, 2 * 4 + 2],
    ]
    assert batch.context_lens.tolist() == [6, 3] and batch.max_context_len == 6
    assert batch.block_table.tolist() == [[3, 1], [5, 0], [7, 2]]
    assert batch.prefill_query_lens == (4,) and batch.prefill_context_lens == (7,)
    assert batch.logits_rows.tolist() == [0, 1] and batch.sample_rows.tolist() == [0, 1]
    assert (batch.num_tokens, batch.num_decodes, batch.decode_only) == (6, 2, False)
    assert batch.tokens.dtype == batch.logits_rows.dtype == np.int64
    assert batch.block_table.dtype == batch.context_lens.dtype == np.int32


def test_tokens_of_the_step_before_are_resolved_by_slot():
    last = torch.tensor([100, 101, 102])
    assert resolve_tokens(torch.tensor([5, -1, 0, -3, -2]), last).tolist() == [5, 100, 0, 102, 101]


def test_on_the_device():
    batch = build((make(range(6), [3, 1]), 5, 1, True), (make(range(3), [5]), 0, 3, True))
    device = DeviceBatch.from_host(batch, torch.device("cpu"))
    assert (
        device.token_ids.tolist() == batch.tokens[0].tolist() and device.positions.tolist() == batch.tokens[1].tolist()
    )
    m = device.metadata
    assert m.slot_mapping.tolist() == batch.tokens[2].tolist() and m.block_table.tolist() == batch.block_table.tolist()
    assert m.context_lens.tolist() == [6, 3] and m.num_decodes == 1 and m.max_context_len == 6
    assert m.cu_seqlens_q.tolist() == [0, 3] and m.max_query_len == 3


# ------------------------------------------------------------------------------------------------ under load


class BatchDevice(Device):
    """Takes tokens, positions, cache cells and contexts from `Batch`, and compares them with what the step means."""

    def execute(self, step):
        batch = Batch.build(step.parts, self.block_size)
        last_tokens = torch.tensor([self.last_tokens.get(slot, -(10**6)) for slot in range(8)])
        tokens = resolve_tokens(torch.from_numpy(batch.tokens[0]), last_tokens).tolist()
        row = 0
        logits_rows = batch.logits_rows.tolist()
        sampled_from = [logits_rows[i] for i in batch.sample_rows]
        for i, part in enumerate(step.parts):
            positions = range(part.start, part.start + part.num_tokens)
            truth = self._truth(part.seq).upto(positions.stop).tokens
            rows = slice(row, row + part.num_tokens)
            row += part.num_tokens
            assert tokens[rows] == truth[part.start : positions.stop]
            assert batch.tokens[1, rows].tolist() == list(positions)
            assert batch.tokens[2, rows].tolist() == [self.cell(part.seq, p) for p in positions]
            num_blocks = -(-positions.stop // self.block_size)
            assert batch.block_table[i, :num_blocks].tolist() == part.seq.block_table[:num_blocks]
            if i < batch.num_decodes:
                assert part.num_tokens == 1 and batch.context_lens[i] == positions.stop <= batch.max_context_len
            else:
                j = i - batch.num_decodes
                assert (batch.prefill_query_lens[j], batch.prefill_context_lens[j]) == (part.num_tokens, positions.stop)
            if part.samples:
                assert sampled_from.pop(0) == row - 1
            wanted = [(first, n) for p, first, n in batch.prompt_rows if p is part]
            if part.seq.params.prompt_logprobs is None:
                assert not wanted and not set(range(rows.start, rows.stop - part.samples)) & set(logits_rows)
            elif part.start < part.seq.prompt_len:
                ((first, n),) = wanted
                assert logits_rows[first : first + n] == list(range(rows.start, rows.start + n))
                assert n == min(positions.stop, part.seq.prompt_len - 1) - part.start
        assert not sampled_from and row == batch.num_tokens == step.num_tokens
        return super().execute(step)


@pytest.mark.parametrize("device", DEVICES)
def test_arrays_of_odd_lengths_and_transposed_ones_arrive_together(device):
    arrays = [
        np.arange(6, dtype=np.int64).reshape(2, 3).T, np.array([1, -2, 2**31 - 1], np.int32), np.zeros(0, np.int32),
        np.array([[0.5], [-1.5], [np.inf]], np.float32), np.array([-(2**62)], np.int64),
    ]  # fmt: skip
    tensors = to_device_together(arrays, torch.device(device))
    for array, tensor in zip(arrays, tensors):
        assert (tensor.device.type, tuple(tensor.shape)) == (device, array.shape)
        assert tensor.dtype == torch.from_numpy(array).dtype and np.array_equal(tensor.cpu().numpy(), array)
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1


@pytest.mark.parametrize("seed", range(40))
def test_every_step_of_random_load(seed):
    rng = random.Random(seed)
    block_size = rng.randint(1, 4)
    sim = Simulation(
        block_size=block_size, max_model_len=24, num_blocks=-(-24 // block_size) + rng.randint(0, 4),
        max_num_seqs=rng.randint(1, 5), budget=rng.randint(2, 12), steps_ahead=rng.randint(0, 1),
    )  # fmt: skip
    sim.device = BatchDevice(block_size)
    random_load(sim, rng)
