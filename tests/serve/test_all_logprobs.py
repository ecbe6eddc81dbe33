"""`logprobs` and `top_logprobs` of -1: log-probabilities of all tokens, where the server has no bound on them."""

from tests.serve.running import RunningServer


def test_log_probabilities_of_all_tokens(model_path, llm):
    size = llm.engine.model_config.vocab_size
    same = dict(max_tokens=2, temperature=0, ignore_eos=True)
    with RunningServer(model_path, max_logprobs=-1) as server:
        (choice,) = server.post("/v1/completions", prompt="abc", logprobs=-1, prompt_logprobs=0, echo=True, **same)[
            "choices"
        ]
        first, *rows = choice["logprobs"]["top_logprobs"]
        assert first is None and len(rows) > 2 and {len(row) for row in rows} == {size}
        body = dict(messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=-1)
        (choice,) = server.post("/v1/chat/completions", **body, **same)["choices"]
        assert [len(entry["top_logprobs"]) for entry in choice["logprobs"]["content"]] == [size, size]
