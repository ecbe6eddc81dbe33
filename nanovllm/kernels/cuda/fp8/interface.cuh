// What the bindings (C++, PyTorch) and the kernel (CUDA, no PyTorch) know of each other.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

namespace nanovllm::fp8 {

// y = x W^T, for x [tokens, columns] and W = weight * scale [rows, columns].
struct Product {
  const void* x;          // columns are neighbours
  const uint8_t* weight;  // e4m3, rows `weight_stride` bytes apart
  const float* scale;
  const void* bias;  // [rows], or null
  void* y;           // [tokens, rows]; gated: [tokens, rows / 2]; sums: float32 [splits, tokens, rows]
  int64_t x_stride;
  uint32_t weight_stride, scale_stride;
  int32_t scale_shift;  // 2^scale_shift rows share scales
  int32_t tokens, rows, columns;
  int32_t tiles;         // of 16 rows
  int32_t split_chunks;  // chunks of columns of a split
  int32_t gated;         // y = silu(gate) * up; the first half of the rows is the gate, and a tile has 8 rows of each half
  int32_t sums;          // y is float32 sums of the splits
};

struct Launch {
  int32_t blocks;  // a split
  int32_t splits, warps, shared_bytes;
  int32_t turns;  // chunks of columns of a warp: 1, or up to 8 tokens 2
};

constexpr int MAX_TOKENS = 16;
constexpr int OCTET = 8;        // tokens of an instruction
constexpr int MAX_WARPS = 16;   // of a block, each with up to 128 registers a thread
constexpr int CHUNK = 256;      // columns that a warp reads at a time
constexpr int STAGES = 2;       // chunks of a warp that are on their way
constexpr int BUFFERS = 4;      // tiles whose sums are not added yet
constexpr int WARP_SUMS = 512;  // bytes: four floats of each lane, of eight tokens

// Enqueue the product. columns: scales are of 128 columns, else of whole rows. The sources hold one type of x each.
cudaError_t bfloat16_product(const Product&, const Launch&, bool columns, cudaStream_t);
cudaError_t float16_product(const Product&, const Launch&, bool columns, cudaStream_t);

}  // namespace nanovllm::fp8
