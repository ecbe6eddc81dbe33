"""Checkpoints that several files of tests use; no pickle is ever opened."""

import pickle
import shutil

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


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    directory = tmp_path_factory.mktemp("original")
    tiny.save(directory, "qwen3", num_hidden_layers=1)
    return directory


@pytest.fixture
def checkpoint(original, tmp_path):
    """An untied Qwen3 with one file of weights, which `edit` rewrites."""
    return shutil.copytree(original, tmp_path, dirs_exist_ok=True)
