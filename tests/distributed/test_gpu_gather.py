"""The op `all_gather_last` between GPUs: by the kernel, which writes to the memory of the others, and by NCCL."""

import pytest
import torch

from tests.distributed.gathers import gathered, wanted
from tests.distributed.spmd import Pool

pytestmark = [pytest.mark.gpu, pytest.mark.several_gpus]


@pytest.fixture(scope="module")
def gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    pool = Pool(min(4, torch.cuda.device_count()), device="cuda")
    yield pool
    pool.close()


@pytest.mark.parametrize(
    "dtype, size, n, padding",
    [
        (torch.bfloat16, 2, 75968, 3),
        (torch.float32, 2, 40, 0),
        (torch.float16, 2, 4099, 1),
        (torch.bfloat16, 3, 37, 2),
        (torch.float32, 3, 2049, 2051),
        (torch.bfloat16, 4, 37984, 0),
    ],
)
@pytest.mark.parametrize("provider", ["triton", "native"])
def test_columns_of_many_calls(gpus, provider, dtype, size, n, padding):
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    # Many rows: more programs than a GPU runs at a time, and more rows than the kernel takes.
    length, sizes = size * n - padding, (3, 1, 128, 2, 300, 1, 256, 0, 5)
    assert gpus.run(size, gathered, provider, dtype, n, length, sizes) == wanted(
        provider, dtype, n, length, size, sizes
    )
