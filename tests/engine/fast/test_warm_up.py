"""That no step compiles a kernel in the middle of serving: what any number of tokens launches, the warm-up has
launched before.
"""

import pytest
import torch

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from nanovllm import LLM
from nanovllm.engine.fast.policy import FastPolicy
from nanovllm.engine.fast.warm_up import SMALL_BATCHES
from nanovllm.kernels import all_ops
from nanovllm.tune.launches import RecordedLaunch, recorded
from tests import tiny

BF16 = torch.bfloat16
# (hidden size, heads, KV heads, head_dim, intermediate size): Qwen3-0.6B, 8B, SmolLM2-135M.
SHAPES = [(1024, 16, 8, 128, 3072), (4096, 32, 8, 128, 12288), (576, 9, 3, 64, 1536)]


def variant(launch: RecordedLaunch) -> tuple:
    """What Triton compiles a kernel for: constants, and of numbers and addresses whether they are 1, or multiples of
    16.
    """
    of = []
    for p in launch.kernel.params:
        value = launch.arguments.get(p.name)
        if p.is_constexpr or value is None or isinstance(value, (bool, float)):
            of.append(value if p.is_constexpr or not isinstance(value, float) else "float")
        elif isinstance(value, torch.Tensor):
            aligned = p.do_not_specialize or p.do_not_specialize_on_alignment or value.data_ptr() % 16 == 0
            of.append((value.dtype, aligned))
        else:
            known = not p.do_not_specialize
            of.append(
                (
                    value.bit_length() > 31,
                    known and value == 1,
                    known and not p.do_not_specialize_on_alignment and value % 16 == 0,
                )
            )
    return launch.name, *map(str, of), str(sorted(launch.options.items()))


def variants(shape: tuple[int, ...], num_tokens: int, cache_dtype: torch.dtype) -> dict[tuple, int]:
    """Of everything but products and attention in a layer that is given positions and slots as a step gives them."""
    hidden, heads, kv_heads, dim, inner = shape
    run = {name: op.providers["triton"].fn for name, op in all_ops().items() if "triton" in op.providers}
    token_ids, positions, slots = torch.zeros(3, num_tokens, dtype=torch.int64)
    x, residual = torch.empty(2, num_tokens, hidden, dtype=BF16)
    sizes = [heads * dim, kv_heads * dim, kv_heads * dim]
    q, k, v = (t.unflatten(1, (-1, dim)) for t in torch.empty(num_tokens, sum(sizes), dtype=BF16).split(sizes, 1))
    weight, table = torch.ones(hidden, dtype=BF16), torch.zeros(100, hidden, dtype=BF16)
    cache = torch.empty(2, 16, kv_heads, dim, dtype=BF16).to(cache_dtype)
    norm, angles = torch.ones(dim, dtype=BF16), torch.empty(4096, dim)
    with recorded() as launches:
        run["embedding"](token_ids, table)
        run["rms_norm"](x, weight, 1e-6)
        run["add_rms_norm"](x, residual, weight, 1e-6)
        run["silu_and_mul"](torch.empty(num_tokens, 2 * inner, dtype=BF16))
        for norms in ((norm, norm), (None, None)):
            run["qk_norm_rope_store"](positions, q, k, v, angles, cache, cache, slots, *norms, 1e-6)
    return {variant(launch): num_tokens for launch in launches}


@pytest.mark.parametrize("cache_dtype", [BF16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_large_steps_launch_what_the_warm_up_launched(shape, cache_dtype):
    known = {}
    for decodes, runs in SMALL_BATCHES:
        known |= variants(shape, decodes + sum(runs), cache_dtype)
    for num_tokens in (4097, 4224, 5000, 8191, 12176, 12823, 16353, 16384):
        new = {v: n for v, n in variants(shape, num_tokens, cache_dtype).items() if v not in known}
        assert not new, f"{num_tokens} tokens compile {new}"


@pytest.mark.parametrize("budget", [1, 2, 7, 2048])
def test_the_warm_up_fits_any_budget(budget, tmp_path, monkeypatch):
    """What a GPU engine runs when it starts, here on the CPU; it must leave the padding block's neighbours alone."""
    monkeypatch.delenv("NANOVLLM_KERNELS", raising=False)  # what it names may need a GPU
    tiny.save(tmp_path)
    llm = LLM(
        tmp_path, device="cpu", skip_tokenizer_init=True, max_num_batched_tokens=budget, max_num_seqs=5,
        num_kvcache_blocks=8,
        fast_policy=FastPolicy(warm_up=True),
    )  # fmt: skip
    caches = llm.engine.runner.paged.caches
    assert all(not cache.k[:-1].any() and not cache.v[:-1].any() for cache in caches)
    assert (budget < 3) != bool(caches[0].k[-1].any())
