"""The token embedding and the language-model head, split over the vocabulary."""

import torch

from nanovllm.distributed.group import current_group
from nanovllm.kernels import Kernels, all_gather_last
from nanovllm.layers.group_sum import GroupSum
from nanovllm.layers.linear import Part, ShardedParameters
from nanovllm.layers.packed_weight import PackedWeight, Weight, new_weight, product
from nanovllm.layers.selected_op import FusedOp
from nanovllm.layers.stored_matrix import StoredMatrix


class VocabParallelEmbedding(ShardedParameters):
    """Token ids [num_tokens] -> [num_tokens, hidden_size]; each rank holds an equal run of the (padded) vocabulary."""

    def __init__(self, vocab_size: int, hidden_size: int, kernels: Kernels) -> None:
        super().__init__()
        self.group = current_group()
        self.vocab_size = vocab_size
        rows = -(-vocab_size // self.group.size)
        self.start = min(self.group.rank * rows, vocab_size)
        self.weight: Weight = new_weight(rows, hidden_size)
        self._embedding = kernels.embedding
        self._sum = GroupSum(self.group, kernels)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return self._rows(token_ids)
        local = token_ids - self.start
        mine = (local >= 0) & (local < self.weight.shape[0])
        rows = self._rows(torch.where(mine, local, 0))
        return self._sum(rows.masked_fill_(~mine.unsqueeze(-1), 0))

    def _rows(self, index: torch.Tensor) -> torch.Tensor:
        if isinstance(self.weight, PackedWeight):
            return self.weight.rows(index)
        return self._embedding(index, self.weight)

    def source_shape(self, name: str, shard: str) -> tuple[int, ...]:
        return (self.vocab_size, self.weight.shape[1])

    def part(self, name: str, shard: str) -> Part | None:
        return Part(0, self.start, min(self.weight.shape[0], self.vocab_size - self.start))

    def load_shard(self, name: str, shard: str, tensor: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.weight, torch.Tensor)
        self.weight.data[len(tensor) :].zero_()
        return self.weight.data[: len(tensor)].copy_(tensor)

    def arranged(self, shard: str, matrix: StoredMatrix) -> StoredMatrix:
        return matrix.padded(self.weight.shape[0])


class LMHead(VocabParallelEmbedding):
    """Hidden states [num_rows, hidden_size] -> logits [num_rows, vocab_size], in the model's dtype.

    With `out`, a tensor of that shape and dtype, the logits are written there; it is then the result.

    Args:
        soft_cap: if given, a logit s becomes soft_cap * tanh(s / soft_cap).
    """

    def __init__(self, vocab_size: int, hidden_size: int, kernels: Kernels, soft_cap: float | None = None) -> None:
        super().__init__(vocab_size, hidden_size, kernels)
        self.soft_cap = soft_cap
        self._linear = FusedOp("linear", kernels)
        self._gather = all_gather_last.native if self.group.size == 1 else kernels.all_gather_last

    def forward(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits = self._products(hidden, out)
        return logits if self.soft_cap is None else logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)

    def _products(self, hidden: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        weight = self.weight
        if out is not None and self.group.size == 1 and isinstance(weight, torch.Tensor):
            if not self._linear.takes(hidden, weight):
                return torch.mm(hidden, weight.T, out=out)
        return self._gather(product(self._linear, hidden, weight), self.vocab_size, self.group, out)
