"""Which rows a step asks the model for."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nanovllm.engine.fast.cuda_graphs import DecodeBuckets
from nanovllm.engine.model_runner import ModelRunner


@pytest.mark.parametrize(
    "wanted, num_tokens, on_gpu",
    [
        ([], 7, 0), ([2], 7, 1), ([0, 1, 6], 7, 4), (list(range(7)), 7, None), (list(range(1, 7)), 7, 8), (list(range(1, 18)), 99, 20),
        (list(range(1, 31)), 99, 30),
    ],
    ids=["none", "one", "three", "all", "more than there are", "as many as run at once", "more than that, for log-probabilities"],
)  # fmt: skip
def test_wanted_rows_are_padded_to_a_size_that_decodes_have(wanted, num_tokens, on_gpu):
    batch = SimpleNamespace(logits_rows=np.asarray(wanted, np.int64), num_tokens=num_tokens)
    for device, count in (("cuda", on_gpu), ("cpu", None if on_gpu is None else len(wanted))):
        runner = SimpleNamespace(
            device=torch.device(device), config=SimpleNamespace(max_num_seqs=20), buckets=DecodeBuckets(20, 64)
        )
        rows = ModelRunner._padded_rows(runner, batch)
        assert (rows is None) == (count is None)
        if rows is not None:
            assert rows.dtype == np.int64 and rows.tolist() == wanted + [0] * (count - len(wanted))
