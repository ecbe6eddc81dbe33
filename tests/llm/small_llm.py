"""An `LLM` over a tiny model, and what transformers says that the model writes."""

import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests import tiny
from tests.devices import DEVICE
from tests.providers import registered

MAX_LEN = 128
TOKENIZER = tiny.tokenizer()
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPTS = ["hello world", "one two three", "x"]
MESSAGES = [{"role": "user", "content": "hi"}]
PROMPT = "<|user|>hi<|end|><|assistant|>"
"""Of MESSAGES."""


def make(directory, **arguments):
    defaults = dict(
        device=DEVICE, kvcache_block_size=16, num_kvcache_blocks=40, max_model_len=MAX_LEN, max_num_seqs=8,
        max_num_batched_tokens=64, enforce_eager=True,
    )  # fmt: skip
    return LLM(directory, **defaults | arguments)


def assert_clean(llm):
    engine = llm.engine
    while engine.has_unfinished:  # aborts that no step has applied yet, and a token too many in flight
        assert not engine.step()
    engine.check()


def greedy_text(reference, prompt, max_tokens=24):
    token_ids = tiny.greedy(reference, TOKENIZER.encode(prompt), max_tokens)
    return token_ids, TOKENIZER.decode(token_ids, skip_special_tokens=True)


def complete(llm, prompt, **params):
    """The output of a single request."""
    (out,) = llm.generate([prompt], SamplingParams(**params), use_tqdm=False)
    return out


def refused(error, directory, *words, **arguments):
    """No engine is made of these arguments, and the error has these words."""
    with pytest.raises(error) as caught:
        make(directory, **arguments)
    for word in words:
        assert word in str(caught.value)


def saying(directory, text, **arguments):
    """An `LLM` whose model says `text` to its first request, and zeros after it."""
    rest, serving = iter(TOKENIZER.encode(text)), False

    def scripted(logits, *_):
        token_ids = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        if serving:  # on a GPU an engine samples when it starts, too
            token_ids[0] = next(rest, 0)
        return token_ids

    with registered("sample", scripted, capturable=False):
        llm = make(directory, kernel_priority={"sample": ["mine"]}, **arguments)
    serving = True
    return llm
