"""Packed weights of small layers that have a dequantised copy, which some steps multiply with."""

import logging
import re

import pytest
import torch

from nanovllm import LLM
from nanovllm.config import EngineConfig
from nanovllm.engine.fast.policy import FastPolicy, PiggybackSizes
from nanovllm.kernels import all_ops
from nanovllm.kernels.op.expansion_plan import ANY, ExpansionPlan, ExpansionRule
from nanovllm.kernels.triton.early_start import are_constant
from nanovllm.layers.packed_weight import PackedWeight
from nanovllm.weights.expanded_layers import expand_layers
from nanovllm.weights.weight_forms import WeightForms
from tests import tiny
from tests.engine.fast.replayed import ReplayedFunctions
from tests.providers import registered
from tests.weights.checkpoints import fused
from tests.weights.quantised_files import FORMATS, write
from tests.weights.test_quantised_checkpoints import GREEDY, OPTIONS, loaded, packed_names, prompts, weights

PACKED_OPS = "linear_fp8", "linear_int4", "linear_int8", "linear_gguf"
SOME = range(3, 12)
LARGE = 2**40
LOGGER = "nanovllm.weights.expanded_layers"


def said_of_copies(caplog):
    """Other tests may leave other loggers at a level at which these write, too."""
    return [record.message for record in caplog.records if record.name == LOGGER]


def plan(num_tokens=SOME, ops=PACKED_OPS, max_layer_weights=LARGE, max_bytes=LARGE):
    return ExpansionPlan([ExpansionRule(ops, max_layer_weights, num_tokens)], max_bytes)


def packed(expansion, **switches):
    return dict(fast_policy=FastPolicy(weight_forms=WeightForms(packed=True, expansion=expansion), **switches))


SIZES = PiggybackSizes(totals=(8, 20, 40), row_multiple=2, min_tokens=2, min_full_speed_tokens=4, max_pieces=3)
MODES = {
    "plain": packed(plan()),
    "one by one": packed(plan()) | dict(max_num_seqs=1),
    "chunked": packed(plan()) | dict(max_num_batched_tokens=11),
    "preempted": packed(plan()) | dict(num_kvcache_blocks=5),
    "no fast paths": dict(fast_policy=FastPolicy.off(weight_forms=WeightForms(packed=True, expansion=plan()))),
    "replayed": packed(plan(), padding=True, prefill_graphs=True, graph_backend=ReplayedFunctions),
    "piggybacked": packed(plan(), piggyback_prefill=True, piggyback=SIZES) | dict(max_num_batched_tokens=40),
}


def served(directory, op, **options):
    """(tokens, the numbers of tokens that were multiplied with packed weights, those with floats, the engine)"""
    counts = {op: [], "linear": []}

    def counted(name):
        def fn(x, *others, **named):
            counts[name].append(len(x))
            return all_ops()[name].native(x, *others, **named)

        return fn

    priority = {name: ["native"] for name in all_ops()} | {name: ["mine"] for name in counts}
    with registered(op, counted(op)), registered("linear", counted("linear")):
        llm = LLM(str(directory), **OPTIONS | options, kernel_priority=priority)
    for made in counts.values():
        made.clear()
    outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
    llm.engine.check()
    # A prompt's blocks are there the second time.
    again = llm.generate(prompts(), GREEDY, use_tqdm=False)
    tokens = [o.outputs[0].token_ids for o in outputs]
    assert [o.outputs[0].token_ids for o in again] == tokens and sum(o.num_cached_tokens for o in again)
    return tokens, set(counts[op]), set(counts["linear"]), llm


@pytest.mark.parametrize("name, op", [("awq", "linear_int4"), ("fp8-block", "linear_fp8")])
def test_tokens_are_those_of_the_dequantised_model(tmp_path, name, op):
    want = tiny.greedy_each(write(tmp_path, FORMATS[name]), prompts(), GREEDY.max_tokens)
    for mode, options in MODES.items():
        tokens, by_packed, by_floats, llm = served(tmp_path, op, **options)
        assert tokens == want, mode
        # Of the last layer some rows may be wanted alone, and the head multiplies floats in any step.
        assert by_packed and not by_packed & set(SOME), mode
        assert by_floats & set(SOME) or mode == "one by one", mode
        assert len(packed_names(llm.engine.runner.model)) == 8
        assert bool(llm.engine.scheduler.num_preemptions) == (mode == "preempted")


