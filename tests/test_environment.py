"""Environment variables: which there are, and what is said of a misspelt one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import nanovllm
from nanovllm.environment import VARIABLES, misspelt
from tests.commands import ROOT


def test_all_that_the_package_reads_are_known():
    source = [path.read_text() for path in Path(nanovllm.__file__).parent.rglob("*.py")]
    assert set(re.findall(r"""b?["'](NANOVLLM_[A-Z_]+)["']""", "\n".join(source))) == set(VARIABLES)


@pytest.mark.parametrize(
    "name, meant",
    [
        ("NANOVLLM_KERNEL", "NANOVLLM_KERNELS"),
        ("nanovllm_kernels", "NANOVLLM_KERNELS"),
        ("NANOVLLM_KERNAL_CONFIGS", "NANOVLLM_KERNEL_CONFIGS"),
        ("NANOVLLM_APIKEY", "NANOVLLM_API_KEY"),
        ("NANOVLLM_CACHE_DIR", "NANOVLLM_CACHE"),
        ("NANOVLLM_NUM_THREADS", "NANOVLLM_CPU_THREADS"),
        ("NANOVLLM-CHECK", "NANOVLLM_CHECK"),
    ],
)
def test_a_misspelt_one_is_found(name, meant):
    assert misspelt([name, "PATH"]) == [(name, meant)]


def test_those_of_other_programs_are_not():
    of_kubernetes = (
        "SERVICE_HOST SERVICE_PORT SERVICE_PORT_HTTP PORT PORT_8000_TCP PORT_8000_TCP_ADDR PORT_8000_TCP_PROTO"
    )
    others = [f"NANOVLLM_{name}" for name in (*of_kubernetes.split(), "VERSION", "MODEL", "TEST_TURN", "")]
    assert not misspelt([*others, *VARIABLES, "NANO_VLLM_KERNELS", "KERNELS", ""])


@pytest.mark.parametrize(
    "lines", [None, "import nanovllm.environment as e; e.warn_of_misspelt(); e.warn_of_misspelt()"]
)
def test_a_line_says_it_once(lines, monkeypatch):
    monkeypatch.setenv("NANOVLLM_KERNEL", "rms_norm=native")
    command = ["-m", "nanovllm", "generate"] if lines is None else ["-c", lines]  # an error follows: no prompt
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    said = "the environment variable NANOVLLM_KERNEL is not read; did you mean NANOVLLM_KERNELS?"
    assert " ".join(done.stderr.split()).count(said) == 1
