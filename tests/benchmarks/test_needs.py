"""Scripts that measure vLLM end with a sentence where vLLM or a GPU is missing, before they start anything."""

import importlib.util
import subprocess
import sys

import pytest
import torch

from benchmarks import needs, tensor_parallel, vllm_ops, vllm_plugin, vllm_tokens
from benchmarks.serving import beside_vllm

NOT_INSTALLED = "vllm is not installed here; run this in vLLM's environment, with nanovllm in it"


def ended(call, *args, **kwargs):
    with pytest.raises(SystemExit) as end:
        call(*args, **kwargs)
    return str(end.value)


@pytest.fixture
def machine(monkeypatch):
    """A function that says whether vLLM and a GPU seem to be there."""

    def make(vllm, gpu):
        found = importlib.util.find_spec
        monkeypatch.setattr(
            needs.importlib.util, "find_spec", lambda name: vllm or None if name == "vllm" else found(name)
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)

    return make


def test_what_is_missing_is_named(machine):
    machine(vllm=False, gpu=True)
    assert ended(needs.need_vllm).startswith(NOT_INSTALLED)
    assert ended(needs.need_vllm, "do that").endswith("here; do that")
    machine(vllm=True, gpu=False)
    assert ended(needs.need_vllm).startswith("this machine has no CUDA device, and vLLM is measured on one; run")
    needs.need_vllm(gpu=False)
    machine(vllm=True, gpu=True)
    needs.need_vllm()


@pytest.mark.parametrize("script", [vllm_plugin, vllm_ops, vllm_tokens])
def test_nothing_starts_without_vllm(machine, monkeypatch, capsys, script):
    machine(vllm=False, gpu=True)
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))
    monkeypatch.setattr(sys, "argv", ["script"])
    assert ended(script.main).startswith(NOT_INSTALLED)
    assert capsys.readouterr().out == ""


def test_the_server_is_not_started_beside_nothing(machine, monkeypatch, tmp_path):
    """`benchmarks.serving.beside_vllm`: its peer must be there, and a GPU, if both servers are to be measured."""
    pytest.importorskip("uvicorn", reason='pip install "nanovllm[serve]"')
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: pytest.fail("a process was started"))

    def said(*args):
        monkeypatch.setattr(sys, "argv", ["beside_vllm", *args])
        return ended(beside_vllm.main)

    machine(vllm=False, gpu=True)
    assert said().startswith("vllm is not installed here; name the folder that it is in: --engine-path vllm=DIR (such")
    (tmp_path / "with" / "vllm").mkdir(parents=True)
    machine(vllm=False, gpu=False)
    given = "--engine-path", f"vllm={tmp_path / 'with'}"
    assert said(*given).startswith("this machine has no CUDA device, and vLLM is measured on one; --parts std256,str")
    with pytest.raises(ValueError, match="there is no package vllm in this directory"):
        said("--engine-path", f"vllm={tmp_path}")
    for args in (["--parts", "std256,storm"], ["--peer", "nanovllm"], ["--peer-command", "other {port}"]):
        with pytest.raises(ValueError, match="--structured none: must be 3 whole numbers"):  # which is looked at next
            said(*args, "--structured", "none")


def test_ranks_without_gpus_have_a_remedy_and_vllm_is_looked_for_first(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    def said(*args):
        monkeypatch.setattr(sys, "argv", ["tensor_parallel", *args])
        return ended(tensor_parallel.main)

    assert said().endswith("has 0 CUDA device(s); run this on one with more, or use --device cpu to try the script")
    assert said("--engine-path", f"vllm={tmp_path / 'none'}").startswith(
        f"--engine-path vllm={tmp_path / 'none'}: there"
    )
    assert "there is no package vllm in this directory" in said("--engine-path", f"vllm={tmp_path}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert said().endswith("has 1 CUDA device(s); run this on one with more, or name at most 1")


def test_an_empty_table_is_not_shown(capsys):
    vllm_plugin.show([])
    assert capsys.readouterr().out == ""
