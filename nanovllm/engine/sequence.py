"""One completion in the making: its tokens, what of them is computed, and the cache blocks it holds."""

from __future__ import annotations

from enum import Enum

from nanovllm.engine.logit_rules import LogitRules
from nanovllm.sampling_params import SamplingParams
from nanovllm.structured.constraint import TokenConstraint


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Token ids and progress of one completion.

    A step that samples a token is *scheduled* (`num_pending` grows), and its result is *read* later (`token_ids` grows,
    `num_pending` shrinks). With asynchronous scheduling the next step is scheduled between the two, so a sequence may
    be longer (`num_tokens`) than the tokens that the host knows.

    Invariant: num_computed_tokens <= num_tokens, and while running, block_table covers num_computed_tokens.
    """

    __slots__ = (
        "seq_id", "index", "params", "seed", "prompt_len", "token_ids", "num_pending", "num_computed_tokens",
        "num_cached_tokens", "block_table", "block_hashes", "num_registered_blocks", "seq_slot", "status",
        "finish_reason", "stop_reason", "max_len", "stop_ids", "offline", "cache_salt", "logit_rules", "admitted_time",
        "constraint",
    )  # fmt: skip

    def __init__(
        self,
        seq_id: int,
        prompt_token_ids: list[int],
        params: SamplingParams,
        seed: int,
        index: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        self.seq_id = seq_id
        self.index = index
        self.params = params
        self.seed = seed
        self.prompt_len = len(prompt_token_ids)
        self.token_ids = list(prompt_token_ids)
        self.num_pending = 0
        self.num_computed_tokens = 0
        """Tokens whose keys and values are in the cache once the steps in flight have run."""
        self.num_cached_tokens: int | None = None
        """Tokens that the first admission found in the prefix cache; None before it."""
        self.admitted_time: float | None = None
        """When it was first admitted, on the clock `time.perf_counter`."""
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []
        """Chained hashes of the leading full blocks of known tokens; kept over preemption."""
        self.num_registered_blocks = 0
        """Leading blocks that were offered to the prefix cache."""
        self.seq_slot = -1
        """The sequence's place in per-sequence buffers (last tokens, token counts) while it runs, else -1. Its row of
        the decode state is another number."""
        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.max_len = 0
        """Most tokens, prompt included, set when it is queued."""
        self.stop_ids: frozenset[int] = frozenset()
        """Tokens that end the sequence, set when it is queued."""
        self.offline = False
        """Whether only the time of the whole output matters, so that the prompt may be computed late."""
        self.cache_salt = cache_salt
        """Cached prefixes are shared only among sequences of the same salt."""
        self.logit_rules: LogitRules | None = None
        """Bias and bad words; None: there are none."""
        self.constraint: TokenConstraint | None = None
        """Which tokens may come next; None: any."""

    @property
    def num_tokens(self) -> int:
        """Known and pending tokens."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        """Known output tokens."""
        return len(self.token_ids) - self.prompt_len

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    @property
    def finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    def end(self, reason: str, stop_reason: int | str | None = None) -> None:
        """Mark the sequence as finished; its blocks and seq_slot have been given back."""
        self.block_table, self.seq_slot = [], -1
        self.status = SequenceStatus.FINISHED
        self.finish_reason = reason
        self.stop_reason = stop_reason

    def __repr__(self) -> str:
        progress = f"{self.num_computed_tokens}/{self.num_tokens} tokens computed"
        return f"Sequence({self.seq_id}, {self.status.value}, {progress})"
