"""Fixtures that several tests of kernels share."""

import pytest


@pytest.fixture
def config_folder(monkeypatch, tmp_path):
    """The user's directory of configurations. Its files are read for calls on the CPU, as if it were a GPU."""
    from nanovllm.kernels.op import config_files
    from tests.kernels.config_files import GPU, forget

    monkeypatch.setattr(config_files, "gpu_of", lambda device: GPU)
    monkeypatch.setenv(config_files.DIRECTORY_VARIABLE, str(tmp_path))
    forget()
    yield tmp_path
    forget()
