"""Checkpoints that several files of tests use; no pickle is ever opened."""

import pickle

import pytest
import torch

from tests import tiny


@pytest.fixture(autouse=True)
def pickles_stay_closed(monkeypatch):
    """Nothing here may ever reach torch.load or pickle."""

    def opened(*_, **__):
        raise AssertionError("a pickle was opened")

    monkeypatch.setattr(torch, "load", opened)
    monkeypatch.setattr(pickle, "load", opened)


@pytest.fixture
def checkpoint(tmp_path):
    """An untied Qwen3 with one file of weights, which `edit` rewrites."""
    tiny.save(tmp_path, "qwen3", num_hidden_layers=1)
    return tmp_path
