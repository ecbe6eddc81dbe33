"""What the tests of the decode kernel for Hopper share: arguments with everything poisoned, results in float64,
compiled kernels.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import torch

from nanovllm.kernels.ops.checks import FP8
from nanovllm.kernels.triton.attention import decode
from tests.kernels.flat import flat

attention_decode = flat("attention_decode", decode.attention_decode)
qk_norm_rope_attention = flat("qk_norm_rope_attention", decode.qk_norm_rope_attention)

MAX_POSITION = 8192


def angles(head_dim, device, dtype=torch.float32):
    """[MAX_POSITION, head_dim]: cosines, then sines."""
    frequencies = 1e6 ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim)
    table = torch.arange(MAX_POSITION, device=device)[:, None] * frequencies
    return torch.cat((table.cos(), table.sin()), -1).to(dtype)


def make(
    lens, group, kv_heads, head_dim, block_size, dtype, norm=True, device="cuda", seed=0, spare=0, new=True, scales=None
):
    """Arguments of `qk_norm_rope_attention`, or unless `new` of `attention_decode`.

    Blocks are shuffled. NaN: slots without a token, those of the new tokens, blocks of no sequence. Table entries
    without a token: 2^30. q, k and v are views of a fused projection's rows.

    Args:
        spare: tokens that each sequence has room for beside its own.
        scales: for a float8 cache; keys' and values': 0 none, 1 one, 2 one a head.
    """
    g = torch.Generator().manual_seed(seed)
    counts = [-(-(n + spare) // block_size) if n + spare else 0 for n in lens]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=g)
    table = torch.full((len(lens), max(*counts, 1) + 1), 2**30, dtype=torch.int32)
    at = 0
    for i, n in enumerate(counts):
        table[i, :n] = order[at : at + n].int()
        at += n
    shape = (num_blocks, block_size, kv_heads, head_dim)
    caches, cache_scales = [], {}
    for s in range(2):
        scale = torch.ones(1)
        if scales and scales[s]:
            # Most of the range of float8, subnormals among it.
            scale = 2 ** (torch.rand(kv_heads if scales[s] == 2 else 1, generator=g) * 9 - 8)
            cache_scales["kv"[s] + "_scale"] = scale.to(device)
        fill = torch.Generator(device).manual_seed(seed + s)
        cache = torch.randn(shape, generator=fill, device=device).view(-1, kv_heads, head_dim)
        cache = cache.to(dtype) if scales is None else to_float8(cache / scale.to(device)[:, None])
        live = torch.zeros(num_blocks * block_size, dtype=torch.bool)
        for i, n in enumerate(lens):
            if n > new:
                live[slots_of(table[i], n - new, block_size)] = True
        cache.view(torch.uint8)[~live.to(device)] = 0xFF  # NaN in every format
        caches.append(cache.view(shape))
    qkv = torch.randn(len(lens), (group + 2) * kv_heads, head_dim, generator=g).to(device, dtype)
    q, k, v = qkv.split((group * kv_heads, kv_heads, kv_heads), 1)
    given = {
        "q": q, "k_cache": caches[0], "v_cache": caches[1], "block_table": table.to(device),
        "context_lens": torch.tensor(lens, dtype=torch.int32, device=device), "max_context_len": max(*lens, 1) + spare,
        "scale": head_dim**-0.5, **cache_scales,
    }  # fmt: skip
    if new:
        given |= {"k": k, "v": v, "cos_sin_cache": angles(head_dim, device)}
        if norm:
            weights = [(torch.rand(head_dim, generator=g) + 0.5).to(device, dtype) for _ in range(2)]
            given |= {"q_weight": weights[0], "k_weight": weights[1], "eps": 1e-6}
    return given


def to_float8(x):
    return x.float().clamp(-448, 448).to(FP8)


def slots_of(table, count, block_size):
    positions = torch.arange(count, device=table.device)
    return table[positions // block_size].long() * block_size + positions % block_size


def _rotated(x, weight, angle, eps):
    """[heads, head_dim] float64, normalised with a weight if there is one, and rotated."""
    half = x.shape[-1] // 2
    if weight is not None:
        x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    cos, sin = angle[:half], angle[half:]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _rounded_key(x, weight, angle, eps):
    """`_rotated`, of x [heads, head_dim] in its dtype, rounded wherever the ops round."""
    dtype, half = x.dtype, x.shape[-1] // 2
    x = x.float()
    if weight is not None:
        x = (x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()).to(dtype).float() * weight.float()
        x = x.to(dtype).float()
    cos, sin = (angle.float().to(dtype).float()[i : i + half] for i in (0, half))
    a, b = x[..., :half], x[..., half:]
    first, second = ((p.to(dtype).float(), r.to(dtype).float()) for p, r in ((a * cos, b * sin), (b * cos, a * sin)))
    return torch.cat((first[0] - first[1], second[0] + second[1]), -1).to(dtype)


def _rows_of(rows, slots):
    """rows[slots]; not every version of PyTorch indexes float8."""
    return rows.view(torch.uint8)[slots].view(FP8) if rows.dtype == FP8 else rows[slots]


def expected(given, after=None):
    """(out [num_seqs, num_heads, head_dim] float64, {slot of a new token: (its key, its value)}, as the cache should
    have them).

    after: k_cache and v_cache as a kernel has left them. Then the new tokens that are attended to are those: float8 is
        coarse, and a
    last bit of a bfloat16 may decide on which side a key is rounded to.
    """
    q, new = given["q"].double(), {}
    block_size, kv_heads, head_dim = given["k_cache"].shape[1:]
    table = angles(head_dim, q.device, torch.float64)
    out = torch.zeros_like(q)
    rows = [(after or given)[n].view(-1, kv_heads, head_dim) for n in ("k_cache", "v_cache")]
    scales = [given.get(n, torch.ones(1, device=q.device))[:, None] for n in ("k_scale", "v_scale")]
    for i, n in enumerate(given["context_lens"].tolist()):
        if not n:
            continue
        slots = slots_of(given["block_table"][i], n, block_size)
        queries = q[i]
        if "k" in given:
            eps = given.get("eps")
            queries = _rotated(queries, given.get("q_weight"), table[n - 1], eps)
            if rows[0].dtype == FP8:
                key = _rounded_key(given["k"][i], given.get("k_weight"), table[n - 1], eps)
                stored = [to_float8(x.float() / s) for x, s in zip((key, given["v"][i]), scales)]
            else:
                key = _rotated(given["k"][i].double(), given.get("k_weight"), table[n - 1], eps)
                stored = [key, given["v"][i].double()]
            new[int(slots[-1])] = tuple(stored)
        if "k" in given and after is None:
            keys, values = (
                torch.cat((_rows_of(x, slots[:-1]).double(), y[None].double())) * s
                for x, y, s in zip(rows, stored, scales)
            )
        else:
            keys, values = (_rows_of(x, slots).double() * s for x, s in zip(rows, scales))
        scores = torch.einsum("hgd,thd->hgt", queries.view(kv_heads, -1, head_dim), keys)
        weights = torch.softmax(scores * given["scale"], -1)
        out[i] = torch.einsum("hgt,thd->hgd", weights, values).reshape(-1, head_dim)
    return out, new


def check_stored(got, want, exact):
    """A new token's keys or values in the cache, and what `expected` has for it."""
    if got.dtype != FP8:
        torch.testing.assert_close(got.double(), want, rtol=2e-2, atol=0 if exact else 4e-2)
        return
    steps = [torch.where(x < 128, x, 128 - x) for x in (y.view(torch.uint8).int() for y in (got, want))]
    apart = (steps[0] - steps[1]).abs()
    # A key's last bit of 16 may differ, by which it is rounded to the other side.
    assert apart.max() <= (0 if exact else 1) and (apart > 0).double().mean() < 0.01, f"up to {apart.max()} steps off"


