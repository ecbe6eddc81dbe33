"""What a load must do at least, and what share of the hardware's limit a time is.

Everything here is a lower bound, so that no share can honestly exceed 100 %: a byte counts only if no engine, however
clever, could avoid moving it, and a flop only if the model's function needs it.

- Weights are read once a step, and a sequence of n output tokens needs n steps, since each token depends on the one
before.
- Of a mixture of experts a step reads the experts that its tokens go to. Their number is the expected one if every
  token goes to any experts with equal probability: E (1 - (1 - k / E)^n) of E experts for n tokens that have k each.
  This is no bound: tokens that go to the same experts read less.
- A decode step reads the keys and values of every earlier token once, or in a layer with a window of those in it; a
  prefix that requests share, once a step for all.
- Every token whose successor is computed has its keys and values written once. Activations may stay on the chip.
- Arithmetic is that of the matrix products and of causal attention; a prefix that is shared is computed once. Of a
  token that nothing is sampled from, the last layer computes keys and values alone.
- A product with activations that the engine quantises counts at the rate of 8-bit floats. The engine tells which
  matrices these are in a step of n tokens. Steps are those of the account: one with all prompts, then one for each
  further output token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanovllm.bench.workloads import Item
from nanovllm.hardware.roofline import Work
from nanovllm.model_config import ModelConfig, MoeConfig


@dataclass(frozen=True)
class ModelShape:
    """A decoder's sizes as they matter for an account. Bytes are per element of weights and of the KV cache.

    A layer has projections q, k, v and o; gate, up and down, or those of each expert and a router; two norms, or four
    in Gemma; and with `qk_norm` two over head_dim.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    qk_norm: bool
    attention_bias: bool
    mlp_bias: bool
    weight_bytes: float
    kv_bytes: int
    output_bias: bool = False
    """Of the projection o."""
    norms: int = 2
    windows: tuple[int | None, ...] = ()
    """The window of each layer, None for full attention; empty: no layer has one."""
    moe: MoeConfig | None = None
    sparse: tuple[bool, ...] = ()
    """Of each layer, whether it has experts; empty: no layer has."""

    @classmethod
    def of(cls, config: ModelConfig, weight_bytes: int, kv_bytes: int | None = None) -> ModelShape:
        c = config
        return cls(
            c.hidden_size, c.intermediate_size, c.num_hidden_layers, c.num_attention_heads, c.num_kv_heads, c.head_dim,
            c.vocab_size, c.tie_word_embeddings, c.architecture.startswith(("Qwen3", "Gemma3")), c.attention_bias,
            c.mlp_bias, weight_bytes, weight_bytes if kv_bytes is None else kv_bytes, c.attention_output_bias,
            4 if c.architecture.startswith("Gemma") else 2, tuple(layer.window for layer in c.layers),
            c.moe, tuple(layer.sparse for layer in c.layers),
        )  # fmt: skip

    @property
    def matrix_parameters(self) -> int:
        """Elements of the matrices of a layer without experts."""
        return self._attention_parameters + 3 * self.hidden * self.intermediate

    @property
    def _attention_parameters(self) -> int:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.hidden * (2 * q + 2 * kv)

    def _token_parameters(self, sparse: bool) -> int:
        """Elements of a layer's matrices that one token is multiplied with."""
        if self.moe is None or not sparse:
            return self.matrix_parameters
        return (
            self._attention_parameters + self.hidden * self.moe.num_experts + self.moe.top_k * self._expert_parameters
        )

    @property
    def _expert_parameters(self) -> int:
        """Elements of one expert."""
        return 0 if self.moe is None else 3 * self.hidden * self.moe.intermediate_size

    @property
    def layer_parameters(self) -> int:
        """Elements of one layer without experts: matrices, norms, biases."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        norms = self.norms * self.hidden + 2 * self.head_dim * self.qk_norm
        biases = (q + 2 * kv) * self.attention_bias + self.hidden * self.output_bias
        biases += (2 * self.intermediate + self.hidden) * self.mlp_bias
        return self.matrix_parameters + norms + biases

    @property
    def parameters(self) -> int:
        """Elements of the whole model, the embedding counted once if it is also the head."""
        experts = 0 if self.moe is None else sum(self.sparse) * self.moe.num_experts * self._expert_parameters
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self._parameters_beside_experts + experts + self.hidden + embeddings

    @property
    def _parameters_beside_experts(self) -> int:
        """Elements of all layers, experts left out; routers belong to these."""
        of_layers = self.layers * self.layer_parameters
        if self.moe is None:
            return of_layers
        return of_layers + sum(self.sparse) * self.hidden * (self.moe.num_experts - 3 * self.intermediate)

    @property
    def step_bytes(self) -> int:
        """Weights that every step reads: the layers, the last norm and the head; of the embedding, rows only.

        Experts are left out: see `expert_bytes`.
        """
        elements = self._parameters_beside_experts + self.hidden + self.vocab * self.hidden
        return round(self.weight_bytes * elements)

    def expert_bytes(self, num_tokens: int, wanted: int) -> int:
        """Expected weights of experts that a step of `num_tokens` tokens reads, of `wanted` in the last layer."""
        if self.moe is None:
            return 0
        e, k = self.moe.num_experts, self.moe.top_k
        *others, last = self.sparse
        distinct = [e * (1 - (1 - k / e) ** n) for n in (num_tokens, wanted)]
        return round(self.weight_bytes * self._expert_parameters * (sum(others) * distinct[0] + last * distinct[1]))

    @property
    def token_kv_bytes(self) -> int:
        """Keys and values of one token, over all layers."""
        return self.layers * self._layer_kv_bytes

    @property
    def unwindowed_kv_bytes(self) -> int:
        """Keys and values of one token, over the layers without a window."""
        return self._layer_windows.count(None) * self._layer_kv_bytes

    @property
    def _layer_kv_bytes(self) -> int:
        return 2 * self.kv_heads * self.head_dim * self.kv_bytes

    @property
    def _layer_windows(self) -> tuple[int | None, ...]:
        return self.windows or (None,) * self.layers

    @property
    def _layer_kinds(self) -> list[tuple[int | None, bool]]:
        """(window, whether it has experts) of each layer."""
        return list(zip(self._layer_windows, self.sparse or (False,) * self.layers))

    def read_bytes(self, num_tokens: int, before: int) -> int:
        """Keys and values of earlier tokens that `num_tokens` decode steps read. The first token follows `before` ones.

        A step reads those within the window.
        """
        reads = (
            count * _attended(num_tokens, before - 1, None if window is None else window - 1)
            for window, count in Counter(self._layer_windows).items()
        )
        return sum(reads) * self._layer_kv_bytes

    def run_flops(self, num_tokens: int, before: int = 0, wanted: int | None = None) -> int:
        """Flops of a run of tokens through the layers, each attending to the `before` ones, those of the run and
        itself.

        Args:
            wanted: of how many tokens, the last ones, the result is wanted; of the others the last layer computes
                keys and values alone. None: of all. One more than num_tokens, where nothing of a prompt is its own:
                its last token's keys and values are then another's.
        """
        wanted = num_tokens if wanted is None else wanted
        *others, last = self._layer_windows
        attended = sum(count * _attended(num_tokens, before, window) for window, count in Counter(others).items())
        attended += _attended(wanted, before + num_tokens - wanted, last)
        return self.product_flops(num_tokens, wanted) + 4 * self.heads * self.head_dim * attended

    def product_flops(self, num_tokens: int, wanted: int) -> int:
        """Those of `run_flops` that are products with the layers' matrices."""
        key_and_value = 2 * self.hidden * self.kv_heads * self.head_dim
        *others, last = (self._token_parameters(sparse) for _, sparse in self._layer_kinds)
        return 2 * (sum(others) * num_tokens + last * wanted + key_and_value * (num_tokens - wanted))

    @property
    def token_parameters(self) -> int:
        """Elements of all layers' matrices that one token is multiplied with."""
        return sum(self._token_parameters(sparse) for _, sparse in self._layer_kinds)

    @property
    def head_flops(self) -> int:
        """Flops of the head for one sampled token."""
        return 2 * self.vocab * self.hidden


