"""Steps that read shared prefixes once, through the engine: the same tokens as without."""

from functools import partial

import pytest

from nanovllm import SamplingParams
from nanovllm.engine.fast.policy import FastPolicy
from nanovllm.kernels import Provider, all_ops
from nanovllm.kernels.ops.shared_prefixes import check_shared
from tests import tiny
from tests.engine import small_engine
from tests.engine.small_engine import generate, random_prompts

SHARED_OPS = ("attention_decode_shared", "qk_norm_rope_attention_shared")
FUSED = ("qk_norm_rope_store", "qk_norm_rope_attention")
ALWAYS = FastPolicy(min_shared_rows=2, min_saved_bytes=1)
"""Whatever is shared is worth it."""
make = partial(
    small_engine.make, fast_policy=ALWAYS, device="cpu", max_model_len=160, max_num_seqs=20, max_num_batched_tokens=200
)


@pytest.fixture
def recorded():
    """The references as providers that say when they were called, and check what they are told of groups."""
    calls = []

    def make(name):
        def fn(*args, **kwargs):
            given = all_ops()[name].signature.bind(*args, **kwargs).arguments
            if name in SHARED_OPS:
                check_shared(given["kv"], given["shared"])
                assert given["shared"].groups[:, 2].any()
            calls.append(name)
            return all_ops()[name].native(*args, **kwargs)

        return fn

    names = [*SHARED_OPS, *FUSED]
    for name in names:
        all_ops()[name].providers["recorded"] = Provider("recorded", make(name))
    yield calls
    for name in names:
        del all_ops()[name].providers["recorded"]


def workload(seed=0):
    system, topic, a, b, c, d, e = random_prompts([40, 30, 5, 3, 20, 9, 50], seed)
    prompts = [system + a, system + topic + b, c, system + topic + d, e, system[:33]]
    params = [
        SamplingParams(temperature=0, n=n, max_tokens=length, ignore_eos=True)
        for n, length in zip((1, 2, 3, 1, 1, 3), (9, 14, 8, 20, 28, 19))
    ]
    return prompts, params


@pytest.mark.parametrize(
    "names, options",
    [
        (SHARED_OPS[:1], dict(num_kvcache_blocks=17)), (SHARED_OPS[1:], {}), ((*SHARED_OPS, *FUSED), {}),
        ((*SHARED_OPS, *FUSED), dict(async_scheduling=True, max_num_batched_tokens=50)),
    ],
    ids=str,
)  # fmt: skip
def test_tokens_are_those_without_sharing(directory, recorded, names, options):
    prompts, params = workload()
    expected = generate(make(directory, **options), prompts, params)
    assert not recorded
    llm = make(directory, kernel_priority={name: ["recorded"] for name in names}, **options)
    assert generate(llm, prompts, params) == expected
    used = set(recorded)
    assert used & set(SHARED_OPS) == {names[-1] if len(names) == 1 else SHARED_OPS[1]}
    if len(names) > 1:
        assert used >= set(FUSED)  # mixed steps, and those where nothing is shared any more
    if options.get("num_kvcache_blocks") == 17:
        assert llm.engine.scheduler.num_preemptions > 0


def test_aborts_and_steps_that_fail_leave_the_groups_right(directory, recorded, monkeypatch):
    prompts, params = workload(1)
    expected = generate(make(directory), prompts, params)
    llm = make(directory, kernel_priority={name: ["recorded"] for name in SHARED_OPS})
    engine, prefixes = llm.engine, llm.engine.runner.fast.decoder.state.prefixes
    requests = [engine.add_request(p, q) for p, q in zip(prompts, params)]
    steps = 0
    while engine.has_unfinished:
        engine.step()
        steps += 1
        if steps == 8:
            assert prefixes.worthwhile
            engine.abort(requests[3])
    for i, request in enumerate(requests):
        tokens = [c.token_ids for c in request.output().outputs]
        assert tokens == expected[i] if i != 3 else all(t == e[: len(t)] for t, e in zip(tokens, expected[i]))

    def interrupted():
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(prefixes, "send", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate(llm, prompts, params)
    assert not prefixes.worthwhile
    assert generate(llm, prompts, params) == expected


def test_a_continued_run_looks_at_nothing(directory, recorded, monkeypatch):
    llm = make(directory, kernel_priority={SHARED_OPS[0]: ["recorded"]})
    prefixes, updates = llm.engine.runner.fast.decoder.state.prefixes, []
    update = prefixes.update
    monkeypatch.setattr(prefixes, "update", lambda *args: updates.append(args) or update(*args))
    prompt = workload()[0][0]
    generate(llm, [prompt], SamplingParams(temperature=0, n=6, max_tokens=40, ignore_eos=True))
    assert len(updates) == 1 and recorded.count(SHARED_OPS[0]) == 2 * 39


def test_without_a_kernel_or_a_prefix_cache_nothing_is_kept(directory, recorded):
    priority = {SHARED_OPS[0]: ["recorded"]}
    for options in (
        {},
        dict(kernel_priority=priority, enable_prefix_caching=False),
        dict(kernel_priority=priority, fast_policy=FastPolicy(prefix_groups=False)),
        # Named by the user, the plain op counts: a fused one that was not named does not stand in for it.
        dict(kernel_priority={"attention_decode": ["native"]}),
    ):
        assert make(directory, **options).engine.runner.fast.decoder.state.prefixes is None


@pytest.mark.gpu
def test_steps_that_share_are_captured_when_they_first_come(tmp_path):
    """From 80 sequences of one long prefix down to 16, while the step before is still running."""
    tiny.save_with_tokenizer(tmp_path, "qwen3", head_dim=64, max_position_embeddings=1024)
    system, *ends = random_prompts([400, *(1 + i % 20 for i in range(80))])
    prompts = [system + end for end in ends]
    params = [
        SamplingParams(temperature=(0, 0.9)[i % 2], seed=i, ignore_eos=True, max_tokens=10 + i // 4) for i in range(80)
    ]
    outputs = []
    for enforce_eager in (True, False):
        llm = make(
            tmp_path, fast_policy=FastPolicy(min_saved_bytes=1), device="cuda", max_num_seqs=80, max_model_len=512,
            num_kvcache_blocks=1000, max_num_batched_tokens=1024,
            enforce_eager=enforce_eager, capture_prefill=True,
        )  # fmt: skip
        llm.generate([prompts[0]], SamplingParams(max_tokens=1), use_tqdm=False)  # its blocks are there to be shared
        outputs.append(generate(llm, prompts, params))
    assert outputs[0] == outputs[1]
    fast = llm.engine.runner.fast
    captured = {shape.rows for shape in fast.decoder.graphs.keys if shape.shared}
    assert captured == set(fast.buckets.shared_sizes) == {16, 32, 48, 64, 80}