def run(given, plan=None):
    """The op that the arguments are of."""
    return (qk_norm_rope_attention if "k" in given else attention_decode)(**given, plan=plan)


def heads_apart(x):
    """x [tokens, heads, dims] with other strides; the next two as well."""
    wide = x.new_full((x.shape[0], 3 * x.shape[1], x.shape[2]), float("nan"))
    wide[:, ::3] = x
    return wide[:, ::3]


def tokens_apart(x):
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def dims_apart(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def compiled(
    plan, seqs_pad, group=2, head_dim=128, block_size=256, dtype="bf16", new=True, norm=True, release=True, scales=None
):
    """The kernel as it is compiled for a launch with aligned tensors, without a GPU. scales: as for `make`."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonASTSource

    from nanovllm.kernels.triton.attention.decode_hopper_kernel import decode_hopper_kernel as kernel

    constants = dict(
        SEQS_PAD=seqs_pad, EMPTY_LAST=plan.empty_last, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        WARPS=plan.warps, BOX=plan.box, SLOTS=plan.slots,
        CHUNK=plan.chunk, NEW=new, NORM=new and norm, RELEASE=release, CLUSTER=plan.cluster,
        FP8=scales is not None, K_SCALES=scales[0] if scales else 0, V_SCALES=scales[1] if scales else 0,
    )  # fmt: skip
    words = head_dim if scales is None else head_dim // 2
    line = min(64, words)
    element = dtype if scales is None else "i16"
    layout = gl.NVMMASharedLayout(swizzle_byte_width=2 * line, element_bitwidth=16, rank=5)
    types = {
        **dict.fromkeys(("table_ptr", "lens_ptr", "counters_ptr"), "*i32"),
        **dict.fromkeys(("acc_ptr", "ml_ptr"), "*fp32"),
        **dict.fromkeys(("eps", "scale"), "fp32"),
        "cos_sin_ptr": "*fp32" if new else f"*{dtype}",
        **dict.fromkeys(("k_ptr", "v_ptr"), f"*{dtype}" if scales is None else "*fp8e4nv"),
        "k_scale_ptr": "*fp32" if scales and scales[0] else "*i32",
        "v_scale_ptr": "*fp32" if scales and scales[1] else "*i32",
    }
    signature, attributes = {}, {}
    for i, parameter in enumerate(kernel.params):
        name = parameter.name
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_descriptor"):
            boxes = plan.tile // plan.box if "whole" in name else 1
            signature[name] = f"tensordesc<{element}[{boxes}, {words // line}, {plan.box}, 1, {line}],{layout!r}>"
        else:
            signature[name] = types.get(name, f"*{dtype}" if name.endswith("_ptr") else "i32")
        aligned = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
        if aligned and signature[name][0] in "*i":
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = GluonASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": plan.warps})


def resources(binary, directory):
    """(registers, bytes of stack, bytes of local memory) a thread, as the assembler allotted them."""
    import triton

    cubin = Path(directory) / "kernel.cubin"
    cubin.write_bytes(binary.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    done = subprocess.run([tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True)
    return tuple(int(n) for n in re.search(r"REG:(\d+) STACK:(\d+).*?LOCAL:(\d+)", done.stdout).groups())
