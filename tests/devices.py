"""Where tests run that are of any device."""

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""A GPU where there is one. What uses it has the marker `any_device`, so that `make test-gpu` runs it, too."""
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
