"""From a scheduled step to the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from nanovllm.engine.kv_cache import kv_slot
from nanovllm.engine.step import ScheduledSequence
from nanovllm.layers.attention import AttentionMetadata, SharedPrefixes


class PromptRows(NamedTuple):
    """The rows of logits that give the log-probabilities of a prompt's tokens.

    A token's row is about the next token: of a prompt of 5 in one part, 4 rows are about tokens 1 to 4, and from the
    fifth row a token is sampled.
    """

    part: ScheduledSequence
    first: int
    """The first row, among the logits that the batch wants."""
    num_rows: int


@dataclass(frozen=True)
class Batch:
    """The host side of a forward pass: one column a token, decodes first, then the runs of tokens of the others.

    A token that was sampled in a step whose result the host has not read yet is written as -1 - seq_slot;
    `resolve_tokens` replaces it on the device by the last token sampled in that seq_slot.
    """

    tokens: np.ndarray
    """[3, num_tokens] int64: token ids, positions, kv_slots."""
    context_lens: np.ndarray
    """[num_decodes] int32."""
    block_table: np.ndarray
    """[num_seqs, max_blocks] int32."""
    max_context_len: int
    prefill_query_lens: tuple[int, ...]
    prefill_context_lens: tuple[int, ...]
    logits_rows: np.ndarray
    """int64: the columns of the tokens whose logits are needed, in order."""
    sample_rows: np.ndarray
    """int64: for each part that samples, its row among the logits."""
    prompt_rows: tuple[PromptRows, ...]
    """Of the parts whose prompt log-probabilities are wanted."""

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[1]

    @property
    def num_decodes(self) -> int:
        return len(self.context_lens)

    @property
    def decode_only(self) -> bool:
        return not self.prefill_query_lens

    @classmethod
    def build(cls, parts: Sequence[ScheduledSequence], block_size: int) -> Batch:
        """The batch of a step's parts, or of some of them. Parts of a single token must come first."""
        num_decodes = sum(part.num_tokens == 1 for part in parts)
        tokens = np.empty((3, sum(part.num_tokens for part in parts)), np.int64)
        token_ids, positions, kv_slots = tokens
        max_blocks = max((-(-(p.start + p.num_tokens) // block_size) for p in parts), default=0)
        block_table = np.zeros((len(parts), max_blocks), np.int32)
        context_lens = np.empty(num_decodes, np.int32)
        logits_rows: list[int] = []
        sample_rows: list[int] = []
        prompt_rows: list[PromptRows] = []
        row = 0
        for i, part in enumerate(parts):
            seq, start, n = part.seq, part.start, part.num_tokens
            end = start + n
            table = seq.block_table[: -(-end // block_size)]
            block_table[i, : len(table)] = table
            if n == 1:
                pending = start >= len(seq.token_ids)
                token_ids[row] = -1 - part.seq_slot if pending else seq.token_ids[start]
                positions[row] = start
                kv_slots[row] = kv_slot(table[-1], start, block_size)
                context_lens[i] = end
            else:
                run, places = np.arange(start, end), slice(row, row + n)
                token_ids[places] = seq.token_ids[start:end]
                positions[places] = run
                kv_slots[places] = kv_slot(block_table[i, run // block_size], run, block_size)
            row += n
            if seq.params.prompt_logprobs is not None and start < seq.prompt_len:
                prompt_rows.append(PromptRows(part, len(logits_rows), min(n, seq.prompt_len - 1 - start)))
                logits_rows.extend(range(row - n, row))
            elif part.samples:
                logits_rows.append(row - 1)
            if part.samples:
                sample_rows.append(len(logits_rows) - 1)  # the row that was just appended
        prefills = parts[num_decodes:]
        return cls(
            tokens=tokens,
            context_lens=context_lens,
            block_table=block_table,
            max_context_len=int(context_lens.max()) if num_decodes else 0,
            prefill_query_lens=tuple(p.num_tokens for p in prefills),
            prefill_context_lens=tuple(p.start + p.num_tokens for p in prefills),
            logits_rows=np.asarray(logits_rows, np.int64),
            sample_rows=np.asarray(sample_rows, np.int64),
            prompt_rows=tuple(prompt_rows),
        )


@dataclass(frozen=True)
class DeviceBatch:
    """The device side: what the model's forward takes."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    metadata: AttentionMetadata

    @classmethod
    def from_host(cls, batch: Batch, device: torch.device) -> DeviceBatch:
        context_lens, cu_seqlens_q = batch.context_lens, None
        if not batch.decode_only:
            context_lens = np.concatenate((context_lens, np.asarray(batch.prefill_context_lens, np.int32)))
            cu_seqlens_q = to_device(np.cumsum((0, *batch.prefill_query_lens), dtype=np.int32), device)
        return cls.from_tensors(
            to_device(batch.tokens, device),
            to_device(context_lens, device),
            to_device(batch.block_table, device),
            batch.max_context_len,
            cu_seqlens_q,
            max(batch.prefill_query_lens, default=0),
        )

    @classmethod
    def from_tensors(
        cls,
        tokens: torch.Tensor,
        context_lens: torch.Tensor,
        block_table: torch.Tensor,
        max_context_len: int,
        cu_seqlens_q: torch.Tensor | None = None,
        max_query_len: int = 0,
        shared: SharedPrefixes | None = None,
    ) -> DeviceBatch:
        """tokens: [3, num_tokens] int64, as in `Batch`; the others as in `AttentionMetadata`."""
        num_runs = 0 if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        return cls(
            token_ids=tokens[0],
            positions=tokens[1],
            metadata=AttentionMetadata(
                num_decodes=context_lens.shape[0] - num_runs,
                slot_mapping=tokens[2],
                block_table=block_table,
                context_lens=context_lens,
                max_context_len=max_context_len,
                cu_seqlens_q=cu_seqlens_q,
                max_query_len=max_query_len,
                shared=shared,
            ),
        )

    def with_piggybacked(self, runs: DeviceBatch) -> DeviceBatch:
        """This batch of decodes, followed by runs of prompt tokens whose attention runs concurrently with that of
        the decodes.
        """
        return DeviceBatch(
            torch.cat((self.token_ids, runs.token_ids)),
            torch.cat((self.positions, runs.positions)),
            replace(self.metadata, piggybacked=replace(runs.metadata, concurrent=True)),
        )


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """A copy on the device; on CUDA from pinned memory, without waiting for it."""
    tensor = torch.from_numpy(array)
    if device.type == "cpu":
        return tensor
    # The caching allocator does not hand pinned memory out again before the copy has run. NumPy copies, since PyTorch
    # would wake its threads.
    pinned = torch.empty_like(tensor, pin_memory=True)
    pinned.numpy()[...] = array
    return pinned.to(device, non_blocking=True)


def to_device_together(arrays: Sequence[np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """As `to_device` of each array (int64, int32 or float32), but in one copy: the tensors are views of one buffer."""
    pin = device.type == "cuda"
    num_words = [-(-array.nbytes // 8) for array in arrays]  # of 8 bytes, so that each array is aligned
    buffer = torch.empty(sum(num_words), dtype=torch.int64, pin_memory=pin)
    host, start = buffer.numpy(), 0
    for array, n in zip(arrays, num_words):
        host[start : start + n].view(array.dtype)[: array.size] = array.reshape(-1)
        start += n
    tensors = list(buffer.to(device, non_blocking=pin).split(num_words))
    for i, array in enumerate(arrays):
        if array.dtype != np.int64:
            tensors[i] = tensors[i].view(torch.int32 if array.dtype == np.int32 else torch.float32)[: array.size]
        tensors[i] = tensors[i].view(array.shape)
    return tensors


def resolve_tokens(token_ids: torch.Tensor, last_tokens: torch.Tensor) -> torch.Tensor:
    """Replace -1 - seq_slot by `last_tokens[seq_slot]`; token_ids [num_tokens] and last_tokens [max_num_seqs] are
    int64.
    """
    return torch.where(token_ids < 0, last_tokens[(-1 - token_ids).clamp(min=0)], token_ids)
