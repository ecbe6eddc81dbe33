"""Solutions become providers that are verified against their Definition."""

import json

import pytest
import torch

from nanovllm.adapters.flashinfer_bench import DocumentError, export_op, find, write_plugin
from nanovllm.adapters.flashinfer_bench.plugin import declare, provider_name
from nanovllm.kernels import Tensors, all_ops, load_plugins, rms_norm
from nanovllm.kernels.op.registry import temporary
from nanovllm.kernels.testing.verify import verify_op
from tests.adapters.flashinfer_bench.documents import (
    DEFINITION,
    IN_PLACE,
    RIGHT,
    WORKLOAD,
    WRONG,
    changed,
    solution,
)

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def ops_are_taken_back():
    with temporary():
        yield


def verdicts(definition, one, workloads=()):
    declared = declare(definition, [one], workloads)
    return verify_op(declared, declared.providers[provider_name(one["name"], definition["name"])], CPU)


def failures(found):
    return [v.failure for v in found if v.failure]


@pytest.mark.parametrize("code, returns", [(RIGHT, True), (IN_PLACE, False)])
def test_a_right_solution(code, returns):
    found = verdicts(DEFINITION, solution(code=code, returns=returns), [WORKLOAD])
    taken = {v.case.shape for v in found if v.skipped is None}
    assert not failures(found) and taken == {(1,), (3,), (17,), (5,)}
    assert any("not contiguous" in (v.skipped or "") for v in found)


def test_a_wrong_solution():
    assert "times the tolerance" in failures(verdicts(DEFINITION, solution(code=WRONG)))[0]


@pytest.mark.parametrize(
    "code, said",
    [
        ("raise OSError('no device')", "no device"),
        ("run = 3", "main.py has no function 'run'"),
        ("def run(x, y, factor):\n    return x, y", "gave 2 results; the outputs of scaled_add_h8 are output"),
        ("def run(x, y, factor):\n    return (x * factor + y)[:, :4]", "has shape"),
    ],
)
def test_solutions_that_fail(code, said):
    assert said in failures(verdicts(DEFINITION, solution(code=code)))[0]


def test_outputs_of_several_dtypes_are_compared_as_flashinfer_bench_does():
    both = changed(DEFINITION, "outputs.total", {"shape": ["rows"], "dtype": "float32"})
    both = changed(
        both, "reference", "def run(x, y, factor):\n    z = x * factor + y\n    return z, z.float().sum(-1)\n"
    )
    right = "def run(x, y, factor):\n    z = x * factor + y\n    return z, z.double().sum(-1).float()\n"
    assert not failures(verdicts(both, solution(code=right)))
    other = changed(both, "name", "other")
    wrong = solution("wrong", right.replace("sum(-1).", "sum(-1).mul(1.5)."))
    assert "total: " in failures(verdicts(other, {**wrong, "definition": "other"}))[0]


def test_sources_of_several_files():
    one = solution(code="from .parts.sum import added\n\ndef run(x, y, factor):\n    return added(x * factor, y)\n")
    one["sources"].append({"path": "parts/sum.py", "content": "def added(a, b):\n    return a + b\n"})
    assert not failures(verdicts(DEFINITION, one))


def test_nothing_of_a_document_runs_when_it_is_declared():
    broken = changed(DEFINITION, "reference", "raise SystemExit(3)\n\ndef run(x, y, factor):\n    pass\n")
    declare(broken, [solution(code="raise SystemExit(4)")])


def test_hardware_that_is_not_there():
    declared = declare(DEFINITION, [solution(target_hardware=["NVIDIA_H100"])])
    assert declared.providers["right"].support(CPU) == "its target_hardware is NVIDIA_H100, this is a CPU"


def test_integers_need_workloads():
    ids = changed(DEFINITION, "inputs.ids", {"shape": ["rows"], "dtype": "int64"})
    with pytest.raises(DocumentError, match="inputs.ids: random integers would be no valid input"):
        declare(ids, [solution()])


