"""A model together with its KV cache: what a forward pass needs apart from the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from nanovllm.engine.batch import DeviceBatch, resolve_tokens
from nanovllm.layers.attention import LayerCache
from nanovllm.models.decoder import DecoderForCausalLM


class PagedModel:
    """A model, its KV cache, and the last token of every sequence.

    Args:
        caches: one for each layer. The last block, the padding block, belongs to no sequence.
        max_num_seqs: the most running sequences, and the number of seq_slots.
        max_model_len: a bound on every context length.
    """

    def __init__(
        self, model: DecoderForCausalLM, caches: Sequence[LayerCache], max_num_seqs: int, max_model_len: int
    ) -> None:
        self.model = model
        self.caches = caches
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.padding_block = caches[0].k.shape[0] - 1
        self.block_size = caches[0].k.shape[1]
        self.device = caches[0].k.device
        self.last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=self.device)
        """[max_num_seqs + 1] int64: the token last sampled in each seq_slot; the last entry is for padding."""

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_model_len // self.block_size)

    def hidden(self, batch: DeviceBatch, rows: torch.Tensor | slice | None = None) -> torch.Tensor:
        """Hidden states of a batch, or of some of its rows. Pending tokens are taken from `last_tokens`."""
        token_ids = resolve_tokens(batch.token_ids, self.last_tokens)
        return self.model(token_ids, batch.positions, self.caches, batch.metadata, rows)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[num_rows, hidden_size] -> [num_rows, vocab_size], in `out` if it is given."""
        return self.model.lm_head(hidden, out)

    @contextmanager
    def few_layers(self) -> Iterator[None]:
        """Within the block the model runs only its first layers. Use it to compile kernels: the results are wrong.

        At least two layers run, and at least one of every kind: of five layers with a window and one without, all six.
        """
        all_caches = self.caches
        layers = self.model.config.layers[: len(all_caches)]
        first_of_each_kind = [layers.index(layer) for layer in set(layers)]
        num_layers = max(2, 1 + max(first_of_each_kind))
        self.caches = all_caches[:num_layers]  # the model runs as many layers as there are caches
        try:
            yield
        finally:
            self.caches = all_caches
