"""Which FlashAttention and FlashInfer are installed, and why one cannot run."""

import importlib
import sys
import types

import pytest
import torch

from nanovllm.kernels.external import flash_attn, flashinfer
from nanovllm.kernels.op import selection
from nanovllm.kernels.ops.attention import attention_decode, attention_prefill
from tests.kernels.external.examples import CPU, CUDA


def test_missing_packages(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for device in (CPU, CUDA):
        assert "not installed; pip install flash-attn" in flash_attn.support(device)
        assert "not installed; pip install flashinfer-python" in flashinfer.support(device)


PACKAGES = ("flash_attn", "flash_attn_interface", "flash_attn_2_cuda", "vllm", "flashinfer", "tvm_ffi")
WORKING = """
def flash_attn_with_kvcache(): ...
def flash_attn_varlen_func(): ...
class BatchDecodeWithPagedKVCacheWrapper: ...
class BatchPrefillWithPagedKVCacheWrapper: ...
"""
VERSION_2 = ["flash_attn/__init__.py", "flash_attn_2_cuda.py"]
VLLM = "vllm/vllm_flash_attn/flash_attn_interface.py"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of packages; nothing else is installed."""
    kept = [p for p in sys.path if "-packages" not in p]
    monkeypatch.setattr(sys, "path", [str(tmp_path), *kept])
    monkeypatch.setattr(sys, "path_importer_cache", {})
    for name in [n for n in sys.modules if n.partition(".")[0] in PACKAGES]:
        monkeypatch.delitem(sys.modules, name)

    def add(*files, text=WORKING):
        for file in files:
            path = tmp_path / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        importlib.invalidate_caches()

    yield add
    for name in [n for n in sys.modules if n.partition(".")[0] in PACKAGES]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "files, capability, expected",
    [
        (VERSION_2, (8, 0), "FlashAttention 2 (flash_attn)"),
        ([*VERSION_2, "flash_attn_interface.py"], (9, 0), "FlashAttention 3 (flash_attn_interface)"),
        ([*VERSION_2, "flash_attn_interface.py"], (8, 6), "FlashAttention 2 (flash_attn)"),
        (
            ["flash_attn/cute/__init__.py", "flash_attn/cute/interface.py"],
            (10, 0),
            "FlashAttention 4 (flash_attn.cute)",
        ),
        (["vllm/__init__.py", VLLM, "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"], (9, 0), "FlashAttention 3 (vLLM)"),
        (["vllm/__init__.py", VLLM, "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so"], (9, 0), "FlashAttention 2 (vLLM)"),
        (["vllm/__init__.py"], (9, 0), None),
        (["flash_attn_interface.py"], (8, 0), None),
    ],
)
def test_what_is_installed_is_found(site, monkeypatch, files, capability, expected):
    site(*files)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    found = flash_attn.variant(CUDA)
    assert (found and found.name) == expected
    reason = flash_attn.support(CUDA)
    assert (reason is None) == (expected is not None)
    if expected is None and flash_attn.installed():
        assert (
            "compute capability 8.0: FlashAttention 3 (flash_attn_interface) runs on compute capability 9.x" in reason
        )


def test_nothing_is_imported_where_it_cannot_run(site, monkeypatch):
    files = ("flash_attn/__init__.py", "flash_attn_2_cuda.py", "flash_attn_interface.py", "flashinfer/__init__.py")
    site(*files, "tvm_ffi/__init__.py", text="raise SystemExit('imported')")
    assert flash_attn.installed() == ("flash_attn_interface", "flash_attn")
    assert flash_attn.support(CPU) == "FlashAttention needs a CUDA device, this is cpu"
    assert flashinfer.support(CPU) == "FlashInfer needs a CUDA device, this is cpu"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert "this GPU has compute capability 7.5" in flash_attn.support(CUDA)
    assert "this GPU has 7.5" in flashinfer.support(CUDA)


BROKEN = {
    "ImportError: /lib/flash.so: undefined symbol: _ZN3c10": "raise ImportError('/lib/flash.so:\\n undefined symbol:"
    " _ZN3c10')",
    "OSError: libcudart.so.12: cannot open": "raise OSError('libcudart.so.12: cannot open')",
    "AttributeError: module 'flash_attn": "",
}


@pytest.mark.parametrize("said", BROKEN)
def test_a_broken_flash_attention_is_a_reason(site, monkeypatch, measured, said):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    site("flash_attn/__init__.py", "flash_attn_interface.py", text=BROKEN[said])
    site("flash_attn_2_cuda.py")
    site("flash_attn-2.7.4.dist-info/METADATA", text="Name: flash-attn\nVersion: 2.7.4\n")
    reason = flash_attn.support(CUDA)
    assert f"FlashAttention 2 (flash_attn), flash-attn 2.7.4, is installed but cannot be imported ({said}" in reason
    assert (
        f"(flash_attn_interface), flash-attn-3 of unknown version, is installed but cannot be imported ({said}"
        in reason
    )
    assert f"install one built for torch {torch.__version__}" in reason and "\n" not in reason
    for declared in (attention_decode, attention_prefill):
        # Listed with the reason, never the choice, and an error with the reason where it is named.
        assert declared.providers["flash_attn"].support(CUDA) == reason
        measured(**{declared.name: ["flash_attn", "native"]})
        assert selection.ranked_providers(declared, CUDA)[0].name == "native"
        with pytest.raises(ValueError, match="is installed but cannot be imported"):
            declared.require("flash_attn", CUDA, "a user")


def test_a_module_without_origin_is_none_of_theirs(site, monkeypatch):
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert "not installed" in flash_attn.support(CUDA) and "not installed" in flashinfer.support(CUDA)


def test_a_broken_flash_attention_is_passed_over(site, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    site("flash_attn_interface.py", text="raise ImportError('built for another torch')")
    site("flash_attn/__init__.py", "flash_attn_2_cuda.py")
    assert flash_attn.support(CUDA) is None
    assert flash_attn.variant(CUDA).name == "FlashAttention 2 (flash_attn)"


def test_libraries_that_vllm_could_not_load_are_a_reason(site, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    unsupported = "def fa_version_unsupported_reason(version): return 'FA3 is unavailable' if version == 3 else None\n"
    site(VLLM, text=WORKING + unsupported)
    site("vllm/__init__.py", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so")
    reason = flash_attn.support(CUDA)
    assert (
        "FlashAttention 3 (vLLM), vllm of unknown version, is installed but cannot run (FA3 is unavailable)" in reason
    )


def test_flashinfer_support(site, monkeypatch):
    site("flashinfer/__init__.py")
    assert "needs apache-tvm-ffi" in flashinfer.support(CUDA)
    site("tvm_ffi/__init__.py")
    assert flashinfer.support(CPU) == "FlashInfer needs a CUDA device, this is cpu"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert "this GPU has 7.5" in flashinfer.support(CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert flashinfer.support(CUDA) is None


def test_a_broken_flashinfer_is_a_reason(site, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    site("tvm_ffi/__init__.py")
    site("flashinfer/__init__.py", text="raise OSError('libtvm_ffi.so: wrong ELF class')")
    said = "flashinfer of unknown version is installed but cannot be imported (OSError: libtvm_ffi.so: wrong ELF class)"
    assert said in flashinfer.support(CUDA)
