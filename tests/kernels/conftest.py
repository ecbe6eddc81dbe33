"""Fixtures that several tests of kernels share."""

import pytest


@pytest.fixture
def measured(monkeypatch, tmp_path):
    """Writes a table of the providers of ops, fastest first, for a GPU that seems to be here."""
    import torch

    from nanovllm.kernels.op.measured_order import DIRECTORY_VARIABLE, save_table

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Test 9")

    def write(**orders):
        directory = tmp_path / f"tables {len(list(tmp_path.glob('tables *')))}"  # each is read once in a process
        directory.mkdir()
        found = {op: {"order": order, "relative": {}} for op, order in orders.items()}
        save_table("nvidia-test-9", found, "2020-01-02", directory)
        monkeypatch.setenv(DIRECTORY_VARIABLE, str(directory))

    return write


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
