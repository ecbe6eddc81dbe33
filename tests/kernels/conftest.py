"""Fixtures that several tests of kernels share."""

import pytest


@pytest.fixture
def config_folders(monkeypatch, tmp_path):
    """(shipped, the user's): files of configurations there are read for calls on the CPU, as if it were a GPU."""
    from nanovllm.kernels.op import config_files
    from tests.kernels.config_files import GPU, forget

    shipped, user = tmp_path / "shipped", tmp_path / "user"
    shipped.mkdir()
    user.mkdir()
    monkeypatch.setattr(config_files, "gpu_of", lambda device: GPU)
    monkeypatch.setattr(config_files, "SHIPPED", shipped)
    monkeypatch.setenv(config_files.DIRECTORY_VARIABLE, str(user))
    forget()
    yield shipped, user
    forget()
