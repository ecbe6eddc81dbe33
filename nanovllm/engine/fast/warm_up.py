"""What an engine runs when it starts, so that no kernel is compiled while it serves: steps of every kind."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable

import torch

from nanovllm.distributed.group import current_group
from nanovllm.engine.batch import DeviceBatch
from nanovllm.engine.fast.step_shape import DecodeBuckets
from nanovllm.engine.kv_cache import kv_slot
from nanovllm.engine.model_setup import StepLimits
from nanovllm.engine.paged_model import PagedModel
from nanovllm.engine.sampler import Sampler, SamplingMetadata, SamplingRow
from nanovllm.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

SMALL_BATCHES: tuple[tuple[int, tuple[int, ...]], ...] = (
    (0, (3,)), (0, (16, 16)), (1, (3,)), (5, (2, 9)), (16, (16,)), (5, (40,)), (0, (100,)), (0, (100, 100)),
    (0, (100,) * 9), (0, (64,) * 65), (0, (1024,)),
)  # fmt: skip
"""(number of decodes, lengths of the runs of tokens) of each batch.

Triton compiles variants for the integer 1 and for multiples of 16, so the numbers of decodes and runs are 1, 16 and
others. Attention has a kernel for each padded number of long runs (`padded_count`). One batch has 4,160 tokens, since a
product has another kernel from 4,096 on."""


class WarmUp:
    """Runs steps on the padding block.

    Args:
        buckets: the sizes to which the wanted rows are padded.
    """

    def __init__(self, paged: PagedModel, sampler: Sampler, buckets: DecodeBuckets, limits: StepLimits) -> None:
        self._paged = paged
        self._sampler = sampler
        self._buckets = buckets
        self._limits = limits

    def compile_kernels(self, captured_steps: list[Callable[[], None]]) -> None:
        """Compile what steps will launch, several kernels at a time, before they are run one by one and captured.

        A few layers stand for all.

        Args:
            captured_steps: each runs all steps of a kind that will be captured.
        """
        from nanovllm.kernels.triton.parallel_compile import compiling_only

        sizes = [size for size in self._buckets.batch_sizes if size <= self._limits.max_num_batched_tokens - 3]
        try:
            with torch.inference_mode(), self._paged.few_layers(), compiling_only():
                for run_every_shape in captured_steps:
                    run_every_shape()
                # Steps that are too large for a graph: decodes have attention of their own there, with a plan for each
                # size.
                self._run([*SMALL_BATCHES, *((size, (3,)) for size in sizes)])
            state = "are compiled"
        except Exception as e:
            logger.info("kernels are compiled one after the other: %s: %s", type(e).__name__, e)
            state = f"are not compiled ahead: {type(e).__name__}"
        # A rank that has failed alone left out sums over the ranks, for which the others' GPUs wait.
        current_group().barrier(f"its kernels {state}")
        self._synchronize()

    def run(self) -> None:
        """Run small batches with runs of tokens, of every kind, and sample from each kind of logits."""
        with self._paged.few_layers():
            self._run(list(SMALL_BATCHES))
        device, config = self._paged.device, self._paged.model.config
        # Sampling kernels have a variant for few rows, which start before their predecessor has ended, and one for
        # many.
        hidden = torch.zeros(40, config.hidden_size, dtype=self._paged.model.dtype, device=device)
        mask = torch.full((1, -(-config.vocab_size // 32)), -1, dtype=torch.int32, device=device)
        first_row = torch.zeros(1, dtype=torch.int64, device=device)
        filters = SamplingParams(top_k=min(10, config.vocab_size), top_p=0.9, min_p=0.01)
        for params in (SamplingParams(temperature=0), SamplingParams(), filters):
            for num_rows in {min(n, self._limits.max_num_seqs) for n in (1, 3, 16, 40)}:
                rows = [SamplingRow(params, seed=0, position=0, seq_slot=i) for i in range(num_rows)]
                logits = self._paged.logits(hidden[:num_rows])
                for given in (logits, logits.float()):  # penalties leave float32
                    self._sampler.mask_op(given, mask, first_row)
                    self._sampler(given, SamplingMetadata.build(rows, device))
        self._synchronize()

    def _synchronize(self) -> None:
        if self._paged.device.type == "cuda":
            torch.cuda.synchronize(self._paged.device)

    def _run(self, batches: list[tuple[int, tuple[int, ...]]]) -> None:
        """Run batches of (decodes, runs of tokens)."""
        paged, limits, device = self._paged, self._limits, self._paged.device
        for num_decodes, runs in batches:
            num_tokens = num_decodes + sum(runs)
            if num_tokens > limits.max_num_batched_tokens or max(runs) > limits.max_model_len:
                continue
            tokens = torch.zeros(3, num_tokens, dtype=torch.int64, device=device)
            tokens[2] = kv_slot(paged.padding_block, 0, paged.block_size)
            lens = torch.tensor((*(1 for _ in range(num_decodes)), *runs), dtype=torch.int32, device=device)
            num_blocks = -(-max(runs) // paged.block_size)
            table = torch.full((len(lens), num_blocks), paged.padding_block, dtype=torch.int32, device=device)
            starts = torch.tensor((0, *itertools.accumulate(runs)), dtype=torch.int32, device=device)
            bound = 1 if self._buckets.by_context else limits.max_model_len
            # As many rows are wanted as there are sequences.
            rows = self._buckets.fit(min(len(lens), limits.max_num_seqs), 1)[0]
            wanted = torch.zeros(rows, dtype=torch.int64, device=device)
            paged.hidden(DeviceBatch.from_tensors(tokens, lens, table, bound, starts, max(runs)), wanted)
