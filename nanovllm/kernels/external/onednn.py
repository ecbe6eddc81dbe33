"""Products on a CPU by oneDNN, which comes with PyTorch, over weights in the blocked layout of its kernels.

PyTorch hands float32 products to another library, whose product of one row runs in one thread, and which rearranges
the weight anew for a few rows. A prepacked weight is rearranged once. Its tensor is opaque: PyTorch knows its shape and
dtype, and only oneDNN the order of its elements. https://uxlfoundation.github.io/oneDNN
"""

from __future__ import annotations

import ctypes
import platform

import torch

_OPS = ("_linear_pointwise", "_reorder_linear_weight", "_nbytes", "data_ptr")


def support(device: torch.device) -> str | None:
    """Why oneDNN cannot run on a device, or None."""
    if device.type != "cpu":
        return f"oneDNN runs here on a CPU, this is {device}; use native"
    if not torch.backends.mkldnn.is_available() or not all(hasattr(torch.ops.mkldnn, name) for name in _OPS):
        return f"PyTorch {torch.__version__} has been built without oneDNN's linear layers; use native"
    if platform.machine() in ("x86_64", "AMD64"):
        if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
            return "oneDNN's kernels for packed weights need AVX2, which PyTorch does not use here; use native"
    elif not torch.ops.mkldnn._is_mkldnn_acl_supported():
        return (
            f"PyTorch {torch.__version__} has been built without Arm's Compute Library, so oneDNN has no fast kernels"
            f" on {platform.machine()}; use native"
        )
    return None


def accepts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> str | None:
    """Why oneDNN cannot take these arguments of `linear`, or None."""
    return _refuses(weight)


def _refuses(weight: torch.Tensor) -> str | None:
    if weight.dtype == torch.bfloat16:
        if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return "bfloat16 needs a processor with AVX-512, AVX-NE-CONVERT, or Arm's BF16"
    elif weight.dtype != torch.float32:
        return f"weights of {weight.dtype}; it takes float32 and bfloat16".replace("torch.", "")
    return None if weight.numel() else f"a weight of {list(weight.shape)}, which is empty"


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The op `linear`. weight: dense, or the `operand` of a `PrepackedWeight`."""
    # oneDNN takes a bias for contiguous.
    bias = None if bias is None else bias.contiguous()
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def num_tokens_linear(weight: torch.Tensor) -> range:
    """All numbers of tokens if the weight is prepacked, else none: with a dense weight PyTorch's product is faster."""
    return range(torch.iinfo(torch.int64).max) if weight.is_mkldnn else range(0)


def prepack_linear(weight: torch.Tensor, readable: bool = False) -> PrepackedWeight | None:
    """A weight in oneDNN's layout; None: oneDNN does not take it, or its rows cannot be read and must be.

    Args:
        weight: [rows, columns] on a CPU, float32 or bfloat16.
        readable: rows will be read one by one.
    """
    if _refuses(weight) is not None:
        return None
    packed = PrepackedWeight(weight)
    return packed if not readable or packed.find_rows(weight) else None


class PrepackedWeight:
    """A weight [rows, columns] in oneDNN's layout. It holds no reference to the dense tensor.

    Attributes:
        operand: the opaque tensor, [rows, columns], which `linear` takes as its weight.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self.operand = _reordered(weight)
        self._places: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in memory, with those that fill blocks."""
        return torch.ops.mkldnn._nbytes(self.operand)

    def dense(self) -> torch.Tensor:
        """[rows, columns], the weight, of its dtype."""
        return self.operand.to_dense()

    def find_rows(self, weight: torch.Tensor) -> bool:
        """Find out where the elements of rows lie, for `rows`; whether they were found.

        weight: the dense tensor, with some rows of which what is read is compared.
        """
        self._places = _places(weight)
        sample = torch.linspace(0, len(weight) - 1, 64).long()
        if self._places is None or not torch.equal(self.rows(sample), weight[sample]):
            self._places = None
        return self._places is not None

    def rows(self, index: torch.Tensor) -> torch.Tensor:
        """The rows that int64 [n] names: [n, columns]. `find_rows` was called before."""
        assert self._places is not None
        of_rows, of_columns = self._places
        return _elements(self.operand)[of_rows[index].unsqueeze(-1) + of_columns]


def _reordered(weight: torch.Tensor) -> torch.Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())


def _elements(packed: torch.Tensor) -> torch.Tensor:
    """The elements of an opaque tensor in the order in which they lie in memory, as a view."""
    nbytes, address = torch.ops.mkldnn._nbytes(packed), torch.ops.mkldnn.data_ptr(packed)
    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=packed.dtype)


def _places(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Where oneDNN puts the elements of a weight: element (r, c) is at place rows[r] + columns[c].

    That holds for every blocked layout. A matrix of zeros, in which the first column numbers the rows and the first row
    the columns, is packed, and its numbers are looked up. A dtype of few bits needs several such matrices, one for each
    digit of the numbers.

    Returns:
        int64 [rows] and int64 [columns]; None: the numbers are not all there.
    """
    rows, columns = weight.shape
    base = int(2 / torch.finfo(weight.dtype).eps)  # all integers up to this one are exact
    row, column, probe = torch.arange(rows), torch.arange(columns), torch.zeros_like(weight)
    numbers, scale, left = torch.zeros((), dtype=torch.int64), 1, max(rows, columns)
    while left:
        probe[:, 0] = row // scale % base + 1
        probe[0] = -(column // scale % base) - 1
        packed = _reordered(probe)
        elements = _elements(packed)
        at = elements.nonzero().squeeze(-1)  # the same for every digit
        values = elements[at].to(torch.int64)
        numbers = numbers + (values.abs() - 1) * scale
        scale, left = scale * base, left // base
    if len(at) != rows + columns - 1:
        return None
    is_column = values < 0
    of_rows, of_columns = torch.empty(rows, dtype=torch.int64), torch.empty(columns, dtype=torch.int64)
    of_columns[numbers[is_column]] = at[is_column]
    of_rows[0] = of_columns[0]
    of_rows[numbers[~is_column]] = at[~is_column]
    return of_rows, of_columns - of_columns[0]
