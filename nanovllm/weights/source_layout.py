"""How the tensors of a checkpoint become those that a model has: fused ones are split, others reordered or completed.

Everything here acts on rows, so it serves blocks of quantised weights as well as plain tensors.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import torch

from nanovllm.layers.linear import Part
from nanovllm.layers.rotary_embedding import head_order
from nanovllm.model_config import ModelConfig
from nanovllm.models.model_registry import model_class
from nanovllm.weights.safetensors_files import NO_PARTS, TensorHeader, WeightError


class SourceLayout:
    """The layout of a checkpoint's tensors.

    Args:
        format: the format of the checkpoint. A GGUF file stores the weights of norms whole; random weights are drawn
            as the model has them.

    Attributes:
        head_order: the order of rows within each head of queries and keys, head_dim indices; None: as they are stored.
    """

    def __init__(self, config: ModelConfig, format: str) -> None:
        cls = model_class(config.architecture)
        c = config
        self._split = cls.SPLIT
        self._fused = {name for names in cls.SPLIT.values() for name in names}
        self._rows = {
            "q_proj": c.num_attention_heads * c.head_dim, "k_proj": c.num_kv_heads * c.head_dim,
            "v_proj": c.num_kv_heads * c.head_dim, "gate_proj": c.intermediate_size, "up_proj": c.intermediate_size,
        }  # fmt: skip
        self._norm_offset = cls.norm_offset if format == "safetensors" else 0.0
        rotated = {c.ropes[layer.rope].rotary_dim(c.head_dim) for layer in c.layers if layer.rope is not None}
        part = {dim for dim in rotated if dim < c.head_dim}
        if part and len(rotated) > 1:
            raise WeightError("config.json: layers that rotate different parts of their heads are not supported")
        self.head_order = head_order(c.head_dim, *part) if part and format != "dummy" else None

    def headers(self, headers: Sequence[TensorHeader], as_stored: Container[str] = ()) -> list[TensorHeader]:
        """The headers of the model's tensors.

        Args:
            as_stored: names of tensors that are left alone.

        Raises:
            WeightError: a fused tensor that has another number of rows than its parts together.
        """
        made = []
        for header in headers:
            pieces = [] if header.name in as_stored else self._pieces(header.name)
            expected = sum(rows for _, rows in pieces)
            if pieces and (not header.shape or header.shape[0] != expected):
                of = ", ".join(f"{rows} of {name.split('.')[-2]}" for name, rows in pieces)
                raise WeightError(
                    f"tensor {header.name!r} has shape {list(header.shape)}, expected {expected} rows: {of}",
                    header.name,
                )
            made += [header._replace(name=name, shape=(rows, *header.shape[1:])) for name, rows in pieces] or [header]
        return made

    def piece_names(self, name: str) -> list[str]:
        """The names of the tensors that are fused in this one; none, if it is not fused."""
        return [piece for piece, _ in self._pieces(name)]

    def stored_parts(self, parts: Mapping[str, Part]) -> dict[str, Part]:
        """The parts of tensors that are stored as they are; those that may be fused are read whole, and then cut."""
        return {name: part for name, part in parts.items() if _leaf(name) not in self._fused}

    def tensors(
        self,
        stored: Iterable[tuple[str, torch.Tensor]],
        parts: Mapping[str, Part] = NO_PARTS,
        as_stored: Container[str] = (),
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's tensors.

        Args:
            stored: (name, tensor), of which those in `stored_parts(parts)` are these parts.
            parts: what is wanted of each tensor.
            as_stored: names of tensors that are left alone: those of packed weights, whose rows may lie anywhere.
        """
        for name, tensor in stored:
            if name in as_stored:
                yield name, tensor
                continue
            pieces = self._pieces(name)
            whole = tensor.split([rows for _, rows in pieces]) if pieces else [tensor]
            for piece_name, piece in zip([piece for piece, _ in pieces] or [name], whole):
                if piece_name in parts and _leaf(piece_name) in self._fused:
                    piece = parts[piece_name].of(piece)
                yield piece_name, self._finished(piece_name, piece)

    def _pieces(self, name: str) -> list[tuple[str, int]]:
        """(name, rows) of the tensors that are fused in this one; none, if it is not fused."""
        *parents, leaf, parameter = name.split(".") if name.count(".") else ("", name, "")
        return [(".".join((*parents, piece, parameter)), self._rows[piece]) for piece in self._split.get(leaf, ())]

    def _finished(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a part of it that has whole heads, in the model's order and completed."""
        leaf = _leaf(name)
        if self._norm_offset and leaf.endswith("norm"):
            return tensor.float() + self._norm_offset
        if self.head_order is not None and leaf in ("q_proj", "k_proj"):
            heads = tensor.unflatten(0, (-1, len(self.head_order)))
            return heads[:, self.head_order].flatten(0, 1)
        return tensor


def _leaf(name: str) -> str:
    """The module that a tensor's name ends with, apart from the parameter: "q_proj" of "....q_proj.weight"."""
    return name.split(".")[-2] if name.count(".") else name
