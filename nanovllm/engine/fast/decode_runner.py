"""Runs decode steps: the model, sampling, and the decode state's advance, as CUDA graphs where there are some."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch

from nanovllm.engine.batch import Batch
from nanovllm.engine.fast.cuda_graphs import GraphBackend, GraphTable
from nanovllm.engine.fast.decode_state import DecodeState
from nanovllm.engine.fast.mask_thread import StartedMasks, ThreadedMaskBuilder
from nanovllm.engine.fast.padding import EMPTY_BATCH, PaddedRuns, RunsBucket
from nanovllm.engine.fast.piggyback import Piggyback
from nanovllm.engine.fast.step_shape import DecodeBuckets, SamplingMode, StepShape
from nanovllm.engine.logprobs import LogprobsTensors
from nanovllm.engine.paged_model import PagedModel
from nanovllm.engine.sampler import Sampler, SamplingMetadata, SamplingRow
from nanovllm.engine.step import ScheduledStep, StepKind
from nanovllm.engine.step_result import StepResult

logger = logging.getLogger(__name__)

_LOGGED_GRAPHS = 32


class DecodeRunner:
    """One decode step after the other, over the same device buffers.

    In a steady step the host only replays one or two graphs: the device writes the tokens to host memory itself
    (`TokenRing`). It sends what changed before (see `DecodeState`), and takes part in sampling only where penalties,
    banned tokens or log-probabilities are wanted.

    A step may have piggybacked pieces of prompts. The model then runs on the rows and on these pieces, of which only
    keys and values are kept.

    Args:
        masks: the mask builder of the sampler.
        state: whose rows are computed.
        buckets: the batch sizes that steps are padded to; None: none is padded.
        capture_sampling: whether `Sampler.sample_op` is worth a graph; it then takes greedy rows too.
        piggyback: the sizes of steps with piggybacked prompts; None: there are none.
        mask_thread: a thread makes the masks. In captured steps the device waits for them, and not the host.
        capture_masks: where sampling is captured, `Sampler.mask_op` is too.
    """

    def __init__(
        self,
        paged: PagedModel,
        sampler: Sampler,
        masks: ThreadedMaskBuilder,
        state: DecodeState,
        buckets: DecodeBuckets | None,
        capture_sampling: bool,
        piggyback: Piggyback | None,
        mask_thread: bool,
        capture_masks: bool,
    ) -> None:
        self.state = state
        self.graphs: GraphTable | None = None
        """By `StepShape`: captured steps, or one of their two parts."""
        self._mask_graphs: GraphTable | None = None
        """By the number of masks; None: masks are applied without a graph."""
        self._paged = paged
        self._sampler = sampler
        self._masks = masks
        self._buckets = buckets
        self._capture_sampling = capture_sampling
        self._piggyback = piggyback
        self._mask_thread = mask_thread
        self._capture_masks = capture_sampling and capture_masks
        if piggyback is not None:
            self._runs = PaddedRuns(self._runs_bucket(piggyback.sizes.totals[-1]), paged)
        self.logits: torch.Tensor | None = None
        """[max_num_seqs, vocab_size]: the static logits, which graphs write and read; None: there are none."""

    def _runs_bucket(self, num_tokens: int) -> RunsBucket:
        assert self._piggyback is not None
        return RunsBucket(num_tokens, self._piggyback.sizes.max_pieces)

    # ---------------------------------------------------------------------------------------------- before serving

    def run_every_shape(self, logits: torch.Tensor) -> None:
        """Run every step that will be captured, once. logits: as for `capture`."""
        assert self._buckets is not None
        self.logits = logits
        self._first_calls(self._buckets.every_shape())

    def capture(self, logits: torch.Tensor, backend: GraphBackend) -> None:
        """Capture the steps that most engines need.

        logits: [max_num_seqs, vocab_size], for graphs that do not sample.
        """
        assert self._buckets is not None
        self.logits = logits
        with self._paged.few_layers():
            backend.first_calls(partial(self._first_calls, self._buckets.first_shapes()))
        graphs, shapes = GraphTable(backend), self._buckets.shapes_at_start()
        for count, shape in enumerate(shapes, 1):
            graphs.capture(shape, partial(self._launch_shape, shape))
            if count % _LOGGED_GRAPHS == 0:
                logger.info("decode graphs: %d of %d", count, len(shapes))
        self.graphs = graphs
        if self._capture_masks:
            self._mask_graphs = GraphTable(backend)

    def _first_calls(self, shapes: Sequence[StepShape]) -> None:
        """Run each shape once; piggybacked tokens are padding."""
        for shape in shapes:
            if shape.piggybacked:
                self._runs.send(EMPTY_BATCH, self._runs_bucket(shape.piggybacked))
            self._launch_shape(shape)

    def _launch_shape(self, shape: StepShape) -> None:
        """Run what a graph of this shape holds. The model writes the static logits, and sampling reads them."""
        assert self.logits is not None
        static = self.logits[: shape.rows]
        if shape.mode is None:
            self._run_model(shape, static)
        else:
            self._sample_from_state(self._run_model(shape) if shape.context else static, shape.mode)

    # ---------------------------------------------------------------------------------------------- serving

    def launch(self, step: ScheduledStep) -> StepResult | None:
        """Launch a step of kind DECODE or PIGGYBACKED; on CUDA this returns before the step has run.

        Returns None, with nothing done, if the step has too many piggybacked tokens.
        """
        size = None
        if step.kind is StepKind.PIGGYBACKED:
            if self._piggyback is not None:
                size = self._piggyback.padded_size(len(step.sampling_parts), sum(p.num_tokens for p in step.pieces))
            if size is None:
                return None
        try:
            return self._launch(step, size)
        except BaseException:  # an interrupt may come between the host's mirror and the device
            self.state.reset()
            self._masks.drain()
            raise

    def _launch(self, step: ScheduledStep, piggybacked_size: tuple[int, int] | None) -> StepResult:
        state = self.state
        order = state.place(step)
        shape = self._shape(piggybacked_size)
        if shape.piggybacked:
            self._runs.send(Batch.build(step.pieces, state.block_size), self._runs_bucket(shape.piggybacked))
        masks = logprobs = None
        constrained = state.constrained()
        if constrained or self.graphs is None or not self.graphs.replay(shape):
            logits = self._launch_model(shape)
            if constrained:
                masks = self._masks.start(constrained, self._mask_thread, device_waits=self._mask_graphs is not None)
            logprobs = self._launch_sampling(shape, logits, masks)
        state.advance_mirror()
        result = StepResult(
            step, state.tokens(), logprobs, order=order, device=self._paged.device,
            check=None if masks is None else masks.filling.raise_failure,
        )  # fmt: skip
        if state.ring is not None:
            state.ring.hold(result)
        return result

    def _launch_model(self, shape: StepShape) -> torch.Tensor:
        """Launch the model. Returns the logits of all rows, padding included."""
        if self.graphs is None:
            return self._run_model(shape)
        assert self.logits is not None
        model = shape.model
        if model not in self.graphs:
            self._masks.drain()
            self.graphs.capture(model, partial(self._launch_shape, model))
        self.graphs.replay(model)
        return self.logits[: shape.rows]

    def _launch_sampling(
        self, shape: StepShape, logits: torch.Tensor, masks: StartedMasks | None
    ) -> LogprobsTensors | None:
        """Mask the logits, sample from them and advance the state. Returns the log-probabilities that are wanted."""
        if shape.mode is SamplingMode.GENERAL:
            return self._sample_by_host(logits[: self.state.num_rows], masks)
        if masks is not None:
            self._apply_masks(logits, masks)
        if self.graphs is None or not self.graphs.replay(shape.sampling):
            self._sample_from_state(logits, shape.mode)
        return None

    def _apply_masks(self, logits: torch.Tensor, masks: StartedMasks) -> None:
        """Mask the logits of a step that is sampled with the state's parameters."""
        graphs, count = self._mask_graphs, len(masks)
        if graphs is None:
            self._sampler.mask_op(logits, *masks.to_device())
        else:
            # The first call compiles or loads a kernel, and is captured: the host waits for the masks.
            on_device = masks.to_device(host_waits=count not in graphs)
            graphs.replay_or_call(count, partial(self._sampler.mask_op, self.logits, *on_device))

    def _shape(self, piggybacked_size: tuple[int, int] | None) -> StepShape:
        """The shape of the step that the state's rows are placed for.

        piggybacked_size: (rows, tokens of prompts) of a step with piggybacked prompts.
        """
        state, buckets = self.state, self._buckets
        rows = state.num_rows
        shared = state.prefixes is not None and state.prefixes.worthwhile
        if buckets is None:
            context = state.max_context_len
        else:
            # Eager steps are padded like captured ones, so that both give the same tokens. Unless `by_context` there is
            # one bound, so the longest context need not be computed.
            rows, context = buckets.fit(rows, state.max_context_len if buckets.by_context else 1)
            if shared:
                context = buckets.longest
        piggybacked = 0
        if piggybacked_size is not None:
            rows, piggybacked = piggybacked_size
        mode = state.sampling_mode
        if mode is SamplingMode.GREEDY and self._capture_sampling:
            mode = SamplingMode.PLAIN
        return StepShape(rows, context, shared, piggybacked, mode)

    def _run_model(self, shape: StepShape, out: torch.Tensor | None = None) -> torch.Tensor:
        """Logits [rows, vocab_size] of the state's first rows, in `out` if it is given."""
        batch = self.state.batch(shape.rows, shape.context, shape.shared)
        wanted = None
        if shape.piggybacked:
            batch = batch.with_piggybacked(self._runs.batch(self._runs_bucket(shape.piggybacked))[0])
            wanted = slice(shape.rows)
        paged = self._paged
        hidden = paged.model(batch.token_ids, batch.positions, paged.caches, batch.metadata, wanted)
        return paged.logits(hidden, out)

    def _sample_from_state(self, logits: torch.Tensor, mode: SamplingMode | None) -> None:
        """Sample with the parameters that the state has on the device, and advance it."""
        if mode is SamplingMode.GREEDY:
            tokens = logits.argmax(-1)
        else:
            filtered = mode is SamplingMode.FILTERED
            tokens = self._sampler.sample_op(logits, *self.state.sampling_arguments(len(logits), filtered))
        self.state.advance(tokens)

    def _sample_by_host(self, logits: torch.Tensor, masks: StartedMasks | None) -> LogprobsTensors | None:
        """Sample with parameters that the host sends for each row (`SamplingMode.GENERAL`), and advance the state."""
        state = self.state
        rows = [
            SamplingRow.of(seq, position + 1, seq_slot)
            for seq, position, seq_slot in zip(state.seqs, state.positions(), state.seq_slots())
        ]
        metadata = SamplingMetadata.build(rows, self._paged.device)
        output = self._sampler(logits, metadata, self._paged.last_tokens, None if masks is None else masks.to_device)
        state.advance(output.token_ids)
        return output.logprobs
