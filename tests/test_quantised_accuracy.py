"""SmolLM2's perplexity on a kept text with quantised weights, beside float32's: the figures of docs/models.md."""

import pytest

from tests.fp8_accuracy import TEXT
from tests.quantised_accuracy import measure


@pytest.mark.slow
def test_quantised_weights_write_as_well_as_floats(smollm2_path):
    found = measure(smollm2_path, TEXT.read_text(encoding="utf-8"), 512)
    exact = found["float32"][0]
    # Blocks are the same numbers; what is left is float32's rounding.
    assert found["Q4_1 blocks"][0] == pytest.approx(exact, rel=1e-4) and found["Q4_1 blocks"][1] < 1e-4
    if "Q4_1, C++, int8 activations" in found:
        ppl, error, same = found["Q4_1, C++, float32 activations"]
        assert ppl == pytest.approx(exact, rel=1e-4) and error < 1e-4
        ppl, error, same = found["Q4_1, C++, int8 activations"]
        assert ppl < exact * 1.01 and 1e-3 < error < 0.1 and same > 0.93
    for form, most in {"int8": 1.005, "fp8": 1.02, "int4": 1.6}.items():
        ppl, error, same = found[form]
        assert ppl < exact * most and 1e-4 < error < 1.2 and same > 0.55, (form, found[form])
    for form, most in {"int8": 1.03, "int4": 1.08, "Q4_1 blocks": 1.03}.items():
        ppl, error, same = found[f"{form}, fp8 activations"]
        assert ppl < found[form][0] * most and 0.1 < error < 1.3 and same > 0.55, (form, found)
    assert found["int8"][1] < found["fp8"][1] < found["int4"][1]
