"""Where the built-in order takes a provider."""

import pytest
import torch

from nanovllm.kernels import Provider, all_ops, resolve_kernels
from nanovllm.kernels.op.provider import NATIVE
from nanovllm.kernels.op.selection import ranked_providers, why_selected

CPU = torch.device("cpu")
ROWS = torch.ones(3, 4), torch.ones(4), 1e-6


def double_rows(x, weight, eps):
    """In place of rms_norm, and easily told from it."""
    return 2 * x


@pytest.mark.parametrize(
    "preferred, in_engines, elsewhere",
    [("anywhere", "cpu", "cpu"), ("engines", "cpu", NATIVE), ("nowhere", NATIVE, NATIVE)],
)
def test_a_provider_runs_where_it_is_preferred_or_named(preferred, in_engines, elsewhere, monkeypatch):
    monkeypatch.delenv("NANOVLLM_KERNELS", raising=False)
    rms_norm = all_ops()["rms_norm"]
    monkeypatch.setattr(rms_norm, "resolved_calls", {})
    monkeypatch.setitem(rms_norm.providers, "cpu", Provider("cpu", double_rows, preferred=preferred))
    assert resolve_kernels(CPU).providers["rms_norm"] == in_engines == ranked_providers(rms_norm, CPU)[0].name
    assert ("a plain call runs the reference" in why_selected(rms_norm, CPU)) == (preferred == "engines")
    assert resolve_kernels(CPU, in_engine=False).providers["rms_norm"] == elsewhere
    assert torch.equal(rms_norm(*ROWS), 2 * ROWS[0]) == (elsewhere == "cpu")
    named = {"rms_norm": ["cpu"]}
    assert resolve_kernels(CPU, priority=named, in_engine=False).providers["rms_norm"] == "cpu"
