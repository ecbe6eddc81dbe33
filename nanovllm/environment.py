"""The environment variables that the package reads."""

from __future__ import annotations

import difflib
import functools
import logging
import os
from collections.abc import Iterable

from nanovllm.console import warn

logger = logging.getLogger(__name__)

_PREFIX = "NANOVLLM_"
VARIABLES = tuple(
    _PREFIX + name
    for name in (
        "API_KEY", "CACHE", "CHECK", "CPU_ARCH", "CPU_THREADS", "KERNELS", "KERNEL_CONFIGS", "KERNEL_TABLES",
        "RAY_CLUSTER", "VLLM",
    )
)  # fmt: skip
"""All of them; a test compares them with the source."""
_LIKE = 0.75
"""The ratio of `difflib` from which on a name is taken for a misspelt one."""


def misspelt(names: Iterable[str]) -> list[tuple[str, str]]:
    """(name, the variable that was probably meant) of each name that begins as the package's do and is not read.

    A name that is like none of the variables is another program's: Kubernetes sets NANOVLLM_PORT for a service that is
    called nanovllm.
    """
    found = []
    for name in names:
        upper = name.upper().replace("-", "_")
        if name not in VARIABLES and upper.startswith(_PREFIX):
            ratios = {v: _ratio(upper, v) for v in VARIABLES}
            nearest = max(VARIABLES, key=ratios.__getitem__)
            found += [(name, nearest)] if ratios[nearest] >= _LIKE else []
    return found


def _ratio(name: str, variable: str) -> float:
    """How alike they are, without the prefix, and without underscores, which are left out easily."""
    a, b = (text.removeprefix(_PREFIX).replace("_", "") for text in (name, variable))
    return difflib.SequenceMatcher(None, a, b).ratio()


@functools.cache
def warn_of_misspelt() -> None:
    """Warn, once in a process, of environment variables whose names are nearly those of the package's."""
    for name, meant in misspelt(os.environ):
        warn(logger, f"the environment variable {name} is not read; did you mean {meant}?")
