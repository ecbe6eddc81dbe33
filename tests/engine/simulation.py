"""A device that is a dictionary and a model that is a hash: what scheduler and block manager must get right, without
torch.

A sequence's next token is a function of all its tokens so far and of its seed. The simulated cache holds, in place of
keys and values, a hash chained over the tokens up to each position, as real keys and values depend on all of them.
Every step writes its tokens through the block tables, then checks that what each sequence sees through its block table
is its own past and nothing else.

A real layer stores the keys and values of a step before it attends to any, unless every part is a single token, or the
other
parts are piggybacked: then one kernel does both (`qk_norm_rope_attention`), so that no part may attend to what another
part of the step writes.
"""

from __future__ import annotations

import random
from collections import deque

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.fast.piggyback import Piggyback
from nanovllm.engine.fast.policy import PiggybackSizes
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.engine.step import ScheduledStep, StepKind
from nanovllm.sampling_params import SamplingParams

VOCAB = 7
EOS = 0
_RNG = random.Random(1)
DOCUMENTS = [[_RNG.randrange(VOCAB) for _ in range(64)] for _ in range(2)]
"""Prompts are the beginnings of these, so that many share one."""


class Truth:
    """What a sequence's tokens are, however it is scheduled: the prompt, and as many tokens after it as asked for."""

    def __init__(self, prompt: list[int], seed: int) -> None:
        self.seed = seed
        self.tokens: list[int] = []
        self.chain: list[int] = []
        for token in prompt:
            self._append(token)

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        self.chain.append(hash((self.chain[-1] if self.chain else 0, token)))

    def upto(self, length: int) -> Truth:
        while len(self.tokens) < length:
            self._append(next_token(self.chain[-1], self.seed))
        return self


def next_token(chain: int, seed: int) -> int:
    return hash((chain, seed)) // 11 % VOCAB


def expected_output(
    prompt: list[int], seed: int, params: SamplingParams, max_model_len: int, stop_at: int | None = None
):
    """(output tokens, finish reason, stop reason) of a request that nothing disturbs; `stop_at` stands for a stop
    string.
    """
    truth = Truth(prompt, seed)
    for n in range(1, params.max_tokens + 1):
        tokens = truth.upto(len(prompt) + n).tokens
        output, token = tokens[len(prompt) :], tokens[-1]
        if n >= params.min_tokens and token == EOS and not params.ignore_eos:
            return output, "stop", None
        if n >= params.min_tokens and token in params.stop_token_ids:
            return output, "stop", token
        if n == params.max_tokens or len(tokens) == max_model_len:
            return output, "length", None
        if n == stop_at:
            return output, "stop", "stop string"
    raise AssertionError


