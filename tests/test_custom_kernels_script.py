"""What `test_custom_kernels.py` prints beside its measurements, which need a GPU."""

import pytest
import torch

import test_custom_kernels as script
from nanovllm.hardware.timing import Timing
from nanovllm.kernels.testing.compare import Measurement
from nanovllm.kernels.testing.verify import Case


def measured(shape, num_bytes, seconds=1e-6, provider="triton"):
    timing = None if seconds is None else Timing(seconds, seconds, seconds)
    peak = None if timing is None else num_bytes
    return Measurement("rms_norm", provider, Case(shape, torch.bfloat16), timing, bytes=num_bytes, peak_bytes=peak)


def test_the_largest_shape_is_the_one_with_the_most_bytes(capsys):
    results = [
        measured((1, 1024), 6, 1e-6), measured((16384, 4096), 900, 71e-6), measured((4096, 5120), 300, 25e-6),
        measured((99999, 1), 0, None), measured((1, 1024), 6, 1e-6, "native"),
        measured((16384, 4096), 900, 142e-6, "native"),
    ]  # fmt: skip
    largest = script.of_the_largest_shape(results)
    shapes = {("rms_norm", provider): (16384, 4096) for provider in ("triton", "native")}
    assert {key: m.case.shape for key, m in largest.items()} == shapes
    script.peak_memory(results)
    assert capsys.readouterr().out.count("16384x4096") == 2
    script.summary({("rms_norm", "triton"): "right"}, results)
    printed = capsys.readouterr().out
    assert "71.0" in printed and "2.00" in printed and "25.0" not in printed


def test_the_script_needs_no_pytest(warm_python):
    code = (
        "import sys; sys.modules['pytest'] = None; import test_custom_kernels as script; print(len(script.PAIRS) > 30)"
    )
    done = warm_python.run("-c", code)
    assert done.stdout == "True\n", done.stderr


def test_several_ops_can_be_named(monkeypatch):
    seen = []
    monkeypatch.setattr(script, "correctness", lambda pairs: seen.extend(op.name for op, _ in pairs) or {})
    for step, result in (("benchmark", []), ("peak_memory", None), ("profile", None), ("summary", None)):
        monkeypatch.setattr(script, step, lambda *args, result=result: result)
    for arguments, names in (
        (["rms_norm", "softmax"], {"rms_norm", "softmax"}),
        (["gelu", "sil"], {"gelu_and_mul", "silu_and_mul", "silu_and_mul_linear_fp8_dynamic"}),
    ):
        seen.clear()
        assert script.main(arguments) == 0 and set(seen) == names
    seen.clear()
    assert script.main([]) == 0 and len(set(seen)) > 15


@pytest.mark.parametrize(
    "arguments, said", [(["--fast"], "--fast"), (["rms_norm", "nope"], "no op begins with 'nope'")]
)
def test_what_is_unknown_is_refused(capsys, arguments, said):
    with pytest.raises(SystemExit) as stopped:
        script.main(arguments)
    assert stopped.value.code == 2 and said in capsys.readouterr().err
