"""A convolution to plan: its sizes, and how much of the image it reads. conv.py has the tiles for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from nanovllm.hardware.gpu_presets import DTYPE_BYTES
from nanovllm.plan.resources import cdiv, one_of, positive

DTYPES = ("bfloat16", "float16", "float32", "tfloat32")
_SECTOR = 32
"""Bytes that memory delivers at least."""


@cache
def positions_read(
    outputs: int, taps: int, stride: int, dilation: int, padding: int = 0, size: int | None = None
) -> int:
    """How many input positions of one dimension `outputs` neighbouring outputs read, each once; of those from 0 to
    `size` if it is given.

    Taps that are a multiple of the stride apart read the same positions, but for their ends: of each such set the
        union is counted.
    """
    starts: dict[int, list[int]] = {}
    for offset in range(0, taps * dilation, dilation):
        starts.setdefault(offset % stride, []).append(offset // stride)
    total = 0
    for phase, begins in starts.items():  # positions phase + stride x begin, and outputs - 1 more
        done = begins[0] if size is None else cdiv(padding - phase, stride)
        stop = begins[-1] + outputs if size is None else cdiv(size + padding - phase, stride)
        for begin in begins:
            total += max(0, min(begin + outputs, stop) - max(begin, done))
            done = max(done, begin + outputs)
    return total


@dataclass(frozen=True)
class ConvProblem:
    """Input [batch, channels, height, width], channels innermost in memory; weights [filters, channels,
    filter_height, filter_width].

    Attributes:
        stride, dilation: of both dimensions; padding: zeros on each side.

    Raises:
        ValueError: a size is not positive, padding is negative, or the filter does not fit the padded image.
    """

    batch: int
    channels: int
    height: int
    width: int
    filters: int
    filter_height: int = 3
    filter_width: int = 3
    stride: int = 1
    padding: int = 1
    dilation: int = 1
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        names = "batch channels height width filters filter_height filter_width stride dilation".split()
        positive(**{name: getattr(self, name) for name in names})
        if not isinstance(self.padding, int) or self.padding < 0:
            raise ValueError(f"padding: expected an integer of at least 0, not {self.padding!r}")
        one_of("dtype", self.dtype, DTYPES)
        for name, taps in (("height", self.filter_height), ("width", self.filter_width)):
            size = getattr(self, name)
            if size + 2 * self.padding < self.dilation * (taps - 1) + 1:
                raise ValueError(
                    f"filter_{name}: {taps} taps with dilation {self.dilation} "
                    f"need {self.dilation * (taps - 1) + 1} pixels, "
                    f"the padded image has {size + 2 * self.padding}"
                )

    def _output(self, size: int, taps: int) -> int:
        return (size + 2 * self.padding - self.dilation * (taps - 1) - 1) // self.stride + 1

    @property
    def out_height(self) -> int:
        return self._output(self.height, self.filter_height)

    @property
    def out_width(self) -> int:
        return self._output(self.width, self.filter_width)

    @property
    def taps(self) -> int:
        return self.filter_height * self.filter_width

    @property
    def flops(self) -> float:
        pixels = self.batch * self.out_height * self.out_width
        return 2.0 * pixels * self.filters * self.channels * self.taps

    @property
    def shares(self) -> bool:
        """Whether some input value is under several taps, of one output pixel and another."""
        sides = ((self.out_height, self.filter_height), (self.out_width, self.filter_width))
        return any(positions_read(*side, self.stride, self.dilation) < math.prod(side) for side in sides)

    @property
    def read_height(self) -> int:
        """Rows of an image that some output needs."""
        return positions_read(
            self.out_height, self.filter_height, self.stride, self.dilation, self.padding, self.height
        )

    @property
    def read_width(self) -> int:
        """Columns of an image that are read: what outputs need, and what lies between in the same sectors."""
        gap = max(self.dilation - 1, self.stride - self.dilation * (self.filter_width - 1) - 1)
        if gap * self.channels * DTYPE_BYTES[self.dtype] < _SECTOR:
            gap_filled = (self.out_width - 1) * self.stride + self.dilation * (self.filter_width - 1) + 1
            return min(self.width, gap_filled)
        return positions_read(self.out_width, self.filter_width, self.stride, self.dilation, self.padding, self.width)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Elements of the input, as far as it is read, the weights and the output."""
        outputs = self.batch * self.filters * self.out_height * self.out_width
        inputs = self.batch * self.channels * self.read_height * self.read_width
        return inputs, self.filters * self.channels * self.taps, outputs

    @property
    def least_bytes(self) -> float:
        """Input, weights and output once."""
        return sum(self.sizes) * DTYPE_BYTES[self.dtype]
