"""Draws of `generate(do_sample=True)` by the op `sample`.

The loop of `generate` stays that of the installed transformers. It asks the model for its logits processors, calls them
on the logits, and then calls softmax and multinomial on the result. A patched model gives it a list of the same
processors. This list runs those that the op does not know. Its result is a tensor that stands for the scores and has no
memory: multinomial of its softmax is a call of the op with the raw logits. Any other operation gets the scores that the
remaining processors compute. So a loop that does something else, such as that of assisted generation, has the results
that it had.
"""

from __future__ import annotations

import functools
import math
import sys
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map

from nanovllm.adapters.transformers.patches import Patches
from nanovllm.adapters.transformers.probe import plain_parameter
from nanovllm.adapters.transformers.report import Outcomes
from nanovllm.adapters.transformers.selected import Call, Selection

Tensor = torch.Tensor
OP = "sample"
METHOD = "_get_logits_processor"
"""The method of a model that `generate` calls for the processors, and of a patched model an attribute."""
SAMPLING = "_nanovllm_sampling"
"""Of a patched model: its `Sampling`."""
_VALUES = ("temperature", torch.float32), ("top_k", torch.int32), ("top_p", torch.float32), ("min_p", torch.float32)
"""An attribute of each of `Classes.warpers`, and the op's argument of this dtype."""
_DTYPES = torch.float32, torch.float16, torch.bfloat16
_aten = torch.ops.aten


class Classes(NamedTuple):
    """Of transformers.

    Attributes:
        warpers: in this order transformers applies them, and the op too, each to what the one before it keeps.
        processors: the list of a call's processors.
    """

    warpers: tuple[type, ...]
    normalisation: type
    processors: Any

    @staticmethod
    @functools.cache
    def known() -> Classes:
        from transformers.generation import logits_process as code

        warpers = code.TemperatureLogitsWarper, code.TopKLogitsWarper, code.TopPLogitsWarper, code.MinPLogitsWarper
        return Classes(warpers, code.LogitNormalization, code.LogitsProcessorList)


