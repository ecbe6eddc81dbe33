"""The key and the built-in plan of a call on a GPU that need not be here, by the kernels' own rules."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.kernels.op.inputs import Arguments
from nanovllm.kernels.op.tunable import Key, Tunable
from nanovllm.kernels.triton import tunables
from nanovllm.tune.launches import RecordedLaunch

if TYPE_CHECKING:
    from nanovllm.hardware.gpu_presets import DeviceModel

_HOPPER_PRODUCTS = {
    "linear": (False, False), "linear_silu_and_mul": (True, False), "linear_add_rms_norm": (False, True),
}  # fmt: skip
"""op -> whether its product is gated, and whether a kernel after it adds the sums of its parts."""


def key_on(tunable: Tunable, key: Key, device: DeviceModel) -> tuple[Tunable, Key]:
    """The tunable and key on `device` of a call that looks up `key` on a CPU."""
    named = tunable.named(key)
    if tunable is tunables.PRODUCT:
        from nanovllm.kernels.triton.gemm.tiled_products import TMA_SHARED

        tma = device.capability >= 90 and device.shared_per_block >= TMA_SHARED
        return tunable, tuple({**named, "tma": tma and named["k"] % 8 == named["n"] % 8 == 0}.values())
    if device.capability != 90:
        return tunable, key
    if tunable is tunables.ATTENTION_DECODE:
        from nanovllm.kernels.triton.attention.decode_hopper import unsuited

        if unsuited(**{n: value for n, value in named.items() if n not in ("kv_heads", "rotate")}) is None:
            return tunables.ATTENTION_DECODE_HOPPER, key
    if tunable is tunables.ATTENTION_PREFILL and named["dtype"].itemsize == 2 and not named["few_rows"]:
        from nanovllm.kernels.triton.attention.prefill_plan import plan_hopper_prefill

        suited = plan_hopper_prefill(named["group"], named["head_dim"], named["block_size"])
        if suited and named["cache_dtype"] == named["dtype"]:
            return tunables.ATTENTION_PREFILL_HOPPER, key[:-1]
    return tunable, key


def builtin_plan(
    tunable: Tunable, key: Key, arguments: Arguments, launch: RecordedLaunch | None, device: DeviceModel
) -> Any:
    """The kernel's own choice: of the simple kernels as launched, of the others as planned for `device`."""
    k = tunable.named(key)
    if tunable is tunables.HOPPER_PRODUCT:
        from nanovllm.kernels.triton.gemm.hopper_product import plan_hopper_product

        return plan_hopper_product(k["tokens"], k["outputs"] * (1 + k["gated"]), k["size"], k["split"], device.sms)
    if tunable is tunables.PRODUCT:
        from nanovllm.kernels.triton.gemm.product_plan import plan_product

        x = arguments["x"]
        rows = x.numel() // x.shape[-1]
        return plan_product(rows, k["n"], k["k"], x.element_size(), k["gated"], True, k["tma"], device.sms)
    if tunable is tunables.SMALL_PRODUCT:
        from nanovllm.kernels.triton.gemm.small_product_plan import plan_small_product

        return plan_small_product(k["tokens"], k["outputs"], k["size"], k["gated"], k["dtype"])
    if tunable is tunables.PACKED_PRODUCT:
        from nanovllm.kernels.triton.gemm.packed_plan import has_shared_operands, plan_packed_product

        shape = k["tokens"], k["outputs"], k["size"], k["bits"], k["parts"]
        return plan_packed_product(*shape, device.sms, has_shared_operands(device.capability // 10))
    if tunable in (tunables.ATTENTION_DECODE, tunables.ATTENTION_DECODE_HOPPER):
        from nanovllm.kernels.triton.attention.decode_hopper_plan import plan_hopper_decode
        from nanovllm.kernels.triton.attention.decode_plan import DecodeSizes, plan_decode

        size, count, heads = k["cache_dtype"].itemsize, len(arguments["context_lens"]), (k["kv_heads"], k["group"])
        if tunable is tunables.ATTENTION_DECODE_HOPPER:
            return plan_hopper_decode(count, heads[0], k["head_dim"], device.sms, size, k["new"], k["group"])
        full_precision = k["dtype"] == torch.float32
        return plan_decode(DecodeSizes(count, *heads, k["head_dim"], size, full_precision, device.sms), k["rotate"])
    if tunable in (tunables.ATTENTION_PREFILL, tunables.ATTENTION_PREFILL_HOPPER):
        from nanovllm.kernels.triton.attention.prefill_plan import plan_hopper_prefill, plan_prefill

        if tunable is tunables.ATTENTION_PREFILL_HOPPER:
            return plan_hopper_prefill(k["group"], k["head_dim"], k["block_size"])
        sizes = k["dtype"].itemsize, arguments["max_query_len"], k["cache_dtype"].itemsize
        return plan_prefill(k["group"], k["head_dim"], *sizes, device.capability // 10)
    assert launch is not None
    (make,) = tunable.classes.values()
    # Kernels of one row a program have no ROWS.
    chosen = {name: launch.arguments.get(name.upper(), 1) for f in fields(make) if (name := f.name) != "warps"}
    return make(**chosen, warps=launch.options["num_warps"])


def hopper_product_key(op: str, arguments: Arguments, device: DeviceModel) -> Key | None:
    """The key of the product that only Hopper GPUs have; None: another GPU, or its kernel refuses the call."""
    if op not in _HOPPER_PRODUCTS or device.capability != 90:
        return None
    from nanovllm.kernels.triton.gemm.hopper_product import most_tokens_whole, worth

    (gated, split), weight = _HOPPER_PRODUCTS[op], arguments["weight"]
    tokens, (rows, size) = arguments["x"].shape[0], weight.shape
    if tokens not in worth(rows, size, gated, weight.dtype):
        return None
    if not (gated or split) and tokens > most_tokens_whole(rows, size):
        return None
    return tunables.hopper_product_key(tokens, rows // 2 if gated else rows, size, weight.dtype, gated, split)
