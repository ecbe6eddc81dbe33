"""What kind of work an ATen operator is, and which dimensions a reduction combines.

The kinds are those of TVM's operator fusion (Chen et al., "TVM", OSDI 2018, section 3), with matrix products apart:
element by element, broadcast, injective (each output element is one input element, moved), reduction, matrix product,
opaque.
"""

from __future__ import annotations

from enum import Enum

import torch
from torch.fx import Node as FxNode

from nanovllm.fuse.fx_nodes import arg, argument, fake, op_name, overload, shape_of
from nanovllm.fuse.matrix_products import is_matmul


class Kind(str, Enum):
    """What an operator does with its elements."""

    ELEMENTWISE = "elementwise"
    BROADCAST = "broadcast"
    INJECTIVE = "injective"
    REDUCTION = "reduction"
    MATMUL = "matmul"
    OPAQUE = "opaque"

    def __str__(self) -> str:
        return self.value


PER_ELEMENT = (Kind.ELEMENTWISE, Kind.BROADCAST)

# Reduce within rows and give a row back.
_ROW_NORMS = ("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm")
NORMALISATIONS = (*_ROW_NORMS, "softmax", "_softmax", "log_softmax", "_log_softmax", "group_norm")
_REDUCTIONS = set(NORMALISATIONS) | set(
    """sum mean amax amin max min prod var std var_mean norm linalg_vector_norm logsumexp argmax argmin any all cumsum
    cumprod""".split()
)
# (input, target, ..., reduction): of classes, and element by element.
CLASS_LOSSES = ("cross_entropy_loss", "nll_loss_nd", "nll_loss")
_LOSSES = (
    "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
)  # fmt: skip
# Pointwise operators that PyTorch does not tag as such: operators of Python, other names of tagged ones, and
# composites.
_POINTWISE = set(
    """__and__ __or__ __xor__ __lshift__ __rshift__ __iand__ __ior__ __ixor__ __ilshift__ __irshift__ absolute arccos
    arccosh arcsin arcsinh arctan arctan2 arctanh divide fix floor_divide greater greater_equal hardswish isreal less
    less_equal log_sigmoid masked_fill_ multiply negative not_equal rsub special_expit special_ndtr
    subtract where""".split()
)
# Their rows are read through an index: what they read from must lie in memory.
GATHERS = ("index", "index_select", "embedding", "gather", "index_put", "index_put_", "take_along_dim")
_INJECTIVE = set(GATHERS) | set(
    """cat stack clone contiguous reshape flatten repeat repeat_interleave roll flip constant_pad_nd pad arange full
    zeros ones empty full_like zeros_like ones_like scalar_tensor tril triu expand_as one_hot copy_ fill_ zero_
    empty_like new_empty new_full
    new_ones new_zeros eye linspace lift_fresh_copy tile hstack fliplr rot90""".split()
)
_CASTS = ("to", "_to_copy", "type_as")


def kind_of(node: FxNode) -> Kind:
    """The kind of an operator that is no view."""
    name, op = op_name(node), overload(node)
    if op is None or op.namespace != "aten":
        return Kind.OPAQUE
    if is_matmul(node):
        return Kind.MATMUL
    if name in ("batch_norm", "_native_batch_norm_legit_no_training"):
        # In training it reduces and writes its statistics.
        return Kind.OPAQUE if name == "batch_norm" and argument(node, "training") else Kind.BROADCAST
    if name in _LOSSES and not argument(node, "reduction"):
        return _pointwise(node)
    if name in CLASS_LOSSES or name in _LOSSES or name == "group_norm":
        return Kind.REDUCTION
    if name == "index_put":  # copies a tensor, then writes some rows: two kernels, the second after all of the first
        return Kind.OPAQUE
    if name in _REDUCTIONS or torch.Tag.reduction in op.tags:
        return Kind.REDUCTION if reduced_dims(node) is not None else Kind.OPAQUE
    if name in _CASTS:
        return Kind.ELEMENTWISE
    if name in _INJECTIVE:
        return Kind.INJECTIVE
    if torch.Tag.pointwise in op.tags or name in _POINTWISE or name.rstrip("_") in _POINTWISE:
        return _pointwise(node)
    return Kind.OPAQUE


def _pointwise(node: FxNode) -> Kind:
    same = all(t.shape == shape_of(node) for n in node.all_input_nodes for t in fake(n) if t.dim() > 0)
    return Kind.ELEMENTWISE if same else Kind.BROADCAST


def reduced_dims(node: FxNode) -> tuple[int, ...] | None:
    """The dimensions of its input, counted from the front, that a reduction combines; None where that is not known."""
    rank, name = len(shape_of(arg(node, 0))), op_name(node)
    if name == "group_norm":  # within an image; the groups of one are rows of their own, see `independent_parts`
        return tuple(range(1, rank))
    if name in CLASS_LOSSES and not argument(node, "reduction"):
        return (min(1, rank - 1),)
    if name in _ROW_NORMS:
        return tuple(range(rank - len(arg(node, 1)), rank))
    dim = argument(node, "dim")
    if isinstance(dim, FxNode):
        return None
    if dim is None or dim == []:
        return tuple(range(rank))
    return tuple(sorted(d % max(rank, 1) for d in ([dim] if isinstance(dim, int) else dim)))


def independent_parts(node: FxNode) -> int:
    """How many parts of a row a reduction treats by themselves: the groups of a group norm."""
    return arg(node, 1) if op_name(node) == "group_norm" else 1
