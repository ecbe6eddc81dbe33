// CUDA C++ on the CPU, as far as the lessons need it: a thread for each CUDA thread of a block, one block after the other.
// It shows wrong indices, wrong arithmetic, misaligned vectors and missing barriers that matter here; not speed, not GPU races.
#pragma once

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <type_traits>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#undef __shared__
#undef __global__
#undef __device__
#undef __launch_bounds__
#define __shared__ static  // blocks run one after the other, so one copy serves all
#define __global__
#define __device__
#define __launch_bounds__(...)
#define rsqrtf(x) (1.0f / sqrtf(x))

using std::max;
using std::min;

struct Index {
  unsigned x = 0;
};
inline thread_local Index threadIdx, blockIdx, blockDim;
inline std::barrier<>* of_block;
inline std::vector<std::unique_ptr<std::barrier<>>>* of_warps;
inline float exchanged[1024];

inline void __syncthreads() { of_block->arrive_and_wait(); }
inline void __syncwarp() { (*of_warps)[threadIdx.x / 32]->arrive_and_wait(); }
inline float __shfl_xor_sync(unsigned, float value, int mask) {
  exchanged[threadIdx.x] = value;
  __syncwarp();
  const float other = exchanged[threadIdx.x ^ mask];
  __syncwarp();
  return other;
}

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

template <typename F>
struct Launcher {
  F kernel;
  unsigned blocks, threads;

  template <typename... Arguments>
  void operator()(Arguments... arguments) {
    require(threads % 32 == 0 && threads <= 1024, "a block of that many threads");
    std::barrier<> barrier(threads);
    of_block = &barrier;
    std::vector<std::unique_ptr<std::barrier<>>> warps;
    for (unsigned w = 0; w < threads / 32; ++w) warps.push_back(std::make_unique<std::barrier<>>(32));
    of_warps = &warps;
    std::vector<std::thread> running;
    for (unsigned t = 0; t < threads; ++t) {
      running.emplace_back([=, this, &barrier] {
        threadIdx = {t}, blockDim = {threads};
        for (unsigned b = 0; b < blocks; ++b) {
          blockIdx = {b};
          kernel(arguments...);
          barrier.arrive_and_wait();
        }
      });
    }
    for (auto& thread : running) thread.join();
  }
};

template <typename F>
Launcher<F> launched(F kernel, unsigned blocks, unsigned threads, size_t = 0, cudaStream_t = nullptr) {
  return {kernel, blocks, threads};
}

// cp.async, at once: the pipeline's waits have nothing to wait for.
inline void copied_async(void* to, const void* from, int bytes) {
  require(reinterpret_cast<uintptr_t>(to) % 16 == 0 && reinterpret_cast<uintptr_t>(from) % 16 == 0, "cp.async: misaligned");
  std::memset(to, 0, 16);
  std::memcpy(to, from, bytes);
}
inline void __pipeline_commit() {}
inline void __pipeline_wait_prior(int) {}

// Every thread holds the whole of a fragment.
namespace nvcuda::wmma {
struct matrix_a;
struct matrix_b;
struct accumulator;
struct row_major;
enum layout_t { mem_row_major };
template <typename Use, int m, int n, int k, typename T, typename Layout = void>
struct fragment {
  float at[16][16];
};
template <typename F>
void fill_fragment(F& f, float value) {
  for (auto& row : f.at) std::fill(std::begin(row), std::end(row), value);
}
template <typename F, typename T>
void load_matrix_sync(F& f, const T* from, int stride) {
  require(reinterpret_cast<uintptr_t>(from) % 32 == 0 && stride % 8 == 0, "wmma load: misaligned");
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) f.at[i][j] = static_cast<float>(from[i * stride + j]);
}
template <typename A, typename B, typename C>
void mma_sync(C& d, const A& a, const B& b, const C& c) {
  C sum = c;
  for (int i = 0; i < 16; ++i)
    for (int k = 0; k < 16; ++k)
      for (int j = 0; j < 16; ++j) sum.at[i][j] += a.at[i][k] * b.at[k][j];
  d = sum;
}
template <typename F>
void store_matrix_sync(float* to, const F& f, int stride, layout_t) {
  require(reinterpret_cast<uintptr_t>(to) % 32 == 0 && stride % 4 == 0, "wmma store: misaligned");
  if (threadIdx.x % 32) return;
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < 16; ++j) to[i * stride + j] = f.at[i][j];
}
}  // namespace nvcuda::wmma
