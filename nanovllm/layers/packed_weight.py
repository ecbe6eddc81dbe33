"""Weights that are stored in fewer bits than the model computes in, where a layer has its parameter `weight`.

A `PackedWeight` is made of matrices, one below the other. A plain layer has one. A fused layer (q, k, v) has one for
each form of storage among its shards. Each matrix knows its op, such as `linear_int4`, and can be dequantised.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanovllm.kernels import Kernels
from nanovllm.layers.quantised_activations import QuantisingOp
from nanovllm.layers.selected_op import FusedOp, SelectedOp
from nanovllm.layers.stored_matrix import StoredMatrix, StoredOperands

_WITHOUT_MEMORY: ContextVar[bool] = ContextVar("weights_without_memory", default=False)


@contextmanager
def weights_without_memory() -> Iterator[None]:
    """Within the block the matrices of new layers are on the meta device: they are replaced while they are loaded."""
    token = _WITHOUT_MEMORY.set(True)
    try:
        yield
    finally:
        _WITHOUT_MEMORY.reset(token)


def new_weight(*shape: int) -> nn.Parameter:
    """A matrix for a layer, or several of one shape, without values."""
    device = "meta" if _WITHOUT_MEMORY.get() else None
    return nn.Parameter(torch.empty(shape, device=device), requires_grad=False)


class PackedWeight(nn.Module):
    """A weight [rows, columns] in packed form, where a layer has its parameter `weight`.

    Args:
        matrices: they lie one below the other. Adjacent ones of one form become one.
        dtype: the dtype of activations.
        kernels: the providers of the matrices' ops.
        quantise_activations: whether matrices may use their `quantising_op`.
    """

    def __init__(
        self,
        matrices: Sequence[StoredMatrix],
        dtype: torch.dtype,
        kernels: Kernels,
        quantise_activations: bool = True,
    ) -> None:
        super().__init__()
        self.matrices = _merged(matrices)
        self.dtype = dtype
        self.shape = torch.Size((sum(m.shape[0] for m in self.matrices), self.matrices[0].shape[1]))
        self._ops = [(FusedOp if m.op == "linear" else SelectedOp)(m.op, kernels) for m in self.matrices]
        names = [m.quantising_op if quantise_activations else None for m in self.matrices]
        self._quantising = [QuantisingOp(name, kernels) for name in names]
        self._embedding = kernels.embedding_packed
        self._stacked = len(self.matrices) == 2 and all(
            m.op == "linear_gguf" and m.permutation is None for m in self.matrices
        )
        """Whether one call of `linear_gguf` multiplies with both."""
        whole = names[0] if len(names) == 1 and self.matrices[0].permutation is None else None
        self._after_silu = QuantisingOp(None if whole is None else f"silu_and_mul_{whole}", kernels)
        self._after_norm = QuantisingOp(None if whole is None else f"add_rms_norm_{whole}", kernels)
        self._forms: tuple[tuple[range, Weight], ...] = ()
        """In a tuple, so that they are no parts of this module, whose weights are those of the matrices."""

    @property
    def ops(self) -> list[str]:
        """Of each matrix the op that multiplies with it; the one that quantises x, if that is used in some steps."""
        pairs = zip(self._quantising, self.matrices)
        return [m.quantising_op if quantising.used and m.quantising_op else m.op for quantising, m in pairs]

    def use_for(self, num_tokens: range, form: Weight) -> None:
        """Let layers multiply x of so many tokens with another form of this weight. The first one that fits is used."""
        self._forms = (*self._forms, (num_tokens, form))

    def expand_for(self, num_tokens: range) -> None:
        """Keep a dequantised copy beside the matrices, for x of so many tokens.

        It is a parameter, so that kernels read it early (`early_start.are_constant`).
        """
        self.use_for(num_tokens, nn.Parameter(self.dequantised(), requires_grad=False))

    def form_for(self, num_tokens: int) -> Weight:
        """What layers multiply x of `num_tokens` tokens with: another form, as of `use_for`, or this weight."""
        return next((form for of, form in self._forms if num_tokens in of), self)

    @property
    def form_changes(self) -> set[int]:
        """Numbers of tokens from which on layers multiply with another form."""
        return {bound for of, _ in self._forms for bound in (of.start, of.stop) if bound}

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T + b: x [..., columns], bias [rows], both of `dtype` -> [..., rows]."""
        if len(self.matrices) == 1:
            return self._product(0, x, bias)
        if self._stacked:
            first, second = self.matrices
            return self._ops[0](x, *first.operands(), bias, *second.operands())
        sizes = [m.shape[0] for m in self.matrices]
        biases: Sequence[torch.Tensor | None] = [None] * len(sizes) if bias is None else bias.split(sizes)
        return torch.cat([self._product(i, x, part) for i, part in enumerate(biases)], -1)

    def takes_gate_up(self, gate_up: torch.Tensor) -> bool:
        """Whether to call `product_after_silu` for gate_up [num_tokens, 2 * columns]."""
        operands = self.matrices[0].operands()
        return self._after_silu.used and self._after_silu.takes_call(operands[0], gate_up, *operands)

    def product_after_silu(self, gate_up: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The product with silu(gate) * up, which is quantised as it is computed."""
        self.matrices[0].fill()
        return self._after_silu(gate_up, *self.matrices[0].operands(), bias)

    def takes_sum(self, x: torch.Tensor, *norm: Any) -> bool:
        """Whether to call `product_after_norm` for x [num_tokens, columns] and these further arguments of it."""
        operands = self.matrices[0].operands()
        return self._after_norm.used and self._after_norm.takes_call(operands[0], x, *norm, *operands)

    def product_after_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        bias: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the product with rms_norm(x + residual), which is quantised as it is computed; x + residual)."""
        self.matrices[0].fill()
        return self._after_norm(x, residual, norm_weight, eps, *self.matrices[0].operands(), bias)

    def _product(self, i: int, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The outputs of the i-th matrix."""
        op, quantising, matrix = self._ops[i], self._quantising[i], self.matrices[i]
        if matrix.permutation is not None:
            x = x.index_select(-1, matrix.permutation)
        matrix.fill()
        operands = matrix.operands()
        if quantising.used and quantising.takes_call(operands[0], x, *operands):
            return quantising(x, *operands, bias)
        if isinstance(op, FusedOp):
            (weight,) = operands
            return product(op, x, weight, bias)
        return op(x, *operands, bias)

    def stored_operands(self, x: torch.Tensor) -> StoredOperands | None:
        """Of its matrix, for an op of x that knows all forms of storage. None: there are several matrices, its columns
        are permuted, x is to be quantised, or ops do not know its form.
        """
        matrix, quantising = self.matrices[0], self._quantising[0]
        if len(self.matrices) > 1 or matrix.permutation is not None:
            return None
        operands = matrix.operands()
        if quantising.used and quantising.takes_call(operands[0], x, *operands):
            return None
        return matrix.stored_operands()

    def quantised_weights(self, num_tokens: int) -> int:
        """How many weights are in matrices that are multiplied with quantised x, where x is of `num_tokens` tokens."""
        form, total = self.form_for(num_tokens), 0
        if form is not self:
            return form.quantised_weights(num_tokens) if isinstance(form, PackedWeight) else 0
        for matrix, quantising in zip(self.matrices, self._quantising):
            operands = matrix.operands()
            if quantising.used:
                x = torch.empty((), dtype=self.dtype, device=operands[0].device).expand(num_tokens, matrix.shape[1])
                total += matrix.shape[0] * matrix.shape[1] * quantising.takes_call(operands[0], x, *operands)
        return total

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """The rows that int64 [n] names, dequantised: [n, columns], of `dtype`."""
        (matrix,) = self.matrices
        stored = matrix.stored_operands() if matrix.permutation is None else None
        if stored is None:
            return matrix.take_rows(index).dequantised(self.dtype)
        return self._embedding(index, *stored, matrix.shape[1], self.dtype)  # type: ignore[no-any-return]

    def dequantised(self) -> torch.Tensor:
        """[rows, columns], of `dtype`."""
        return torch.cat([m.dequantised(self.dtype) for m in self.matrices])

    @property
    def planes(self) -> list[torch.Tensor]:
        """The tensors of all matrices."""
        return [plane for matrix in self.matrices for plane in matrix.planes.values()]

    @property
    def nbytes(self) -> int:
        return sum(m.nbytes for m in self.matrices)

    def dim(self) -> int:
        """2: as of a tensor."""
        return 2

    def numel(self) -> int:
        """Weights, not stored elements."""
        return self.shape.numel()


Weight = torch.Tensor | PackedWeight
"""What a layer has as its `weight`."""


def form_for(weight: Weight, x: torch.Tensor) -> Weight:
    """What x [num_tokens, size] is multiplied with: the weight, or a packed one's form for so many tokens."""
    return weight.form_for(x.shape[0]) if isinstance(weight, PackedWeight) else weight


def product(linear: FusedOp, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + b with either kind of weight. linear: the op for plain ones, where it pays; else PyTorch's."""
    if isinstance(weight, PackedWeight):
        return weight(x, bias)
    return linear(x, weight, bias) if linear.takes(x, weight) else F.linear(x, weight, bias)


def _merged(matrices: Sequence[StoredMatrix]) -> list[StoredMatrix]:
    """With adjacent matrices of one form as one."""
    whole = matrices[0].joined(matrices[1:]) if len(matrices) > 1 else matrices[0]
    if whole is not None:
        return [whole]
    merged = [matrices[0]]
    for matrix in matrices[1:]:
        both = merged[-1].joined([matrix])
        if both is None:
            merged.append(matrix)
        else:
            merged[-1] = both
    return merged


def bytes_and_weights(module: nn.Module) -> tuple[int, int]:
    """(bytes, weights) of all parameters and packed weights within a module; what is shared counts once."""
    packed = [m for m in module.modules() if isinstance(m, PackedWeight)]
    parameters = list(module.parameters())
    return (
        sum(p.nbytes for p in parameters) + sum(p.nbytes for p in packed),
        sum(p.numel() for p in parameters) + sum(p.numel() for p in packed),
    )
