"""Outputs: vLLM's attributes and nano-vLLM's keys are the same values."""

import copy
import dataclasses
import pickle

import pytest

from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

LOGPROBS = [{7: Logprob(-0.1, 1)}, {8: Logprob(-0.2, 1)}]
COMPLETIONS = [CompletionOutput(0, " there", [7, 8], "stop", "x", LOGPROBS), CompletionOutput(1, " you", [9], "length")]
OUTPUT = RequestOutput("3", "Hi", [1, 2], COMPLETIONS, finished=True)


def test_keys_are_the_first_completion_and_the_request():
    assert OUTPUT["text"] == OUTPUT.outputs[0].text == " there"
    assert OUTPUT["token_ids"] == OUTPUT.outputs[0].token_ids == [7, 8]
    assert OUTPUT["finish_reason"] == "stop" and OUTPUT["stop_reason"] == "x" and OUTPUT["logprobs"] is LOGPROBS
    assert OUTPUT["prompt_token_ids"] is OUTPUT.prompt_token_ids
    assert (OUTPUT["prompt"], OUTPUT["request_id"]) == ("Hi", "3")
    assert OUTPUT["outputs"][1].text == " you" and OUTPUT["finished"] is True


def test_an_output_is_a_mapping():
    mapping = dict(**OUTPUT)
    assert mapping["text"] == " there" and mapping["metrics"] == RequestMetrics()
    names = {f.name for cls in (CompletionOutput, RequestOutput) for f in dataclasses.fields(cls)}
    names |= {"cumulative_logprob", "num_cached_tokens"}
    assert set(mapping) == set(OUTPUT.keys()) == names


def test_sums_and_times():
    assert OUTPUT.outputs[0].cumulative_logprob == OUTPUT["cumulative_logprob"] == pytest.approx(-0.3)
    metrics = RequestMetrics(0.25, 2.0, num_cached_tokens=3, arrival_time=100.0)
    assert (metrics.first_token_time, metrics.finished_time) == (100.25, 102.0)
    output = dataclasses.replace(OUTPUT, metrics=metrics)
    assert output.num_cached_tokens == output["num_cached_tokens"] == 3


VLLM = {
    RequestOutput: "request_id prompt prompt_token_ids prompt_logprobs outputs finished metrics lora_request"
    " encoder_prompt encoder_prompt_token_ids num_cached_tokens kv_transfer_params",
    CompletionOutput: "index text token_ids cumulative_logprob logprobs routed_experts finish_reason stop_reason"
    " lora_request kv_transfer_params finished",
}
"""The public attributes of vLLM 0.33's classes."""


@pytest.mark.parametrize("output", [OUTPUT, COMPLETIONS[0]], ids=lambda output: type(output).__name__)
def test_attributes_are_those_of_vllm(output):
    absent = [name for name in VLLM[type(output)].split() if not hasattr(output, name)]
    assert not absent
    for name in ("lora_request", "kv_transfer_params"):
        assert getattr(output, name) is None and name not in OUTPUT.keys()
    assert OUTPUT.outputs[0].finished() is True and CompletionOutput(0, "", []).finished() is False
    assert RequestMetrics(0.25).first_token_latency == 0.25


def test_an_attribute_of_a_completion_says_where_it_is():
    for name in ("text", "token_ids", "finish_reason", "cumulative_logprob", "message"):
        with pytest.raises(AttributeError) as error:
            getattr(OUTPUT, name)
        assert str(error.value) == f"a RequestOutput has no {name}; use output.outputs[0].{name} or output[{name!r}]"
        assert not hasattr(OUTPUT, name)
    with pytest.raises(AttributeError, match="^'RequestOutput' object has no attribute 'txt'$"):
        _ = OUTPUT.txt
    assert copy.deepcopy(OUTPUT) == pickle.loads(pickle.dumps(OUTPUT)) == OUTPUT


def test_an_unknown_key_lists_the_known():
    with pytest.raises(KeyError, match="'txt'.*text"):
        OUTPUT["txt"]


def test_request_and_completion_have_no_name_in_common():
    """Otherwise a key would be ambiguous."""
    request, completion = ({f.name for f in dataclasses.fields(c)} for c in (RequestOutput, CompletionOutput))
    assert not request & completion


def test_defaults():
    output = RequestOutput("0", None, [1], [CompletionOutput(0, "", [])], False)
    assert output.prompt_logprobs is None and output["finish_reason"] is None
    metrics = output.metrics
    assert metrics.time_to_first_token is None and metrics.num_cached_tokens == 0
    assert output.outputs[0].cumulative_logprob is metrics.first_token_time is metrics.finished_time is None
    assert output.metrics is not RequestOutput("0", None, [1], [], False).metrics
