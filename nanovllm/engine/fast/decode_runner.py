"""Runs the steps that only decode: the model, sampling, and the decode state's advance, as CUDA graphs where there are some."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch

from nanovllm.engine.batch import Batch
from nanovllm.engine.fast import piggyback
from nanovllm.engine.fast.cuda_graphs import DecodeBuckets, DecodeGraphs
from nanovllm.engine.fast.decode_state import DecodeState, SamplingMode
from nanovllm.engine.fast.padding import NOTHING, PaddedRuns, RunsBucket
from nanovllm.engine.sampler import LogprobsTensors, Sampler, SamplingMetadata, SamplingRow
from nanovllm.engine.step import ScheduledStep
from nanovllm.engine.step_result import StepResult
from nanovllm.layers.attention import LayerCache
from nanovllm.models.decoder import DecoderForCausalLM


class DecodeRunner:
    """One decode step after the other, over the same device buffers.

    In a steady step the host replays a graph, or two, and nothing else: the tokens come to it by themselves (`TokenRing`). It
    sends what changed before (see `DecodeState`), and takes part in sampling only where penalties, banned tokens or
    log-probabilities are wanted.

    Pieces of prompts may ride on a step (`pacing`): the model runs on the rows and on them, and they only leave their keys and values.

    Args:
        state: whose rows are computed.
        buckets: the batch sizes that steps are padded to; None: none is padded.
        sampling_kernel: whether `Sampler.sample_op` is a few launches, so that it is worth a graph and takes greedy rows too;
            the reference is thousands of launches.
        riders: the static inputs of what rides on steps; None: nothing does.
    """

    def __init__(
        self,
        model: DecoderForCausalLM,
        caches: Sequence[LayerCache],
        sampler: Sampler,
        state: DecodeState,
        buckets: DecodeBuckets | None,
        sampling_kernel: bool,
        riders: PaddedRuns | None = None,
    ) -> None:
        self.state = state
        self._model = model
        self.caches = caches
        self._sampler = sampler
        self._buckets = buckets
        self._sampling_kernel = sampling_kernel
        self._riders = riders
        self._logits: torch.Tensor | None = None
        self.graphs: DecodeGraphs | None = None

    @property
    def _modes(self) -> tuple[SamplingMode, ...]:
        return (SamplingMode.PLAIN, SamplingMode.FILTERED) if self._sampling_kernel else ()

    def visit(self, logits: torch.Tensor) -> None:
        """Run every step that will be captured, once. logits: as for `capture`."""
        buckets = self._buckets
        assert buckets is not None
        longest = buckets.context_lens[-1]
        calls = [(rows, False) for rows in buckets.batch_sizes] + [(rows, True) for rows in buckets.shared_sizes]
        for rows, shared in calls:
            self._run_model(rows, longest, shared, 0, logits[:rows])
        for rows, tokens in buckets.riding_sizes:
            self._ride_once(rows, tokens, logits)
        for rows in buckets.batch_sizes:
            for mode in self._modes:
                self._draw(logits[:rows], mode)

    def capture(self, logits: torch.Tensor, brief: AbstractContextManager[None] | None = None) -> None:
        """Capture every step that can come.

        Args:
            logits: [max_num_seqs, vocab_size], which graphs that do not sample write to.
            brief: entered for the first calls before the capture, such as `two_layers`.
        """
        assert self._buckets is not None
        self._logits = logits
        self.graphs = DecodeGraphs(
            lambda rows, context, shared, riding: self._run_model(rows, context, shared, riding, logits[:rows]),
            lambda rows, mode: self._draw(logits[:rows], mode),
            lambda rows, context, mode: self._draw(self._run_model(rows, context, False, 0), mode),
            lambda rows, tokens: self._ride_once(rows, tokens, logits),
            self._buckets,
            self._modes,
            logits.device,
            brief,
        )

    def _ride_once(self, rows: int, riding: int, logits: torch.Tensor) -> None:
        """Run a step that padding alone rides on."""
        self._riders.send(NOTHING, RunsBucket(riding, piggyback.MAX_RIDERS))
        self._run_model(rows, self._buckets.context_lens[-1], False, riding, logits[:rows])

    def carries(self, step: ScheduledStep) -> bool:
        """Whether a step is one of decodes and of pieces of prompts that can ride on them."""
        return self._riders is not None and step.riding is not None and self._riding_tokens(step) is not None

    def _riding_tokens(self, step: ScheduledStep) -> int | None:
        """What the tokens that ride on a step are padded to; None: they are too many."""
        rows = piggyback.padded_rows(step.decoding.num_decodes, self.state.max_num_seqs)
        return next((n for n in piggyback.riding_sizes(rows) if n >= step.riding.num_tokens), None)

    def launch(self, step: ScheduledStep) -> StepResult:
        """Launch a step that only decodes, or one that it `carries`; on CUDA this returns before it has run."""
        try:
            return self._launch(step)
        except BaseException:  # an interrupt may come between the host's mirror and the device
            self.state.reset()
            raise

    def _launch(self, step: ScheduledStep) -> StepResult:
        state = self.state
        order = state.place(step.decoding)
        num_seqs = rows = state.num_rows
        max_context_len = 0
        if self._buckets is None:
            max_context_len = state.max_context_len
        else:
            # Eager steps are padded like captured ones, so that both give the same tokens.
            rows, max_context_len = self._buckets.fit(
                num_seqs, state.max_context_len if self._buckets.by_context else 1
            )
        riding = 0
        if not step.decodes_only:
            riding = self._riding_tokens(step)
            rows = piggyback.padded_rows(num_seqs, state.max_num_seqs)
            self._riders.send(Batch.build(step.riding, state.block_size), RunsBucket(riding, piggyback.MAX_RIDERS))
        shared = state.prefixes is not None and state.prefixes.worthwhile
        if shared and self._buckets is not None:
            max_context_len = self._buckets.context_lens[-1]
        mode = state.sampling_mode
        if mode is SamplingMode.GREEDY and self._sampling_kernel:
            mode = SamplingMode.PLAIN
        drawn = False
        if self.graphs is not None:
            drawn = self.graphs.run(rows, max_context_len, shared, riding, mode)
            logits = self._logits[:rows]
        else:
            logits = self._run_model(rows, max_context_len, shared, riding)
        logprobs = None
        if mode is SamplingMode.GENERAL:
            logprobs = self._sample(logits[:num_seqs])
        elif not drawn:
            self._draw(logits, mode)
        state.advanced()
        return StepResult(step, state.tokens(), logprobs, order=order, ring=state.ring)

    def _run_model(
        self, rows: int, max_context_len: int, shared: bool, riding: int, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [rows, vocab_size] of the state's first rows.

        shared: blocks that several have are attended to once. riding: tokens of the static inputs that are computed as well.
        """
        batch = self.state.batch(rows, max_context_len, shared)
        if riding:
            batch = batch.with_piggybacked(self._riders.batch(RunsBucket(riding, piggyback.MAX_RIDERS))[0])
        wanted = slice(rows) if riding else None
        hidden = self._model(batch.token_ids, batch.positions, self.caches, batch.metadata, wanted)
        return self._model.lm_head(hidden, out)

    def _draw(self, logits: torch.Tensor, mode: SamplingMode) -> None:
        """Sample with the parameters that the state holds, and advance it."""
        if mode is SamplingMode.GREEDY:
            tokens = logits.argmax(-1)
        else:
            filtered = mode is SamplingMode.FILTERED
            tokens = self._sampler.sample_op(logits, *self.state.sampling_arguments(len(logits), filtered))
        self.state.advance(tokens)

    def _sample(self, logits: torch.Tensor) -> LogprobsTensors | None:
        """Sample with what the host says of each row, and advance the state."""
        state = self.state
        rows = [
            SamplingRow.of(seq, position + 1, slot)
            for seq, position, slot in zip(state.seqs, state.positions(), state.slots())
        ]
        output = self._sampler(logits, SamplingMetadata.build(rows, state.device, pin=state.device.type == "cuda"))
        state.advance(output.token_ids)
        return output.logprobs