def test_the_switch(tmp_path):
    write(tmp_path, FORMATS["awq"])
    _, by_packed, by_floats, llm = served(tmp_path, "linear_int4", **packed(plan()), expand_small_weights="off")
    assert by_packed & set(SOME) and len(packed_names(llm.engine.runner.model)) == 8
    for wrong in ("on", True, None, 0):
        with pytest.raises(ValueError, match=f"expand_small_weights={wrong!r}: must be one of auto, off"):
            EngineConfig("x", expand_small_weights=wrong)
    # Without a plan of its own an engine on a CPU has none.
    _, by_packed, _, _ = served(tmp_path, "linear_int4", **packed(None))
    assert by_packed & set(SOME)


def test_a_packed_form_that_is_never_used_is_not_kept(tmp_path, caplog):
    reference = write(tmp_path, FORMATS["awq"])
    want = tiny.greedy_each(reference, prompts(), GREEDY.max_tokens)
    with caplog.at_level(logging.INFO, LOGGER):
        tokens, by_packed, _, llm = served(tmp_path, "linear_int4", **packed(plan(ANY)))
    model = llm.engine.runner.model
    assert tokens == want and not by_packed and not packed_names(model)
    (said,) = said_of_copies(caplog)
    assert "expanded to float32" in said and "8 for all steps" in said and 'expand_small_weights="off"' in said
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, fused(reference, name)), name


def test_copies_are_the_dequantised_weights_rounded_once(tmp_path, caplog):
    reference = write(tmp_path, FORMATS["fp8-block"])
    model = loaded(tmp_path, torch.bfloat16)
    with caplog.at_level(logging.INFO, LOGGER), torch.inference_mode():
        expand_layers(model, plan())
    found = {n: m for n, m in model.named_modules() if isinstance(m, PackedWeight)}
    assert len(found) == 8
    for name, weight in found.items():
        copy = weight.form_for(3)
        assert copy.dtype == torch.bfloat16 and torch.equal(copy, fused(reference, name).bfloat16()), name
        assert weight.form_for(11) is copy and weight.form_for(2) is weight.form_for(12) is weight
        assert are_constant(copy), f"{name}: kernels would wait for their predecessors before they read it"
    nbytes = 2 * sum(weight.numel() for weight in found.values())
    (said,) = said_of_copies(caplog)
    assert f"takes {nbytes / 1e9:.2f} GB more: 8 for steps of 3 to 11 tokens" in said
    assert model.form_changes == {3, 12}
    assert set(weights(model)) == set(weights(loaded(tmp_path, torch.bfloat16)))  # no copies


def test_layers_decide_by_their_own_size(tmp_path):
    write(tmp_path, FORMATS["awq"])
    model = loaded(tmp_path)
    numel = sum(p.numel() for p in model.model.layers[0].parameters()) + sum(
        m.numel() for m in model.model.layers[0].modules() if isinstance(m, PackedWeight)
    )
    with torch.inference_mode():
        expand_layers(model, plan(max_layer_weights=numel - 1))
        assert not model.form_changes
        expand_layers(model, plan(max_layer_weights=numel))
    assert model.form_changes == {3, 12}


@pytest.mark.parametrize("num_tokens", [SOME, ANY])
def test_all_copies_or_none_by_their_memory(tmp_path, caplog, num_tokens):
    write(tmp_path, FORMATS["awq"])
    model = loaded(tmp_path)
    found = [m for m in model.modules() if isinstance(m, PackedWeight)]
    more = sum(4 * w.numel() for w in found) - (sum(w.nbytes for w in found) if num_tokens == ANY else 0)
    with caplog.at_level(logging.INFO, LOGGER), torch.inference_mode():
        expand_layers(model, plan(num_tokens, max_bytes=more - 1))
        assert len(packed_names(model)) == 8 and not model.form_changes
        (said,) = said_of_copies(caplog)
        assert re.search(r"of small layers, 8, stay packed: copies would take \d\.\d\d GB more", said)
        expand_layers(model, plan(num_tokens, max_bytes=more), lambda fits: 0)  # another rank has too little
        assert len(packed_names(model)) == 8 and not model.form_changes
        expand_layers(model, plan(num_tokens, max_bytes=more))
    assert bool(model.form_changes) == (num_tokens == SOME) != (not packed_names(model))


def test_nothing_is_said_of_a_model_without_small_packed_layers(tmp_path, caplog):
    write(tmp_path, FORMATS["awq"])
    with caplog.at_level(logging.INFO, LOGGER):
        expand_layers(loaded(tmp_path), plan(ops=("linear_gguf",)))
    assert not said_of_copies(caplog)
