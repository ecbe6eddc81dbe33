"""What is exported is what the schema asks for, and computes what the op computes, without this package."""

import json

import pytest
import torch
from safetensors.torch import load_file

from nanovllm.adapters.flashinfer_bench import documents, export_op
from nanovllm.adapters.flashinfer_bench.definition_inputs import declared_inputs
from nanovllm.kernels import Tensors, all_ops, load_plugins, rms_norm
from nanovllm.kernels.op.registry import temporary

OPS = all_ops()
# One of each kind: plain rows, two outputs, a multiple of an axis, positions in a file, records, text as an argument.
SHAPES = {
    "rms_norm": (3, 64),
    "add_rms_norm": (3, 64),
    "silu_and_mul": (3, 48),
    "qk_norm_rope": (3, 4, 2, 16),
    "attention_decode": (3, 5, 9, 4, 2, 16, 4),
    "fused_add_gelu": (3, 64),
    "linear": (3, 32, 48),
    "embedding": (3, 50, 16),
}


def exported(name, folder, **options):
    export_op(OPS[name], folder, torch.float32, [SHAPES[name]], **options)
    return sorted((folder / "definitions" / name).iterdir())


@pytest.mark.parametrize("name", SHAPES)
def test_the_reference_is_the_ops(name, tmp_path):
    for path in exported(name, tmp_path):
        definition = documents.definition(json.loads(path.read_text()), str(path))
        file = tmp_path / "workloads" / name / f"{definition.name}.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        workloads = documents.workloads(lines, definition, str(file))
        assert workloads
        inputs = declared_inputs(definition, workloads, tmp_path)
        arguments = inputs(Tensors(torch.float32, torch.device("cpu"), seed=1), inputs.decode[0])
        namespace = {}
        exec(definition.reference, namespace)
        assert "import nanovllm" not in definition.reference and "from nanovllm" not in definition.reference
        got = namespace["run"](**arguments)
        variants = OPS[name].inputs.variants
        variant = next((v for v in variants if v and all(f"{n}_{x}" in path.stem for n, x in v.items())), {})
        own = {k: v for k, v in variant.items() if k not in arguments}
        wanted = OPS[name].native(**OPS[name].records.group({**arguments, **own}))
        results = [(r,) if isinstance(r, torch.Tensor) else r for r in (got, wanted)]
        assert len(results[0]) == len(definition.outputs)
        for mine, right, spec in zip(*results, definition.outputs.values()):
            torch.testing.assert_close(mine, right, rtol=0, atol=0)
            sizes = {**definition.axes, **workloads[0].axes}
            assert [sizes[a] for a in spec.shape] == list(mine.shape) and f"torch.{spec.dtype}" == str(mine.dtype)


def test_axes(tmp_path):
    (path,) = exported("silu_and_mul", tmp_path)
    definition = documents.definition(json.loads(path.read_text()), "")
    assert definition.axes == {"rows": None, "n_x2": 96, "n": 48}
    assert definition.inputs["gate_up"].shape == ("rows", "n_x2")
    assert definition.outputs["output"].shape == ("rows", "n")


def test_as_many_rows_as_outputs(tmp_path):
    export_op(OPS["linear"], tmp_path, torch.float32, [(16, 16, 32)], ["native"])
    (path,) = (tmp_path / "definitions" / "linear").iterdir()
    assert json.loads(path.read_text())["outputs"]["output"]["shape"] == ["rows", "outputs"]


@pytest.mark.parametrize(
    "name, shape, stored",
    [
        ("linear_fp8", (3, 130, 256), {"scale"}),
        ("linear_int8", (3, 9, 256), {"scale", "zero"}),
        ("linear_gguf", (3, 9, 256), {"weight"}),
        ("moe_experts_fp8", (3, 4, 2, 128, 32), {"gate_up_scale", "down_scale", "weights", "experts"}),
    ],
)
def test_only_what_is_not_simply_random_is_stored(name, shape, stored, tmp_path):
    export_op(OPS[name], tmp_path, torch.float32, [shape], ["native"])
    file = min((tmp_path / "workloads" / name).iterdir())
    inputs = json.loads(file.read_text().splitlines()[0])["workload"]["inputs"]
    assert {n for n, given in inputs.items() if given["type"] == "safetensors"} - {"zero"} == stored - {"zero"}
    for blob in (tmp_path / "blob").rglob("*.safetensors"):
        assert all(v.float().isfinite().all() for v in load_file(blob).values())


