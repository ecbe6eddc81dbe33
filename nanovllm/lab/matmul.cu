// c = a @ b on the tensor cores (16 bits in, float32 sums): tiles in shared memory, three stages filled by cp.async.
//
// Written with wmma, the tensor cores' C++ interface, which every GPU since Volta has and which compiles to mma.sync. Hopper's
// own instruction, wgmma, reads its operands from shared memory and is faster; it is what Triton and cuBLAS use there.
#include <cuda_pipeline.h>
#include <mma.h>

#include "lab.cuh"

namespace lab {

namespace wmma = nvcuda::wmma;

constexpr int kM = 128, kN = 128, kK = 32;  // the tile of c that a block computes, and its step along k
constexpr int kStages = 3;                  // one is computed with while two are under way
constexpr int kThreads = 256;               // 8 warps, 2 x 4; each computes 64 x 32 of c
constexpr int kPad = 8;                     // elements: rows start 4 banks (16 bytes) apart from a multiple of 128 bytes
constexpr int kGroup = 8;                   // block rows that are walked together, so that their tiles stay in the L2 cache

template <typename T>
struct Stage {
  T a[kM][kK + kPad];
  T b[kK][kN + kPad];
};

constexpr int kSharedBytes = kStages * sizeof(Stage<__half>);

// 16 bytes from device memory to shared memory past the registers and the L1 cache; the thread goes on at once. Of the source
// `bytes` are read, the rest of the target becomes 0.
__device__ inline void copy_async(void* to, const void* from, int bytes) {
  const auto target = static_cast<unsigned>(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target), "l"(from), "r"(bytes) : "memory");
}

// 8 elements from device memory to shared memory; what lies outside of the matrix becomes 0. cp.async wants 16 aligned bytes, so
// matrices whose rows are not that go element by element, through registers.
template <typename T, bool aligned>
__device__ void fetch(T* to, const T* matrix, int row, int col, int rows, int cols) {
  const int here = row < rows ? min(max(cols - col, 0), 8) : 0;
  const T* from = matrix + (here ? int64_t(row) * cols + col : 0);
  if constexpr (aligned) {
    copy_async(to, from, here * sizeof(T));
  } else {
    for (int e = 0; e < 8; ++e) to[e] = e < here ? from[e] : narrow<T>(0.0f);
  }
}

template <typename T, bool aligned>
__device__ void fetch_stage(Stage<T>& to, const T* a, const T* b, int m, int n, int k, int row0, int col0, int k0) {
  for (int chunk = threadIdx.x; chunk < kM * kK / 8; chunk += kThreads) {
    const int row = chunk / (kK / 8), col = chunk % (kK / 8) * 8;
    fetch<T, aligned>(&to.a[row][col], a, row0 + row, k0 + col, m, k);
  }
  for (int chunk = threadIdx.x; chunk < kK * kN / 8; chunk += kThreads) {
    const int row = chunk / (kN / 8), col = chunk % (kN / 8) * 8;
    fetch<T, aligned>(&to.b[row][col], b, k0 + row, col0 + col, k, n);
  }
}

