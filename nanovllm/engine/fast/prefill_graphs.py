"""Steps with pieces of prompts, padded to a few sizes and captured as CUDA graphs: one launch instead of some hundred.

Launched one by one, the kernels of such a step take the host 14 to 17 ms (Qwen3-0.6B, H200), whatever the step's size,
and a busy host up to 40 ms. Up to some 5,000 tokens the GPU needs less than 14 ms. A graph has fixed shapes, so a step
is padded to one of a few numbers of tokens, and to one of two bounds on its sequences. How the sequences share the
tokens does not matter: the op `attention_prefill` reads the runs' lengths on the device, and a sequence that decodes is
a run of one token. Graphs are captured when the engine starts: a capture while the engine serves would stall every
sequence for longer than the eager step that the graph replaces.

Where the GPU computes a full step (`max_num_batched_tokens`) in about the time that a busy host needs to launch it,
full steps have a graph as well (`FastPolicy.max_full_step_flops`).
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

import torch

from nanovllm.distributed.group import current_group
from nanovllm.engine.batch import Batch
from nanovllm.engine.fast.cuda_graphs import Graph, GraphBackend
from nanovllm.engine.fast.padding import EMPTY_BATCH, PaddedRuns, RunsBucket
from nanovllm.engine.paged_model import PagedModel

logger = logging.getLogger(__name__)

_MIN_FULL_SHARE = 15 / 16
"""The least share of `max_num_batched_tokens` that a step padded to a full one must have. Below, the padding costs the
GPU more time than the host saves."""


def prefill_buckets(
    max_num_batched_tokens: int, max_num_seqs: int, sizes: Sequence[int], num_seqs: Sequence[int], full: bool = False
) -> list[RunsBucket]:
    """The sizes that a scheduler with these limits needs, in order.

    Args:
        sizes: the sizes of a step in tokens, ascending.
        num_seqs: bounds on a step's sequences.
        full: whether steps of `max_num_batched_tokens` have a bucket too, if `sizes` end below.
    """
    largest = min(sizes[-1], max_num_batched_tokens)
    tokens = [size for size in sizes if size < largest] + [largest]
    if full and max_num_batched_tokens > largest:
        tokens.append(max_num_batched_tokens)
    return [RunsBucket(n, seqs) for n in tokens for seqs in sorted({min(n, max_num_seqs, most) for most in num_seqs})]


class PrefillRunner:
    """Runs steps with pieces of prompts, padded. Steps that no bucket has room for are left to the caller.

    Without `capture` the same padded steps run kernel by kernel, so that both compute the same thing.

    Args:
        largest_usual: buckets of more tokens than this are for full steps.
    """

    def __init__(self, paged: PagedModel, buckets: list[RunsBucket], largest_usual: int) -> None:
        self.buckets = buckets
        self._largest_usual = largest_usual
        self._paged = paged
        self._runs = PaddedRuns(buckets[-1], paged)
        self._graphs: dict[RunsBucket, Graph] = {}
        self._logits: torch.Tensor | None = None

    def __len__(self) -> int:
        """Sizes that are captured."""
        return len(self._graphs)

    def capture(self, logits: torch.Tensor, backend: GraphBackend) -> None:
        """Capture every size; those of full steps only if there is memory for them.

        logits: [max_num_seqs, vocab_size], written by the graphs.
        """
        with self._paged.few_layers():
            backend.first_calls(lambda: self.run_every_shape(logits))
        self._logits = logits
        # The largest first, so that smaller ones fit into the memory that these have.
        for bucket in reversed(self.buckets):
            try:
                self._graphs[bucket] = backend.capture(partial(self.run_padded, bucket, logits))
            except torch.OutOfMemoryError:
                if bucket.num_tokens <= self._largest_usual:
                    raise
                logger.warning(
                    "no memory for a CUDA graph of steps of %d tokens; a lower gpu_memory_utilization leaves some",
                    bucket.num_tokens,
                )
        # A step is padded only to what all ranks have captured: they sum equally many rows.
        smallest, device = current_group().smallest, self._paged.device
        self.buckets = [bucket for bucket in self.buckets if smallest(int(bucket in self._graphs), device)]
        self._graphs = {bucket: self._graphs[bucket] for bucket in self.buckets}

    def run_every_shape(self, logits: torch.Tensor) -> None:
        """Run every size once. logits: as for `capture`."""
        for bucket in self.buckets:
            self._runs.send(EMPTY_BATCH, bucket)
            self.run_padded(bucket, logits)

    def launch(self, batch: Batch) -> torch.Tensor | None:
        """Logits of `batch.logits_rows`, valid until the next step; None, and nothing done, if no bucket has room."""
        bucket = self.fit(batch.num_tokens, max(len(batch.block_table), len(batch.logits_rows)))
        if bucket is None:
            return None
        self._runs.send(batch, bucket)
        graph = self._graphs.get(bucket)
        if graph is None or self._logits is None:
            logits = self.run_padded(bucket)
        else:
            graph.replay()
            logits = self._logits
        return logits[: len(batch.logits_rows)]

    def fit(self, num_tokens: int, num_seqs: int) -> RunsBucket | None:
        """The smallest bucket with room for this many tokens and sequences; None: there is none, or a full step would
        fill too little of its bucket.
        """
        first = bisect_left(self.buckets, num_tokens, key=lambda bucket: bucket.num_tokens)
        bucket = next((bucket for bucket in self.buckets[first:] if bucket.num_seqs >= num_seqs), None)
        if bucket is None or bucket.num_tokens <= self._largest_usual:
            return bucket
        return bucket if num_tokens >= _MIN_FULL_SHARE * bucket.num_tokens else None

    def run_padded(self, bucket: RunsBucket, logits: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [num_seqs, vocab_size] of the static inputs; in the first rows of `logits` if it is given."""
        batch, rows = self._runs.batch(bucket)
        return self._paged.logits(
            self._paged.hidden(batch, rows), None if logits is None else logits[: bucket.num_seqs]
        )
