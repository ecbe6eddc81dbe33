"""What an architecture assumes where its config.json says nothing: the defaults of transformers' configurations.

A config.json that transformers wrote leaves out no entry. Many on the hub were written by hand or by other programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from nanovllm.model_config.entries import Entries, fail
from nanovllm.model_config.rope import RopeDefaults

Windows = Sequence["int | None"]
"""The sliding window of each layer, in tokens; None: full attention."""

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Family:
    """The defaults of one architecture, and which of the optional entries it reads."""

    windows: Callable[[Entries, int], Windows]
    """(entries, number of layers) -> the window of each layer."""
    num_kv_heads: int | None = None
    """Where num_key_value_heads is missing; None: as many as query heads. An entry of null always says the latter."""
    head_dim: int | None = None
    """None: hidden_size / num_attention_heads."""
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    tied: bool = False
    qkv_bias: bool | None = None
    """None: as the entry attention_bias says, which then is for the output projection as well."""
    attention_bias: bool = True
    """Whether the entry attention_bias is read."""
    mlp_bias: bool = False
    """Whether the entry mlp_bias is read."""
    activation_entry: str = "hidden_act"
    activation: str = "silu"
    rope: RopeDefaults = RopeDefaults()
    local_rope_theta: float | None = None
    """The base frequency of layers with a window, where these have a rotation of their own; None: they have not."""
    gemma: bool = False
    """Whether embeddings are scaled, and the scale of queries and soft caps are entries."""
    moe: bool = False
    """Whether layers may have experts."""
    soft_caps: tuple[float | None, float | None] = (None, None)
    """The soft caps of attention scores and of logits, if config.json has no entries for them."""


def _layer_types(entries: Entries, num_layers: int) -> list[str] | None:
    kinds = entries.config.get("layer_types")
    if kinds is None or kinds == []:
        return None
    if not isinstance(kinds, list) or any(kind not in (FULL, SLIDING) for kind in kinds):
        fail("layer_types", kinds, f": only a list of {FULL!r} and {SLIDING!r} is supported")
    if len(kinds) != num_layers:
        fail("layer_types", kinds, f": has {len(kinds)} entries, but num_hidden_layers={num_layers}")
    return kinds


def _of_types(kinds: Sequence[str], window: int | None, why: str) -> Windows:
    if window is None and SLIDING in kinds:
        fail("layer_types", list(kinds), f": has {SLIDING!r}, but {why}")
    return [window if kind == SLIDING else None for kind in kinds]


def _no_window(entries: Entries, num_layers: int) -> Windows:
    """Llama: transformers reads no window.

    But its cache reads the entry, and `generate` then differs from one forward of the same tokens.
    "use_sliding_window": false says which of the two is meant.
    """
    use = entries.optional_flag("use_sliding_window")
    kinds = entries.config.get("layer_types")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != FULL for kind in kinds)):
        fail("layer_types", kinds, f": only a list of {FULL!r} is supported")
    window = entries.config.get("sliding_window")
    if not kinds and window is not None and use is not False:
        fail("sliding_window", window, " is not supported; set it to null for full attention")
    return [None] * num_layers


def _one_window(default: int | None) -> Callable[[Entries, int], Windows]:
    """Mistral and Phi-3: all layers have the window, if there is one."""

    def windows(entries: Entries, num_layers: int) -> Windows:
        window = entries.optional_count("sliding_window", default)
        kinds = _layer_types(entries, num_layers)
        expected = FULL if window is None else SLIDING
        if kinds is not None and any(kind != expected for kind in kinds):
            fail("layer_types", kinds, f": expected only {expected!r}, as sliding_window={window} says")
        return [window] * num_layers

    return windows


def _upper_layers(entries: Entries, num_layers: int) -> Windows:
    """Qwen2 and Qwen3: the layers from max_window_layers on have the window, if use_sliding_window is true."""
    use = entries.flag("use_sliding_window")
    window = entries.optional_count("sliding_window", 4096) if use else None
    kinds = _layer_types(entries, num_layers)
    if kinds is not None:
        return _of_types(kinds, window, "use_sliding_window is not true, or sliding_window is null")
    first = entries.config.get("max_window_layers", 28)
    if window is not None and (not isinstance(first, int) or isinstance(first, bool) or first < 0):
        fail("max_window_layers", first, ": must be an integer, at least 0")
    return [window if window is not None and i >= first else None for i in range(num_layers)]


def _every_layer(entries: Entries, num_layers: int) -> Windows:
    """Qwen3-MoE: all layers have the window, if use_sliding_window is true. transformers reads no layer_types."""
    window = entries.optional_count("sliding_window", 4096) if entries.flag("use_sliding_window") else None
    return [window] * num_layers


def _unrotated_layers(entries: Entries, num_layers: int) -> Windows:
    """SmolLM3: the layers without rotation have the window, if use_sliding_window is true."""
    window = entries.optional_count("sliding_window", None) if entries.flag("use_sliding_window") else None
    kinds = _layer_types(entries, num_layers)
    if kinds is not None:
        return _of_types(kinds, window, "use_sliding_window is not true, or sliding_window is null")
    return [None if rotated else window for rotated in rotated_layers(entries, num_layers)]


def _repeated(pattern_entry: str | None, pattern: int) -> Callable[[Entries, int], Windows]:
    """Gemma: every n-th layer has full attention, the others have the window."""

    def windows(entries: Entries, num_layers: int) -> Windows:
        every = entries.count(pattern_entry, pattern) if pattern_entry else pattern
        kinds = _layer_types(entries, num_layers) or [SLIDING if (i + 1) % every else FULL for i in range(num_layers)]
        return _of_types(kinds, entries.optional_count("sliding_window", 4096), "sliding_window is null")

    return windows


def rotated_layers(entries: Entries, num_layers: int) -> list[bool]:
    """SmolLM3's layers with rotary embedding: `no_rope_layers` says 1 for these, 0 for those without."""
    flags: Any = entries.config.get("no_rope_layers")
    if flags is None:
        interval = entries.count("no_rope_layer_interval", 4)
        return [bool((i + 1) % interval) for i in range(num_layers)]
    if not isinstance(flags, list) or any(flag not in (0, 1) for flag in flags) or len(flags) < num_layers:
        fail("no_rope_layers", flags, f": must be a list of 0 and 1, one for each of {num_layers} layers")
    return [bool(flag) for flag in flags[:num_layers]]


