"""Where the tests of Triton's kernels run, what they run on, and what they compare.

With a GPU they run there at real shapes, else in Triton's interpreter on small ones, in a process that
`tests/test_interpreted.py` starts.
"""

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

triton = pytest.importorskip("triton")
INTERPRETED = triton.knobs.runtime.interpret
GPU = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if GPU else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

_POISONED = (*DTYPES, torch.int64, torch.int32, torch.uint8, torch.int8)
_GUARD = 128


@contextmanager
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Memory that a kernel gets is NaN (integers: the largest number), and what lies around it must stay so."""
    original, allocated = torch.empty, []
    # On its first use in a process `with torch.device(...)` notes which functions make tensors; a patched one would
    # be noted instead of torch's, and the context would have no effect on it ever after.
    with torch.device("cpu"):
        original(0)

    def value(dtype):
        return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max

    def poisoned(*size, dtype=torch.float32, device=None, **kwargs):
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        if dtype not in _POISONED:
            return original(shape, dtype=dtype, device=device, **kwargs)
        count = shape.numel()
        memory = original(count + 2 * _GUARD, dtype=dtype, device=device, **kwargs).fill_(value(dtype))
        allocated.append((memory, count))
        return memory[_GUARD : _GUARD + count].view(shape)

    monkeypatch.setattr(torch, "empty", poisoned)
    yield
    for memory, count in allocated:
        around = torch.cat((memory[:_GUARD], memory[_GUARD + count :]))
        intact = around.isnan() if around.is_floating_point() else around == value(around.dtype)
        assert intact.all(), "wrote outside of its memory"


def randn(*shape, dtype, seed=0, scale=1.0):
    """The same numbers on any device, but for very many: a core draws 200 million a second."""
    device = DEVICE if math.prod(shape) >= 1 << 24 else "cpu"
    drawn = torch.randn(*shape, generator=torch.Generator(device).manual_seed(seed), device=device)
    return (drawn * scale).to(dtype).to(DEVICE)


def strided(x):
    """x with other elements between its rows. They are NaN, so that reading one shows."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 8), float("nan"), dtype=x.dtype, device=x.device)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def by_turns(*choices, turns=2):
    """One of `turns` combinations of the choices, spread evenly. Each two values still meet if the places in the other
    lists, from 0, can sum to `turns` - 1.

    On a GPU most combinations have kernels of their own, which take seconds to compile.
    """
    numbered = itertools.product(*map(enumerate, choices))
    return [tuple(value for _, value in each) for each in numbered if sum(i for i, _ in each) % turns == 0]


def graph_of(fn, warm=True):
    """(a captured graph of fn, its result). warm: fn ran before on the stream of the capture."""
    fn()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    if warm:
        with torch.cuda.stream(stream):
            fn()
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = fn()
    return graph, out
