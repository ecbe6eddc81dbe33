"""PyTorch's own checks of an operator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_OTHERS = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def opcheck(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> None:
    """`torch.library.opcheck`. Of a schema with 8-bit floats nothing is checked: it compares, which PyTorch cannot."""
    tests = ("test_schema", *_OTHERS)
    if any(getattr(a, "dtype", None) == torch.float8_e4m3fn for a in args):
        tests = _OTHERS
    torch.library.opcheck(operator, tuple(args), dict(kwargs or {}), test_utils=tests)