_LLAMA = Family(_no_window, mlp_bias=True)
_QWEN3 = Family(_upper_layers, num_kv_heads=32, head_dim=128, max_position_embeddings=32768)
_GEMMA2 = Family(
    _repeated(None, 2), num_kv_heads=4, head_dim=256, max_position_embeddings=8192, tied=True,
    activation_entry="hidden_activation", activation="gelu_pytorch_tanh", gemma=True, soft_caps=(50.0, 30.0),
)  # fmt: skip
FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": _LLAMA,
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3MoeForCausalLM": replace(_QWEN3, windows=_every_layer, num_kv_heads=4, head_dim=None, moe=True),
    "Qwen2ForCausalLM": replace(_QWEN3, head_dim=None, qkv_bias=True, attention_bias=False),
    "MistralForCausalLM": Family(
        _one_window(4096), num_kv_heads=8, max_position_embeddings=131072, attention_bias=False
    ),
    "SmolLM3ForCausalLM": Family(
        _unrotated_layers, num_kv_heads=4, max_position_embeddings=32768, tied=True, mlp_bias=True,
        rope=RopeDefaults(theta=2e6),
    ),
    "Phi3ForCausalLM": Family(
        _one_window(None), max_position_embeddings=4096, rms_norm_eps=1e-5, attention_bias=False,
        rope=RopeDefaults(
            original_length=4096, types=("default", "longrope"), renamed=(("su", "longrope"), ("yarn", "longrope")),
            partial=True,
        ),
    ),
    "Gemma2ForCausalLM": _GEMMA2,
    "Gemma3ForCausalLM": replace(
        _GEMMA2, windows=_repeated("sliding_window_pattern", 6), max_position_embeddings=131072,
        soft_caps=(None, None), rope=RopeDefaults(theta=1e6), local_rope_theta=1e4,
    ),
}  # fmt: skip


def family_of(architecture: str) -> Family:
    """The defaults of an architecture; those of Qwen3 or Llama for one that is not in the table."""
    return FAMILIES.get(architecture, _QWEN3 if architecture.startswith("Qwen3") else _LLAMA)


@dataclass(frozen=True)
class MoeConfig:
    """Experts in place of the MLP, of which a router gives each token some.

    Attributes:
        num_experts: experts of a layer.
        top_k: experts of a token.
        intermediate_size: the intermediate size of an expert.
        renormalise: the weights of a token's experts are divided by their sum.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    renormalise: bool


def read_moe(entries: Entries) -> MoeConfig:
    """The experts that a Qwen3-MoE's config.json describes; missing entries take the defaults of transformers.

    Raises:
        ValueError: an entry is out of range; the message names it.
    """
    activation = entries.get("hidden_act", "silu")
    if activation != "silu":
        fail("hidden_act", activation, " is not supported for experts; only 'silu' is")
    # transformers 5 writes num_local_experts, 4 wrote num_experts.
    name = "num_experts" if entries.config.get("num_experts") is not None else "num_local_experts"
    num_experts, top_k = entries.count(name, 128), entries.count("num_experts_per_tok", 8)
    if top_k > num_experts:
        fail("num_experts_per_tok", top_k, f": must be at most {name}={num_experts}")
    return MoeConfig(num_experts, top_k, entries.count("moe_intermediate_size", 768), entries.flag("norm_topk_prob"))


def sparse_layers(entries: Entries, num_layers: int) -> list[bool]:
    """Of each layer, whether it has experts: every `decoder_sparse_step`-th one that is not in `mlp_only_layers`.

    Raises:
        ValueError: an entry is out of range; the message names it.
    """
    dense = entries.config.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or any(type(i) is not int or not 0 <= i < num_layers for i in dense):
        fail("mlp_only_layers", dense, f": must be a list of layers, from 0 to {num_layers - 1}")
    step = entries.count("decoder_sparse_step", 1)
    return [i not in dense and (i + 1) % step == 0 for i in range(num_layers)]
