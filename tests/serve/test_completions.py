"""/v1/completions: the same tokens as `LLM.generate`, in OpenAI's shapes."""

import bisect
import random
import threading

import pytest

from nanovllm import SamplingParams
from nanovllm.engine.requests.detokenizer import TextDecoder
from nanovllm.outputs import Logprob
from nanovllm.serve import completions
from nanovllm.serve.token_logprobs import CompletionLogprobs
from tests import tiny

PROMPTS = ["hello there", "one two three four", "abc"]


def test_whole_and_streamed_answers_are_those_of_generate(server, llm):
    body = dict(prompt=PROMPTS, n=2, max_tokens=12, temperature=0.9, seed=11, stop=["qq", "zz"], top_k=50)
    params = SamplingParams(n=2, max_tokens=12, temperature=0.9, seed=11, stop=["qq", "zz"], top_k=50)
    expected = [c for o in llm.generate(PROMPTS, params, use_tqdm=False) for c in o.outputs]
    whole = server.post("/v1/completions", **body)
    assert [c["text"] for c in whole["choices"]] == [c.text for c in expected]
    assert [c["finish_reason"] for c in whole["choices"]] == [c.finish_reason for c in expected]
    assert [c["index"] for c in whole["choices"]] == list(range(6))
    assert whole["usage"]["completion_tokens"] == sum(len(c.token_ids) for c in expected)

    *chunks, usage, done = server.events("/v1/completions", **body, stream_options={"include_usage": True})
    assert done == "[DONE]" and usage["choices"] == [] and usage["usage"]["completion_tokens"] > 0
    texts, reasons = [""] * 6, [None] * 6
    for chunk in chunks:
        assert chunk["object"] == "text_completion" and chunk["usage"] is None
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            assert reasons[choice["index"]] is None, "one finish reason for each choice"
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == [c.text for c in expected] and reasons == [c.finish_reason for c in expected]


def test_token_ids_as_prompts(server, llm):
    ids = llm.tokenizer.encode("hello there")
    expected = server.post("/v1/completions", prompt="hello there", max_tokens=5, temperature=0)["choices"][0]["text"]
    for prompt in (ids, [ids]):
        found = server.post("/v1/completions", prompt=prompt, max_tokens=5, temperature=0, return_token_ids=True)
        assert found["choices"][0]["text"] == expected
        assert found["choices"][0]["prompt_token_ids"] == ids and len(found["choices"][0]["token_ids"]) == 5


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_token_ids_in_a_stream(server, path):
    """The prompt's come once, with the first chunk of each choice; every token of the output comes in one chunk."""
    asked = (
        {"prompt": "hello there"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "hi"}]}
    )
    body = asked | {"max_tokens": 6, "n": 2, "seed": 1, "return_token_ids": True}
    whole = server.post(path, **body)
    expected = {choice["index"]: choice["token_ids"] for choice in whole["choices"]}
    assert whole["system_fingerprint"].startswith("nanovllm-")
    found, prompts = {0: [], 1: []}, {0: [], 1: []}
    for chunk in server.events(path, **body):
        for choice in [] if chunk == "[DONE]" else chunk["choices"]:
            assert chunk["system_fingerprint"] == whole["system_fingerprint"]
            tokens, prompt = choice.get("token_ids"), (choice | chunk).get("prompt_token_ids")
            found[choice["index"]] += tokens or []
            prompts[choice["index"]] += [] if prompt is None else [prompt]
            if path == "/v1/chat/completions":
                assert prompt is not None or tokens or choice["delta"] or choice["finish_reason"]
    prompt = whole.get("prompt_token_ids") or whole["choices"][0]["prompt_token_ids"]
    assert found == expected and prompts == {0: [prompt], 1: [prompt]}


