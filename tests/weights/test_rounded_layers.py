"""`prompt_activations="fp8"`: steps of many tokens multiply packed weights in 8-bit floats."""

import logging

import pytest
import torch
import torch.nn as nn

from nanovllm import LLM, SamplingParams
from nanovllm.config import EngineConfig
from nanovllm.engine.fast.policy import FastPolicy, PiggybackSizes
from nanovllm.kernels import all_ops, resolve_kernels
from nanovllm.kernels.op.expansion_plan import ANY, ExpansionPlan, ExpansionRule
from nanovllm.kernels.ops.linear_fp8_dynamic import quantise_fp8
from nanovllm.layers.packed_weight import PackedWeight
from nanovllm.layers.stored_matrices import Fp8Matrix
from nanovllm.weights.weight_forms import WeightForms
from tests import tiny
from tests.engine.fast.replayed import ReplayedFunctions
from tests.native import NATIVE
from tests.providers import registered
from tests.weights.quantised_files import FORMATS, write
from tests.weights.test_quantised_checkpoints import GREEDY, MOE, OPTIONS, prompts

OP = "linear_fp8_dynamic"
LEAST = 6
LOGGER = "nanovllm.weights.rounded_layers"
GPU = torch.cuda.is_available()


def policy(least=LEAST, expansion=None, **switches):
    forms = WeightForms(packed=True, expansion=expansion, fp8_prompt_tokens=least)
    return dict(fast_policy=FastPolicy(weight_forms=forms, **switches))


SIZES = PiggybackSizes(totals=(8, 20, 40), row_multiple=2, min_tokens=2, min_full_speed_tokens=4, max_pieces=3)
MODES = {
    "plain": policy(1),
    "one by one": policy(1) | dict(max_num_seqs=1),
    "chunked": policy(1) | dict(max_num_batched_tokens=11),
    "preempted": policy(1) | dict(num_kvcache_blocks=5),
    "no fast paths": dict(fast_policy=FastPolicy.off(weight_forms=WeightForms(packed=True, fp8_prompt_tokens=1))),
    "replayed": policy(1, padding=True, prefill_graphs=True, graph_backend=ReplayedFunctions),
    "piggybacked": policy(1, piggyback_prefill=True, piggyback=SIZES) | dict(max_num_batched_tokens=40),
}


def started(directory, least=LEAST, prompt_activations="fp8", seen=None, **options):
    """An engine of references whose product with quantised activations is a provider of the test.

    seen: takes (op, tokens) of each product.
    """
    seen = [] if seen is None else seen

    def counted(name):
        def fn(x, *others):
            seen.append((name, len(x)))
            return all_ops()[name].native(x, *others)

        return fn

    priority = {name: ["native"] for name in all_ops()} | {OP: ["mine"], "linear_int4": ["mine"]}
    options = OPTIONS | policy(least) | options
    with registered(OP, counted(OP)), registered("linear_int4", counted("linear_int4")):
        return LLM(str(directory), **options, kernel_priority=priority, prompt_activations=prompt_activations)


def tokens_of(llm):
    found = [o.outputs[0].token_ids for o in llm.generate(prompts(), GREEDY, use_tqdm=False)]
    llm.engine.check()
    return found


def packed_modules(model):
    return [m for layer in model.model.layers for m in layer.modules() if isinstance(m, PackedWeight)]


def hold_8_bit_floats(model, kernels):
    """Replace packed weights by ones that are stored in e4m3, with a scale for each row, for quantised activations."""
    for module in list(model.model.layers.modules()):
        weight = getattr(module, "weight", None)
        if isinstance(weight, PackedWeight):
            codes, scale = quantise_fp8(weight.dequantised(), weight.shape[1])
            del module.weight
            module.weight = PackedWeight([Fp8Matrix(codes, scale, True)], weight.dtype, kernels)


@pytest.mark.parametrize("name", ["awq", "gptq-8", "gptq-act-order", "w4a16-asymmetric"])
def test_tokens_are_those_of_weights_stored_in_8_bit_floats(tmp_path, name):
    write(tmp_path, FORMATS[name])
    plain = tokens_of(started(tmp_path, prompt_activations="auto"))
    stored = started(tmp_path, prompt_activations="auto")
    hold_8_bit_floats(stored.engine.runner.model, stored.engine.kernels)
    want = tokens_of(stored)
    assert want != plain
    for mode, options in MODES.items() if name == "awq" else [("plain", MODES["plain"])]:
        llm = started(tmp_path, **options)
        assert tokens_of(llm) == want, mode
        assert bool(llm.engine.scheduler.num_preemptions) == (mode == "preempted")


