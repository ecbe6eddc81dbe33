"""What a call asks and chooses on a GPU that need not be here, from shapes and what the GPU is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.kernels.op.declaration import Arguments
from nanovllm.kernels.op.tunable import Tunable
from nanovllm.kernels.triton import tunables
from nanovllm.tune.launches import Launch

if TYPE_CHECKING:
    from nanovllm.hardware.gpu_presets import DeviceModel

Named = Mapping[str, Any]
_HOPPER = {"linear": (False, False), "linear_silu_and_mul": (True, False), "linear_add_rms_norm": (False, True)}
"""Whether the product is gated and whether a kernel after it adds the sums of its parts, of ops that have one for Hopper."""


def asked_on(tunable: Tunable, key: tuple[Any, ...], device: DeviceModel) -> tuple[Tunable, tuple[Any, ...]]:
    """What a call asks on `device` that asks for `key` on a CPU."""
    named = tunable.named(key)
    if tunable is tunables.PRODUCT:
        from nanovllm.kernels.triton.gemm.products import TMA_SHARED

        tma = (
            device.capability >= 90
            and device.shared_per_block >= TMA_SHARED
            and named["k"] % 8 == 0
            and named["n"] % 8 == 0
        )
        return tunable, tuple({**named, "tma": tma}.values())
    if tunable is tunables.ATTENTION_DECODE and device.capability == 90:
        from nanovllm.kernels.triton.attention.decode_hopper import unsuited

        shape = {n: value for n, value in named.items() if n not in ("kv_heads", "rotate")}
        if unsuited(**shape) is None:
            return tunables.ATTENTION_DECODE_HOPPER, key
    if (
        tunable is tunables.ATTENTION_PREFILL
        and device.capability == 90
        and named["dtype"].itemsize == 2
        and not named["few_rows"]
    ):
        from nanovllm.kernels.triton.attention.prefill import plan_hopper

        if named["cache_dtype"] == named["dtype"] and plan_hopper(
            named["group"], named["head_dim"], named["block_size"]
        ):
            return tunables.ATTENTION_PREFILL_HOPPER, key[:-1]
    return tunable, key


def builtin_plan(tunable: Tunable, key: Named, arguments: Arguments, launch: Launch | None, device: DeviceModel) -> Any:
    """The kernel's own choice: of the simple kernels as launched, of the others as planned for `device`."""
    if tunable.name == "hopper_product":
        from nanovllm.kernels.triton.gemm.hopper_product import plan_hopper_product

        rows = key["outputs"] * (2 if key["gated"] else 1)
        return plan_hopper_product(key["tokens"], rows, key["size"], key["split"], device.sms)
    if tunable.name == "product":
        from nanovllm.kernels.triton.gemm.product_plan import plan_product

        x = arguments["x"]
        rows = x.numel() // x.shape[-1]
        return plan_product(rows, key["n"], key["k"], x.element_size(), key["gated"], True, key["tma"], device.sms)
    if tunable.name == "small_product":
        from nanovllm.kernels.triton.gemm.small_product_plan import plan_small_product

        return plan_small_product(key["tokens"], key["outputs"], key["size"], key["gated"], key["dtype"])
    if tunable.name == "attention_decode":
        from nanovllm.kernels.triton.attention.decode_plan import plan_decode

        size, precise = key["cache_dtype"].itemsize, key["dtype"] == torch.float32
        return plan_decode(
            len(arguments["context_lens"]), key["kv_heads"], key["group"], key["head_dim"], size, precise, device.sms,
            key["rotate"],
        )  # fmt: skip
    if tunable.name == "attention_decode_hopper":
        from nanovllm.kernels.triton.attention.decode_plan import plan_hopper_decode

        size = key["cache_dtype"].itemsize
        count = len(arguments["context_lens"])
        return plan_hopper_decode(count, key["kv_heads"], key["head_dim"], device.sms, size, key["new"], key["group"])
    if tunable.name == "attention_prefill_hopper":
        from nanovllm.kernels.triton.attention.prefill import plan_hopper

        return plan_hopper(key["group"], key["head_dim"], key["block_size"])
    if tunable.name == "attention_prefill":
        from nanovllm.kernels.triton.attention.prefill import plan_prefill

        return plan_prefill(
            key["group"], key["head_dim"], key["dtype"].itemsize, arguments["max_query_len"], key["cache_dtype"].itemsize,
            device.capability // 10,
        )  # fmt: skip
    assert launch is not None
    (make,) = tunable.classes.values()
    named = {"rows": "ROWS", "block": "BLOCK", "heads": "HEADS"}
    # Kernels of one row a program have no ROWS.
    chosen = {field: launch.arguments.get(named[field], 1) for field in make.__dataclass_fields__ if field != "warps"}
    return make(**chosen, warps=launch.options["num_warps"])


def hopper_asks(op: str, arguments: Arguments, device: DeviceModel) -> tuple[Any, ...] | None:
    """What a call on a Hopper GPU asks, whose own product only it has; None: `device` is none, or the product not taken there."""
    if op not in _HOPPER or device.capability != 90:
        return None
    from nanovllm.kernels.triton.gemm.hopper_product import most_tokens_whole, worth

    (gated, split), weight = _HOPPER[op], arguments["weight"]
    tokens, (rows, size) = arguments["x"].shape[0], weight.shape
    if tokens not in worth(rows, size, gated, weight.dtype):
        return None
    if not (gated or split) and tokens > most_tokens_whole(rows, size):
        return None
    return tunables.hopper_product_key(tokens, rows // 2 if gated else rows, size, weight.dtype, gated, split)
