// What the four kernels of the lab share: numbers of three dtypes, vectors of them, and sums over a block.
//
// No header of PyTorch, which nvcc would take longer to read than all of this. Python passes pointers (ctypes).
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// What Python calls: without C++'s name for it, and visible although -fvisibility=hidden hides the rest.
#define LAB_EXPORT extern "C" __attribute__((visibility("default")))

namespace lab {

// Arithmetic is float32 whatever the dtype in memory.
__device__ inline float widen(float x) { return x; }
__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ inline T narrow(float x);
template <>
__device__ inline float narrow<float>(float x) { return x; }
template <>
__device__ inline __half narrow<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// `alignas` is what lets the compiler move all of it with one instruction.
template <typename T, int width>
struct alignas(sizeof(T) * width) Vector {
  T at[width];
};

// Whether an array can be read in vectors of 16 bytes, when its rows have `cols` elements.
inline bool in_vectors(const void* pointer, int64_t cols, int element_bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0 && cols * element_bytes % 16 == 0;
}

// F called with a null pointer of the dtype's C++ type; returns the launch's error code, 0 if there is none.
template <typename F>
int by_dtype(int dtype, F f) {
  switch (dtype) {
    case 0: f(static_cast<float*>(nullptr)); break;
    case 1: f(static_cast<__half*>(nullptr)); break;
    case 2: f(static_cast<__nv_bfloat16*>(nullptr)); break;
    default: return static_cast<int>(cudaErrorInvalidValue);
  }
  return static_cast<int>(cudaGetLastError());
}

struct Add {
  __device__ static float of(float a, float b) { return a + b; }
};
struct Max {
  __device__ static float of(float a, float b) { return fmaxf(a, b); }
};

// One number a thread -> their combination, in every thread of the block. Always in the same order: the same bits every run.
// `scratch`: 32 floats of shared memory. Every thread of the block must call it.
template <typename Combine>
__device__ float over_block(float value, float* scratch) {
  for (int offset = 16; offset; offset /= 2) value = Combine::of(value, __shfl_xor_sync(0xffffffff, value, offset));
  __syncthreads();  // the scratch of an earlier call has been read by all
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  value = scratch[0];
  for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) value = Combine::of(value, scratch[warp]);
  return value;
}

}  // namespace lab
