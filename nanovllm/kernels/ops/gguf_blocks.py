"""GGUF's packed weights: what a block of each type consists of, its numbers, and the form in which kernels read it.

Formats: ggml-common.h of llama.cpp. A row of K weights is K / block_size blocks, one behind the other. A block is its
fields, one behind the other. For example a block of Q8_0 is a float16 and 32 signed bytes, 34 bytes in all, so loads of
16 bytes would not be aligned.

`gguf_planes` rewrites rows without loss, so that kernels on a GPU can read them: the quants of the row, and then each
kind of scale and minimum. Each of these *planes* starts at a multiple of 32 bytes. The name of a type with "/planes"
behind it, such as "Q4_K/planes", stands for this form:

- q: the quants in the order of the columns. Those of 4 bits, and the low four bits of those of 6, are packed as in
  `linear_int4`; those of 5 and 8 bits take a byte each. They are not negative: `zero` is taken from them.
- qh: the two high bits of quants of 6. Byte i of four has those of columns 2i, 2i + 1, 8 + 2i and 9 + 2i of 16: in bits
  4, 6, 0 and 2. So a kernel moves the bits of four columns with one instruction.
- sc, mn: scales and minima of the parts of a block of 256, a byte each.
- d, m: float16 scale, and minimum or scale of the minima, of a block.

A weight is d * sc * (q - zero), with sc = 1 where there is no such plane; plus m, or minus m * mn where there is mn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

PLANES = "/planes"
"""Follows a type's name where rows are planes."""
ALIGNMENT = 32
"""Bytes: the start of a plane, and the distance of rows, are multiples of it."""

Fields = dict[str, torch.Tensor]
"""uint8 [outputs, blocks, bytes] by name."""


