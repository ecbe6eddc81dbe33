"""An engine on a simulated device, which fails when told to."""

from types import SimpleNamespace

import torch

from nanovllm.config import EngineConfig
from nanovllm.engine.fast.piggyback import Piggyback
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.step import StepKind
from tests.engine.simulation import EOS, Device

BLOCK = 16


class Broken(Exception):
    """What a failing device raises."""


class SimulatedResult:
    def __init__(self, step, token_ids, runner, fails):
        self.step, self._token_ids, self._runner, self._fails = step, token_ids, runner, fails
        self.logprobs, self.prompt_logprobs = None, []

    def token_ids(self):
        if self._fails:
            self._runner.broken = False
            raise Broken("while reading")
        return self._token_ids


class SimulatedRunner:
    """A ModelRunner on a simulated device that fails when told to, having spoilt all that the step wrote.

    A step that fails on the device is known to have failed only when it is read: what is launched until then computes
    rubbish.

    Attributes:
        launched: the steps so far.
        fail_next: how the next step fails, once: "launch" or "read".
        refuses: whether to raise at a step before it is launched; asked until it first says so.
    """

    device = torch.device("cpu")

    def __init__(self, num_blocks, budget, max_model_len, piggyback=None):
        self.num_kvcache_blocks, self.max_num_batched_tokens, self.max_model_len = num_blocks, budget, max_model_len
        self.limits = SimpleNamespace(remedy="shorten the prompt")
        self.fast = SimpleNamespace(piggyback=piggyback, reserve_tokens_ahead=32)
        self.simulated = Device(BLOCK)
        self.launched = []
        self.fail_next = None
        self.refuses = None
        self.broken = False
        self.seen = set()

    def execute(self, step):
        if self.refuses is not None and self.refuses():
            self.refuses = None
            raise Broken("before launching")
        self.launched.append(step)
        fails, self.fail_next = self.fail_next, None
        if step.kind is StepKind.PIGGYBACKED:
            self.seen.add("piggybacked")
        if self.broken:
            token_ids = [0 for part in step.parts if part.samples]
        else:
            token_ids = self.simulated.execute(step)
        if fails or self.broken:
            for part in step.parts:
                for position in range(part.start, part.start + part.num_tokens):
                    self.simulated.cache[self.simulated.cell(part.seq, position)] = None
            self.simulated.last_tokens.clear()
        if fails == "launch":
            self.broken = False
            raise Broken("while launching")
        fails = fails == "read" and not self.broken
        self.broken |= fails
        return SimulatedResult(step, token_ids, self, fails)


def simulated_engine(
    *,
    num_blocks=8,
    budget=40,
    max_model_len=64,
    max_num_seqs=4,
    asynchronous=False,
    caching=True,
    piggyback=None,
):
    """piggyback: the sizes of steps with piggybacked prompts; None: there are none."""
    runner = SimulatedRunner(num_blocks, budget, max_model_len, piggyback and Piggyback(max_num_seqs, piggyback))
    engine = LLMEngine(
        EngineConfig(
            "smollm2-135m", load_format="dummy", skip_tokenizer_init=True, kvcache_block_size=BLOCK,
            max_num_seqs=max_num_seqs,
            async_scheduling=asynchronous, enable_prefix_caching=caching,
        ),
        lambda *_: runner,
    )  # fmt: skip
    engine.scheduler.eos_token_ids = frozenset({EOS})
    return engine


def drain(engine):
    for _ in range(3000):
        if not engine.has_unfinished:
            return
        try:
            engine.step()
        except Broken:
            pass
        engine.check()
    raise AssertionError("no end")


def assert_clean(engine):
    while engine.has_unfinished:  # aborts that no step has applied yet, and a token too many in flight
        assert not engine.step()
    engine.check()
