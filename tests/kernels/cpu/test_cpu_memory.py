"""The memory of packed weights."""

import mmap
import random
import sys
from pathlib import Path

import pytest
import torch

from nanovllm.kernels.cpu.library import PackedMatrix
from nanovllm.kernels.cpu.memory import ALIGNMENT, WeightMemory


def flags_of_mapping(address: int) -> list[str] | None:
    """The kernel's flags of the mapping that holds an address."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name = line.split()[0]
        if "-" in name and not name.endswith(":"):
            begin, end = (int(part, 16) for part in name.split("-"))
            inside = begin <= address < end
        elif inside and name == "VmFlags:":
            return line.split()[1:]
    return None


def test_pieces_are_apart_aligned_and_keep_their_content():
    memory = WeightMemory(mapping=1 << 16)
    rng = random.Random(0)
    sizes = [0, 1, 63, 64, 65, 1 << 13, 1 << 14, (1 << 14) - 1, 1 << 17, *(rng.randrange(1 << 15) for _ in range(40))]
    pieces = [memory.take(size) for size in sizes]
    for i, piece in enumerate(pieces):
        piece.fill_(i)
    for i, (piece, size) in enumerate(zip(pieces, sizes)):
        assert piece.shape == (size,) and piece.dtype == torch.uint8
        assert bool((piece == i).all()), f"piece {i} of {size} bytes was overwritten"
        assert size == 0 or piece.data_ptr() % ALIGNMENT == 0


def test_small_pieces_share_a_mapping_and_large_ones_have_their_own():
    memory = WeightMemory(mapping=1 << 16)
    small = memory.take(100), memory.take(100)
    large = memory.take(1 << 14)
    assert small[0].untyped_storage().data_ptr() == small[1].untyped_storage().data_ptr()
    assert large.untyped_storage().data_ptr() != small[0].untyped_storage().data_ptr()
    assert large.untyped_storage().nbytes() == 1 << 14


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux alone has huge pages for whoever asks")
@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this kernel has no huge pages")
@pytest.mark.parametrize("rows", [16, 16384])  # in a mapping with others, and in one of its own
def test_weights_lie_in_memory_that_asks_for_huge_pages(rows):
    matrix = PackedMatrix.of(torch.ones(rows, 1024))
    assert "hg" in flags_of_mapping(matrix.tiles.data_ptr())
    # The test can fail: a mapping of which nothing was asked. (Other libraries ask for pages of the heap.)
    ordinary = torch.frombuffer(mmap.mmap(-1, 1 << 16), dtype=torch.uint8)
    assert "hg" not in flags_of_mapping(ordinary.data_ptr())


def test_a_linux_without_huge_pages_gives_ordinary_memory(monkeypatch):
    class Refusing(mmap.mmap):
        def madvise(self, *_):
            raise OSError(22, "Invalid argument")

    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
    monkeypatch.setattr(mmap, "mmap", Refusing)
    assert WeightMemory(mapping=1 << 16).take(1 << 15).fill_(3).sum() == 3 << 15


NO_MEMORY = """
import resource, torch
from nanovllm.kernels.cpu.library import PackedMatrix
matrix, x = PackedMatrix.of(torch.randn(16, 64)), torch.randn(1_000_000, 64)
want = matrix.product(x[:5])
used = 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1])
resource.setrlimit(resource.RLIMIT_AS, (used + (150 << 20), resource.RLIM_INFINITY))  # the copy of x takes 256 MB
try:
    matrix.product(x)
except MemoryError as e:
    print(e)
assert torch.equal(matrix.product(x[:5]), want)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_product_without_memory_is_an_error(warm_python):
    """An exception of C++ that reaches Python ends the process."""
    done = warm_python.run("-c", NO_MEMORY)
    said = "the C++ kernels: the system has no memory left for the step; set max_num_batched_tokens to less\n"
    assert (done.returncode, done.stdout) == (0, said), done.stderr[-2000:]
