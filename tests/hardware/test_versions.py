"""What a bug report has of the machine."""

import platform

import torch

from nanovllm.hardware.versions import environment, versions


def test_the_environment_names_the_build_of_pytorch(monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", None)
    found = environment()
    assert found["torch"] == f"{torch.__version__} (CPU build)" and found["python"] == platform.python_version()
    assert found["triton"] == versions()["triton"] and found["system"].startswith(platform.system())
    assert {"nanovllm", "transformers", "processor"} <= found.keys()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert environment()["torch"] == torch.__version__ and environment()["cuda"] == "13.0"
