"""Decode steps as CUDA graphs: one launch instead of one for each kernel.

A graph has fixed shapes, so there is one for each of a few batch sizes, and a batch is padded to the next larger one. The
reference's attention does work in proportion to the bound on the context length, so for it there are a few of these
bounds as well; a kernel that reads the lengths on the device needs only the largest. All graphs are captured when the
engine starts, in one memory pool.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import torch

from nanovllm.engine.batch import Batch, DeviceBatch


def batch_buckets(max_num_seqs: int) -> list[int]:
    """Batch sizes to capture: 1, 2, 4, 8, then steps of about an eighth; the last is `max_num_seqs`, so none is missed."""
    sizes = {s for s in (1, 2, 4, 8) if s < max_num_seqs}
    size = 16
    while size < max_num_seqs:
        sizes.add(size)
        size += 16 if size < 256 else 32 if size < 512 else size // 8
    return sorted(sizes | {max_num_seqs})


def context_buckets(max_model_len: int) -> list[int]:
    """Bounds on the context length: powers of two from 512; the last is `max_model_len`."""
    sizes = []
    size = 512
    while size < max_model_len:
        sizes.append(size)
        size *= 2
    return [*sizes, max_model_len]


class DecodeBuckets:
    """The sizes that decode batches are padded to, with or without graphs, so that both compute the same thing.

    Args:
        by_context: whether attention costs what the bound on the context length says, not what the lengths are.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, by_context: bool = True) -> None:
        self.by_context = by_context
        self.batch_sizes = batch_buckets(max_num_seqs)
        self.context_lens = context_buckets(max_model_len) if by_context else [max_model_len]

    def fit(self, num_seqs: int, max_context_len: int) -> tuple[int, int]:
        """The smallest (batch size, context length) that holds a batch."""
        return (
            self.batch_sizes[bisect_left(self.batch_sizes, num_seqs)],
            self.context_lens[bisect_left(self.context_lens, max_context_len)],
        )


class DecodeGraphs:
    """Captured decode forward passes over static input buffers.

    Args:
        forward: the pass to capture: DeviceBatch -> hidden states [batch size, hidden_size]. It may read and write
            other static device state; it must not depend on host values that change.
        hidden: [max batch size, hidden_size], the buffer that all graphs write their result to.
        buckets: which sizes to capture.
        max_blocks: columns of the widest block table.
        padding_block: a block that no sequence owns.
    """

    def __init__(
        self,
        forward: Callable[[DeviceBatch], torch.Tensor],
        hidden: torch.Tensor,
        buckets: DecodeBuckets,
        max_blocks: int,
        block_size: int,
        padding_block: int,
    ) -> None:
        device = hidden.device
        max_rows = buckets.batch_sizes[-1]
        self._tokens = torch.zeros(3, max_rows, dtype=torch.int64, device=device)
        self._tokens[2] = padding_block * block_size
        self._context_lens = torch.ones(max_rows, dtype=torch.int32, device=device)
        self._block_table = torch.full((max_rows, max_blocks), padding_block, dtype=torch.int32, device=device)
        self._hidden = hidden
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        pool = None
        stream = torch.cuda.Stream(device)
        # Largest first, so that the smaller ones fit into the memory that the pool already has.
        for rows in reversed(buckets.batch_sizes):
            for context_len in reversed(buckets.context_lens):
                batch = DeviceBatch.from_tensors(
                    self._tokens[:, :rows],
                    self._context_lens[:rows],
                    self._block_table[:rows, : -(-context_len // block_size)],
                    context_len,
                )
                if pool is None:
                    stream.wait_stream(torch.cuda.current_stream(device))
                    with torch.cuda.stream(stream):
                        forward(batch)  # creates library handles and workspaces outside of the capture
                    torch.cuda.current_stream(device).wait_stream(stream)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    hidden[:rows] = forward(batch)
                pool = pool or graph.pool()
                self._graphs[rows, context_len] = graph
        torch.cuda.synchronize(device)

    def __len__(self) -> int:
        return len(self._graphs)

    def replay(self, batch: Batch) -> torch.Tensor:
        """Run a padded batch; returns hidden states [num_tokens, hidden_size], valid until the next replay."""
        rows = batch.num_tokens
        for buffer, array in (
            (self._tokens[:, :rows], batch.tokens),
            (self._context_lens[:rows], batch.context_lens),
            (self._block_table[:rows, : batch.block_table.shape[1]], batch.block_table),
        ):
            buffer.copy_(torch.from_numpy(array).pin_memory(), non_blocking=True)
        self._graphs[rows, batch.max_context_len].replay()
        return self._hidden[:rows]