@pytest.mark.parametrize("asked", [{}, {"return_token_ids": False}])
def test_token_ids_that_nobody_asked_for_are_null(server, asked):
    """vLLM's clients read these fields from each whole answer."""
    (choice,) = server.post("/v1/completions", prompt="x", max_tokens=1, **asked)["choices"]
    assert choice["token_ids"] is None and choice["prompt_token_ids"] is None
    found = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "x"}], max_tokens=1, **asked)
    assert found["choices"][0]["token_ids"] is None and found["prompt_token_ids"] is None


def test_echo_and_log_probabilities(server, llm):
    """What lm-eval asks for: the log-probabilities of a prompt, and nothing generated."""
    prompt = "abc hello"
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=2, prompt_logprobs=2)
    (expected,) = llm.generate(prompt, params, use_tqdm=False)
    ids = expected.prompt_token_ids

    choice = server.post("/v1/completions", prompt=prompt, max_tokens=0, echo=True, logprobs=2)["choices"][0]
    assert choice["text"] == prompt
    found = choice["logprobs"]
    assert found["tokens"] == [llm.tokenizer.decode([t]) for t in ids] and found["token_logprobs"][0] is None
    rows = expected.prompt_logprobs
    assert found["token_logprobs"][1:] == pytest.approx([row[t].logprob for row, t in zip(rows[1:], ids[1:])])
    assert found["text_offset"] == [0] + [len("".join(found["tokens"][:i])) for i in range(1, len(ids))]
    assert all(len(top) in (2, 3) for top in found["top_logprobs"][1:])
    assert choice["prompt_logprobs"] is None
    own = server.post("/v1/completions", prompt=prompt, max_tokens=2, logprobs=0)["choices"][0]["logprobs"]
    assert [len(top) for top in own["top_logprobs"]] == [1, 1]

    whole = server.post("/v1/completions", prompt=prompt, max_tokens=3, echo=True, logprobs=2, temperature=0)
    choice = whole["choices"][0]
    assert choice["text"] == prompt + expected["text"]
    own = [row[t].logprob for row, t in zip(expected.outputs[0].logprobs, expected["token_ids"])]
    assert choice["logprobs"]["token_logprobs"][len(ids) :] == pytest.approx(own)
    assert whole["usage"]["completion_tokens"] == 3

    events = server.events("/v1/completions", prompt=prompt, max_tokens=3, echo=True, logprobs=2, temperature=0)
    pieces = [e["choices"][0] for e in events[:-1]]
    assert "".join(p["text"] for p in pieces) == choice["text"]
    assert [x for p in pieces for x in p["logprobs"]["token_logprobs"]] == choice["logprobs"]["token_logprobs"]
    assert [x for p in pieces for x in p["logprobs"]["text_offset"]] == choice["logprobs"]["text_offset"]


def test_tokens_are_called_by_their_ids(server):
    """Different tokens may have the same text: half of a character."""
    body = dict(max_tokens=3, temperature=0, ignore_eos=True, return_token_ids=True, return_tokens_as_token_ids=True)
    whole = server.post("/v1/completions", prompt="abc", echo=True, logprobs=2, **body)["choices"][0]
    ids = [*whole["prompt_token_ids"], *whole["token_ids"]]
    found = whole["logprobs"]
    body["return_tokens_as_token_ids"] = False
    plain = server.post("/v1/completions", prompt="abc", echo=True, logprobs=2, **body)["choices"][0]["logprobs"]
    for told in (plain, found):  # as vLLM: each token stands first, though a prompt's are seldom the most likely
        assert told["top_logprobs"][0] is None
        own = [next(iter(top.items())) for top in told["top_logprobs"][1:]]
        assert own == list(zip(told["tokens"], told["token_logprobs"]))[1:]
    body["return_tokens_as_token_ids"] = True
    assert found["tokens"] == [f"token_id:{t}" for t in ids] and found["text_offset"] == plain["text_offset"]
    assert found["token_logprobs"] == plain["token_logprobs"]
    assert all(t in top and len(top) in (2, 3) for t, top in zip(found["tokens"][1:], found["top_logprobs"][1:]))
    chat = dict(messages=[{"role": "user", "content": "x"}], logprobs=True, top_logprobs=2, **body)
    choice = server.post("/v1/chat/completions", **chat)["choices"][0]
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{t}" for t in choice["token_ids"]]
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in content)


