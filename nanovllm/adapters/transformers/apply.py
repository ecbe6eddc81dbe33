"""Puts the ops into a model of transformers, and takes them out again."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from nanovllm.adapters.transformers.attn_implementation import NAME, register_attention
from nanovllm.adapters.transformers.compiled import compile_own_code
from nanovllm.adapters.transformers.patches import ATTRIBUTE, Patches, put_in_here
from nanovllm.adapters.transformers.replace import Replacing
from nanovllm.adapters.transformers.report import Outcomes, Report
from nanovllm.adapters.transformers.sampling import put_sampling_in
from nanovllm.adapters.transformers.selected import OPS, Selection
from nanovllm.arguments import did_you_mean
from nanovllm.wording import brief

logger = logging.getLogger(__name__)


def apply(
    model: nn.Module,
    ops: str | Iterable[str] | Mapping[str, str | Iterable[str]] | None = None,
    exclude: Iterable[str] = (),
    cuda_graphs: bool = True,
) -> Report:
    """Let a model of transformers compute with the ops of this package.

    Modules are recognised by what they compute. The forward of each is replaced, in this model only. Weights of
    projections that have the same input are moved next to each other in memory; their values do not change. The draws
    of `generate(do_sample=True)` follow the same distribution as before, but a seed gives other tokens.

    Move the model to its device and dtype first. In training, and where gradients are recorded, every module runs its
    own code, since the kernels have no backward pass. Under torch.compile the attention is put in, and named ops:
    Inductor fuses norms, activations and rotations with their neighbours itself.

    Args:
        model: a model of transformers, or any module that contains its layers. It is changed.
        ops: the ops to put in (`OPS`), with the usual provider, or a mapping from ops to providers. None: every op that
            has a kernel on the model's device. On a CPU that is `sample` alone: of others the reference is as fast as
            the model's own code, and it is put in only if it is asked for.
        exclude: names of modules, as `model.named_modules()` has them, or of classes. They and what they contain are
            left alone. Names of ops, too, such as "sample": these are not put in.
        cuda_graphs: on a GPU, capture decode steps on a static cache as a CUDA graph: after two steps on the
            first cache of its shape, at the first step on later ones.

    Returns:
        What was replaced and what was left, and why. `report.undo()` takes it back, as does `with apply(model):`.

    Raises:
        TypeError: the model is no module, or `ops` or `exclude` has another type.
        ValueError: an unknown op or provider, no op at all, a name in `exclude` that the model does not have, a model
            that was changed already, or one without weights (on the device "meta").
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, such as a model of transformers, not {brief(model)}")
    selection = Selection.of(ops)
    _check(model)
    excluded, without = _excluded(model, exclude)
    selection = selection.without(without)
    outcomes, notes, patches = Outcomes(), _notes(model), Patches(model)
    try:
        replacing = Replacing(model, selection, patches, outcomes, excluded)
        replacing.modules()
        _attention_function(model, replacing, patches, outcomes)
        replacing.stacks(cuda_graphs)
        put_sampling_in(model, selection, patches, outcomes, excluded, notes)
        if not selection.explicit:
            compile_own_code(model, patches)
    except BaseException:
        patches.undo()
        raise
    report = Report(outcomes.rows(), notes, patches)
    if any(row.op != "sample" for row in report.replaced) and not selection.explicit:
        notes.append("Under torch.compile the attention alone is put in. To have other ops there, name them: ops=OPS.")
    if not report.rows:
        notes.append("no module of the model computes anything that " + selection.described)
    if not report.replaced:
        logger.warning("nothing was replaced in %s; print the report to see why", type(model).__name__)
    return report