class Sampling:
    """What draws the tokens of a model.

    Attributes:
        call: the op.
        device: of the model when it was patched.
        notes: of the report; they get why a call of `generate` drew its tokens by transformers.
    """

    def __init__(self, call: Call, device: torch.device, notes: list[str]) -> None:
        self.call, self.device, self._notes = call, device, notes

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of the model draws by transformers."""
        return None

    def __reduce__(self) -> Any:
        return type(None), ()

    def left(self, why: str) -> None:
        note = f"transformers drew the tokens of a call of generate(do_sample=True): {why}"
        if note not in self._notes:
            self._notes.append(note)

    def takes(self, scores: Tensor) -> bool:
        """Whether the op draws from these."""
        return (
            type(scores) is Tensor
            and scores.dim() == 2
            and scores.shape[1] > 0
            and scores.dtype in _DTYPES
            and scores.device == self.device
        )


def put_sampling_in(
    model: nn.Module, selection: Selection, patches: Patches, outcomes: Outcomes, excluded: set[nn.Module],
    notes: list[str],
) -> None:  # fmt: skip
    """Let each model that generates within `model` draw by the op.

    Args:
        excluded: modules that are left alone.
        notes: of the report; calls of `generate` may add to them.
    """
    code: Any = sys.modules.get("transformers.generation.utils")  # no model generates without it
    if OP not in selection.wanted or code is None:
        return
    for module in model.modules():
        weight = next(module.parameters(), None)
        if not isinstance(module, code.GenerationMixin) or module in excluded or weight is None:
            continue
        given = module.__dict__.get(METHOD)
        call: Call | str = str(plain_parameter(weight))
        if given is not None and getattr(given, "__func__", None) is not getattr(type(module), METHOD):
            call = "its method that gives logits processors was replaced by other code"
        elif weight.dtype != torch.float64:
            call = "its weights are elsewhere (offloaded)" if weight.is_meta else selection.call(OP, weight.device)
        if isinstance(call, str):
            outcomes.left(module, OP, call)
            continue
        patches.set_attribute(module, SAMPLING, Sampling(call, weight.device, notes))
        patches.set_attribute(module, METHOD, MethodType(_get_logits_processor, module))
        outcomes.replaced(module, OP, call.provider, "draws of generate(do_sample=True), not of beams or drafts")


def _get_logits_processor(model: Any, *args: Any, **kwargs: Any) -> Any:
    """What a patched model has in place of the method of its class. A pickle has that method, by this name."""
    processors = getattr(type(model), METHOD)(model, *args, **kwargs)
    sampling = model.__dict__.get(SAMPLING)
    config = args[0] if args else kwargs.get("generation_config")
    if sampling is None or not getattr(config, "do_sample", False):
        return processors
    if len(args) < 2 and "input_ids_seq_length" not in kwargs:
        return processors  # `generate_batch` reads the list and draws in a way of its own
    why = _refused(model, config, processors)
    if why is None:
        return Drawing(processors, sampling)
    sampling.left(why)
    return processors


def _refused(model: Any, config: Any, processors: Any) -> str | None:
    """Why the tokens of a call are not drawn by the op; None: they are."""
    mode = config.get_generation_mode().value
    if mode != "sample":
        return f"its mode is {mode}"
    if config.output_scores and config.return_dict_in_generate:
        return "it returns the scores (output_scores)"
    if type(processors) is not Classes.known().processors:
        return "its logits processors are in a list of another class"
    if torch.compiler.is_compiling():
        return "it is compiled"
    return "the model is in training mode" if model.training else None


def divided(processors: list[Any]) -> int:
    """How many of the processors run first as they are. The op does what those after them do.

    These are at most one of each kind, in the op's order, that keep at least one token and set others to -inf. A
    normalisation at the end does not change the distribution.
    """
    order = Classes.known().warpers
    start, before = len(processors), len(order)
    if start and type(processors[-1]) is Classes.known().normalisation:
        start -= 1
    while start:
        warper = processors[start - 1]
        kind = order.index(type(warper)) if type(warper) in order else before
        if kind >= before or getattr(warper, "filter_value", -math.inf) != -math.inf:
            break
        if type(warper) in order[2:] and warper.min_tokens_to_keep != 1:  # top-k has it in its k
            break
        start, before = start - 1, kind
    return start


class Drawing(list[Any]):
    """The processors of one call of `generate`, and the state of its draws. It is called like their list."""

    def __init__(self, processors: list[Any], sampling: Sampling) -> None:
        super().__init__(processors)
        self._sampling = sampling
        self._is_read = False
        self._known: tuple[Any, ...] = ()
        self._arguments: list[Tensor | None] = []
        self._seeds: Tensor | None = None
        self._positions: Tensor | None = None

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        run = Classes.known().processors
        if self._is_read:
            return run(self)(input_ids, scores, **kwargs)
        first = divided(self)
        if first:
            scores = run(self[:first])(input_ids, scores, **kwargs)
        if self._sampling.takes(scores):
            return Scores(_Step(self, scores, self[first:], input_ids), False)
        self._sampling.left(f"its scores are not a tensor [rows, vocabulary] of floats on {self._sampling.device}")
        return run(self[first:])(input_ids, scores)

    def read(self) -> None:
        """The scores of a step were needed, so those of later steps are computed at once."""
        self._is_read = True
        self._sampling.left("its loop did something else with the scores than draw from their softmax")

    def draw(self, logits: Tensor, warpers: list[Any]) -> Tensor:
        """A token of each row: [rows, vocab_size] -> [rows] int64.

        The seeds of the rows come from PyTorch's generator of the device, once. Each step is the next draw of them.
        """
        rows, device = logits.shape[0], logits.device
        if self._seeds is None or self._positions is None or len(self._seeds) != rows:
            self._seeds = torch.randint(2**63 - 1, (rows,), device=device)
            self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        else:
            self._positions += 1
        of_kind = {type(warper): warper for warper in warpers}
        values = [getattr(of_kind.get(kind), name, None) for kind, (name, _) in zip(Classes.known().warpers, _VALUES)]
        if (rows, *values) != self._known:
            self._known = rows, *values
            # Beyond float32, as infinity, a temperature would turn logits of -inf into NaN.
            values[0] = 1.0 if values[0] is None else min(values[0], torch.finfo(torch.float32).max)
            values[1] = None if values[1] is None else min(values[1], logits.shape[1])
            self._arguments = [
                None if value is None else torch.full((rows,), value, dtype=dtype, device=device)
                for value, (_, dtype) in zip(values, _VALUES)
            ]
        _check(logits)
        return self._sampling.call.fn(logits, *self._arguments, self._seeds, self._positions)


def _check(logits: Tensor) -> None:
    """As multinomial does, raise a RuntimeError if a row has no probabilities: the op would give it some token.

    On a GPU it is raised by a later call, since nothing waits for the result.
    """
    if logits.shape[0] and logits.device.type in ("cpu", "cuda"):
        usable = (logits.amax(-1).abs() < math.inf).all()
        torch._assert_async(usable, "logits: a row has NaN, or infinity, or no token that is allowed")


class _Step:
    """The scores of one step, of which nothing was computed."""

    def __init__(self, drawing: Drawing, logits: Tensor, warpers: list[Any], input_ids: Any) -> None:
        self._drawing, self.logits, self._warpers, self._input_ids = drawing, logits, warpers, input_ids
        self._scores: Tensor | None = None

    def scores(self) -> Tensor:
        """What the processors compute."""
        if self._scores is None:
            self._drawing.read()
            self._scores = Classes.known().processors(self._warpers)(self._input_ids, self.logits)
        return self._scores

    def draw(self) -> Tensor:
        return self._drawing.draw(self.logits, self._warpers)


class Scores(Tensor):
    """Stands for the scores of a step, or for their softmax.

    Args:
        step: which scores.
        softmax: whether it is their softmax over the vocabulary.
    """

    _step: _Step
    _softmax: bool
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, step: _Step, softmax: bool) -> Scores:
        x = step.logits
        return Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)

    def __init__(self, step: _Step, softmax: bool) -> None:
        self._step, self._softmax = step, softmax

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(_computed(self))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Scores):
            if not first._softmax and _is_softmax(func, args, kwargs):
                return Scores(first._step, True)
            if first._softmax and func is _aten.multinomial.default and args[1:] in ((1,), (1, False)) and not kwargs:
                return first._step.draw()[:, None]
        return func(*tree_map(_computed, args), **tree_map(_computed, kwargs))


def _is_softmax(func: Any, args: Any, kwargs: Any) -> bool:
    """Over the vocabulary, in the same dtype. Without inference mode it arrives as `_softmax`."""
    if func not in (_aten._softmax.default, _aten.softmax.int) or kwargs:
        return False
    return args[1:] in ((-1,), (1,), (-1, False), (1, False), (-1, None), (1, None))


def _computed(x: Any) -> Any:
    """The tensor that something stands for, or else itself."""
    if not isinstance(x, Scores):
        return x
    scores = x._step.scores()
    return torch.softmax(scores, -1) if x._softmax else scores