def test_an_echo_with_log_probabilities_of_the_prompt_and_no_output(server):
    body = dict(prompt="hello there", max_tokens=0, echo=True)
    whole = server.post("/v1/completions", **body, prompt_logprobs=1, request_id="mine")
    ids = server.post("/tokenize", prompt="hello there")["tokens"]
    rows = whole["choices"][0]["prompt_logprobs"]
    assert rows[0] is None and [str(t) in row for t, row in zip(ids[1:], rows[1:])] == [True] * (len(ids) - 1)
    assert whole["id"] == "cmpl-mine"
    *_, last, done = server.events("/v1/completions", **body, stream_options={"include_usage": True})
    assert last["usage"] == whole["usage"] | {"prompt_tokens_details": last["usage"]["prompt_tokens_details"]}
    assert last["usage"]["completion_tokens"] == 0 and done == "[DONE]"


def test_cached_tokens_are_told(server):
    prompt = "the quick brown fox jumps over the lazy dog again and again"
    first = server.post("/v1/completions", prompt=prompt, max_tokens=1, cache_salt="a")
    second = server.post("/v1/completions", prompt=prompt, max_tokens=1, cache_salt="a")
    other = server.post("/v1/completions", prompt=prompt, max_tokens=1, cache_salt="b")
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in (first, second, other)]
    assert cached[0] == cached[2] == 0 and cached[1] >= 16


@pytest.mark.parametrize(
    "body, param, said",
    [
        (dict(prompt="x", tempratur=1), "tempratur", "did you mean 'temperature'"),
        (dict(prompt="x", temperature="hot"), "temperature", "float"),
        (dict(prompt="x", temperature=-1), "temperature", "at least 0"),
        (dict(prompt="x", n=129), "n", "at most 128"),
        (dict(prompt="x", best_of=3), "best_of", "use n"),
        (dict(prompt="x", suffix="y"), "suffix", "put everything into the prompt"),
        (dict(prompt="x", max_tokens=0), "max_tokens", "echo"),
        (
            dict(prompt="x", max_tokens=-1),
            "max_tokens",
            "=-1: must be at least 1 (0 with echo=true); without the field",
        ),
        (dict(prompt="x", max_tokens=-1, echo=True), "max_tokens", "max_tokens=-1: must be at least 1 (0 with"),
        (dict(prompt="x", logit_bias={"a": 1, "b": 1}), "logit_bias", "expected token ids, not 'a', 'b'"),
        (dict(prompt="x", logit_bias={"123456": 1}), "logit_bias", "outside the vocabulary"),
        (dict(prompt="x", stream_options={"usage": True}), "stream_options", "unknown field"),
        (dict(prompt="x", stream_options={"include_usage": None}), "stream_options", "stream=true"),
        (dict(prompt="x", seed=2**63), "seed", "less than"),
        (dict(prompt="x", prompt_logprobs=1, stream=True), "prompt_logprobs", "leave stream out"),
        (dict(prompt="x", request_id="a b"), "request_id", "letters"),
        (dict(prompt=["x"] * 100, n=100), "n", "send several requests"),
        (dict(prompt=[]), "prompt", "pass 1 to"),
        (dict(prompt=["a", 5]), "prompt", "prompt[1]=5: must be a string or a list of token ids"),
        (dict(prompt=[5, "a"]), "prompt", "prompt[1]='a': must be a token id, as prompt[0] is"),
        (dict(prompt=""), "prompt", "empty"),
        (dict(prompt="x", cache_salt=""), "cache_salt", "cache_salt='': must be"),
        (dict(prompt=[10**6]), "prompt", "vocabulary"),
        (dict(max_tokens=5), "prompt", "prompt"),
        (dict(prompt="x", use_beam_search=True), "use_beam_search", "beam search"),
    ],
)
def test_what_cannot_be_honoured_is_named(server, body, param, said):
    status, error = server.refused("/v1/completions", **body)
    assert status == 400 and error["param"] == param and said in error["message"]
    assert error["type"] == "invalid_request_error"