def test_what_would_be_too_large_a_file_is_not_made(tmp_path):
    with pytest.raises(ValueError, match="151936x4096x5: it has 486 MiB of integers to be stored, more than 64"):
        export_op(OPS["embedding_packed"], tmp_path, torch.float32, [(1, 151936, 4096, 5)])


def test_a_large_file_is_made_for_a_shape_that_is_named(tmp_path):
    op = OPS["linear_gguf"]
    exported = export_op(op, tmp_path, providers=["native"])
    assert any(
        "1x4096x4096: its inputs are a file of 9 MiB; --shape 1x4096x4096 writes it" in r for r in exported.left_out
    )
    files = list(tmp_path.rglob("*.safetensors"))
    assert files and all(path.stat().st_size <= 4 << 20 for path in files)
    export_op(op, tmp_path, shapes=[(1, 4096, 4096)], providers=["native"])
    assert max(path.stat().st_size for path in tmp_path.rglob("*.safetensors")) > 4 << 20


def test_the_same_files_each_time(tmp_path):
    for folder in ("a", "b"):
        exported("qk_norm_rope", tmp_path / folder)
    files = [sorted(p.relative_to(tmp_path / f) for p in (tmp_path / f).rglob("*.*")) for f in ("a", "b")]
    assert files[0] == files[1] and any(p.suffix == ".safetensors" for p in files[0])
    assert all((tmp_path / "a" / p).read_bytes() == (tmp_path / "b" / p).read_bytes() for p in files[0])


def test_solutions(tmp_path):
    exported("rms_norm", tmp_path, providers=["native", "triton"])
    found = {}
    for path in (tmp_path / "solutions").rglob("*.json"):
        one = documents.solution(json.loads(path.read_text()), str(path))
        found[one.language] = one
    assert set(found) == {"python", "triton"}
    assert "import nanovllm" not in found["python"].sources["main.py"]
    namespace = {}
    exec(found["triton"].sources["main.py"].replace("'triton'", "'native'"), namespace)
    x, weight = torch.randn(3, 64), torch.randn(64)
    assert torch.equal(namespace["run"](x, weight, 1e-6), OPS["rms_norm"].native(x, weight, 1e-6))


def test_a_plugins_provider_goes_with_its_file(tmp_path):
    plugin = tmp_path / "mine.py"
    plugin.write_text(
        "from nanovllm.kernels import rms_norm\n\n@rms_norm.provider('mine')\ndef mine(x, weight, eps):\n"
        "    return rms_norm.native(x, weight, eps)\n"
    )
    with temporary():
        load_plugins([str(plugin)])
        export_op(rms_norm, tmp_path / "out", torch.float32, [(3, 64)], ["mine"])
    (path,) = (tmp_path / "out" / "solutions").rglob("*.json")
    one = documents.solution(json.loads(path.read_text()), str(path))
    assert one.sources["kernels.py"] == plugin.read_text() and "kernels.py" in one.sources["main.py"]


@pytest.mark.parametrize(
    "name, said",
    [("store_kvcache", "writes to k_cache"), ("sample", "not compared number by number"), ("all_reduce", "no inputs")],
)
def test_ops_that_the_schema_cannot_express(name, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        export_op(OPS[name], tmp_path)
    assert not list(tmp_path.iterdir())


def test_an_unknown_provider(tmp_path):
    with pytest.raises(ValueError, match="rms_norm has no provider 'rocm'; it has native, triton"):
        export_op(OPS["rms_norm"], tmp_path, providers=["rocm"])


def test_flashinfer_benchs_own_models_take_it(tmp_path):
    data = pytest.importorskip("flashinfer_bench.data")
    for name in SHAPES:
        exported(name, tmp_path)
    read = data.TraceSet.from_path(str(tmp_path))
    assert {d.op_type for d in read.definitions.values()} == set(SHAPES)
    assert set(read.solutions) == set(read.workloads) == set(read.definitions)
    for name, definition in read.definitions.items():
        for trace in read.workloads[name]:
            assert set(trace.workload.inputs) == set(definition.inputs)
            assert definition.get_output_shapes(trace.workload.axes)
