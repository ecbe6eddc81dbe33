"""Steps that have pieces of prompts in them as CUDA graphs: one launch instead of some hundred kernels.

Launched one by one, the kernels of such a step take the host 14 to 17 ms (Qwen3-0.6B, H200), whatever the step's size;
up to some 5,000 tokens the GPU needs less. A graph has fixed shapes, so a step is padded to one of a few numbers of
tokens, and to one of two bounds on its sequences. How these share the tokens does not matter: the op `attention_prefill` reads
the runs' lengths on the device, and a sequence that decodes is a run of one token. The graphs are captured when the engine
starts: in the middle of serving a capture would stall every sequence for longer than the eager step that it
replaces.

Padding tokens are one more run, an ordinary sequence whose blocks are all the padding block; the sequences that are missing
are empty runs. So no kernel has a special case for padding, nothing that it writes is ever read by anyone else, and its
rows are as finite as all others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch

from nanovllm.engine.batch import Batch, DeviceBatch
from nanovllm.engine.cuda_graph import capture

SIZES = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Tokens of a step to capture. Larger steps keep the GPU busy for as long as the host needs to launch them."""
SEQS = (64, 256)
"""Sequences of a captured step: it computes as many rows of logits, and its attention looks at each, there or not."""
_ALIGNMENT = 2  # int64 words: what kernels are compiled for must not depend on the number of tokens


class PrefillBucket(NamedTuple):
    """What a captured step has room for."""

    num_tokens: int
    num_seqs: int
    """Sequences, and rows whose logits are wanted."""

    @property
    def num_runs(self) -> int:
        return self.num_seqs + 1  # the last one for padding


def prefill_buckets(max_num_batched_tokens: int, max_num_seqs: int) -> list[PrefillBucket]:
    """The sizes that a scheduler with these limits needs, in order."""
    largest = min(SIZES[-1], max_num_batched_tokens)
    sizes = [size for size in SIZES if size < largest] + [largest]
    return [
        PrefillBucket(size, seqs) for size in sizes for seqs in sorted({min(size, max_num_seqs, most) for most in SEQS})
    ]


class PrefillInputs(NamedTuple):
    """A padded step; all are views of one buffer, so that they reach the device in one copy."""

    tokens: torch.Tensor
    """[3, num_tokens] int64: token ids, positions, cache slots, as in `Batch`."""
    logits_rows: torch.Tensor
    """[num_seqs] int64: the rows whose logits are wanted, and then row 0."""
    context_lens: torch.Tensor
    """[num_runs] int32."""
    cu_seqlens_q: torch.Tensor
    """[num_runs + 1] int32; the last is num_tokens."""
    block_table: torch.Tensor
    """[num_runs, max_blocks] int32."""

    @staticmethod
    def num_words(bucket: PrefillBucket, max_blocks: int) -> int:
        """Length of the buffer."""
        return sum(_words(bucket, max_blocks))

    @classmethod
    def of(cls, buffer: torch.Tensor, bucket: PrefillBucket, max_blocks: int) -> PrefillInputs:
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
        """Write a batch and its padding; for inputs on the host."""
        tokens, rows, lens, starts, table = (t.numpy() for t in self)
        num_tokens, num_seqs, capacity = batch.num_tokens, len(batch.block_table), tokens.shape[1]
        padding = capacity - num_tokens
        tokens[:, :num_tokens] = batch.tokens
        tokens[:2, num_tokens:] = 0
        tokens[2, num_tokens:] = padding_block * block_size
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


