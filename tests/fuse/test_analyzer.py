"""What is fused in a layer, in which reports, and what cannot be traced."""

import json

import pytest
import torch
import torch.nn.functional as F

from nanovllm.cli.fuse_layer import decoder_layer
from nanovllm.fuse import FusionAnalyzer, TraceError
from nanovllm.fuse.group_timing import Agreement, measure
from nanovllm.fuse.module_export import trace
from nanovllm.fuse.op_graph import build
from tests.fuse.modules import PLAIN, norm


@pytest.mark.slow
def test_the_ops_that_we_have_are_the_ones_that_a_decode_step_wants():
    """At one token a norm goes into the product behind it; at 64 that would be repeated too often."""
    layer, kwargs, known = decoder_layer("qwen3-0.6b", 1, 1024)
    one = FusionAnalyzer(layer, (), kwargs, known=known).report()
    assert [str(r.served) for r in one.rows if str(r.served) != "linear"] == [
        "add_rms_norm_linear", "qk_norm_rope_store", "attention_decode",
        "linear (1 of 2 kernels); part of linear_add_rms_norm", "add_rms_norm_gate_up",
    ]  # fmt: skip
    layer, kwargs, known = decoder_layer("qwen3-0.6b", 64, 1024)
    many = FusionAnalyzer(layer, (), kwargs, known=known).report()
    assert {"add_rms_norm", "qk_norm_rope_store", "linear_silu_and_mul"} <= {str(r.served) for r in many.rows}
    assert any("every tile repeats" in d.reason for d in many.decisions if not d.made)
    # Attention's traffic is that of the keys and values: 64 sequences of 1024 tokens, 8 heads of 128.
    (attention,) = [r for r in many.rows if str(r.served) == "attention_decode"]
    assert attention.estimate.bytes == pytest.approx(2 * 64 * 1024 * 8 * 128 * 2, rel=0.01)


def test_prefill_and_llama_and_the_numbers_of_a_layer():
    layer, kwargs, known = decoder_layer("llama3.2-1b", 48, 80, decode=False, device="cpu", dtype=torch.float32)
    x, residual = layer(**kwargs)
    assert x.isfinite().all() and residual.isfinite().all() and x.shape == (48, 2048)
    report = FusionAnalyzer(layer, (), kwargs, known=known, device="a100").report()
    assert {"rotary_embedding", "qk_norm_rope_store"} & {op for r in report.rows for op in r.served.ops}
    for bad in (dict(tokens=0), dict(context=3), dict(name="gpt")):
        with pytest.raises(ValueError, match="tokens: expected at least 1|context: expected at least|no preset 'gpt'"):
            decoder_layer(**{"name": "llama3.2-1b", "tokens": 4, "context": 8, "decode": False, **bad})


def test_report_as_json():
    steps = []
    x, weight = torch.randn(4, 8), torch.randn(8)
    report = FusionAnalyzer(norm, (x, weight), device="rtx4090", progress=steps.append).report()
    assert "tracing the module" in steps and "looking for rms_norm in torch.float32" in steps
    data = json.loads(json.dumps(report.to_json()))
    (group,) = data["groups"]
    gain = pytest.approx(group["unfused_us"] - group["fused_us"], abs=1e-3)
    assert group["served"] == "rms_norm" and group["gain_us"] == gain
    assert data["device"] == "nvidia-rtx-4090" and all(d["made"] for d in data["decisions"])
    shown = f"1: {group['ops']}: {group['unfused_us']:.1f} -> {group['fused_us']:.1f} us, rms_norm>"  # at a prompt
    assert repr(report).splitlines()[1].strip() == shown


