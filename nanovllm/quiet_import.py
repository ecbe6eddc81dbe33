"""Imports of Hugging Face's packages without tqdm's warning in notebooks: progress is shown as text there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Within the block tqdm does not warn that a notebook lacks its widgets (ipywidgets)."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress not found")
        yield
