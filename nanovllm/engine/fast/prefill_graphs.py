"""Steps that have pieces of prompts in them as CUDA graphs: one launch instead of some hundred kernels.

Launched one by one, the kernels of such a step take the host 14 to 17 ms (Qwen3-0.6B, H200), whatever the step's size;
up to some 5,000 tokens the GPU needs less. A graph has fixed shapes, so a step is padded to one of a few numbers of
tokens, and to one of two bounds on its sequences. How these share the tokens does not matter: the op `attention_prefill` reads
the runs' lengths on the device, and a sequence that decodes is a run of one token. The graphs are captured when the engine
starts: in the middle of serving a capture would stall every sequence for longer than the eager step that it
replaces.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from nanovllm.engine.batch import Batch, DeviceBatch
from nanovllm.engine.fast.cuda_graphs import capture
from nanovllm.engine.fast.padding import NOTHING, PaddedRuns, RunsBucket
from nanovllm.hardware.cuda_graph_memory import GraphMemory

logger = logging.getLogger(__name__)

SIZES = (64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Tokens of a step to capture. Larger steps keep the GPU busy for as long as the host needs to launch them, unless it is slow."""
LEAST_FULL = 15 / 16
"""The share of its tokens that a step beyond these sizes must have, or its padding takes the GPU longer than the host saves."""
MOST_FULL_FLOPS = 2**44
"""Of the layers in a step beyond these sizes, to capture it unasked: 30 ms at an H100's 600 TFLOP/s, and a slow host takes about 40 to
launch it. At 16,384 tokens Qwen3-0.6B has 1.44e13, Qwen3-1.7B 4.6e13: for long enough to hide any host that was seen. On a slower GPU the
graph gains nothing, and costs memory."""
SEQS = (64, 256)
"""Sequences of a captured step: it computes as many rows of logits, and its attention looks at each, there or not."""


def prefill_buckets(max_num_batched_tokens: int, max_num_seqs: int, full: bool = False) -> list[RunsBucket]:
    """The sizes that a scheduler with these limits needs, in order; with `full` also that of its largest steps."""
    largest = min(SIZES[-1], max_num_batched_tokens)
    sizes = [size for size in SIZES if size < largest] + [largest]
    if full and max_num_batched_tokens > largest:
        sizes.append(max_num_batched_tokens)
    return [
        RunsBucket(size, seqs) for size in sizes for seqs in sorted({min(size, max_num_seqs, most) for most in SEQS})
    ]


def slow_hosts_lag(layers: torch.nn.Module, num_tokens: int) -> bool:
    """Whether the GPU may have computed so many tokens in a model's layers before a slow host has launched their kernels."""
    weights = sum(parameter.numel() for parameter in layers.parameters())
    return 2 * weights * num_tokens <= MOST_FULL_FLOPS


class PrefillRunner:
    """Runs steps with pieces of prompts in them, padded; those that no bucket has room for are left to the caller.

    Without `capture` the same padded steps run kernel by kernel, so that both compute the same thing.

    Args:
        forward: the hidden states of some rows of a batch.
        lm_head: (hidden states, optional output) -> logits.
        max_model_len: a bound on every context length.
        padding_block: a block that no sequence owns.
    """

    def __init__(
        self,
        forward: Callable[[DeviceBatch, torch.Tensor], torch.Tensor],
        lm_head: Callable[..., torch.Tensor],
        buckets: list[RunsBucket],
        max_model_len: int,
        block_size: int,
        padding_block: int,
        device: torch.device,
    ) -> None:
        self.buckets = buckets
        self._forward = forward
        self._lm_head = lm_head
        self._runs = PaddedRuns(buckets[-1], max_model_len, block_size, padding_block, device)
        self._graphs: dict[RunsBucket, torch.cuda.CUDAGraph] = {}
        self._logits: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self._graphs)

    def capture(
        self, logits: torch.Tensor, stream: torch.cuda.Stream, memory: GraphMemory, brief: AbstractContextManager[None] | None = None
    ) -> None:  # fmt: skip
        """Capture every size, of the sizes beyond `SIZES` only those that there is memory for.

        Args:
            logits: [max_num_seqs, vocab_size], written by the graphs. memory: of other graphs.
            brief: entered for the first calls before the capture, such as `two_layers`.
        """
        with brief or nullcontext():
            self._prepare(logits, stream)
        graphs, too_large = {}, None
        for bucket in reversed(
            self.buckets
        ):  # largest first, so that the smaller ones fit into what the memory already has
            if bucket.num_tokens == too_large:
                continue
            try:
                graphs[bucket] = self._capture(bucket, logits, stream, memory)
            except torch.OutOfMemoryError:
                if bucket.num_tokens <= SIZES[-1]:
                    raise
                too_large = bucket.num_tokens
                logger.warning(
                    "no memory for a CUDA graph of steps of %d tokens; a lower gpu_memory_utilization leaves some",
                    bucket.num_tokens,
                )
        self.buckets = [bucket for bucket in self.buckets if bucket in graphs]
        self._graphs, self._logits = graphs, logits

    def visit(self, logits: torch.Tensor) -> None:
        """Run every size once. logits: as for `capture`."""
        for bucket in self.buckets:
            self._runs.send(NOTHING, bucket)
            self._run(bucket, logits)

    def _prepare(self, logits: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Run every size once, on the stream that captures: first calls compile kernels and make workspaces."""
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            self.visit(logits)
        torch.cuda.synchronize(stream.device)
        torch.cuda.empty_cache()  # graphs have memory of their own

    def _capture(self, bucket: RunsBucket, logits: torch.Tensor, stream: torch.cuda.Stream, memory: GraphMemory) -> Any:
        return capture(lambda: self._run(bucket, logits), stream, memory)

    def launch(self, batch: Batch) -> torch.Tensor | None:
        """Logits of `batch.logits_rows`, valid until the next step; None, and nothing done, if no bucket has room."""
        bucket = self.fit(batch.num_tokens, max(len(batch.block_table), len(batch.logits_rows)))
        if bucket is None:
            return None
        self._runs.send(batch, bucket)
        graph = self._graphs.get(bucket)
        if graph is None:
            logits = self._run(bucket)
        else:
            graph.replay()
            logits = self._logits
        return logits[: len(batch.logits_rows)]

    def fit(self, num_tokens: int, num_seqs: int) -> RunsBucket | None:
        """The smallest bucket with room for so many tokens and sequences, or None; a large one only for a step that fills it."""
        first = bisect_left(self.buckets, num_tokens, key=lambda bucket: bucket.num_tokens)
        bucket = next((bucket for bucket in self.buckets[first:] if bucket.num_seqs >= num_seqs), None)
        if bucket is None or bucket.num_tokens > SIZES[-1] and num_tokens < LEAST_FULL * bucket.num_tokens:
            return None
        return bucket

    def _run(self, bucket: RunsBucket, logits: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [num_seqs, vocab_size] of the static inputs; in the first rows of `logits` if it is given."""
        batch, rows = self._runs.batch(bucket)
        return self._lm_head(self._forward(batch, rows), None if logits is None else logits[: bucket.num_seqs])
