"""GGUF's packed weights: what a block of each type consists of, in which order a row has the parts, and its numbers.

Formats: ggml-common.h of llama.cpp. A row of K weights is K / block_size blocks, one behind the other. A block is its
fields, one behind the other. For example a block of Q8_0 is a float16 and 32 signed bytes, 34 bytes in all, so loads of
16 bytes would not be aligned.

`gguf_planes` reorders the bytes of a row without loss: the largest field of all blocks comes first, then the next
field of all blocks, and so on. Each of these *planes* starts at a multiple of 16 bytes. The name of a type with
"/planes" behind it, such as "Q4_K/planes", stands for this form.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PLANES = "/planes"
"""Follows a type's name where rows are planes."""
ALIGNMENT = 16
"""Bytes: the start of a plane, and the distance of rows, are multiples of it."""


@dataclass(frozen=True)
class GGUFType:
    """A type of block.

    Attributes:
        type_id: its number in a file.
        block_size: weights of a block.
        fields: (name, bytes) in the order of a stored block. d, m: float16 scale and minimum; dmin: float16 scale of
            the minima; sc: scales (with Q4_K's and Q5_K's minima, 6 bits each; of Q6_K signed bytes); qs: quants or
            their low four bits; qh: their high bits.
    """

    name: str
    type_id: int
    block_size: int
    fields: tuple[tuple[str, int], ...]

    @property
    def block_bytes(self) -> int:
        return sum(n for _, n in self.fields)

    def row_bytes(self, size: int) -> int:
        """Bytes of a stored row of `size` weights."""
        return size // self.block_size * self.block_bytes

    def plane_offsets(self, size: int) -> tuple[dict[str, int], int]:
        """({field: where its plane starts}, bytes of a row) of a row of `size` weights in planes."""
        offsets, end = {}, 0
        for name, n in sorted(self.fields, key=lambda field: -field[1]):
            offsets[name] = end
            end += -(-size // self.block_size * n // ALIGNMENT) * ALIGNMENT
        return offsets, end


_K_SCALES = (("d", 2), ("dmin", 2), ("sc", 12))
GGUF_TYPES: dict[str, GGUFType] = {
    t.name: t
    for t in (
        GGUFType("Q4_0", 2, 32, (("d", 2), ("qs", 16))),
        GGUFType("Q4_1", 3, 32, (("d", 2), ("m", 2), ("qs", 16))),
        GGUFType("Q5_0", 6, 32, (("d", 2), ("qh", 4), ("qs", 16))),
        GGUFType("Q5_1", 7, 32, (("d", 2), ("m", 2), ("qh", 4), ("qs", 16))),
        GGUFType("Q8_0", 8, 32, (("d", 2), ("qs", 32))),
        GGUFType("Q4_K", 12, 256, (*_K_SCALES, ("qs", 128))),
        GGUFType("Q5_K", 13, 256, (*_K_SCALES, ("qh", 32), ("qs", 128))),
        GGUFType("Q6_K", 14, 256, (("qs", 128), ("qh", 64), ("sc", 16), ("d", 2))),
    )
}
"""The types that `linear_gguf` takes, by name."""


def gguf_type(kind: str) -> tuple[GGUFType, bool]:
    """(the type, whether rows are planes) of a kind such as "Q4_K" or "Q4_K/planes".

    Raises:
        ValueError: there is no such kind.
    """
    name = kind.removesuffix(PLANES)
    if name not in GGUF_TYPES:
        raise ValueError(f"kind: expected {', '.join(GGUF_TYPES)}, or one of these with {PLANES!r}, not {kind!r}")
    return GGUF_TYPES[name], name != kind


def check_gguf(weight: torch.Tensor, kind: str, size: int) -> tuple[GGUFType, bool]:
    """`gguf_type(kind)`; a ValueError unless the rows of weight, uint8 [outputs, bytes], have `size` weights."""
    of, planes = gguf_type(kind)
    if size % of.block_size:
        raise ValueError(f"x: expected a multiple of {of.block_size} columns, the block of {kind}, not {size}")
    expected = of.plane_offsets(size)[1] if planes else of.row_bytes(size)
    if weight.dim() != 2 or weight.shape[1] != expected or weight.dtype != torch.uint8:
        raise ValueError(
            f"weight: expected uint8 [outputs, {expected}], {size} columns in {kind}, not "
            f"{str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}"
        )
    return of, planes


def gguf_planes(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, str]:
    """Stored rows as planes: (uint8 [outputs, bytes of such a row], kind with "/planes").

    Kernels on a GPU read this form with 16-byte loads. Nothing is lost, and only padding is added. Rows stay rows: they
    can be cut or joined before or after. Columns must be cut before.

    Args:
        weight: uint8 [outputs, bytes of a stored row], on any device.

    Raises:
        ValueError: kind is unknown or already has planes, or weight does not consist of whole blocks.
    """
    of, planes = gguf_type(kind)
    if planes:
        raise ValueError(f"kind: expected the form of a file, such as {of.name!r}, not {kind!r}")
    if weight.dim() != 2 or weight.dtype != torch.uint8 or weight.shape[1] % of.block_bytes:
        raise ValueError(
            f"weight: expected uint8 [outputs, a multiple of {of.block_bytes} bytes], the block of {kind}, not "
            f"{str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}"
        )
    size = weight.shape[1] // of.block_bytes * of.block_size
    offsets, total = of.plane_offsets(size)
    out = weight.new_zeros(weight.shape[0], total)
    for name, field in _fields(weight, of, False, size).items():
        plane = field.flatten(1)
        out[:, offsets[name] : offsets[name] + plane.shape[1]] = plane
    return out, kind + PLANES


def _fields(weight: torch.Tensor, of: GGUFType, planes: bool, size: int) -> dict[str, torch.Tensor]:
    """{field: uint8 [outputs, blocks, bytes]}"""
    blocks = size // of.block_size
    if not planes:
        parts = weight.reshape(weight.shape[0], blocks, of.block_bytes).split([n for _, n in of.fields], -1)
        return dict(zip((name for name, _ in of.fields), parts))
    offsets, _ = of.plane_offsets(size)
    return {
        name: weight[:, offsets[name] : offsets[name] + blocks * n].unflatten(1, (blocks, n)) for name, n in of.fields
    }


def dequantise_gguf(weight: torch.Tensor, kind: str, size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The numbers of packed rows: [outputs, size] in `dtype`. In float32 equal to the bit to what llama.cpp computes.

    Args:
        weight: uint8 [outputs, bytes of a row], stored rows or planes, as kind says.
        size: columns.
        dtype: float32 or float64, in which the numbers are computed.

    Raises:
        ValueError: as `check_gguf`.
    """
    of, planes = check_gguf(weight, kind, size)
    fields = _fields(weight, of, planes, size)
    if of.name == "Q6_K":
        w = _q6_k(fields, dtype)
    elif of.block_size == 256:
        w = _k_quants(fields, dtype)
    else:
        w = _plain(fields, of, dtype)
    return w.reshape(weight.shape[0], size)


def _half(field: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [..., 2] -> [..., 1]"""
    return field.contiguous().view(torch.float16).to(dtype)


def _nibbles(qs: torch.Tensor, chunk: int) -> torch.Tensor:
    """uint8 [outputs, blocks, n] -> [outputs, blocks, 2n]: of each `chunk` bytes the low halves, then the high ones."""
    chunks = qs.unflatten(-1, (-1, chunk))
    return torch.stack((chunks & 15, chunks >> 4), -2).flatten(-3)


def _shifts(bits: int, qs: torch.Tensor) -> torch.Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=qs.device)


def _plain(fields: dict[str, torch.Tensor], of: GGUFType, dtype: torch.dtype) -> torch.Tensor:
    """Blocks of 32: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0."""
    d, qs = _half(fields["d"], dtype), fields["qs"]
    if of.name == "Q8_0":
        return qs.view(torch.int8).to(dtype) * d
    q = _nibbles(qs, 16)
    if "qh" in fields:
        qh = fields["qh"]
        q = q | (((qh[..., None] >> _shifts(1, qh)) & 1) << 4).flatten(-2)
    if "m" in fields:
        return d * q.to(dtype) + _half(fields["m"], dtype)
    return d * (q.to(dtype) - (16 if "qh" in fields else 8))


def k_scales(sc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [..., 12] -> scales and minima of a block's eight parts of 32 weights, 6 bits each: two uint8 [..., 8]."""
    low, middle, high = sc.unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((low & 63, (high & 15) | (low >> 2 & 48)), -1)
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 2 & 48)), -1)
    return scales, minima


def _k_quants(fields: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Q4_K and Q5_K."""
    scales, minima = k_scales(fields["sc"])
    d = _half(fields["d"], dtype) * scales.to(dtype)
    m = _half(fields["dmin"], dtype) * minima.to(dtype)
    q = _nibbles(fields["qs"], 32)
    if "qh" in fields:
        qh = fields["qh"][..., None, :] >> _shifts(1, q)[:, None]  # bit i of byte l: weight l of part i
        q = q | ((qh & 1) << 4).flatten(-2)
    return d[..., None] * q.unflatten(-1, (8, 32)).to(dtype) - m[..., None]


def _q6_k(fields: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    d = _half(fields["d"], dtype) * fields["sc"].view(torch.int8).to(dtype)
    low = _nibbles(fields["qs"], 64)
    high = fields["qh"].unflatten(-1, (2, 1, 32)) >> _shifts(2, low)[:, None]  # of each half of 128 weights
    q = low | ((high & 3) << 4).flatten(-3)
    return d[..., None] * (q.unflatten(-1, (16, 16)).to(dtype) - 32)