def _attended(num_tokens: int, before: int, window: int | None) -> int:
    """The sum of before + 1, before + 2, ... for `num_tokens` tokens, each number at most `window`."""
    below = num_tokens if window is None else min(max(window - before, 0), num_tokens)
    return below * before + below * (below + 1) // 2 + (num_tokens - below) * (window or 0)


def request_work(model: ModelShape, num_prompt: int, num_output: int, num_shared: int = 0) -> Work:
    """One request's own work: all but the weights, and but what it takes from a shared prefix.

    Args:
        num_shared: leading prompt tokens whose keys and values another request computes and writes, and whose reading
            is counted elsewhere.
    """
    own = num_prompt - num_shared
    steps = num_output - 1  # decode steps; the prefill gives the first token
    flops = model.run_flops(own + steps, num_shared, num_output) + num_output * model.head_flops
    # Step j reads the own + j tokens before it. Of a shared prefix, a window may leave nothing to be read.
    return Work(model.read_bytes(steps, own) + (own + steps) * model.token_kv_bytes, flops)


def workload_work(
    model: ModelShape, items: Sequence[Item], shared_prefix: int = 0, quantised: Callable[[int], int] | None = None
) -> Work:
    """What all the requests of a draw must do together.

    Args:
        quantised: elements of all layers' matrices that are multiplied with activations of 8-bit floats, in a step of
            this number of tokens. None: there are none.
    """
    steps = max(item.num_output for item in items)
    prompts = sum(len(item.prompt) - shared_prefix for item in items) + shared_prefix
    experts = model.expert_bytes(prompts, len(items))
    for n in (sum(item.num_output > step for item in items) for step in range(1, steps)) if experts else ():
        experts += model.expert_bytes(n, n)
    total = Work(steps * model.step_bytes + experts)
    # Requests of equal lengths cost the same.
    kinds = Counter((len(item.prompt), item.num_output) for item in items)
    for (num_prompt, num_output), count in kinds.items():
        one = request_work(model, num_prompt, num_output, shared_prefix)
        total += Work(count * one.bytes, count * one.flops)
    if shared_prefix:
        # Written once, and read in every step but the first, in layers without a window.
        written, read = model.token_kv_bytes, model.unwindowed_kv_bytes
        total += Work((written + (steps - 1) * read) * shared_prefix, model.run_flops(shared_prefix, wanted=0))
    if quantised is not None:
        total += Work(fp8_flops=_fp8_flops(model, items, shared_prefix, quantised))
    return total


def _fp8_flops(model: ModelShape, items: Sequence[Item], shared_prefix: int, quantised: Callable[[int], int]) -> int:
    """Of the products with the layers' matrices, the flops of those with quantised activations.

    Matrices that are not quantised are taken to be spread evenly over the layers.
    """
    shares: dict[int, float] = {}

    def of_step(num_tokens: int, flops: int) -> float:
        if num_tokens not in shares:
            shares[num_tokens] = min(1.0, quantised(num_tokens) / model.token_parameters)
        return shares[num_tokens] * flops

    own = Counter(len(item.prompt) - shared_prefix for item in items)
    prompts = sum(count * model.product_flops(n, 1) for n, count in own.items()) + model.product_flops(shared_prefix, 0)
    total = of_step(shared_prefix + sum(n * count for n, count in own.items()), prompts)
    for step in range(1, max(item.num_output for item in items)):
        n = sum(item.num_output > step for item in items)
        total += of_step(n, model.product_flops(n, n))
    return round(total)
