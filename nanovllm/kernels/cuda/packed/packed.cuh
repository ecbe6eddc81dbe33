// What the bindings (C++, PyTorch) and the kernel (CUDA, no PyTorch) know of each other.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

namespace nanovllm::packed {

// How weights are stored. An integer q stands for (q - zero) * scale. With planes, the rows are those of GGUF.
enum class Storage {
  int4,       // a scale for a group of 128 columns or more; the zero point is `middle`
  int4_zero,  // a zero point for each group
  int8,
  int8_zero,
  planes4,          // Q4_0: a scale for 32 columns
  planes4_minimum,  // Q4_1: and a minimum
  planes8,          // Q5_0, Q8_0
  planes8_minimum,  // Q5_1
  q4_k,
  q5_k,
  q6_k,
};

enum class Real { float16, bfloat16 };

// y = x W^T, for x [tokens, columns] and W [rows, columns].
struct Product {
  const void* x;          // columns are neighbours
  const uint8_t* weight;  // rows `weight_stride` bytes apart
  const void* scale;      // of groups
  const uint8_t* zero;    // of groups, where `scale` is
  const void* bias;       // [rows], or null
  void* y;                // [tokens, rows]; gated: [tokens, rows / 2]; sums: float32 [splits, tokens, rows]
  int64_t x_stride;
  uint32_t weight_stride, scale_stride;
  uint32_t d, m, sc, mn;  // where the planes of a row begin, in bytes; of Q6_K, which has no minima, m: the high bits
  int32_t tokens, rows;
  int32_t steps, split_steps;  // of a row and of a split; a step is 128 columns of 4 or 6 bits, 64 of 8 bits
  int32_t phase_turns;         // turns for which x is in shared memory; in a turn every warp takes a step. wide: steps of x
                               // that have room in shared memory; boxes: stages of weights
  int32_t row_warps;           // warps (wide: warpgroups) of a block that have rows of their own; the others share columns
                               // boxes: blocks
  int32_t step_shift;          // groups have 2^step_shift steps
  int32_t middle;              // the zero point of all weights
  int32_t gated;               // y = silu(gate) * up; the first half of the rows is the gate
  int32_t sums;                // y is float32 sums of the splits
  int32_t panel[5];            // ring: where planes of scales begin in a row in shared memory, and the bytes of such a row
  int32_t y_stride;            // of tokens in y, if it is neither gated nor sums
  int32_t column_warps;        // ring: warps of a block that share columns
  int32_t column_share;        // ring: 65536 / column_warps, rounded up: the quotient of a warp's number without a division
  uint32_t section;            // ring: where the scales of a row begin, in bytes
  int32_t section_pieces;      // ring: pieces of 16 bytes that they are, if shared memory has all of a row. 0: it has those
                               // of a phase, plane by plane
};

// Two products of the same x, tokens and columns, whose y are columns of one tensor. They share the launch.
struct Stacked {
  Product q4_k, q6_k;
  int32_t q6_k_blocks;
};

// A weight in int4 as 8-bit floats: row by row times a factor, rounded to e4m3.
struct Rounding {
  const uint8_t* weight;  // rows `weight_stride` bytes apart, at multiples of 8 bytes
  const void* scale;      // [rows, groups], rows `scale_stride` numbers apart
  const uint8_t* zero;    // of groups, where `scale` is; or null: 8
  const float* factor;    // [rows]
  uint8_t* out;           // [rows, columns], at a multiple of 16 bytes
  int64_t weight_stride, scale_stride;
  int32_t rows, columns;  // columns: a multiple of 128
  int32_t group_shift;    // groups have 128 * 2^group_shift columns
};

struct Launch {
  int32_t splits, warps, shared_bytes;
  int32_t fragments;  // of 16 rows. ring: 1 or 2, that a warp has. wide: 4, that a warpgroup has. 0: the kernel of product.cuh
                      // 8: that of box.cuh
  int32_t stages;     // ring: RING_FEW_STAGES, or 0: as many as the storage has
};

constexpr int MAX_TOKENS = 16;
constexpr int RING_STAGES = 6;      // ring: steps of a warp whose weights are on their way
constexpr int RING_SIX_STAGES = 4;  // ring: the same of Q6_K, whose steps have 24 bytes for the 16 of others
constexpr int RING_FEW_STAGES = 4;  // ring: the same of Q4_K, where that makes room for more blocks; one token, whole rows of scales
constexpr int RING_WARPS = 12;  // ring: of a block, at most
constexpr int WIDE_TOKENS = 128;
constexpr int WIDE_STAGES = 8;  // wide: steps of a warp whose weights are on their way
// Tokens that x has room for in shared memory, a power of two.
constexpr int wide_width(int tokens) { return tokens <= 32 ? 32 : tokens <= 64 ? 64 : 128; }
constexpr int BOX_WARPS = 16;  // boxes: of a block

// Enqueue the product for x of type `x` and scales of type `scale`. The sources hold one storage each.
cudaError_t int4_product(const Product&, const Launch&, Real x, Real scale, bool zero, cudaStream_t);
// int4 and int4_zero, on Hopper
cudaError_t wide_product(const Product&, const Launch&, Real x, Real scale, cudaStream_t);
cudaError_t wide_zero_product(const Product&, const Launch&, Real x, Real scale, cudaStream_t);
cudaError_t int8_product(const Product&, const Launch&, Real x, Real scale, bool zero, cudaStream_t);
cudaError_t planes_product(const Product&, const Launch&, Storage, cudaStream_t);  // x: bfloat16
cudaError_t k_product(const Product&, const Launch&, Storage, cudaStream_t);       // x: bfloat16; Q4_K and Q5_K
cudaError_t ring_product(const Product&, const Launch&, Storage, cudaStream_t);    // x: bfloat16; Q4_K and Q6_K
cudaError_t ring_stacked_product(const Stacked&, const Launch&, cudaStream_t);     // x: bfloat16, up to 8 tokens; no splits
// x: bfloat16, up to 8 tokens; int4, whose rows of scales begin at multiples of 16 bytes
cudaError_t ring_int4_product(const Product&, const Launch&, Real scale, cudaStream_t);
// x: bfloat16, one token; int4 in groups of 128 columns, an even number of them; rows of scales as above
cudaError_t box_int4_product(const Product&, const Launch&, Real scale, cudaStream_t);
cudaError_t box_q4_k_product(const Product&, const Launch&, cudaStream_t);  // x: bfloat16, one token
cudaError_t int4_to_fp8(const Rounding&, Real scale, cudaStream_t);

}  // namespace nanovllm::packed
