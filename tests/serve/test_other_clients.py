"""Clients of others: LangChain, LiteLLM, lm-eval. They are slow to import."""

import json

import pytest

from nanovllm import SamplingParams

MESSAGES = [{"role": "user", "content": "hello there"}]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def expected(llm):
    params = SamplingParams(max_tokens=12, temperature=0)
    return llm.chat(MESSAGES, params, use_tqdm=False)[0]["text"]


def test_litellm(server, expected):
    litellm = pytest.importorskip("litellm", reason="pip install litellm")
    asked = dict(model="openai/model", api_base=server.url + "/v1", api_key="none", messages=MESSAGES, max_tokens=12,
                 temperature=0)  # fmt: skip
    assert litellm.completion(**asked).choices[0].message.content == expected
    chunks = litellm.completion(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected
    with pytest.raises(litellm.exceptions.BadRequestError):
        litellm.completion(**asked | {"temperature": -3}, num_retries=0)


def test_langchain(server, expected):
    langchain = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
    model = langchain.ChatOpenAI(
        base_url=server.url + "/v1", api_key="none", model="model", max_tokens=12, temperature=0
    )
    assert model.invoke("hello there").content == expected
    assert "".join(chunk.content for chunk in model.stream("hello there")) == expected
    schema = {"title": "pair", "description": "two numbers", "type": "object", "additionalProperties": False,
              "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["a"]}  # fmt: skip
    longer = model.model_copy(update={"max_tokens": 60})
    assert set(longer.with_structured_output(schema, method="json_schema").invoke("hello there")) == {"a"}
    call = model.bind_tools([{"type": "function", "function": {"name": "pair", "parameters": schema}}],
                            tool_choice="required", parallel_tool_calls=False).bind(max_tokens=80)  # fmt: skip
    (made,) = call.invoke("hello there").tool_calls
    assert made["name"] == "pair" and set(made["args"]) == {"a"}


def test_lm_eval_scores_as_the_engine_does(server, llm, model_path, tmp_path):
    """Loglikelihoods of two answers to each question, asked of the server by lm-eval and of the engine directly."""
    evaluator = pytest.importorskip("lm_eval", reason="pip install lm-eval[api]")
    from lm_eval.tasks import TaskManager

    rows = [
        {"question": f"one {w} two", "choices": [" a b", " c d"], "answer": i % 2} for i, w in enumerate("abcdefgh")
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "tiny.yaml").write_text(
        f"task: tiny\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {data}\n"
        "output_type: multiple_choice\ntest_split: test\ndoc_to_text: '{{question}}'\ndoc_to_choice: choices\n"
        "doc_to_target: answer\n"
        "target_delimiter: ''\nmetric_list:\n  - metric: acc\n"
    )
    arguments = f"model=model,base_url={server.url}/v1/completions,tokenizer={model_path},num_concurrent=2"
    found = evaluator.simple_evaluate(
        "local-completions", model_args=arguments, tasks=["tiny"], task_manager=TaskManager(include_path=str(tmp_path)),
        bootstrap_iters=0,
    )  # fmt: skip
    right = 0
    for row in rows:
        scores = []
        for choice in row["choices"]:
            text = row["question"] + choice
            (output,) = llm.generate(text, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
            ids = output.prompt_token_ids
            start = len(llm.tokenizer.encode(row["question"]))
            scores.append(sum(output.prompt_logprobs[i][ids[i]].logprob for i in range(start, len(ids))))
        right += scores.index(max(scores)) == row["answer"]
    assert found["results"]["tiny"]["acc,none"] == pytest.approx(right / len(rows))
