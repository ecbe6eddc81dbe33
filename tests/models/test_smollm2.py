"""The embedded SmolLM2 through our engine is the same function as through transformers, in float32."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from nanovllm import LLM, SamplingParams
from nanovllm.weights import gguf
from tests import tiny
from tests.devices import DEVICE
from tests.engine.small_engine import check_logits
from tests.weights.gguf_files import read_quickly

pytestmark = pytest.mark.any_device

NUM_TOKENS, LENGTHS, NUM_BLOCKS, MAX_LEN = 64, [1, 2, 8, 16, 17, 31, 32, 100, 255, 256, 400, 700, 1500], 110, 1600
if DEVICE == "cpu":
    NUM_TOKENS, LENGTHS, NUM_BLOCKS, MAX_LEN = 4, [1, 16, 17, 130], 15, 140
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
BLOCK_SIZE = 16

TEXT = """The lighthouse keeper counted 1,024 ships in 1873, and wrote each one down in a book bound with blue cloth.
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)
Água mole em pedra dura, tanto bate até que fura. 水滴石穿。 "What," she asked, "is the difference between heat & temperature?"
"""  # noqa: E501


@pytest.fixture(scope="module")
def path(smollm2_path):
    return smollm2_path


@pytest.fixture(scope="module")
def prompts(path):
    """Prefixes of one text, and prompts that share nothing with it."""
    from nanovllm.weights.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(path)
    long = tokenizer.encode(TEXT * 20)
    assert len(long) > max(LENGTHS)
    chat = [{"role": "user", "content": "Name three colours."}]
    template = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return [
        *(long[:n] for n in LENGTHS),
        tokenizer.encode(template, add_special_tokens=False),
        tokenizer.encode("Once upon a time"),
        tokenizer.encode("import numpy as np\n\n\ndef"),
    ]


@pytest.fixture(scope="module")
def reference(path):
    with read_quickly():
        made = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    return made.eval().to(DEVICE)


@pytest.fixture(scope="module")
def expected(reference, prompts):
    """What transformers' own generate writes, prompt by prompt."""
    reference.generation_config.eos_token_id = None
    return [tiny.greedy(reference, prompt, NUM_TOKENS) for prompt in prompts]


def engine(path, **kwargs) -> LLM:
    return LLM(
        path, device=DEVICE, dtype="float32", kvcache_block_size=BLOCK_SIZE, **{"num_kvcache_blocks": 1024, **kwargs}
    )


def tokens(llm: LLM, prompts) -> list[list[int]]:
    outputs = [o["token_ids"] for o in llm.generate(prompts, GREEDY, use_tqdm=False)]
    llm.engine.scheduler.check()
    return outputs


def test_weights_and_config_are_those_that_transformers_loads(path, reference):
    expected = reference.state_dict()
    loaded = dict(gguf.iter_tensors(path))
    assert expected.keys() - loaded.keys() <= {"lm_head.weight"} and loaded.keys() <= expected.keys()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, expected[name].cpu()), name
    config, theirs = gguf.read_config(path), reference.config
    for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                "head_dim", "max_position_embeddings", "vocab_size", "tie_word_embeddings"):  # fmt: skip
        assert config[key] == getattr(theirs, key), key
    assert config["rms_norm_eps"] == 1e-5 == pytest.approx(theirs.rms_norm_eps)
    assert config["rope_theta"] == theirs.rope_parameters["rope_theta"]
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)


def test_logits(path, reference, prompts):
    check_logits(engine(path), reference, (prompts[0], prompts[3], prompts[-3]))


@pytest.mark.parametrize(
    "kwargs",
    [
        pytest.param({"enable_prefix_caching": False}, id="batched"),
        pytest.param({"max_num_batched_tokens": 100, "async_scheduling": True}, id="chunked-async"),
        pytest.param({"num_kvcache_blocks": NUM_BLOCKS, "max_model_len": MAX_LEN}, id="preempted"),
    ],
)
def test_greedy_equals_transformers(path, prompts, expected, kwargs):
    llm = engine(path, **kwargs)
    assert tokens(llm, prompts) == expected
    if "num_kvcache_blocks" in kwargs:
        assert llm.engine.scheduler.num_preemptions > 0
    if "async_scheduling" in kwargs:  # once more: now the prompts' blocks are found in the prefix cache
        outputs = llm.generate(prompts[-4:], GREEDY, use_tqdm=False)
        assert [o["token_ids"] for o in outputs] == expected[-4:] and outputs[0].num_cached_tokens > 0


@pytest.mark.gpu
def test_greedy_with_custom_kernels_on_and_off(path, prompts, expected):
    on = engine(path)
    assert "triton" in on.kernels.providers.values() and tokens(on, prompts) == expected
    del on
    off = engine(path, use_custom_kernels=False)
    assert set(off.kernels.providers.values()) == {"native"} and tokens(off, prompts) == expected
