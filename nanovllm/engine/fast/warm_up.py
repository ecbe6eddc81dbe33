"""What a GPU engine runs when it starts: the largest steps, to see how much memory they take, and steps of every kind."""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from nanovllm.engine import kv_cache
from nanovllm.engine.batch import DeviceBatch
from nanovllm.engine.sampler import SamplingMetadata, SamplingRow
from nanovllm.kernels.triton.parallel_compile import compiling_only
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.model_runner import ModelRunner


logger = logging.getLogger(__name__)

# (decodes, runs of tokens): one-token and longer runs, alone and beside decodes, in numbers that kernels specialise on (1, 16) and others,
# as many long runs as attention has a kernel for each (`padded_count`), and 4,160 tokens, from 4,096 of which on a product has its own.
_SMALL: tuple[tuple[int, tuple[int, ...]], ...] = (
    (0, (3,)), (0, (16, 16)), (1, (3,)), (5, (2, 9)), (16, (16,)), (5, (40,)), (0, (100,)), (0, (100, 100)), (0, (100,) * 9),
    (0, (64,) * 65), (0, (1024,)),
)  # fmt: skip


def compile_ahead(runner: ModelRunner, logits: torch.Tensor) -> None:
    """Compile what steps will launch, several kernels at a time, before they are run one by one and captured.

    Two layers stand for all. logits: as for `DecodeRunner.capture`.
    """
    sizes = [size for size in runner.buckets.batch_sizes if size <= runner.max_num_batched_tokens - 3]
    try:
        with torch.inference_mode(), two_layers(runner), compiling_only():
            runner.decoding.visit(logits)
            if runner.prefill is not None:
                runner.prefill.visit(logits)
            # Steps that are too large for a graph: decodes have attention of their own there, with a plan for each size.
            _run(runner, [*_SMALL, *((size, (3,)) for size in sizes)])
    except Exception as e:
        logger.info("kernels are compiled one after the other: %s: %s", type(e).__name__, e)
    torch.cuda.synchronize(runner.device)


@contextmanager
def one_collection() -> Iterator[None]:
    """Within the block Python does not look for garbage, but once at its end.

    A start creates so many objects that Python looks at all there are, a few hundred thousand, many times; and once more some
    time later, while requests wait. Does nothing where the user has switched it off.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()


@contextmanager
def two_layers(runner: ModelRunner) -> Iterator[None]:
    """Within the block the model has two layers, which stand for all: for first calls, whose results nobody reads."""
    caches = runner.caches
    runner.caches = runner.decoding.caches = caches[:2]  # the model runs as many layers as there are caches
    try:
        yield
    finally:
        runner.caches = runner.decoding.caches = caches


def _run(runner: ModelRunner, batches: list[tuple[int, tuple[int, ...]]]) -> None:
    """Run batches of (decodes, runs of tokens) on the padding block."""
    padding_block, device = runner.num_kvcache_blocks, runner.device
    for num_decodes, runs in batches:
        num_tokens = num_decodes + sum(runs)
        if num_tokens > runner.max_num_batched_tokens or max(runs) > runner.max_model_len:
            continue
        tokens = torch.zeros(3, num_tokens, dtype=torch.int64, device=device)
        tokens[2] = padding_block * runner.block_size
        lens = torch.tensor((*(1 for _ in range(num_decodes)), *runs), dtype=torch.int32, device=device)
        num_blocks = -(-max(runs) // runner.block_size)
        table = torch.full((len(lens), num_blocks), padding_block, dtype=torch.int32, device=device)
        starts = torch.tensor((0, *itertools.accumulate(runs)), dtype=torch.int32, device=device)
        bound = 1 if runner.buckets.by_context else runner.max_model_len
        # As many rows are wanted as there are sequences.
        rows = runner.buckets.fit(min(len(lens), runner.config.max_num_seqs), 1)[0]
        wanted = torch.zeros(rows, dtype=torch.int64, device=device)
        runner.forward(DeviceBatch.from_tensors(tokens, lens, table, bound, starts, max(runs)), wanted)


def warm_up(runner: ModelRunner) -> None:
    """Run small batches with runs of tokens, of every kind, so that kernels are compiled now and not while serving."""
    with two_layers(runner):
        _run(runner, list(_SMALL))
    device = runner.device
    # Sampling kernels have a variant for few rows, which start before their predecessor has ended, and one for many.
    hidden = torch.zeros(40, runner.model_config.hidden_size, dtype=runner.dtype, device=device)
    filters = SamplingParams(top_k=min(10, runner.model_config.vocab_size), top_p=0.9, min_p=0.01)
    for params in (SamplingParams(temperature=0), SamplingParams(), filters):
        for num_rows in {min(n, runner.config.max_num_seqs) for n in (1, 3, 16, 40)}:
            rows = [SamplingRow(params, seed=0, position=0, slot=i) for i in range(num_rows)]
            logits = runner.model.compute_logits(hidden[:num_rows])
            for given in (logits, logits.float()):  # penalties leave float32
                runner.sampler(given, SamplingMetadata.build(rows, device))
    torch.cuda.synchronize(device)


def profile_peak(runner: ModelRunner) -> int:
    """PyTorch's peak memory in bytes over the largest prefill, decode and sampling, weights included."""
    device, model_config = runner.device, runner.model_config
    torch.cuda.reset_peak_memory_stats(device)
    length = min(runner.max_model_len, runner.max_num_batched_tokens)
    max_num_seqs = runner.config.max_num_seqs
    num_seqs = max(1, min(runner.max_num_batched_tokens // length, max_num_seqs))
    num_blocks = -(-runner.max_model_len // runner.block_size)
    caches = kv_cache.allocate(model_config, num_blocks, runner.block_size, runner.cache_dtype, device)
    # Every sequence uses the same blocks: only the memory matters here.
    blocks = torch.arange(num_blocks, dtype=torch.int32, device=device)
    positions = torch.arange(length, device=device).repeat(num_seqs)
    prefill = DeviceBatch.from_tensors(
        torch.stack((torch.zeros_like(positions), positions, positions)),
        torch.full((num_seqs,), length, dtype=torch.int32, device=device),
        blocks.expand(num_seqs, -1),
        0,
        torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * length,
        length,
    )
    decode = DeviceBatch.from_tensors(
        torch.zeros(3, max_num_seqs, dtype=torch.int64, device=device),
        torch.ones(max_num_seqs, dtype=torch.int32, device=device),
        blocks.expand(max_num_seqs, -1),
        runner.max_model_len,
    )
    runner.model(prefill.token_ids, prefill.positions, caches, prefill.metadata)
    logits = runner.model.compute_logits(runner.model(decode.token_ids, decode.positions, caches, decode.metadata))
    params = SamplingParams(top_k=10, top_p=0.5, logprobs=1)
    rows = [SamplingRow(params, seed=0, position=0, slot=i) for i in range(max_num_seqs)]
    runner.sampler(logits, SamplingMetadata.build(rows, device))
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    return peak - kv_cache.block_bytes(model_config, runner.block_size, runner.cache_dtype) * (num_blocks + 1)
