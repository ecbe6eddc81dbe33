"""Documents that are wrong are errors that name the file, the field and the value."""

import pytest

from nanovllm.adapters.flashinfer_bench import documents
from tests.adapters.flashinfer_bench.documents import DEFINITION, WORKLOAD, changed, solution


def test_a_definition_is_read():
    read = documents.definition(DEFINITION, "d.json")
    assert read.variable == ("rows",) and read.axes == {"rows": None, "h": 8}
    assert read.inputs["factor"].shape is None and read.outputs["output"].dtype == "bfloat16"


@pytest.mark.parametrize(
    "path, value, said",
    [
        ("name", "", 'd.json: name: expected text, not ""'),
        ("axes", None, "d.json: axes: is missing"),
        ("axes.h.value", -1, "d.json: axes.h.value: expected a number of at least 0, not -1"),
        ("axes.h.type", "fixed", "d.json: axes.h.type: expected one of const, var, not 'fixed'"),
        ("inputs.x.dtype", "fp8", "d.json: inputs.x.dtype: expected one of float32"),
        ("inputs.x.shape", ["rows", "k"], "d.json: inputs.x.shape: axis 'k' is not among the axes rows, h"),
        ("inputs.factor.shape", None, "d.json: inputs.factor.shape: is missing; null says that it is a scalar"),
        ("outputs", {}, "d.json: outputs: expected at least one output"),
        ("outputs.x", {"shape": ["h"], "dtype": "int8"}, "d.json: outputs: 'x' is an input too"),
        ("reference", "def ruin(): pass", "d.json: reference: defines no function run at its top level"),
        ("reference", "def run(:", "d.json: reference: is not Python"),
        ("reference", f"def run(): return {'(' * 5000}{')' * 5000}", "d.json: reference: is not Python"),
        ("axes.h.value", 10**30, "d.json: axes.h.value: is larger than a size can be"),
        ("inputs.class", {"shape": ["h"], "dtype": "int8"}, "d.json: inputs.class: expected a name as Python has"),
    ],
)
def test_a_wrong_definition(path, value, said):
    with pytest.raises(documents.DocumentError) as error:
        documents.definition(changed(DEFINITION, path, value), "d.json")
    assert str(error.value).startswith(said)


def test_an_output_whose_size_is_open():
    open_size = changed(changed(DEFINITION, "axes.n", {"type": "var"}), "outputs.output.shape", ["n"])
    with pytest.raises(documents.DocumentError, match="outputs.output.shape: no input has the variable axis 'n'"):
        documents.definition(open_size, "d.json")


@pytest.mark.parametrize(
    "path, value, said",
    [
        ("spec", None, "s.json: spec: is missing"),
        ("spec.language", "rust", "s.json: spec.language: expected one of python, triton"),
        ("spec.entry_point", "main.py", "s.json: spec.entry_point: expected FILE::FUNCTION, not 'main.py'"),
        ("spec.entry_point", "other.py::run", "s.json: spec.entry_point: 'other.py' is not among the sources main.py"),
        ("spec.target_hardware", [], "s.json: spec.target_hardware: expected at least one kind of hardware"),
        ("spec.destination_passing_style", "no", 's.json: spec.destination_passing_style: expected true or false'),
        ("sources", [], "s.json: sources: expected a list that is not empty"),
        ("sources.0.path", "../x.py", "s.json: sources[0].path: expected a relative path without '..'"),
        ("sources.0.path", ".", "s.json: sources[0].path: expected the name of a file, not '.'"),
        ("sources.0.path", "a\0.py", "s.json: sources[0].path: expected the name of a file"),
        ("sources.0.path", "main.txt", "s.json: spec.entry_point: 'main.py' is not among"),
        ("sources.0.content", "def run(:", "s.json: sources[0].content: is not Python"),
        ("sources.0.content", "# \ud800", "s.json: sources[0].content: has half of a pair of surrogates"),
        ("sources.0.path", "/x.py", "s.json: sources[0].path: expected a relative path without '..'"),
    ],
)  # fmt: skip
def test_a_wrong_solution(path, value, said):
    with pytest.raises(documents.DocumentError) as error:
        documents.solution(changed(solution(), path, value), "s.json")
    assert str(error.value).startswith(said)


def test_sources_whose_paths_or_entry_point_cannot_be():
    one = solution(entry_point="main.txt::run")
    one["sources"] = [{"path": "main.txt", "content": "x"}]
    with pytest.raises(documents.DocumentError, match="spec.entry_point: expected a file whose name ends in .py"):
        documents.solution(one, "s.json")
    one = solution()
    one["sources"].append({"path": "main.py/x.py", "content": "x"})
    with pytest.raises(documents.DocumentError, match=r"sources\[1\].path: of .* one is a file and the other's folder"):
        documents.solution(one, "s.json")


OUTSIDE = {"type": "safetensors", "path": "../x.safetensors", "tensor_key": "x"}


@pytest.mark.parametrize(
    "path, value, said",
    [
        ("workload.axes.more", 3, "w.jsonl, line 1: workload.axes.more: is no axis of scaled_add_h8, which has rows"),
        ("workload.inputs.x", OUTSIDE, "w.jsonl, line 1: workload.inputs.x.path: expected a path without '..'"),
        ("workload.inputs.factor.value", 10**400, "w.jsonl, line 1: workload.inputs.factor.value: is too large"),
        ("workload.axes.rows", None, "w.jsonl, line 1: workload.axes.rows: expected a number"),
        ("workload.inputs.y", None, "w.jsonl, line 1: workload.inputs.y: is missing"),
        ("workload.inputs.y", {"type": "zeros"}, "w.jsonl, line 1: workload.inputs.y.type: expected one of random"),
        (
            "workload.inputs.y",
            {"type": "scalar", "value": 1},
            "w.jsonl, line 1: workload.inputs.y.type: expected random",
        ),
    ],
)
def test_a_wrong_workload(path, value, said):
    with pytest.raises(documents.DocumentError) as error:
        documents.workloads([changed(WORKLOAD, path, value)], documents.definition(DEFINITION, "d.json"), "w.jsonl")
    assert str(error.value).startswith(said)


@pytest.mark.parametrize("text", [b"{", b"\xff", b"[" * 100_000, b"[NaN]", b"[1e999]"])
def test_what_is_no_json(text, tmp_path):
    (tmp_path / "d.json").write_bytes(text)
    with pytest.raises(documents.DocumentError, match="d.json: no JSON"):
        documents.load(tmp_path / "d.json")