class PrefillRunner:
    """Runs steps with pieces of prompts in them, padded; those that no bucket has room for are left to the caller.

    Without `capture` the same padded steps run kernel by kernel, so that both compute the same thing.

    Args:
        forward: the hidden states of a batch.
        lm_head: (hidden states, optional output) -> logits.
        max_model_len: a bound on every context length.
        padding_block: a block that no sequence owns.
    """

    def __init__(
        self,
        forward: Callable[[DeviceBatch], torch.Tensor],
        lm_head: Callable[..., torch.Tensor],
        buckets: list[PrefillBucket],
        max_model_len: int,
        block_size: int,
        padding_block: int,
        device: torch.device,
    ) -> None:
        self.buckets = buckets
        self._forward = forward
        self._lm_head = lm_head
        self._block_size = block_size
        self._padding_block = padding_block
        # The padding is a sequence too, at most as long as the largest step.
        self._max_blocks = -(-max(max_model_len, buckets[-1].num_tokens) // block_size)
        words = PrefillInputs.num_words(buckets[-1], self._max_blocks)
        # Steps run in order on one stream: all sizes share the memory of the largest.
        self._static = torch.zeros(words, dtype=torch.int64, device=device)
        self._graphs: dict[PrefillBucket, torch.cuda.CUDAGraph] = {}
        self._logits: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(
        self, logits: torch.Tensor, stream: torch.cuda.Stream, pool: Any, brief: AbstractContextManager[None] | None = None
    ) -> None:  # fmt: skip
        """Capture every size.

        Args:
            logits: [max_num_seqs, vocab_size], written by the graphs. pool: memory of other graphs.
            brief: entered for the first calls before the capture, such as `two_layers`.
        """
        with brief or nullcontext():
            self._prepare(logits, stream)
        # Largest first, so that the smaller ones fit into the memory that the pool already has.
        graphs = {bucket: self._capture(bucket, logits, stream, pool) for bucket in reversed(self.buckets)}
        self._graphs, self._logits = graphs, logits

    def visit(self, logits: torch.Tensor) -> None:
        """Run every size once. logits: as for `capture`."""
        for bucket in self.buckets:
            self._send(_NOTHING, bucket)
            self._run(bucket, logits)

    def _prepare(self, logits: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Run every size once, on the stream that captures: first calls compile kernels and make workspaces."""
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self.visit(logits)
        torch.cuda.synchronize(stream.device)
        torch.cuda.empty_cache()  # graphs have a pool of their own

    def _capture(self, bucket: PrefillBucket, logits: torch.Tensor, stream: torch.cuda.Stream, pool: Any) -> Any:
        return capture(lambda: self._run(bucket, logits), stream, pool)

    def launch(self, batch: Batch) -> torch.Tensor | None:
        """Logits of `batch.logits_rows`, valid until the next step; None, and nothing done, if no bucket has room."""
        bucket = self.fit(batch.num_tokens, max(len(batch.block_table), len(batch.logits_rows)))
        if bucket is None:
            return None
        self._send(batch, bucket)
        graph = self._graphs.get(bucket)
        if graph is None:
            logits = self._run(bucket)
        else:
            graph.replay()
            logits = self._logits
        return logits[: len(batch.logits_rows)]

    def fit(self, num_tokens: int, num_seqs: int) -> PrefillBucket | None:
        """The smallest bucket with room for so many tokens and sequences, or None."""
        first = bisect_left(self.buckets, num_tokens, key=lambda bucket: bucket.num_tokens)
        return next((bucket for bucket in self.buckets[first:] if bucket.num_seqs >= num_seqs), None)

    def _send(self, batch: Batch, bucket: PrefillBucket) -> None:
        """Make the static inputs those of a batch; on CUDA from pinned memory, without waiting for the copy."""
        on_gpu = self._static.device.type == "cuda"
        num_words = PrefillInputs.num_words(bucket, self._max_blocks)
        # The caching allocator does not hand pinned memory out again before the copy has run.
        host = torch.empty(num_words, dtype=torch.int64, pin_memory=on_gpu)
        PrefillInputs.of(host, bucket, self._max_blocks).fill(batch, self._padding_block, self._block_size)
        self._static[:num_words].copy_(host, non_blocking=on_gpu)

    def _run(self, bucket: PrefillBucket, logits: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [num_seqs, vocab_size] of the static inputs; in the first rows of `logits` if it is given."""
        inputs = PrefillInputs.of(self._static, bucket, self._max_blocks)
        # Every bound is the bucket's: tile sizes follow from them, and must hold for any runs.
        batch = DeviceBatch.from_tensors(
            inputs.tokens, inputs.context_lens, inputs.block_table, 0, inputs.cu_seqlens_q, bucket.num_tokens
        )
        hidden = self._forward(batch)[inputs.logits_rows]
        return self._lm_head(hidden, None if logits is None else logits[: bucket.num_seqs])


def _words(bucket: PrefillBucket, max_blocks: int) -> list[int]:
    """int64 words of each of the inputs, in order."""
    small = (bucket.num_runs, bucket.num_runs + 1, bucket.num_runs * max_blocks)
    words = (3 * bucket.num_tokens, bucket.num_seqs, *(-(-n // 2) for n in small))
    return [-(-n // _ALIGNMENT) * _ALIGNMENT for n in words]


_NOTHING = Batch(
    tokens=np.empty((3, 0), np.int64),
    context_lens=np.empty(0, np.int32),
    block_table=np.empty((0, 0), np.int32),
    max_context_len=0,
    prefill_query_lens=(),
    prefill_context_lens=(),
    logits_rows=np.empty(0, np.int64),
    sample_rows=np.empty(0, np.int64),
    prompt_rows=(),
)
"""A step of padding alone."""
