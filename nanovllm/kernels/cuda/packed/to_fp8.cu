// int4 as 8-bit floats: a table of 16 codes for each group, through which `prmt` passes eight weights at a time.
//
// A weight of a group is one of 16 numbers, (q - zero) * scale * factor, which are rounded once for the group. A thread has 16
// weights of a row, and a group is of 128 columns or more, so four neighbouring threads share one: each rounds four of the
// numbers, and they exchange these registers. A byte permutation looks four weights up in eight codes, so there are two, one
// for integers below 8 and one for the others, and a third takes each weight from one of the two.
//
// The kernel starts when all kernels in front have ended, for they may read what it writes over.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "packed.cuh"

namespace nanovllm::packed {
namespace {

constexpr int THREADS = 256;
constexpr int UNIT = 16;  // weights of a row that a thread has
constexpr int SHARERS = 4;
constexpr int ROWS = 4;  // of a block: so many loads of a thread are under way at once

__device__ __forceinline__ uint32_t permute(uint32_t a, uint32_t b, uint32_t selectors) {
  uint32_t v;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(selectors));
  return v;
}

__device__ __forceinline__ float widen(__half v) { return __half2float(v); }
__device__ __forceinline__ float widen(__nv_bfloat16 v) { return __bfloat162float(v); }

// Four codes of e4m3, the first in the lowest byte.
__device__ __forceinline__ uint32_t rounded(const float (&v)[4]) {
  const uint32_t low = __nv_cvt_float2_to_fp8x2(make_float2(v[0], v[1]), __NV_SATFINITE, __NV_E4M3);
  const uint32_t high = __nv_cvt_float2_to_fp8x2(make_float2(v[2], v[3]), __NV_SATFINITE, __NV_E4M3);
  return low | high << 16;
}

// Grid [blocks of ROWS rows, blocks of THREADS units].
template <typename SCALE, bool ZERO>
__global__ void __launch_bounds__(THREADS) to_fp8_kernel(const __grid_constant__ Rounding p) {
  const int units = p.columns / UNIT;
  const int unit = blockIdx.y * THREADS + threadIdx.x, here = min(unit, units - 1);  // a warp's threads all exchange codes
  const int group = here * UNIT / 128 >> p.group_shift;
  uint2 words[ROWS];
  float scale[ROWS], factor[ROWS];
  int zero[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const int row = min(int(blockIdx.x) * ROWS + i, p.rows - 1);
    words[i] = *reinterpret_cast<const uint2*>(p.weight + int64_t(row) * p.weight_stride + here * (UNIT / 2));
    const int64_t at = int64_t(row) * p.scale_stride + group;
    scale[i] = widen(static_cast<const SCALE*>(p.scale)[at]);
    zero[i] = ZERO ? p.zero[at] : 8;
    factor[i] = p.factor[row];
  }
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    float mine[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float q = static_cast<float>(int(threadIdx.x % SHARERS) * 4 + e - zero[i]);
      mine[e] = __fmul_rn(__fmul_rn(scale[i], q), factor[i]);
    }
    const uint32_t codes = rounded(mine);
    uint32_t table[4];
#pragma unroll
    for (int part = 0; part < 4; ++part) table[part] = __shfl_sync(~0u, codes, part, SHARERS);
    uint32_t out[4];
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      const uint32_t packed = word ? words[i].y : words[i].x;
      const uint32_t in_half = packed & 0x77777777, half = 0x32103210 | (packed >> 1 & 0x44444444);
#pragma unroll
      for (int four = 0; four < 2; ++four) {
        const uint32_t low = permute(table[0], table[1], in_half >> 16 * four);
        const uint32_t high = permute(table[2], table[3], in_half >> 16 * four);
        out[2 * word + four] = permute(low, high, half >> 16 * four);
      }
    }
    const int row = blockIdx.x * ROWS + i;
    if (row < p.rows && unit < units) {
      *reinterpret_cast<uint4*>(p.out + int64_t(row) * p.columns + unit * UNIT) = make_uint4(out[0], out[1], out[2], out[3]);
    }
  }
}

template <typename SCALE>
void enqueue(const Rounding& p, dim3 blocks, cudaStream_t stream) {
  if (p.zero) {
    to_fp8_kernel<SCALE, true><<<blocks, THREADS, 0, stream>>>(p);
  } else {
    to_fp8_kernel<SCALE, false><<<blocks, THREADS, 0, stream>>>(p);
  }
}

}  // namespace

cudaError_t int4_to_fp8(const Rounding& p, Real scale, cudaStream_t stream) {
  const dim3 blocks((p.rows + ROWS - 1) / ROWS, (p.columns / UNIT + THREADS - 1) / THREADS);
  if (scale == Real::float16) {
    enqueue<__half>(p, blocks, stream);
  } else {
    enqueue<__nv_bfloat16>(p, blocks, stream);
  }
  return cudaGetLastError();
}

}  // namespace nanovllm::packed
