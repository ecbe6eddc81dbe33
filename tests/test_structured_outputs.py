"""What structured outputs take, and the errors of what they do not."""

import pytest

from nanovllm import SamplingParams, StructuredOutputs


def test_kinds_and_schemas():
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    spec = StructuredOutputs(json=schema)
    assert spec == StructuredOutputs(json=spec.json) and hash(spec) and '"b": {}, "a"' in spec.json
    params = SamplingParams(structured_outputs={"json": schema, "disable_any_whitespace": True})
    assert params.structured_outputs == spec and params.constrained
    assert StructuredOutputs(choice=["a", "b"]).choice == ("a", "b")

    class Model:  # as pydantic's
        model_json_schema = staticmethod(lambda: schema)

    assert StructuredOutputs(json=Model) == spec


def test_response_formats():
    of = StructuredOutputs.of_response_format
    assert of(None) is None and of({"type": "text"}) is None and of({"type": "json_object"}).json_object
    assert of({"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}) == StructuredOutputs(json={})
    assert of({"type": "json_object", "schema": {"type": "null"}}) == StructuredOutputs(json={"type": "null"})
    for wrong in (
        "json", {}, {"type": "xml"}, {"type": ["text"]}, {"type": "json_schema"}, {"type": "json_object", "schema": 5},
        {"type": "json_schema", "json_schema": {}}, {"type": "text", "schema": {}},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="response_format"):
            of(wrong)


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({}, "exactly one of json, json_object, regex, choice, grammar, not none of them"),
        (dict(regex="a", choice=["a"]), "not regex, choice"),
        (dict(json="{"), "must be a JSON schema"),
        (dict(json="[]"), "no JSON object"),
        (dict(json={"a": float("nan")}), "must be a JSON schema"),
        (dict(json={"a": object()}), "must be a JSON schema"),
        (dict(regex=""), "regex='': must be a string"),
        (dict(regex="a" * (2**18 + 1)), "regex: 262145 characters, at most 262144"),
        (dict(choice=[]), "choice="),
        (dict(choice=["a", ""]), "choice="),
        (dict(choice="yes"), "choice='yes'"),
        (dict(grammar=5), "grammar=5"),
        (dict(json_object=1), "json_object=1"),
        (dict(json_object=True, reasoning="yes"), "reasoning='yes'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_values_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        StructuredOutputs(**arguments)


def test_of_sampling_params():
    for wrong, words in [
        (dict(structured_outputs=5), "structured_outputs=5: must be"),
        (dict(structured_outputs={"json": {}}, ignore_eos=True), "ignore_eos"),
        (dict(allowed_token_ids=[]), "no token could be sampled"),
        (dict(allowed_token_ids=[-1]), "at least 0"),
        (dict(allowed_token_ids="a"), "list of integers"),
    ]:
        with pytest.raises(ValueError, match=words):
            SamplingParams(**wrong)
    with pytest.raises(TypeError, match="structural_tag"):
        SamplingParams(structured_outputs={"json": {}, "structural_tag": "x"})
    with pytest.raises(TypeError, match="did you mean 'regex'"):
        SamplingParams(structured_outputs={"regexp": "x"})
