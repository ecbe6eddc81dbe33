"""Weights packed for the C++ kernels: greedy tokens are those of transformers, in every mode of the engine."""

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.fast.policy import FastPolicy, PiggybackSizes
from nanovllm.kernels.cpu.build import cpu_support
from nanovllm.kernels.cpu.library import GGUF_FORMATS, can_round
from tests import tiny
from tests.weights.gguf_files import VOCAB, quantised
from tests.weights.quantised_files import FORMATS, write

if (reason := cpu_support(torch.device("cpu"))) is not None:
    pytest.skip(reason, allow_module_level=True)
pytest.importorskip("transformers")

OUTPUT = 10
SIZES = PiggybackSizes(totals=(8, 20, 40), row_multiple=2, min_tokens=2, min_full_speed_tokens=4, max_pieces=3)
PIGGYBACK = FastPolicy(piggyback_prefill=True, piggyback=SIZES, min_shared_rows=2, min_saved_bytes=1)
MODES = {
    "one by one": dict(max_num_seqs=1),
    "three": dict(max_num_seqs=3),
    "all": dict(),
    "chunks": dict(max_num_batched_tokens=11),
    "preempted": dict(num_kvcache_blocks=10),
    "piggybacked": dict(fast_policy=PIGGYBACK, max_num_batched_tokens=40, max_num_seqs=4),
    "no fast paths": dict(fast_policy=FastPolicy.off()),
    "in turns": dict(async_scheduling=False),
}
CHECKPOINTS = ("fp8-block", "fp8-channel", "awq", "awq-symmetric", "gptq", "gptq-8")


def quick(names, some):
    """Test cases, of which all but `some` are slow."""
    return [name if name in some else pytest.param(name, marks=pytest.mark.slow) for name in names]


def prompts(vocab):
    """Two begin with the same two blocks of 16 tokens."""
    rng = torch.Generator().manual_seed(0)
    made = [torch.randint(3, vocab, (n,), generator=rng).tolist() for n in (1, 5, 40, 17, 33, 9, 70)]
    return [*made, made[2][:35] + [7]]


def check(directory, reference, vocab, monkeypatch):
    reference.generation_config.eos_token_id = None
    asked = prompts(vocab)
    want = tiny.greedy_each(reference, asked, OUTPUT)
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    for mode, changes in MODES.items():
        options = dict(kvcache_block_size=16, num_kvcache_blocks=80, max_model_len=112, max_num_seqs=8) | changes
        llm = LLM(str(directory), device="cpu", dtype="float32", skip_tokenizer_init=True, **options)
        assert llm.kernels.providers["decoder_step"] == "cpu"
        for threads in (1, 3):
            monkeypatch.setenv("NANOVLLM_CPU_THREADS", str(threads))  # and with the blocks of the prompts before
            outputs = llm.generate(asked, params, use_tqdm=False)
            llm.engine.check()
            assert [o.outputs[0].token_ids for o in outputs] == want, (mode, threads)
        assert bool(llm.engine.scheduler.num_preemptions) == (mode == "preempted")
        assert sum(o.num_cached_tokens for o in outputs)
    several = SamplingParams(temperature=0, n=3, max_tokens=OUTPUT, ignore_eos=True)
    outputs = llm.generate(asked, several, use_tqdm=False)
    assert [[c.token_ids for c in o.outputs] for o in outputs] == [[tokens] * 3 for tokens in want]


@pytest.mark.parametrize("kind", quick(GGUF_FORMATS, ("Q4_1", "Q6_K")))
def test_gguf_files(tmp_path, monkeypatch, kind):
    import transformers

    path = quantised(tmp_path / "x.gguf", "llama", kind, context_length=512, vocab_size=VOCAB)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    check(path, reference, VOCAB, monkeypatch)


@pytest.mark.parametrize("name", quick(CHECKPOINTS, ("fp8-block", "awq")))
def test_quantised_checkpoints(tmp_path, monkeypatch, name):
    reference = write(tmp_path, FORMATS[name], "qwen3")
    check(tmp_path, reference, 199, monkeypatch)


@pytest.mark.parametrize("dtype", quick((torch.bfloat16, torch.float16), ()))
def test_checkpoints_of_16_bits(tmp_path, monkeypatch, dtype):
    reference = tiny.model().to(dtype)
    reference.save_pretrained(tmp_path)
    check(tmp_path, reference.float(), 199, monkeypatch)


@pytest.mark.skipif(not can_round(), reason="the C++ kernels have no products of bfloat16 activations here")
def test_bfloat16_activations_change_a_prompts_logits_a_little(tmp_path, monkeypatch):
    tiny.model().to(torch.bfloat16).save_pretrained(tmp_path)
    asked, params = prompts(199)[2:], SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    options = dict(device="cpu", dtype="float32", skip_tokenizer_init=True, max_model_len=112)
    found = []
    for activations, threads in (("float32", 1), ("bfloat16", 1), ("bfloat16", 3)):
        monkeypatch.setenv("NANOVLLM_CPU_THREADS", str(threads))
        llm = LLM(str(tmp_path), cpu_activations=activations, **options)
        outputs = llm.generate(asked, params, use_tqdm=False)
        found.append(
            torch.tensor([p[t].logprob for o in outputs for t, p in zip(o.prompt_token_ids[1:], o.prompt_logprobs[1:])])
        )
    exact, one, several = found
    assert 1e-6 < (one - exact).abs().max() < 0.05 and torch.equal(one, several)