@pytest.mark.parametrize("switches", [{}, dict(padding=True, prefill_graphs=True, graph_backend=ReplayedFunctions)])
def test_steps_of_many_tokens_alone_quantise(tmp_path, switches):
    write(tmp_path, FORMATS["awq"])
    seen = []
    llm = started(tmp_path, seen=seen, **policy(**switches))
    seen.clear()
    tokens_of(llm)
    by_op = {op: {n for name, n in seen if name == op} for op in (OP, "linear_int4")}
    assert by_op[OP] and min(by_op[OP]) >= LEAST and by_op["linear_int4"] and max(by_op["linear_int4"]) < LEAST
    assert llm.engine.runner.model.form_changes == {LEAST, ANY.stop}


def test_all_layers_share_one_buffer_and_the_log_names_it(tmp_path, caplog):
    write(tmp_path, FORMATS["awq"])
    with caplog.at_level(logging.INFO, LOGGER):
        llm = started(tmp_path)
    weights = packed_modules(llm.engine.runner.model)
    forms = [weight.form_for(LEAST) for weight in weights]
    assert len(weights) == 8 and len({form.matrices[0].weight.data_ptr() for form in forms}) == 1
    nbytes = max(weight.numel() for weight in weights)
    assert forms[0].matrices[0].weight.untyped_storage().nbytes() == nbytes
    (said,) = [r.message for r in caplog.records if r.name == LOGGER]
    assert f"8 in steps of {LEAST} tokens or more; those that are rounded share {nbytes / 1e6:.1f} MB" in said


def test_the_usual_changes_nothing(tmp_path):
    write(tmp_path, FORMATS["awq"])
    seen = []
    llm = started(tmp_path, prompt_activations="auto", seen=seen)
    tokens_of(llm)
    assert not llm.engine.runner.model.form_changes and {name for name, _ in seen} == {"linear_int4"}


def test_copies_of_small_layers_serve_fewer_tokens(tmp_path):
    """A copy that would replace the packed weight stands beside it, up to where 8-bit floats are faster."""
    write(tmp_path, FORMATS["awq"])
    small = [ExpansionRule((OP,), 2**40, range(12)), ExpansionRule(("linear_int4",), 2**40, ANY)]
    seen = []
    llm = started(tmp_path, seen=seen, **policy(expansion=ExpansionPlan(small, 2**40)))
    seen.clear()
    tokens_of(llm)
    assert seen and {name for name, _ in seen} == {OP} and min(n for _, n in seen) >= 12
    for weight in packed_modules(llm.engine.runner.model):
        assert isinstance(weight.form_for(11), nn.Parameter) and isinstance(weight.form_for(12), PackedWeight)
        assert weight.form_for(12) is not weight
    off = started(tmp_path, expand_small_weights="off", **policy(expansion=ExpansionPlan(small, 2**40)))
    assert {w.form_for(LEAST - 1) is w for w in packed_modules(off.engine.runner.model)} == {True}
    assert off.engine.runner.model.form_changes == {LEAST, ANY.stop}


def test_experts_and_the_head_are_left_alone(tmp_path, caplog):
    tiny.save(tmp_path, "qwen3_moe", hidden_size=128, head_dim=32, **MOE)
    with caplog.at_level(logging.INFO, LOGGER):
        llm = started(tmp_path, quantization="int4", lm_head_quantization="int8")
    model = llm.engine.runner.model
    assert (
        isinstance(model.lm_head.weight, PackedWeight) and model.lm_head.weight.form_for(LEAST) is model.lm_head.weight
    )
    assert {w.form_for(LEAST) is w for w in packed_modules(model)} == {False}
    (said,) = [r.message for r in caplog.records if r.name == LOGGER]
    assert said.endswith("; experts are multiplied as before")
    assert all(len(ids) == GREEDY.max_tokens for ids in tokens_of(llm))


def test_what_cannot_be_done_is_an_error_that_names_the_argument(tmp_path):
    tiny.save(tmp_path / "floats", "qwen3", hidden_size=128, intermediate_size=256, head_dim=32)
    with pytest.raises(ValueError, match="prompt_activations='fp8': the layers have no quantised weights; pass quant"):
        started(tmp_path / "floats")
    tiny.save(tmp_path / "odd", "qwen3", hidden_size=128, intermediate_size=256, head_dim=32)
    priority = {name: ["native"] for name in all_ops()} | {OP: ["mine"]}
    refuse = lambda x, weight, scale, bias=None: "not today"  # noqa: E731
    with registered(OP, all_ops()[OP].native, accepts=refuse):
        with pytest.raises(ValueError, match="no quantised weight can be multiplied so: not today; leave the argument"):
            LLM(
                str(tmp_path / "odd"), quantization="int4", prompt_activations="fp8", kernel_priority=priority,
                **OPTIONS, **policy(),
            )  # fmt: skip