def test_what_cannot_be_traced_is_one_line_that_says_what_can(capfd):
    x = torch.ones(3)
    library = torch.library.Library("fusion_test", "DEF")
    library.define("opaque(Tensor x) -> Tensor")
    library.impl("opaque", lambda x: x + 1, "CPU")
    square, opaque = torch.ones(4, 4), torch.ops.fusion_test.opaque
    for fn, x, said in [
        (lambda x: x + 1 if x.sum() > 0 else x, x, "it branches on a tensor's value"),
        (lambda x: x[x > 0], x, r"has the shape \[u0\]"),
        (lambda x: opaque(x), x, r"the operator fusion_test.opaque.default has no fake implementation"),
        (lambda x: x.nope(), x, "has no attribute 'nope'"),
        (lambda x: x @ torch.ones(4), x, "size mismatch|got 3"),
        (7, x, "neither a module nor a function"),
        # Tensors without memory of their own.
        (lambda x: torch.sparse.mm(x.to_sparse(), x), square, r"to_sparse \(.*\) is a tensor of layout sparse_coo"),
        (lambda x: torch.vmap(lambda a: a.sum())(x), square, "is a tensor within torch.vmap"),
    ]:
        with pytest.raises(TraceError, match=said) as e:
            FusionAnalyzer(fn, (x,))
        assert "\n" not in str(e.value) and "supported are an nn.Module" in str(e.value)
    assert capfd.readouterr() == ("", "")  # the tracer prints pages of its own


class Mistaken(torch.nn.Module):
    def forward(self, x):
        return {}["key"] + x


def test_an_error_of_the_users_has_its_line():
    line = Mistaken.forward.__code__.co_firstlineno + 1
    with pytest.raises(TraceError, match=rf"KeyError: 'key' \(.*test_analyzer.py:{line}\)"):
        FusionAnalyzer(Mistaken(), (torch.ones(3),))
    analyzer = FusionAnalyzer(F.embedding, (torch.tensor([99]), torch.ones(4, 4)), device=PLAIN)
    with pytest.raises(ValueError, match="the module cannot be run: IndexError: index out of range in self$"):
        list(measure(analyzer, (torch.tensor([99]), torch.ones(4, 4))))


@pytest.mark.parametrize("rows", (0, 1))
def test_no_rows_are_no_work(rows):
    w = torch.randn(8, 4)
    for fn, args in [
        (lambda x: F.linear(F.layer_norm(x, (4,)), w), (torch.randn(rows, 4),)),
        (lambda x: torch.relu(F.linear(torch.exp(x), w)), (torch.randn(rows, 4),)),
        (lambda x: torch.softmax(x * 2, -1), (torch.randn(rows, 4),)),
    ]:
        analyzer = FusionAnalyzer(fn, args)
        report = analyzer.report()
        for r in report.rows:
            assert (r.unfused == r.fused == r.estimate.bytes == 0) == (rows == 0)
        found = list(measure(analyzer, args, ways=("unfused", "ours"), iters=1))
        assert all(r.unfused.seconds for r in found) and (Agreement.of(found).unfused_error is None) == (rows == 0)
    # What is left of nothing may be something: a sum of no rows is zeros, which are written.
    (zeros,) = FusionAnalyzer(lambda x: x.sum(0) * 2, (torch.randn(rows, 4),)).report().rows
    assert [k.name for k in zeros.group.kernels] == ["sum_1", "mul"] and 0 < zeros.fused < zeros.unfused


def test_other_bad_input():
    with pytest.raises(ValueError, match="gpu: no preset for 'v100'; known are a100, h100"):
        FusionAnalyzer(norm, (torch.ones(2, 2), torch.ones(2)), device="v100")
    with pytest.raises(ValueError, match=r"example_inputs: expected a sequence of arguments, not one tensor"):
        FusionAnalyzer(torch.relu, torch.ones(2))


def test_modules_functions_and_programs_are_traced():
    x = torch.randn(4, 8)
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    program = torch.export.export(module, (x,))
    symbolic = torch.fx.symbolic_trace(module)
    ops = [[k.op for k in build(t, (x,))] for t in (module, program, symbolic, lambda x: module(x))]
    assert ops == [["linear", "gelu"]] * 4
    assert trace(program) is program
