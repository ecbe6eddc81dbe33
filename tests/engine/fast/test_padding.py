"""The inputs of padded steps with prompts."""

import numpy as np
import pytest
import torch

from nanovllm.engine.batch import Batch
from nanovllm.engine.fast.padding import EMPTY_BATCH, PaddedInputs, RunsBucket


def inputs(bucket, max_blocks=5):
    buffer = torch.full((PaddedInputs.num_words(bucket, max_blocks),), -99, dtype=torch.int64)
    return PaddedInputs.of(buffer, bucket, max_blocks)


def batch(tokens, decode_lens, table, runs, contexts, rows):
    return Batch(
        np.asarray(tokens, np.int64), np.asarray(decode_lens, np.int32), np.asarray(table, np.int32), 0, runs, contexts,
        np.asarray(rows, np.int64), np.arange(len(rows)), (),
    )  # fmt: skip


def test_padding_is_a_run_of_its_own():
    got = inputs(RunsBucket(10, 4))
    got.fill(
        batch(
            [[7, -2, 5, 6, 8], [20, 3, 0, 1, 2], [36, 51, 0, 1, 2]], [21, 4], [[9, 2], [3, 0], [0, 0]], (3,), (3,), [0,
            1, 4]
        ),
        padding_block=6, block_size=16,
    )  # fmt: skip
    assert got.tokens.tolist() == [
        [7, -2, 5, 6, 8, 0, 0, 0, 0, 0],
        [20, 3, 0, 1, 2, 0, 0, 0, 0, 0],
        [36, 51, 0, 1, 2, 96, 96, 96, 96, 96],
    ]
    assert got.logits_rows.tolist() == [0, 1, 4, 0]
    assert got.cu_seqlens_q.tolist() == [0, 1, 2, 5, 10, 10]
    assert got.context_lens.tolist() == [21, 4, 3, 5, 1]
    assert got.block_table.tolist() == [[9, 2, 6, 6, 6], [3, 0, 6, 6, 6], [0, 0, 6, 6, 6], [6] * 5, [6] * 5]


def test_a_full_bucket_has_an_empty_run_of_padding():
    got = inputs(RunsBucket(3, 1))
    got.fill(batch([[1, 2, 3]] * 3, [], [[4]], (3,), (9,), []), padding_block=6, block_size=16)
    assert got.cu_seqlens_q.tolist() == [0, 3, 3] and got.context_lens.tolist() == [9, 1]
    assert got.logits_rows.tolist() == [0]


def test_padding_alone():
    got = inputs(RunsBucket(4, 2))
    got.fill(EMPTY_BATCH, padding_block=6, block_size=16)
    assert got.tokens.tolist() == [[0] * 4, [0] * 4, [96] * 4] and got.logits_rows.tolist() == [0, 0]
    assert got.cu_seqlens_q.tolist() == [0, 4, 4, 4] and got.context_lens.tolist() == [4, 1, 1]
    assert (got.block_table == 6).all()


@pytest.mark.parametrize("bucket, max_blocks", [((1, 1), 1), ((37, 5), 3), ((64, 64), 16), ((2048, 64), 17)])
def test_inputs_share_one_buffer_and_no_memory(bucket, max_blocks):
    got = inputs(RunsBucket(*bucket), max_blocks)
    for i, tensor in enumerate(got):
        assert tensor.is_contiguous() and tensor.data_ptr() % 16 == got.tokens.data_ptr() % 16
        tensor.fill_(i)
    assert all((tensor == i).all() for i, tensor in enumerate(got))
