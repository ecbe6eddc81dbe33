"""Encoders, models of images, and models that accelerate, torch.compile or torch.export has in hand."""

import pytest

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from nanovllm.adapters.transformers import OPS, apply, undo  # noqa: E402
from tests.adapters.models import prompts, put_in, tiny  # noqa: E402

_TEXT = {
    "vocab_size": 120, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
_VISION = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 56, "image_size": 16,
    "patch_size": 4,
}  # fmt: skip
_IMAGE = 110
_LEFT = "not built as in Llama's decoder layers"


def random_weights(model):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0, 0.2, generator=generator)
    return model.eval().requires_grad_(False)


def bert():
    config = transformers.BertConfig(**{k: v for k, v in _TEXT.items() if k.endswith("s") or k.endswith("size")})
    return transformers.BertModel(config), prompts("right")


def vit():
    config = transformers.ViTConfig(**_VISION)
    return transformers.ViTModel(config), {"pixel_values": torch.randn(2, 3, 16, 16)}


def dinov2():
    config = transformers.Dinov2Config(**_VISION, use_swiglu_ffn=True)
    return transformers.Dinov2Model(config), {"pixel_values": torch.randn(2, 3, 16, 16)}


def images(tokens, pixels, **more):
    ids = torch.arange(2, 2 + 2 * (tokens + 5)).view(2, -1)
    ids[:, 3 : 3 + tokens] = _IMAGE
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": pixels, **more}


def mistral3():
    text = transformers.MistralConfig(**_TEXT)
    vision = transformers.PixtralVisionConfig(**_VISION, head_dim=8)
    config = transformers.Mistral3Config(
        text_config=text, vision_config=vision, image_token_index=_IMAGE, spatial_merge_size=2, vision_feature_layer=-1
    )
    sizes = torch.tensor([[16, 16]] * 2)
    given = images(4, torch.randn(2, 3, 16, 16), image_sizes=sizes)
    return transformers.Mistral3ForConditionalGeneration(config), given


def qwen3_vl():
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0, "mrope_interleaved": True}
    vision = {
        "depth": 2, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 4, "intermediate_size": 48,
        "deepstack_visual_indexes": [0], "num_position_embeddings": 64,
    }  # fmt: skip
    config = transformers.Qwen3VLConfig(
        text_config=_TEXT | {"rope_parameters": rope}, vision_config=vision, image_token_id=_IMAGE, video_token_id=111,
        vision_start_token_id=112, vision_end_token_id=113,
    )  # fmt: skip
    given = images(4, torch.randn(2 * 16, 3 * 2 * 16 * 16), image_grid_thw=torch.tensor([[1, 4, 4]] * 2))
    given["input_ids"][:, 2] = 112
    given["mm_token_type_ids"] = (given["input_ids"] == _IMAGE).long()
    return transformers.Qwen3VLForConditionalGeneration(config), given