def _check(model: nn.Module) -> None:
    """Raise a ValueError if the ops cannot be put in: they are there already, or there are no weights."""
    if any(module.__dict__.get(ATTRIBUTE) is not None for module in model.modules()):
        raise ValueError("model: nanovllm was applied to it before; call undo(model) first")
    if any(put_in_here(module) for module in model.modules()):
        raise ValueError("model: nanovllm was applied to a model that contains it; undo that first")
    parameters = list(model.parameters())
    offloaded = any("_hf_hook" in module.__dict__ for module in model.modules())  # accelerate brings the weights
    if parameters and all(parameter.is_meta for parameter in parameters) and not offloaded:
        raise ValueError('model: its weights are on the device "meta", so there is nothing to compute; load them first')


def undo(model: nn.Module) -> None:
    """Take back what `apply` did to a model.

    Raises:
        ValueError: it was not applied to this model.
    """
    patches = model.__dict__.get(ATTRIBUTE) if isinstance(model, nn.Module) else None
    if patches is None:
        raise ValueError("model: nanovllm was not applied to it, or that was taken back")
    patches.undo()


def _excluded(model: nn.Module, exclude: Iterable[str]) -> tuple[set[nn.Module], set[str]]:
    """The modules named, and all within them; and the ops named."""
    excluded: set[nn.Module] = set()
    ops: set[str] = set()
    names = [exclude] if isinstance(exclude, str) else list(exclude) if isinstance(exclude, Iterable) else [exclude]
    if others := [name for name in names if not isinstance(name, str)]:
        raise TypeError(f"exclude: expected names of modules, of classes of them or of ops, not {brief(others[0])}")
    for name in names:
        found = [m for path, m in model.named_modules() if name in (path, type(m).__name__)]
        if not found and name not in OPS:
            known = {n for path, m in model.named_modules() for n in (path, type(m).__name__) if n}
            meant = f"; {question}" if (question := did_you_mean(name, known.union(OPS))) else ""
            raise ValueError(f"exclude: the model has no module and no class of modules {name!r}{meant}")
        if not found:
            ops.add(name)
        for module in found:
            excluded.update(module.modules())
    return excluded, ops


def _notes(model: nn.Module) -> list[str]:
    if model.training:
        return ["The model is in training mode, in which it runs its own code. Call model.eval() to use the ops."]
    if any(parameter.requires_grad for parameter in model.parameters()):
        return [
            "Parameters require gradients: outside of torch.no_grad() the model runs its own code. generate() uses it."
        ]
    return []


def _attention_function(model: nn.Module, replacing: Replacing, patches: Patches, outcomes: Outcomes) -> None:
    """Choose `attn_implementation="nanovllm"` for the submodels with attention that it can serve."""
    modules = replacing.attention_modules()
    if not modules:
        return
    from transformers import PreTrainedModel

    for module, call in modules:
        if isinstance(call, str):
            outcomes.left(module, "attention_dense", call)
    served = [(module, call) for module, call in modules if not isinstance(call, str)]
    if not served:
        return
    configs: dict[int, Any] = {id(module.config): module.config for module, _ in served}
    owners = [m for m in model.modules() if isinstance(m, PreTrainedModel) and id(m.config) in configs]
    reason = None if owners else "no submodel of transformers contains it"
    for owner in owners:
        reason = reason or _fixed(owner, replacing.caps_scores)
    if reason is None:
        register_attention()
        for config in configs.values():
            patches.set_attribute(config, "_attn_implementation_internal", NAME)
    for module, call in served:
        if reason is None:
            outcomes.replaced(module, "attention_dense", call.provider)
            replacing.choose(module, call)
        else:
            outcomes.left(module, "attention_dense", reason)


def _fixed(model: Any, caps_scores: bool) -> str | None:
    """Why the attention function of a model is not to be chosen; None: it is.

    Args:
        caps_scores: whether scores have a soft cap, for which transformers has "eager" alone.
    """
    if not model._can_set_attn_implementation():
        return "the model has its attention function built in"
    chosen = getattr(model.config, "_attn_implementation", None)
    if caps_scores and chosen == "sdpa":
        return 'its "sdpa" leaves out the soft cap of scores; set_attn_implementation("nanovllm") would change results'
    if chosen not in ("eager" if caps_scores else "sdpa", NAME):
        return f'attn_implementation="{chosen}" was chosen'
    return None