def test_a_solution_of_our_op_becomes_its_provider(tmp_path):
    export_op(rms_norm, tmp_path, torch.float32, [(3, 64)], ["native"])
    (one,) = find(tmp_path)
    declared = declare(one.definition, one.solutions, one.workloads, str(tmp_path))
    assert declared.name == "rms_norm_size64_float32"
    x, weight = torch.randn(5, 64), torch.randn(64)
    with rms_norm.use("solution_native"):
        assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm.native(x, weight, 1e-6))
        with pytest.raises(
            ValueError, match=r"rms_norm_size64_float32: x: expected the shape float32\[rows, 64\], not \[5, 32\]"
        ):
            rms_norm(torch.randn(5, 32), torch.randn(32), 1e-6)
        with pytest.raises(ValueError, match="x: expected float32, not float16"):
            rms_norm(x.half(), weight.half(), 1e-6)


@pytest.mark.parametrize("name, shape", [("qk_norm_rope", (3, 4, 2, 16)), ("attention_decode", (3, 5, 9, 4, 2, 16, 4))])
def test_what_was_exported_is_imported(name, shape, tmp_path):
    export_op(all_ops()[name], tmp_path, torch.float32, [shape], ["native"])
    for one in find(tmp_path):
        declared = declare(one.definition, one.solutions, one.workloads, str(tmp_path))
        found = verify_op(declared, declared.providers["solution_native"], CPU)
        assert not failures(found) and any(v.skipped is None for v in found)


@pytest.mark.parametrize(
    "name, shape",
    [("linear_int8", (2, 9, 96, 32)), ("linear_gguf", (3, 9, 256)), ("linear_packed_add_rms_norm", (2, 16, 256, 4)),
     ("embedding_packed", (2, 9, 256, 4))],
)  # fmt: skip
def test_packed_weights_are_bytes_of_the_schema(name, shape, tmp_path):
    """The schema has no uint8; and the name of a kind such as Q4_K/planes must be no folder."""
    export_op(all_ops()[name], tmp_path, torch.float32, [shape], ["native"])
    assert all(p.is_file() for p in (tmp_path / "definitions" / name).iterdir())
    for one in find(tmp_path):
        assert one.definition["inputs"]["weight"]["dtype"] == "int8"
        declared = declare(one.definition, one.solutions, one.workloads, str(tmp_path))
        found = verify_op(declared, declared.providers["solution_native"], CPU)
        assert not failures(found) and any(v.skipped is None for v in found)
        arguments = declared.inputs(Tensors(torch.float32, CPU), declared.inputs.decode[0])
        assert torch.isfinite(declared.native(**arguments)[0]).all()


def test_solutions_of_several_sizes_of_our_op(tmp_path):
    export_op(rms_norm, tmp_path, torch.float32, [(3, 64), (3, 32), (3, 16)], ["native"])
    for one in find(tmp_path):
        declare(one.definition, one.solutions, one.workloads, str(tmp_path))
    for size, name in ((16, "solution_native"), (32, "rms_norm_size32_float32_native")):
        x, weight = torch.randn(5, size), torch.randn(size)
        with rms_norm.use(name):
            assert torch.equal(rms_norm(x, weight, 1e-6), rms_norm.native(x, weight, 1e-6))


def write(folder, solutions, definition=DEFINITION, workload=WORKLOAD):
    for kind, documents in (("definitions", [definition]), ("solutions", solutions)):
        for document in documents:
            path = folder / kind / "elementwise" / f"{document['name']}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(document))
    (folder / "workloads").mkdir(exist_ok=True)
    (folder / "workloads" / "scaled_add_h8.jsonl").write_text(json.dumps(workload) + "\n")
    return folder


def test_finding(tmp_path):
    write(tmp_path, [solution(), solution("other", WRONG)])
    (one,) = find(tmp_path)
    assert [s["name"] for s in one.solutions] == ["other", "scaled_add_h8_right"] and len(one.workloads) == 1
    (one,) = find(tmp_path / "solutions" / "elementwise" / "other.json")
    assert [s["name"] for s in one.solutions] == ["other"] and one.dtype == "bfloat16"
    (one,) = find(tmp_path / "solutions")
    assert len(one.solutions) == 2 and len(one.workloads) == 1
    (one,) = find(tmp_path, only=["other"])
    assert [s["name"] for s in one.solutions] == ["other"]