def test_harmless_fields_and_nulls_are_taken(server):
    server.post(
        "/v1/completions", prompt="x", max_tokens=1, user="me", suffix=None, stop=None, best_of=1, n=1, logprobs=None,
        use_beam_search=False, metadata={"a": "b"}, seed=-5,
    )  # fmt: skip


def test_an_unsupported_best_of_has_the_code_of_other_unsupported_fields(server):
    codes = [server.refused("/v1/completions", prompt="x", **more)[1]["code"]
             for more in ({"best_of": 3}, {"use_beam_search": True})]  # fmt: skip
    assert codes == ["unsupported_parameter"] * 2


def test_large_bodies_are_read_in_threads(server, monkeypatch):
    service = server.server.service
    threads = []

    def recording(call):
        def run(*args, **kwargs):
            threads.append(threading.get_ident())
            return call(*args, **kwargs)

        return run

    monkeypatch.setattr(service, "render", recording(service.render))
    monkeypatch.setattr(service.engine.maker.prompts, "check_ids", recording(service.engine.maker.prompts.check_ids))
    monkeypatch.setattr(completions, "split_prompts", recording(completions.split_prompts))
    server.post("/detokenize", tokens=[5])  # in the event loop's thread
    large = [{"role": "user", "content": "word " * 2000}]
    server.refused("/tokenize", messages=large)
    server.post("/detokenize", tokens=[5] * 10_000)
    server.refused("/v1/completions", prompt=[5] * 10_000)
    server.refused("/v1/chat/completions", messages=large)
    server.refused("/v1/messages", messages=large, max_tokens=1)
    server.refused("/v1/responses", input=large)
    assert len(threads) == 7 and threads[0] not in threads[1:]