template <typename T, bool aligned>
__global__ void __launch_bounds__(kThreads, 2)  // two blocks an SM: 128 registers a thread, for which a value or two may spill
    matmul_kernel(const T* __restrict__ a, const T* __restrict__ b, T* __restrict__ c, int m, int n, int k) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto* stages = reinterpret_cast<Stage<T>*>(shared);

  // Blocks in groups of kGroup rows, down each column of a group: neighbours in time share rows of a and columns of b.
  const int block_rows = (m + kM - 1) / kM, block_cols = (n + kN - 1) / kN;
  const int first = blockIdx.x / (kGroup * block_cols) * kGroup;
  const int in_group = min(kGroup, block_rows - first), within = blockIdx.x % (kGroup * block_cols);
  const int row0 = (first + within % in_group) * kM, col0 = within / in_group * kN;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warp_row = warp / 4 * 64, warp_col = warp % 4 * 32;

  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sums[4][2];
  for (auto& row : sums) for (auto& sum : row) wmma::fill_fragment(sum, 0.0f);

  const int steps = (k + kK - 1) / kK;
  for (int s = 0; s < kStages - 1; ++s) {
    if (s < steps) fetch_stage<T, aligned>(stages[s], a, b, m, n, k, row0, col0, s * kK);
    __pipeline_commit();
  }
  for (int step = 0; step < steps; ++step) {
    __pipeline_wait_prior(kStages - 2);  // this step's stage has arrived, as far as this thread fetched it
    __syncthreads();                     // ... as far as all did; and nobody computes with the stage that is filled next
    const int ahead = step + kStages - 1;
    if (ahead < steps) fetch_stage<T, aligned>(stages[ahead % kStages], a, b, m, n, k, row0, col0, ahead * kK);
    __pipeline_commit();  // also when empty: the wait counts commits
    const Stage<T>& stage = stages[step % kStages];
#pragma unroll
    for (int kk = 0; kk < kK; kk += 16) {
      wmma::fragment<wmma::matrix_a, 16, 16, 16, T, wmma::row_major> fa[4];
      wmma::fragment<wmma::matrix_b, 16, 16, 16, T, wmma::row_major> fb[2];
#pragma unroll
      for (int i = 0; i < 4; ++i) wmma::load_matrix_sync(fa[i], &stage.a[warp_row + 16 * i][kk], kK + kPad);
#pragma unroll
      for (int j = 0; j < 2; ++j) wmma::load_matrix_sync(fb[j], &stage.b[kk][warp_col + 16 * j], kN + kPad);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) wmma::mma_sync(sums[i][j], fa[i], fb[j], sums[i][j]);
      }
    }
  }

  // A fragment's layout over the threads is not specified, so it goes through shared memory, 16 x 16 a warp at a time.
  __pipeline_wait_prior(0);
  __syncthreads();
  constexpr int width = 20;  // not 16: fewer bank conflicts; a multiple of 4, as wmma wants it
  float* staging = reinterpret_cast<float*>(shared) + warp * 16 * width;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      wmma::store_matrix_sync(staging, sums[i][j], width, wmma::mem_row_major);
      __syncwarp();
      for (int e = lane; e < 256; e += 32) {
        const int row = row0 + warp_row + 16 * i + e / 16, col = col0 + warp_col + 16 * j + e % 16;
        if (row < m && col < n) c[int64_t(row) * n + col] = narrow<T>(staging[e / 16 * width + e % 16]);
      }
      __syncwarp();
    }
  }
}

template <typename T, bool aligned>
void launch_matmul(const T* a, const T* b, T* c, int m, int n, int k, cudaStream_t stream) {
  const auto kernel = matmul_kernel<T, aligned>;
  // More than 48 KB of shared memory has to be asked for.
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  const unsigned blocks = unsigned((m + kM - 1) / kM) * unsigned((n + kN - 1) / kN);
  kernel<<<blocks, kThreads, kSharedBytes, stream>>>(a, b, c, m, n, k);
}

template <typename T>
int matmul(const void* a, const void* b, void* c, int m, int n, int k, cudaStream_t stream) {
  const auto *pa = static_cast<const T*>(a), *pb = static_cast<const T*>(b);
  auto* pc = static_cast<T*>(c);
  if (in_vectors(a, k, sizeof(T)) && in_vectors(b, n, sizeof(T))) {
    launch_matmul<T, true>(pa, pb, pc, m, n, k, stream);
  } else {
    launch_matmul<T, false>(pa, pb, pc, m, n, k, stream);
  }
  return static_cast<int>(cudaGetLastError());
}

}  // namespace lab

// c [m, n] = a [m, k] @ b [k, n], contiguous, m, n and k above 0; dtype 1: float16, 2: bfloat16. Returns the launch's error.
LAB_EXPORT int lab_matmul(const void* a, const void* b, void* c, int m, int n, int k, int dtype, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  if (dtype == 1) return lab::matmul<__half>(a, b, c, m, n, k, s);
  if (dtype == 2) return lab::matmul<__nv_bfloat16>(a, b, c, m, n, k, s);
  return static_cast<int>(cudaErrorInvalidValue);
}