@dataclass(frozen=True)
class GGUFType:
    """A type of block.

    Attributes:
        type_id: its number in a file.
        block_size: weights of a block.
        fields: (name, bytes) in the order of a stored block. d, m: as in planes; sc: scales, and the minima of Q4_K and
            Q5_K, 6 bits each; qs: quants or their low four bits; qh: their high bits.
        planes: {name: bytes of a block} in the order of the planes of a row.
        zero: what is taken from a quant of the planes.
        part: weights that share a scale.
    """

    name: str
    type_id: int
    block_size: int
    fields: tuple[tuple[str, int], ...]
    planes: Mapping[str, int]
    zero: int
    part: int = 32

    @property
    def block_bytes(self) -> int:
        return sum(n for _, n in self.fields)

    @property
    def bits(self) -> int:
        """Bits of one quantised value in the plane q: 4 or 8."""
        return 8 * self.planes["q"] // self.block_size

    def row_bytes(self, size: int) -> int:
        """Bytes of a stored row of `size` weights."""
        return size // self.block_size * self.block_bytes

    def plane_offsets(self, size: int) -> tuple[dict[str, int], int]:
        """({plane: where it starts}, bytes of a row) of a row of `size` weights in planes."""
        offsets, end = {}, 0
        for name, n in self.planes.items():
            offsets[name] = end
            end += -(-size // self.block_size * n // ALIGNMENT) * ALIGNMENT
        return offsets, end

    def plane(self, weight: torch.Tensor, name: str, size: int) -> torch.Tensor:
        """A plane of rows of `size` weights, uint8 [outputs, blocks, bytes of a block]: a view of weight."""
        blocks, start = size // self.block_size, self.plane_offsets(size)[0][name]
        width = self.planes[name]
        return weight[:, start : start + blocks * width].unflatten(1, (blocks, width))


_K_SCALES = (("d", 2), ("m", 2), ("sc", 12))
GGUF_TYPES: dict[str, GGUFType] = {
    t.name: t
    for t in (
        GGUFType("Q4_0", 2, 32, (("d", 2), ("qs", 16)), {"q": 16, "d": 2}, 8),
        GGUFType("Q4_1", 3, 32, (("d", 2), ("m", 2), ("qs", 16)), {"q": 16, "d": 2, "m": 2}, 0),
        GGUFType("Q5_0", 6, 32, (("d", 2), ("qh", 4), ("qs", 16)), {"q": 32, "d": 2}, 16),
        GGUFType("Q5_1", 7, 32, (("d", 2), ("m", 2), ("qh", 4), ("qs", 16)), {"q": 32, "d": 2, "m": 2}, 0),
        GGUFType("Q8_0", 8, 32, (("d", 2), ("qs", 32)), {"q": 32, "d": 2}, 128),
        GGUFType("Q4_K", 12, 256, (*_K_SCALES, ("qs", 128)), {"q": 128, "sc": 8, "mn": 8, "d": 2, "m": 2}, 0),
        GGUFType(
            "Q5_K", 13, 256, (*_K_SCALES, ("qh", 32), ("qs", 128)), {"q": 256, "sc": 8, "mn": 8, "d": 2, "m": 2}, 0
        ),
        GGUFType(
            "Q6_K",
            14,
            256,
            (("qs", 128), ("qh", 64), ("sc", 16), ("d", 2)),
            {"q": 128, "qh": 64, "sc": 16, "d": 2},
            32,
            16,
        ),
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

    Nothing is lost. Rows stay rows: they can be cut or joined before or after. Columns must be cut before. Q5_0, Q5_1
    and Q5_K grow to a byte a quant.

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
    out = weight.new_zeros(weight.shape[0], of.plane_offsets(size)[1])
    fields = _unpacked(_fields(weight, of, size), of)
    if "qh" in of.planes:
        fields["qh"] = _high_plane(fields["q"])
    for name, field in fields.items():
        if name == "q" and of.bits == 4:
            field = field[..., ::2] & 15 | field[..., 1::2] << 4
        of.plane(out, name, size).copy_(field)
    return out, kind + PLANES


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
    if planes:
        fields = {name: of.plane(weight, name, size) for name in of.planes}
        if of.bits == 4:
            fields["q"] = torch.stack((fields["q"] & 15, fields["q"] >> 4), -1).flatten(-2)
        if "qh" in fields:
            fields["q"] |= _of_high_plane(fields["qh"])
    else:
        fields = _unpacked(_fields(weight, of, size), of)
    d = _half(fields["d"], dtype)
    if "sc" in fields:  # Q6_K's are signed
        d = d * (fields["sc"].view(torch.int8) if of.part == 16 else fields["sc"]).to(dtype)
    q = fields["q"].unflatten(-1, (-1, of.part)).to(dtype)
    w = d[..., None] * (q - of.zero)
    if "m" in fields:
        m = _half(fields["m"], dtype)
        w = w - (m * fields["mn"].to(dtype))[..., None] if "mn" in fields else w + m[..., None]
    return w.reshape(weight.shape[0], size)


def _fields(weight: torch.Tensor, of: GGUFType, size: int) -> Fields:
    """The fields of stored rows."""
    parts = weight.reshape(weight.shape[0], size // of.block_size, of.block_bytes).split([n for _, n in of.fields], -1)
    return dict(zip((name for name, _ in of.fields), parts))


def _unpacked(fields: Fields, of: GGUFType) -> Fields:
    """The fields of stored rows as those of planes, but with a byte for every quant."""
    out: Fields = {name: fields[name] for name in ("d", "m") if name in fields}
    qs = fields["qs"]
    if of.name == "Q8_0":
        q = qs ^ 128  # signed bytes, plus 128
    elif of.name == "Q6_K":
        out["sc"] = fields["sc"]
        high = fields["qh"].unflatten(-1, (2, 1, 32)) >> _shifts(2, qs)  # of each half of 128 weights
        q = _nibbles(qs, 64) | ((high & 3) << 4).flatten(-3)
    elif of.block_size == 256:
        out["sc"], out["mn"] = _k_scales(fields["sc"])
        q = _nibbles(qs, 32)
        if "qh" in fields:  # bit i of byte l: weight l of part i
            q = q | ((fields["qh"][..., None, :] >> _shifts(1, qs) & 1) << 4).flatten(-2)
    else:
        q = _nibbles(qs, 16)
        if "qh" in fields:  # 32 bits, the lowest first
            q = q | ((fields["qh"][..., None] >> _shifts(1, qs)[:, 0] & 1) << 4).flatten(-2)
    return {"q": q, **out}


def _high_plane(q: torch.Tensor) -> torch.Tensor:
    """The plane qh of quants with a byte each: uint8 [..., n] -> [..., n / 4]"""
    (a, b), (c, d) = (pair.unbind(-1) for pair in (q >> 4).unflatten(-1, (-1, 2, 4, 2)).unbind(-3))
    return (a << 4 | b << 6 | c | d << 2).flatten(-2)


def _of_high_plane(qh: torch.Tensor) -> torch.Tensor:
    """The high bits of quants, at their place in a quant: uint8 [..., n] -> [..., 4n]"""
    four = qh.unflatten(-1, (-1, 4))
    halves = [torch.stack((four >> i & 3, four >> i + 2 & 3), -1) for i in (4, 0)]
    return torch.stack(halves, -3).flatten(-4) << 4


def _half(field: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8 [..., 2] -> [..., 1]"""
    return field.contiguous().view(torch.float16).to(dtype)


def _nibbles(qs: torch.Tensor, chunk: int) -> torch.Tensor:
    """uint8 [outputs, blocks, n] -> [outputs, blocks, 2n]: of each `chunk` bytes the low halves, then the high ones."""
    chunks = qs.unflatten(-1, (-1, chunk))
    return torch.stack((chunks & 15, chunks >> 4), -2).flatten(-3)


def _shifts(bits: int, like: torch.Tensor) -> torch.Tensor:
    """0, bits, 2 * bits ... below 8: [8 / bits, 1]"""
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=like.device)[:, None]


def _k_scales(sc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [..., 12] -> scales and minima of a block's eight parts of 32 weights, 6 bits each: two uint8 [..., 8]."""
    low, middle, high = sc.unflatten(-1, (3, 4)).unbind(-2)
    scales = torch.cat((low & 63, (high & 15) | (low >> 2 & 48)), -1)
    minima = torch.cat((middle & 63, (high >> 4) | (middle >> 2 & 48)), -1)
    return scales, minima