def test_too_long_a_prompt(server):
    status, error = server.refused("/v1/completions", prompt="hello there " * 5000, max_tokens=5)
    assert status == 400 and error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "path, prompt",
    [("completions", {"prompt": "x"}), ("chat/completions", {"messages": [{"role": "user", "content": "x"}]})],
)
def test_continuous_usage(server, path, prompt):
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = server.events(f"/v1/{path}", **prompt, max_tokens=9, ignore_eos=True, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == last["usage"]["completion_tokens"] == 9
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == ["length"]
    if path == "chat/completions":
        assert counts[0] == 0 < counts[1], "a role is no token"
        asked = dict(max_tokens=9, ignore_eos=True, n=2, return_token_ids=True, stream_options=options)
        *chunks, last, _ = server.events(f"/v1/{path}", **prompt, **asked)
        told = 0
        for chunk in chunks:
            told += len(chunk["choices"][0].get("token_ids") or ())
            assert chunk["usage"]["completion_tokens"] == told
            assert chunk["usage"]["total_tokens"] == told + last["usage"]["prompt_tokens"]
        assert told == last["usage"]["completion_tokens"] == 18
    options["include_usage"] = False
    events = server.events(f"/v1/{path}", **prompt, max_tokens=3, stream_options=options)
    assert all("usage" not in e for e in events[:-1])


def test_tokens_that_are_parts_of_characters(server, llm):
    """Their names are their bytes, none is lost, and they begin at their character, as OpenAI has it."""
    prompt = "a🦜日 é"
    ids = llm.tokenizer.encode(prompt)
    params = SamplingParams(max_tokens=6, temperature=0, logprobs=20, prompt_logprobs=20, ignore_eos=True)
    (expected,) = llm.generate(prompt, params, use_tqdm=False)
    body = dict(prompt=prompt, max_tokens=6, temperature=0, logprobs=20, ignore_eos=True)
    for echo in (True, False):
        choice = server.post("/v1/completions", **body, echo=echo)["choices"][0]
        found = choice["logprobs"]
        assert found["tokens"][: len(ids)].count("bytes:\\xf0") == echo
        rows = [*(expected.prompt_logprobs if echo else ()), *expected.outputs[0].logprobs]
        own = [*(ids if echo else ()), *expected["token_ids"]]
        assert len(found["tokens"]) == len(rows)
        for name, token_id, row, top in zip(found["tokens"], own, rows, found["top_logprobs"]):
            if row is not None:
                assert len(top) == len(row) and sorted(top.values()) == sorted(p.logprob for p in row.values())
                assert top[name] == pytest.approx(row[token_id].logprob)  # by which lm-eval finds the greedy token
        assert found["text_offset"] == sorted(found["text_offset"])
        assert max(found["text_offset"]) < len(choice["text"])
        if echo:
            raw = [llm.engine.maker.decoder.token_bytes(token_id) for token_id in ids]
            before = [b"".join(raw[:i]) for i in range(len(ids))]
            assert found["text_offset"][: len(ids)] == [len(b.decode(errors="ignore")) for b in before]
        pieces = [e["choices"][0]["logprobs"] for e in server.events("/v1/completions", **body, echo=echo)[:-1]]
        assert {name: [x for piece in pieces for x in piece[name]] for name in found} == found
    assert (
        server.post("/v1/completions", **body | dict(prompt=ids, max_tokens=0), echo=True)["choices"][0]["text"]
        == prompt
    )


@pytest.mark.parametrize("as_ids", [True, False])
def test_special_tokens_that_a_prompt_has_and_those_that_the_tokenizer_adds(as_ids):
    tokenizer = tiny.tokenizer()
    special, *ids = tokenizer.encode("<|end|>a<|end|>b")
    rows = [{t: Logprob(-1.0, 1, "")} for t in (special, *ids)]
    for text, offsets in (("a<|end|>b", [0, 0, 1, 8]), ("<|end|>a<|end|>b", [0, 7, 8, 15])):
        logprobs = CompletionLogprobs(1, as_ids, TextDecoder(tokenizer))
        assert logprobs.of_prompt(rows, [special, *ids], text)["text_offset"] == offsets
        assert logprobs.of(rows[1:2], ids[:1])["text_offset"] == [len(text)]


@pytest.mark.parametrize("skip", [True, False])
def test_offsets_are_those_of_the_text_whatever_the_tokens(skip):
    """Any bytes: half characters that others follow, wrong ones, and special tokens."""
    tokenizer = tiny.tokenizer()
    decoder, rng = TextDecoder(tokenizer), random.Random(0)
    special = tokenizer.eos_token_id
    parts = {bytes([b]): t for t in range(len(tokenizer)) if len(b_ := decoder.token_bytes(t)) == 1 for b in b_}
    alphabet = [parts[bytes([b])] for b in (0x61, 0xF0, 0x9F, 0xA6, 0x9C, 0xE0, 0x80, 0xEF, 0xBF, 0xBD, 0xC3, 0xFF)]
    for _ in range(300):
        ids = [rng.choice([*alphabet, special]) for _ in range(rng.randrange(1, 9))]
        logprobs = CompletionLogprobs(1, False, decoder, skip)
        rows = [{t: Logprob(-1.0, 1, "")} for t in ids]
        found = logprobs.of(rows, ids)["text_offset"]
        raw = [decoder.bytes_of(t, skip) for t in ids]
        begins = character_begins(b"".join(raw))
        assert len(begins) == len(decoder.decode(ids, skip)) and found == sorted(found)
        for i in range(len(ids)):
            if raw[i]:
                assert found[i] == bisect.bisect(begins, len(b"".join(raw[:i]))) - 1, (ids, i)


def character_begins(data):
    """The indices of the bytes at which the characters of a text begin; wrong bytes are U+FFFD."""
    begins, at = [], 0
    while at < len(data):
        try:
            good, wrong = data[at:].decode(), 0
        except UnicodeDecodeError as error:
            good, wrong = data[at : at + error.start].decode(), error.end - error.start
        for character in good:
            begins.append(at)
            at += len(character.encode())
        begins += [at] * (wrong > 0)
        at += wrong
    return begins
