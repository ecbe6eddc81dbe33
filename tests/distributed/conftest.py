import pytest

from tests.distributed.spmd import Pool


@pytest.fixture(scope="package")
def pool():
    pool = Pool(4)
    yield pool
    pool.close()
