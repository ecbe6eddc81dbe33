"""Runs of tokens of several sequences, padded to a shape that a CUDA graph can have, in static tensors.

Padding tokens are one more run, an ordinary sequence whose blocks are all the padding block. A batch with fewer
sequences than the shape ends with empty runs. So no kernel has a special case for padding, no sequence reads what
padding writes, and the rows of padding are finite.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from nanovllm.engine.batch import Batch, DeviceBatch
from nanovllm.engine.kv_cache import kv_slot
from nanovllm.engine.paged_model import PagedModel

_ALIGNMENT = 2  # int64 words: what kernels are compiled for must not depend on the number of tokens


class RunsBucket(NamedTuple):
    """What a padded shape has room for."""

    num_tokens: int
    num_seqs: int
    """Sequences, and rows whose logits are wanted."""

    @property
    def num_runs(self) -> int:
        return self.num_seqs + 1  # the last one for padding


class PaddedInputs(NamedTuple):
    """Padded runs: views of one buffer, so that all reach the device in one copy."""

    tokens: torch.Tensor
    """[3, num_tokens] int64: token ids, positions, kv_slots, as in `Batch`."""
    logits_rows: torch.Tensor
    """[num_seqs] int64: the rows whose logits are wanted; padded with row 0."""
    context_lens: torch.Tensor
    """[num_runs] int32."""
    cu_seqlens_q: torch.Tensor
    """[num_runs + 1] int32; the last is num_tokens."""
    block_table: torch.Tensor
    """[num_runs, max_blocks] int32."""

    @staticmethod
    def num_words(bucket: RunsBucket, max_blocks: int) -> int:
        """Length of the buffer."""
        return sum(_words(bucket, max_blocks))

    @classmethod
    def of(cls, buffer: torch.Tensor, bucket: RunsBucket, max_blocks: int) -> PaddedInputs:
        """Views of a buffer [at least `num_words`] int64."""
        num_tokens, num_runs = bucket.num_tokens, bucket.num_runs
        words = _words(bucket, max_blocks)
        tokens, rows, lens, starts, table = buffer[: sum(words)].split(words)
        return cls(
            tokens[: 3 * num_tokens].view(3, num_tokens),
            rows[: bucket.num_seqs],
            lens.view(torch.int32)[:num_runs],
            starts.view(torch.int32)[: num_runs + 1],
            table.view(torch.int32)[: num_runs * max_blocks].view(num_runs, max_blocks),
        )

    def fill(self, batch: Batch, padding_block: int, block_size: int) -> None:
        """Write a batch and its padding; for inputs on the host.

        Example: a decode and 4 tokens of a prompt, padded to 8 tokens and 3 sequences. The runs have 1, 4, 3 (padding)
        and 0 tokens, so cu_seqlens_q is 0, 1, 5, 8, 8.
        """
        tokens, rows, lens, starts, table = (t.numpy() for t in self)
        num_tokens, num_seqs, capacity = batch.num_tokens, len(batch.block_table), tokens.shape[1]
        padding = capacity - num_tokens
        tokens[:, :num_tokens] = batch.tokens
        tokens[:2, num_tokens:] = 0
        tokens[2, num_tokens:] = kv_slot(padding_block, 0, block_size)
        rows[: len(batch.logits_rows)] = batch.logits_rows
        rows[len(batch.logits_rows) :] = 0
        lens[:num_seqs] = (*batch.context_lens, *batch.prefill_context_lens)
        lens[num_seqs] = max(1, padding)
        lens[num_seqs + 1 :] = 1
        query_lens = (*(1,) * batch.num_decodes, *batch.prefill_query_lens, padding)
        starts[0] = 0
        starts[1 : num_seqs + 2] = np.cumsum(query_lens)
        starts[num_seqs + 2 :] = capacity
        table[:] = padding_block
        table[:num_seqs, : batch.block_table.shape[1]] = batch.block_table


class PaddedRuns:
    """Static inputs on the device, and what is sent to them.

    Args:
        largest: the bucket that takes most memory.
    """

    def __init__(self, largest: RunsBucket, paged: PagedModel) -> None:
        self._paged = paged
        # The padding is a sequence too, at most as long as the largest bucket.
        self._max_blocks = -(-max(paged.max_model_len, largest.num_tokens) // paged.block_size)
        # Steps run in order on one stream: all sizes share the memory of the largest.
        words = PaddedInputs.num_words(largest, self._max_blocks)
        self._static = torch.zeros(words, dtype=torch.int64, device=paged.device)

    def send(self, batch: Batch, bucket: RunsBucket) -> None:
        """Write a batch to the static inputs; on CUDA from pinned memory, without waiting for the copy."""
        on_gpu = self._static.device.type == "cuda"
        num_words = PaddedInputs.num_words(bucket, self._max_blocks)
        # The caching allocator does not hand pinned memory out again before the copy has run.
        host = torch.empty(num_words, dtype=torch.int64, pin_memory=on_gpu)
        PaddedInputs.of(host, bucket, self._max_blocks).fill(batch, self._paged.padding_block, self._paged.block_size)
        self._static[:num_words].copy_(host, non_blocking=on_gpu)

    def batch(self, bucket: RunsBucket) -> tuple[DeviceBatch, torch.Tensor]:
        """(what the model's forward takes, [num_seqs] int64: the rows whose logits are wanted), views of the static
        inputs.
        """
        inputs = PaddedInputs.of(self._static, bucket, self._max_blocks)
        # Every bound is the bucket's: tile sizes follow from them, and must hold for any runs.
        batch = DeviceBatch.from_tensors(
            inputs.tokens, inputs.context_lens, inputs.block_table, 0, inputs.cu_seqlens_q, bucket.num_tokens
        )
        return batch, inputs.logits_rows


def _words(bucket: RunsBucket, max_blocks: int) -> list[int]:
    """int64 words of each of the inputs, in order."""
    small = (bucket.num_runs, bucket.num_runs + 1, bucket.num_runs * max_blocks)
    words = (3 * bucket.num_tokens, bucket.num_seqs, *(-(-n // 2) for n in small))
    return [-(-n // _ALIGNMENT) * _ALIGNMENT for n in words]


EMPTY_BATCH = Batch.build((), block_size=1)
"""Padding alone."""