@pytest.mark.parametrize("make", [bert, vit, dinov2, mistral3, qwen3_vl])
def test_encoders_and_models_of_images(make):
    torch.manual_seed(0)
    model, given = make()
    model = random_weights(model)
    expected = model(**given)[0]
    with apply(model, ops=dict.fromkeys(OPS, ()) | {"linear": "native"}) as report:
        torch.testing.assert_close(model(**given)[0], expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    assert torch.equal(model(**given)[0], expected)
    assert not any("experts" in row.why for row in report.left)
    assert any(row.op == "attention_dense" and _LEFT in row.why for row in report.left)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("make, op", [(mistral3, "rotary_embedding"), (qwen3_vl, "attention_decode")])
def test_the_rotation_of_a_vision_tower_is_not_that_of_the_text(make, op, cache):
    torch.manual_seed(0)
    model, given = make()
    model = random_weights(model)
    options = {"max_new_tokens": 6, "do_sample": False}
    if cache == "static":
        options |= {"cache_implementation": "static", "disable_compile": True}
    expected = model.generate(**given, **options)
    with put_in(model) as report:
        assert op in {row.op for row in report.replaced}
        assert torch.equal(model.generate(**given, **options), expected)


@torch.no_grad()
def test_an_image_that_comes_token_by_token(steps):
    """Qwen3-VL adds features of the image between its layers, which a loop over all layers would miss."""
    model, given = qwen3_vl()
    model = random_weights(model)
    text = model.model.language_model
    x, marks = torch.randn(2, 1, 32), torch.ones(2, 1, dtype=torch.bool)
    seen = {"visual_pos_masks": marks, "deepstack_visual_embeds": [torch.randn(2, 32)]}

    def step():
        cache = transformers.DynamicCache(config=text.config)
        text(None, None, None, cache, inputs_embeds=torch.ones(2, 3, 32))
        return text(None, None, None, cache, inputs_embeds=x, **seen)[0]

    expected = step()
    with put_in(model):
        torch.testing.assert_close(step(), expected, rtol=0, atol=1e-4)
    assert True not in steps


@pytest.mark.parametrize("offload", ["cpu", "disk"])
def test_a_model_that_is_offloaded_as_a_whole(offload, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    model = tiny("Llama").requires_grad_(False)
    expected = model(**prompts()).logits
    if offload == "cpu":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    else:
        accelerate.disk_offload(model, str(tmp_path), execution_device=torch.device("cpu"))
    with apply(model, ops=OPS) as report:
        assert not report.replaced and all("offloaded" in row.why for row in report.left)
        assert torch.equal(model(**prompts()).logits, expected)


@pytest.mark.parametrize("order", ["undo, remove", "remove, undo"])
def test_hooks_of_accelerate_that_are_added_later(order, tmp_path):
    """accelerate keeps the forward that it finds; after `undo` its hooks call that of the class."""
    accelerate = pytest.importorskip("accelerate")
    from accelerate.hooks import remove_hook_from_submodules

    model = tiny("Llama").requires_grad_(False)
    expected = model(**prompts()).logits
    report = put_in(model)
    parts = {name: "cpu" for name in ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb")}
    parts |= {"model.layers.1": "disk", "lm_head": "cpu"}
    accelerate.dispatch_model(model, parts, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True)
    torch.testing.assert_close(model(**prompts()).logits, expected, rtol=0, atol=1e-4)
    for word in order.split(", "):
        report.undo() if word == "undo" else remove_hook_from_submodules(model)
        if word == "undo":
            torch.testing.assert_close(model(**prompts()).logits, expected, rtol=0, atol=0)
    assert not any("nanovllm" in repr(module.__dict__.get("forward")) for module in model.modules())


@pytest.mark.parametrize("when", ["before", "after"])
def test_other_hooks_of_accelerate_on_projections_run(when):
    hooks = pytest.importorskip("accelerate.hooks")
    calls = []

    class Counting(hooks.ModelHook):
        def post_forward(self, module, output):
            calls.append(module)
            return output * 2

    model = tiny("Llama").requires_grad_(False)
    layer = model.model.layers[0]
    hooked = [layer.self_attn.q_proj, layer.mlp.gate_proj, layer.post_attention_layernorm]

    def add():
        for module in hooked:
            hooks.add_hook_to_module(module, Counting())

    if when == "before":
        add()
    report = put_in(model)
    if when == "after":
        add()
    got = model(**prompts()).logits
    assert set(calls) == set(hooked)
    report.undo()
    torch.testing.assert_close(model(**prompts()).logits, got, rtol=0, atol=1e-4)


def test_a_model_that_torch_compile_wraps():
    model = tiny("Qwen3").requires_grad_(False)
    expected = model(**prompts()).logits
    compiled = torch.compile(model, backend="eager")
    compiled(**prompts())
    report = put_in_whole(compiled)
    assert report.replaced
    for one in (compiled, model):
        torch.testing.assert_close(one(**prompts()).logits, expected, rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="a model that contains it"):
        apply(model, ops=OPS)
    undo(compiled)
    assert torch.equal(model(**prompts()).logits, expected) and torch.equal(compiled(**prompts()).logits, expected)


def put_in_whole(model):
    return apply(model, ops=dict.fromkeys(OPS, ()) | {"linear": "native"})


@pytest.mark.parametrize("strict", [True, False])
def test_an_exported_model_has_its_weights_once(strict):
    model = tiny("Llama").requires_grad_(False)
    given = {**prompts("left"), "use_cache": False}
    expected = model(**given).logits
    with put_in(model):
        exported = torch.export.export(model, (), given, strict=strict)
    torch.testing.assert_close(exported.module()(**given).logits, expected, rtol=0, atol=1e-4)
    stored = sum(t.numel() for t in (*exported.state_dict.values(), *exported.constants.values()))
    assert stored < 1.1 * sum(parameter.numel() for parameter in model.parameters())


def test_a_dtype_that_no_kernel_takes():
    model = tiny("Qwen3", torch.float64).requires_grad_(False)
    expected = model(**prompts()).logits
    with put_in(model) as report:
        assert not report.replaced and all("float64" in row.why for row in report.left)
        assert torch.equal(model(**prompts()).logits, expected)


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Gemma3"])
def test_padding_on_the_right_is_attended_as_by_pytorch(architecture):
    """Also at padded positions, which `generate` continues, and which a caller may average."""
    model, given = tiny(architecture).requires_grad_(False), prompts("right")
    options = {"max_new_tokens": 6, "do_sample": False}
    hidden, tokens = model.model(**given)[0], model.generate(**given, **options)
    with put_in(model):
        torch.testing.assert_close(model.model(**given)[0], hidden, rtol=0, atol=1e-4)
        assert torch.equal(model.generate(**given, **options), tokens)
