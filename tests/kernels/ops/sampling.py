"""What tests of the op `sample` share: its arguments, a slow reference of its filters, and a test of frequencies."""

import math

import numpy as np
import torch


def tensors(rows, top_k=None, top_p=None, min_p=None, temperature=1.0, seeds=0, positions=0, device="cpu"):
    """Arguments of `sample` after the logits, from scalars (the same in every row) or sequences."""

    def column(value, dtype):
        if value is None:
            return None
        return torch.as_tensor(value, dtype=dtype).expand(rows).contiguous().to(device)

    return (
        column(temperature, torch.float32),
        column(top_k, torch.int32),
        column(top_p, torch.float32),
        column(min_p, torch.float32),
        column(seeds, torch.int64),
        column(positions, torch.int64),
    )


def reference_probabilities(logits, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """Probabilities after the filters, in Python floats: a dict {token: probability} of the survivors."""
    best = max(logits)
    weights = {i: math.exp((x - best) / temperature) for i, x in enumerate(logits) if x > -math.inf}
    order = sorted(weights, key=lambda i: (-logits[i], i))
    if top_k is not None and 0 < top_k < len(logits):
        kth = sorted(logits, reverse=True)[top_k - 1]
        order = [i for i in order if logits[i] >= kth]
    if top_p is not None and top_p < 1:
        total, before, kept = math.fsum(weights[i] for i in order), 0.0, []
        for i in order:
            if before >= top_p * total and kept:
                break
            kept.append(i)
            before += weights[i]
        order = kept
    if min_p is not None:
        order = [i for i in order if weights[i] >= min_p]
    total = math.fsum(weights[i] for i in order)
    return {i: weights[i] / total for i in order}


def chi_square_is_plausible(counts, expected):
    """Pearson's test at about one in a million; cells below five expected are pooled (Wilson-Hilferty quantile)."""
    small = expected < 5
    counts = np.append(counts[~small], counts[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    counts, expected = counts[expected > 0], expected[expected > 0]
    df = len(counts) - 1
    if df == 0:
        return True
    statistic = ((counts - expected) ** 2 / expected).sum()
    return statistic < df * (1 - 2 / (9 * df) + 4.75 * math.sqrt(2 / (9 * df))) ** 3