def test_on_a_cpu_it_is_refused_before_anything_is_loaded(tmp_path):
    write(tmp_path, FORMATS["awq"])
    for options in ({}, dict(use_custom_kernels=False)):
        with pytest.raises(ValueError, match="prompt_activations='fp8': needs a GPU with fp8 tensor cores, not a CPU"):
            LLM(str(tmp_path), prompt_activations="fp8", **OPTIONS, **options)


def test_what_a_gpu_needs(monkeypatch):
    """At which number of tokens it begins, or why it does not."""
    with registered(OP, all_ops()[OP].native):
        kernels = resolve_kernels(torch.device("cpu"), True, {OP: ["mine"]})
    asked, gpu, half = EngineConfig("x", prompt_activations="fp8"), torch.device("cuda"), torch.bfloat16
    for capability, dtype, chosen, said in [
        (
            (8, 6),
            half,
            kernels,
            "needs fp8 tensor cores, of compute capability 8.9 or later, not 8.6; use another GPU,",
        ),
        ((9, 0), torch.float32, kernels, "needs activations of 16 bits, not float32; pass dtype='bfloat16', or leave"),
        ((9, 0), half, NATIVE, "needs a kernel for linear_fp8_dynamic, of which the reference was selected"),
    ]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        with pytest.raises(ValueError, match=f"prompt_activations='fp8': {said}"):
            WeightForms().least_fp8_tokens(asked, chosen, dtype, gpu)
        assert WeightForms().least_fp8_tokens(EngineConfig("x"), chosen, dtype, gpu) is None
    for capability in ((8, 9), (9, 0), (12, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert WeightForms().least_fp8_tokens(asked, kernels, half, gpu) == 257


def test_values():
    for wrong in ("int8", True, None, 8, "FP8"):
        with pytest.raises(ValueError, match=f"prompt_activations={wrong!r}: must be one of auto, fp8"):
            EngineConfig("x", prompt_activations=wrong)
    with pytest.raises(ValueError, match="prompt_activations='fp8' contradicts activation_quantization=False"):
        EngineConfig("x", prompt_activations="fp8", activation_quantization=False)
    assert EngineConfig("x", activation_quantization=False).prompt_activations == "auto"


def test_a_checkpoint_made_for_it_has_no_other_form(tmp_path, caplog):
    write(tmp_path, FORMATS["fp8-block"])
    with caplog.at_level(logging.INFO, LOGGER):
        llm = started(tmp_path)
    assert not llm.engine.runner.model.form_changes
    (said,) = [r.message for r in caplog.records if r.name == LOGGER]
    assert "changes nothing: the checkpoint is made for activations in fp8" in said


@pytest.mark.gpu
@pytest.mark.skipif(
    not GPU or torch.cuda.get_device_capability() < (8, 9), reason="needs a GPU with fp8 tensor cores"
)  # fmt: skip
def test_on_a_gpu_prompts_are_multiplied_so_and_their_probabilities_stay_close(tmp_path, caplog):
    """Captured steps of prompts and others, beside an engine with activations of 16 bits."""
    tiny.save(tmp_path, "qwen3", hidden_size=512, intermediate_size=1024, head_dim=64)
    options = OPTIONS | dict(
        device="cuda", dtype="bfloat16", max_model_len=512, num_kvcache_blocks=200, quantization="int4",
        expand_small_weights="off", enable_prefix_caching=False,
    )  # fmt: skip
    asked = [torch.randint(0, 199, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (300, 290, 400)]
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0, ignore_eos=True)
    found = []
    for more in (dict(), dict(prompt_activations="fp8"), dict(prompt_activations="fp8", enforce_eager=True)):
        with caplog.at_level(logging.INFO, LOGGER):
            llm = LLM(str(tmp_path), **options, **more)
        model = llm.engine.runner.model
        assert bool(model.quantised_weights(257)) == bool(more) and not model.quantised_weights(256)
        outputs = llm.generate(asked, params, use_tqdm=False)
        rows = [pair for o, ids in zip(outputs, asked) for pair in zip(ids[1:], o.prompt_logprobs[1:], strict=True)]
        found.append(torch.tensor([row[token].logprob for token, row in rows]))
        llm.close()
    alike = torch.corrcoef(torch.stack(found))
    assert len(found[0]) == 987 and alike[1, 2] > 0.999 and 0.9 < alike[0, 1] < 0.99999, alike
    assert any(r.name == LOGGER for r in caplog.records)
