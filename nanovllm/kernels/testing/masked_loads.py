"""Finds kernels that use elements which a masked load left out, in Triton's interpreter.

Without `other` the elements that the mask leaves out are undefined. The interpreter makes them zeros, so a kernel that
adds them up gives the right result there.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from nanovllm.kernels.testing.crash_report import place_of_frame

_NAN_BITS = {1: 0x7F, 2: 0x7FC0}
"""NaN of the float types that NumPy lacks, by the bytes of one element: those of 8 bits, and bfloat16."""


class MaskedLoads:
    """Within the block, elements that a masked load of an interpreted kernel leaves out are NaN, or the largest
    integer, unless the kernel gives the load `other`. Without the interpreter, nothing happens.

    Args:
        only: change the loads at these places alone; None: all.

    Attributes:
        places: of the loads that were changed, each as ", at file:line, `source`".
    """

    def __init__(self, only: Collection[str] | None = None) -> None:
        self.places: dict[str, None] = {}
        self._only = only
        self._restore: Callable[[], None] | None = None

    def __enter__(self) -> MaskedLoads:
        if "triton.runtime.interpreter" not in sys.modules:
            return self
        from triton.runtime.interpreter import TensorHandle, interpreter_builder

        load = interpreter_builder.create_masked_load

        def masked_load(ptrs: Any, mask: Any, other: Any, *args: Any, **kwargs: Any) -> Any:
            if other is None and not mask.data.all():
                place = place_of_frame(sys._getframe())
                element = ptrs.get_element_ty()
                value = _undefined(element)
                if value is not None and (self._only is None or place in self._only):
                    self.places[place] = None
                    other = TensorHandle(np.full(ptrs.data.shape, value), element)
            return load(ptrs, mask, other, *args, **kwargs)

        interpreter_builder.create_masked_load = masked_load
        self._restore = functools.partial(setattr, interpreter_builder, "create_masked_load", load)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._restore is not None:
            self._restore()


def _undefined(element: Any) -> np.generic | None:
    """A value that shows in results, as the interpreter stores it; None: of a pointer, which is left as it is."""
    from triton.runtime.interpreter import _get_np_dtype

    if element.is_ptr():
        return None
    dtype = _get_np_dtype(element)
    if element.is_floating():
        return dtype.type(np.nan if dtype.kind == "f" else _NAN_BITS[dtype.itemsize])
    return dtype.type(True if dtype.kind == "b" else np.iinfo(dtype).max)
