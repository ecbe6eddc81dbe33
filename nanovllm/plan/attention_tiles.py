"""Tiles of attention: query rows stay with a block, keys and values stream through shared memory.

The kernel is `kernels/triton/attention/prefill_kernel.py`, in the manner of FlashAttention-2 (Dao, 2023): a block has
`rows` query rows, `tile` keys and values a step, the output O and the running maximum m and sum l of each row in
registers. Decoding is the same with the query heads that share a KV head as rows, and the context cut into pieces so
that every multiprocessor has work.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from nanovllm.hardware.gpu_presets import DTYPE_BYTES, DeviceModel
from nanovllm.plan.loop import latency, loaded_latency
from nanovllm.plan.registers import ATTENTION_MOST, attention_registers
from nanovllm.plan.resources import (
    SPILL_MARGIN,
    Plan,
    cdiv,
    combine,
    next_power_of_2,
    occupancy,
    one_of,
    padded,
    positive,
    ranked,
    stages_needed,
    that_fit,
    uses_wgmma,
    waves,
)

DTYPES = ("bfloat16", "float16")
MOST_ROWS = 256
_EXP_LANES = 16
"""Exponentials that the special-function units of a multiprocessor compute a cycle."""
_SOFTMAX_CYCLES = 7.0
"""Instructions of an ordinary lane for one score: scale, maximum, subtract, sum, convert. FITTED, with the next three,
to `prefill_kernel` on an H200 (`python -m benchmarks.planner_proof --times`: every tile that the planner keeps for
ten shapes, PyTorch 2.11, Triton 3.6). The fit looks at the share of the best that the first five reach, not at the
times."""
_CHAIN_CYCLES = 200
"""Cycles of a step in which a block waits for its own results: product, maximum, exponential, product."""
_START_LATENCIES = 3
"""What a block needs besides its steps, in latencies of device memory: lengths, table, queries and first keys, each
after the other, then the output, some of them at once."""
_RESCALE_CYCLES = 3.0
"""Cycles of an ordinary lane, a step, for one output accumulator, which a new maximum may scale."""
_MMA_ON_HOPPER = 0.5
"""Share of the rate that Ampere's instructions reach on Hopper in these kernels. FITTED to an order, not a time: 32
rows of two warps take twice as long as 64 of four."""
_L2_SHARE = 0.8


@dataclass(frozen=True)
class AttentionProblem:
    """`batch` sequences of `query` new tokens, which end at a context of `context` tokens.

    Attributes:
        context: keys a sequence, at least `query`.
        heads, kv_heads: of queries, and of keys and values.
        causal: a token sees none after it.

    Raises:
        ValueError: a size is not positive, the heads are no multiple of the KV heads or too many for one, the context
            is shorter than the queries, or the dtype is unknown.
    """

    batch: int
    query: int
    context: int
    heads: int
    kv_heads: int
    head_dim: int = 128
    causal: bool = True
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        sizes = {n: getattr(self, n) for n in ("batch", "query", "context", "heads", "kv_heads", "head_dim")}
        positive(**sizes)
        if self.heads % self.kv_heads:
            raise ValueError(f"heads: expected a multiple of the {self.kv_heads} KV heads, not {self.heads}")
        if self.context < self.query:
            raise ValueError(f"context: expected at least the {self.query} query tokens, not {self.context}")
        if self.group > MOST_ROWS:
            raise ValueError(f"heads: a tile holds at most {MOST_ROWS} query heads of one KV head, not {self.group}")
        if self.head_dim > 256:
            raise ValueError(f"head_dim: expected at most 256, not {self.head_dim}")
        one_of("dtype", self.dtype, DTYPES)

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def seen(self) -> float:
        """Keys that a query token sees, on average."""
        return self.context - (self.query - 1) / 2 if self.causal else self.context

    @property
    def flops(self) -> float:
        """Two products, over what is seen."""
        return 4.0 * self.batch * self.heads * self.query * self.seen * self.head_dim

    @property
    def least_bytes(self) -> float:
        """Queries, keys, values and outputs once."""
        rows = 2 * self.heads * self.query + 2 * self.kv_heads * self.context
        return self.batch * rows * self.head_dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class AttentionTile:
    """rows: query rows of a block (B_r), tokens times query heads of a KV head; tile: keys a step (B_c).
    pieces: blocks that share the context of a sequence, for few queries."""

    rows: int
    tile: int
    warps: int
    stages: int
    pieces: int = 1

    def __str__(self) -> str:
        return f"{self.rows}x{self.tile} w{self.warps} s{self.stages}" + (
            f" pieces {self.pieces}" if self.pieces > 1 else ""
        )


def shared_bytes(tile: AttentionTile, problem: AttentionProblem, device: DeviceModel) -> int:
    """The query tile, the keys and values of each stage, and the probabilities where warps share rows and so exchange
    them.

    Warps of wgmma never do; others do where the output is wider than high, since Triton then gives them columns of it.
    """
    size = DTYPE_BYTES[problem.dtype]
    dim = padded(problem.head_dim)
    wgmma = uses_wgmma(device, tile.rows, tile.warps)
    keys_and_values = 2 * tile.tile * dim * size * (tile.stages if wgmma else max(1, tile.stages - 1))
    exchanged = not wgmma and tile.warps > 1 and (dim > tile.rows or 16 * tile.warps > tile.rows)
    return math.ceil(keys_and_values + tile.rows * dim * size + (tile.rows * tile.tile * size if exchanged else 0))


def intensity(tile: AttentionTile, problem: AttentionProblem) -> float:
    """Flops for each byte of keys and values that a step loads: 4 B_r B_c d / (2 B_c d bytes)."""
    return 2 * tile.rows / DTYPE_BYTES[problem.dtype]


def candidates(problem: AttentionProblem, device: DeviceModel) -> list[AttentionTile]:
    """Every configuration that fits a block: shared memory, registers with little spilling, rows for every warp."""
    device.rate(problem.dtype)
    group_rows = problem.query * problem.group
    blocks = problem.batch * problem.kv_heads * cdiv(group_rows, 16)
    found = []
    for rows, size, warps, stages in itertools.product(
        (16, 32, 64, 128, MOST_ROWS), (16, 32, 64, 128), (1, 2, 4, 8), (2, 3, 4)
    ):
        if rows < next_power_of_2(problem.group) or rows >= 2 * max(16, next_power_of_2(group_rows)):
            continue
        # Warps that share rows help only where there are no more rows.
        if warps * 16 > (max(rows, 64) if group_rows <= rows else rows) or size >= 2 * max(16, problem.context):
            continue
        most = cdiv(problem.context, size)
        # Only few queries leave multiprocessors without work.
        pieces = (
            [1] if problem.query > 1 or blocks >= 2 * device.sms else [p for p in (1, 2, 4, 8, 16, 32, 64) if p <= most]
        )
        for share in pieces:
            tile = AttentionTile(rows, size, warps, stages, share)
            if shared_bytes(tile, problem, device) > device.shared_per_block:
                continue
            most_registers = ATTENTION_MOST * device.registers_per_thread - SPILL_MARGIN
            if attention_registers(tile, problem, device) <= most_registers:
                found.append(tile)
    return found


def predict(tile: AttentionTile, problem: AttentionProblem, device: DeviceModel) -> Plan:
    """The plan of one configuration."""
    p = problem
    size, dim = DTYPE_BYTES[p.dtype], padded(p.head_dim)
    shared = shared_bytes(tile, p, device)
    registers = min(attention_registers(tile, p, device), device.registers_per_thread)
    fit = occupancy(device, shared, registers, tile.warps)
    tokens = max(1, tile.rows // next_power_of_2(p.group))
    runs = cdiv(p.query, tokens)
    blocks = p.batch * p.kv_heads * runs * tile.pieces
    wave = waves(blocks, max(1, fit.blocks), device.sms)
    at_once = max(1, min(fit.blocks, wave.busiest))
    # What is computed is whole tiles: half a tile more than is seen at the diagonal.
    steps = max(1.0, (p.seen + (tile.tile / 2 if p.causal and p.query > 1 else 0)) / tile.tile / tile.pieces)
    t_tile = 4.0 * tile.rows * tile.tile * dim / (device.rate(p.dtype) / device.sms)
    full_rate = min(1.0, tile.warps * at_once / 4)
    if device.matrix_unit == "wgmma" and not uses_wgmma(device, tile.rows, tile.warps):
        full_rate *= _MMA_ON_HOPPER
    product = t_tile / full_rate
    # Softmax does not overlap with the products of its own warps, but with those of other blocks.
    scores, outputs = tile.rows * tile.tile, tile.rows * dim
    vector = (scores * _SOFTMAX_CYCLES + outputs * _RESCALE_CYCLES) / device.lanes + scores / _EXP_LANES
    softmax = vector / device.clock / full_rate if full_rate < 1 else vector / device.clock
    step = max(product, softmax) + (min(product, softmax) + _CHAIN_CYCLES / device.clock) / at_once
    start = _START_LATENCIES * latency(device) / at_once
    # The blocks at the end of a causal run are longer than the average, but come first: their tail is short.
    busiest = wave.busiest if not p.causal or runs == 1 else max(blocks / device.sms + 0.5, min(1.0, wave.busiest))
    kv_bytes = 2.0 * p.batch * p.kv_heads * p.context * p.head_dim * size
    q_bytes = 2.0 * p.batch * p.heads * p.query * p.head_dim * size
    step_bytes = 2.0 * tile.tile * dim * size
    loaded = blocks * steps * step_bytes
    # The blocks of one KV head read the same keys; what fits the L2 cache comes from memory once.
    again = 1 if kv_bytes <= _L2_SHARE * device.l2_bytes or runs == 1 else cdiv(blocks, at_once * device.sms)
    dram = min(loaded, kv_bytes * again) + q_bytes
    partial = 0.0 if tile.pieces == 1 else 2.0 * 4 * p.batch * p.heads * tile.pieces * (p.head_dim + 2)
    # wgmma reads the queries anew in each step; other units keep them in registers.
    readers = tile.rows // 64 if uses_wgmma(device, tile.rows, tile.warps) else min(tile.warps, tile.rows // 16)
    queries = tile.rows * dim * size if uses_wgmma(device, tile.rows, tile.warps) else 0
    parts = {
        "compute": busiest * (steps * step + start),
        "shared memory": busiest * steps * (queries + step_bytes * (1 + max(1, readers))) / (128 * device.clock),
        "latency": cdiv(wave.busiest, at_once) * steps * loaded_latency(device) / (tile.stages - 1),
        "L2": (loaded + q_bytes + partial) / device.l2_bandwidth,
        "memory": dram / device.bandwidth,
    }
    fixed = device.launch + 2 * latency(device) + (2 * device.l2_latency if tile.pieces > 1 else 0)
    seconds = combine(parts, fixed) if fit.blocks else math.inf
    stages = stages_needed(loaded_latency(device), t_tile)
    return Plan(
        tile, blocks, intensity(tile, p), shared, registers, fit, stages, wave, seconds, parts, fixed, p.flops, dram
    )


def plan_attention(problem: AttentionProblem, device: DeviceModel) -> list[Plan]:
    """Every configuration that fits, the fastest by prediction first.

    Raises:
        ValueError: the device does not multiply the dtype, or nothing fits.
    """
    least = AttentionTile(max(16, next_power_of_2(problem.group)), 16, 1, 2)
    shared, registers = shared_bytes(least, problem, device), attention_registers(least, problem, device)
    predicted = (predict(tile, problem, device) for tile in candidates(problem, device))
    plans = that_fit("attention", predicted, device, least, shared, registers)
    # Pieces that leave multiprocessors idle cannot take all of the bandwidth that the prediction gives them.
    idle = {plan.config: problem.query == 1 and plan.blocks < device.sms for plan in plans}
    return ranked(plans, lambda tile: (idle[tile],))