class Device:
    """Executes scheduled steps on the simulated cache; raises AssertionError where a real device would compute
    nonsense.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.cache: dict[int, int] = {}
        self.last_tokens: dict[int, int] = {}
        self.penalty_state: dict[int, list[int]] = {}
        self._truths: dict[int, tuple[Sequence, Truth]] = {}
        self.num_pending_inputs = 0

    def execute(self, step: ScheduledStep) -> list[int]:
        written: set[int] = set()
        for part in step.parts:  # a layer stores the keys and values of the whole step before it attends
            if part.admitted:
                self.penalty_state[part.seq_slot] = list(part.seq.token_ids)
            truth = self._truth(part.seq).upto(part.start + part.num_tokens)
            for position in range(part.start, part.start + part.num_tokens):
                token = self._input(part, position)
                assert token == truth.tokens[position], f"{part} computes token {token} at {position}, not its own"
                cell = self.cell(part.seq, position)
                assert cell not in written, f"{part} writes a cell that another part of the step writes"
                written.add(cell)
                self.cache[cell] = truth.chain[position]
        if all(part.num_tokens == 1 for part in step.parts) or step.kind is StepKind.PIGGYBACKED:
            for part in step.parts:
                past = {self.cell(part.seq, position) for position in range(part.start)}
                assert not past & written, f"{part} attends to what another part of the step writes"
        sampled = []
        for part in step.parts:
            end = part.start + part.num_tokens
            truth = self._truth(part.seq)
            for position in range(end):
                seen = self.cache.get(self.cell(part.seq, position))
                assert seen == truth.chain[position], f"{part} sees at {position} what is not its own past"
            if part.samples:
                assert self.penalty_state[part.seq_slot] == truth.tokens[:end], (
                    f"{part}: the seq_slot's token counts are of others"
                )
                sampled.append((part.seq_slot, next_token(self.cache[self.cell(part.seq, end - 1)], part.seq.seed)))
        for slot, token in sampled:
            self.last_tokens[slot] = token
            self.penalty_state[slot].append(token)
        return [token for _, token in sampled]

    def _truth(self, seq: Sequence) -> Truth:
        if id(seq) not in self._truths:
            self._truths[id(seq)] = seq, Truth(seq.token_ids[: seq.prompt_len], seq.seed)
        return self._truths[id(seq)][1]

    def cell(self, seq: Sequence, position: int) -> int:
        return seq.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def _input(self, part, position: int) -> int:
        if position < len(part.seq.token_ids):
            return part.seq.token_ids[position]
        assert part.num_tokens == 1, "only a lone token can come from the step before"
        self.num_pending_inputs += 1
        return self.last_tokens[part.seq_slot]


class Simulation:
    """Scheduler, block manager and simulated device, driven as LLMEngine drives the real ones; checks after every
    move.
    """

    def __init__(
        self,
        *,
        block_size=2,
        num_blocks=16,
        max_num_seqs=4,
        budget=8,
        max_model_len=16,
        steps_ahead=0,
        caching=True,
        piggyback: PiggybackSizes | None = None,
        reserve_tokens_ahead=32,
    ) -> None:
        self.blocks = BlockManager(num_blocks, block_size, caching)
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs,
            budget,
            max_model_len,
            (EOS,),
            piggyback and Piggyback(max_num_seqs, piggyback),
            reserve_tokens_ahead,
        )
        self.device = Device(block_size)
        self.steps_ahead = steps_ahead
        self.in_flight: deque[tuple[ScheduledStep, list[int]]] = deque()
        self.added: list[tuple[Sequence, list[int], int | None]] = []
        self.continued = False  # whether the latest step was a continuation
        self.seen: set[str] = set()  # which situations came about, to know that the tests are not blind to them

    def add(
        self, prompt: list[int], params: SamplingParams | None = None, seed: int = 0, stop_at: int | None = None,
        offline: bool = False,
    ) -> Sequence:  # fmt: skip
        seq = Sequence(len(self.added), prompt, params or SamplingParams(max_tokens=4, ignore_eos=True), seed)
        seq.offline = offline
        self.added.append((seq, list(prompt), stop_at))
        self.scheduler.add(seq)
        self.scheduler.check()
        return seq

    def abort(self, seq: Sequence) -> None:
        self._note("abort", seq)
        self.scheduler.finish(seq, "abort")
        self.scheduler.check()

    def step(self, abort: Sequence | None = None) -> ScheduledStep | None:
        """Launch a step and read the one that is due, as LLMEngine does; `abort` a sequence between the two."""
        preemptions = self.scheduler.num_preemptions
        step = self.scheduler.schedule()
        self.scheduler.check()
        if self.scheduler.num_preemptions > preemptions:
            self.seen.add("preempted")
            self.seen.update("preempted with a token in flight" for s in self.scheduler.waiting if s.num_pending)
            if self.continued:
                self.seen.add("preempted in a run")
        self.continued = step is not None and step.continues
        if step is not None:
            self._check_step(step)
            self.in_flight.append((step, self.device.execute(step)))
        if abort is not None:
            self.abort(abort)
        if self.in_flight and (step is None or len(self.in_flight) > self.steps_ahead):
            self.read()
        return step

    def read(self) -> None:
        step, token_ids = self.in_flight.popleft()
        sampling = [p.seq for p in step.parts if p.samples]
        alive = [s for s in sampling if not s.finished]
        if len(alive) < len(sampling):
            self.seen.add("dropped a token")
        grown = self.scheduler.update(step, token_ids)
        assert grown == alive
        for seq in grown:
            if seq.num_output_tokens == self.added[seq.seq_id][2]:
                self._note("stop string", seq)
                self.scheduler.finish(seq, "stop", "stop string")
        self.scheduler.check()

    def drain(self) -> None:
        for _ in range(3000):
            if not (self.scheduler.has_unfinished or self.in_flight):
                break
            self.step()
        else:
            raise AssertionError(f"no end: {list(self.scheduler.running)}, {list(self.scheduler.waiting)}")
        assert self.blocks.num_free_blocks == self.blocks.num_blocks
        for seq, prompt, stop_at in self.added:
            output, reason, stop_reason = expected_output(
                prompt, seq.seed, seq.params, self.scheduler.max_model_len, stop_at
            )
            assert seq.finished and seq.token_ids[: seq.prompt_len] == prompt and not seq.block_table
            if seq.finish_reason == "abort":
                assert seq.output_token_ids == output[: seq.num_output_tokens]
            else:
                assert (seq.output_token_ids, seq.finish_reason, seq.stop_reason) == (output, reason, stop_reason)

    def _check_step(self, step: ScheduledStep) -> None:
        lengths = [p.num_tokens for p in step.parts]
        assert min(lengths) >= 1 and sum(lengths) == step.num_tokens <= self.scheduler.max_num_batched_tokens
        single = lengths.count(1)
        assert set(lengths[:single]) <= {1}, "parts of a single token come first"
        assert len({id(p.seq) for p in step.parts}) == len({p.seq_slot for p in step.parts}) == len(lengths)
        for part in step.parts:
            seq = part.seq
            before = seq.num_tokens - part.samples
            assert part.samples == (part.start + part.num_tokens == before) and part.seq_slot == seq.seq_slot
            if part.admitted and part.start:
                self.seen.add("prefix hit")
            if part.admitted and seq.num_output_tokens:
                self.seen.add("resumed")
            if not part.samples:
                self.seen.add("chunked")
        if step.continues:
            self.seen.add("continued")
            if self.scheduler.waiting:
                self.seen.add("continued while someone waits")
        if 0 < single < len(lengths):
            self.seen.add("mixed")
        if step.kind is StepKind.PIGGYBACKED:
            self.seen.add("piggybacked")
            if any(p.admitted and p.seq.num_output_tokens for p in step.pieces):
                self.seen.add("piggybacked when resumed")
            if any(p.num_tokens == 1 for p in step.pieces):
                self.seen.add("piggybacked with one token")
        if self.device.num_pending_inputs:
            self.seen.add("input from the step before")

    def _note(self, what: str, seq: Sequence) -> None:
        if not seq.finished:
            state = "waiting" if seq.status is SequenceStatus.WAITING else "running"
            self.seen.add(f"{what} while {state}" + (" with a token in flight" if seq.num_pending else ""))


def random_load(sim: Simulation, rng: random.Random, count: int = 14) -> None:
    """Requests of prompts that begin alike, ends that are read late, and aborts; until all have ended."""
    for i in range(count):
        prompt = [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6][: rng.randint(1, 12)] + [rng.randint(0, 1)] * rng.randint(0, 2)
        params = SamplingParams(
            max_tokens=rng.randint(1, 20), ignore_eos=rng.random() < 0.7, prompt_logprobs=rng.choice((None, None, 1))
        )
        seq = sim.add(prompt, params, seed=i, stop_at=rng.choice((None, None, 3)))
        for _ in range(rng.randint(0, 5)):
            sim.step(abort=seq if rng.random() < 0.05 else None)
    sim.drain()