@pytest.mark.parametrize(
    "solutions, options, said",
    [
        ([], {}, "no Solution is there"),
        ([solution()], {"only": ["x"]}, "no Solution or Definition named x is there"),
        ([solution(language="cuda")], {}, "spec.language: 'cuda' cannot be imported; python and triton can"),
        ([{**solution(), "definition": "gone"}], {}, r"definition: 'gone' is not among the Definitions found \(scaled"),
    ],
)
def test_what_cannot_be_found(solutions, options, said, tmp_path):
    with pytest.raises(DocumentError, match=said):
        find(write(tmp_path, solutions), **options)


def test_a_path_that_is_not_there(tmp_path):
    with pytest.raises(DocumentError, match="gone: no such file or directory"):
        find(tmp_path / "gone")


def test_the_plugin_is_a_file_of_its_own(tmp_path):
    write_plugin(find(write(tmp_path, [solution()])), tmp_path / "plugin.py")
    load_plugins([str(tmp_path / "plugin.py")])
    op, x = all_ops()["scaled_add_h8"], torch.ones(2, 8, dtype=torch.bfloat16)
    with op.use("right"):
        assert op(x, x, 2.0).sum().item() == 48
    assert torch.ops.nanovllm.scaled_add_h8(x, x, 2.0).sum().item() == 48


def test_the_name_of_a_solution_does_not_end_the_plugins_text(tmp_path):
    """What is in the documents must not run when the plugin is loaded."""
    write(tmp_path, [])
    name = 'a"""\nraise SystemExit(9)\n"""'
    (tmp_path / "solutions").mkdir(exist_ok=True)
    (tmp_path / "solutions" / "s.json").write_text(json.dumps(solution(name)))
    write_plugin(find(tmp_path), tmp_path / "plugin.py")
    load_plugins([str(tmp_path / "plugin.py")])
    assert name in all_ops()["scaled_add_h8"].providers


@pytest.mark.parametrize("name", ["/etc/x", "../../x", "a[**"])
def test_the_name_of_a_definition_is_no_path(name, tmp_path):
    (tmp_path / "definitions").mkdir()
    (tmp_path / "definitions" / "d.json").write_text(json.dumps({**DEFINITION, "name": name}))
    (tmp_path / "s.json").write_text(json.dumps({**solution(), "definition": name}))
    (one,) = find(tmp_path / "s.json")
    assert one.op.isidentifier() and not one.workloads


GONE = {"type": "safetensors", "path": "gone.safetensors", "tensor_key": "x"}


@pytest.mark.parametrize(
    "definition, workload, said",
    [
        (changed(DEFINITION, "name", "rms_norm"), WORKLOAD, "name: there is an op rms_norm already"),
        (changed(DEFINITION, "inputs.y.dtype", "float4_e2m1"), WORKLOAD, "inputs.y.dtype: torch has no float4_e2m1"),
        (changed(DEFINITION, "axes.h.value", 10**12), WORKLOAD, "axes.h: 1000000000000 is too large: x would take"),
        (
            DEFINITION,
            changed(WORKLOAD, "workload.axes.rows", 10**12),
            "scaled_add_h8.jsonl: workload.axes.rows: 1000000000000 is too large: x would take",
        ),
        (DEFINITION, changed(WORKLOAD, "workload.inputs.x", GONE), "inputs.x: .*gone.safetensors: No such file"),
    ],
)
def test_documents_that_this_machine_cannot_run(definition, workload, said, tmp_path):
    one = {**solution(), "definition": definition["name"]}
    with pytest.raises(DocumentError, match=said):
        find(write(tmp_path, [one], definition, workload))


def test_a_reference_that_fails_is_a_verdict():
    broken = changed(DEFINITION, "reference", "def run(x, y, factor):\n    raise OSError('no data')\n")
    assert "the reference failed: OSError: no data" in failures(verdicts(broken, solution()))[0]
