// The kernel of int4 for more tokens, on Hopper: a warpgroup decodes 64 rows in registers, `wgmma` multiplies them with all tokens.
//
// A block has warpgroups that multiply, each with rows of its own, and a last one that copies x. Decoded weights are the first
// operand, in the registers in which product.cuh has them. x is the second, in shared memory: the copying warps bring its
// columns into the order of the decoded pairs. Stages of 128 columns pass between them through barriers. Weights go through a
// ring as in ring.cuh: a lane copies what it will read itself. They are asked for before the kernel in front has ended.
#pragma once

#include "ring.cuh"

namespace nanovllm::packed {

// D [64 rows, N tokens] += A B^T, for A [64, 16] in registers and B [N, 16] in shared memory.
template <typename T, int N>
struct Wgmma;

#define NANOVLLM_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define NANOVLLM_F16(i) NANOVLLM_F4(i), NANOVLLM_F4(i + 4), NANOVLLM_F4(i + 8), NANOVLLM_F4(i + 12)
#define NANOVLLM_WGMMA(T, TYPE, N, D, A, B, ...)                                                                           \
  template <>                                                                                                              \
  struct Wgmma<T, N> {                                                                                                     \
    static __device__ __forceinline__ void multiply(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b) {               \
      asm volatile("{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE    \
                   " {" D "}, {" A "}, " B ", p, 1, 1, 0; }"                                                               \
                   : __VA_ARGS__                                                                                           \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                  \
    }                                                                                                                      \
  };
#define NANOVLLM_D4 "%0,%1,%2,%3"
#define NANOVLLM_D8 NANOVLLM_D4 ",%4,%5,%6,%7"
#define NANOVLLM_D16 NANOVLLM_D8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define NANOVLLM_D32 NANOVLLM_D16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NANOVLLM_D64                                                                                       \
  NANOVLLM_D32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53," \
               "%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NANOVLLM_WGMMAS(T, TYPE)                                                                                             \
  NANOVLLM_WGMMA(T, TYPE, 32, NANOVLLM_D16, "%16,%17,%18,%19", "%20", NANOVLLM_F16(0))                                       \
  NANOVLLM_WGMMA(T, TYPE, 64, NANOVLLM_D32, "%32,%33,%34,%35", "%36", NANOVLLM_F16(0), NANOVLLM_F16(16))                     \
  NANOVLLM_WGMMA(T, TYPE, 128, NANOVLLM_D64, "%64,%65,%66,%67", "%68", NANOVLLM_F16(0), NANOVLLM_F16(16), NANOVLLM_F16(32), \
                 NANOVLLM_F16(48))
NANOVLLM_WGMMAS(__nv_bfloat16, "bf16")
NANOVLLM_WGMMAS(__half, "f16")

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ uint64_t descriptor(uint32_t low) {  // of x: groups of 8 tokens are 128 bytes apart
  uint64_t d;
  asm("mov.b64 %0, {%1, 8};" : "=l"(d) : "r"(low));
  return d;
}

__device__ __forceinline__ void barrier_init(uint32_t at, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t at) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t at, uint32_t parity) {
  asm volatile(
      "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again; }" ::"r"(at), "r"(parity)
      : "memory");
}

// As SCALE_FACTOR and SCALED_UNIT, with room for scales of bfloat16 up to 2^42.
constexpr float WIDE_FACTOR = 0x1p85f, WIDE_UNIT = 0x1p-48f;

template <typename T, typename SCALE, bool ZERO, int N>
__global__ void __launch_bounds__(WIDE_THREADS, 1) wide_kernel(const __grid_constant__ Product p) {
  constexpr bool FAST = Half<T>::bf16 && !ZERO;  // one fma scales a pair, else it is made an exact integer first
  constexpr uint32_t STAGE_BYTES = N * 256;      // x of a step
  extern __shared__ __align__(128) uint8_t shared[];

  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);  // uniform, as the compiler then knows
  const int warps = p.row_warps * 4;  // that multiply
  const int stages = p.phase_turns, tokens = p.tokens;
  const int first_step = blockIdx.y * p.split_steps, steps = min(p.split_steps, p.steps - first_step);

  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t x_shared = ring + warps * (WIDE_STAGES * 1024);
  const uint32_t full = x_shared + stages * STAGE_BYTES, empty = full + stages * 8;
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) {
      barrier_init(full + s * 8, 4);
      barrier_init(empty + s * 8, warps);
    }
  }
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  if (warp >= warps) {
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    // A lane has a token, and chunk j of 8 columns of each of the four lanes that share a decoded row.
    constexpr int TASKS = N / 32, AHEAD = N <= 64 ? 2 : 1;  // tokens of a lane; steps of x that are on their way
    const int j = lane >> 3, first_token = (warp & 3) * 8 + (lane & 7);
    const T* x = static_cast<const T*>(p.x) + first_token * p.x_stride + int64_t(first_step) * 128 + j * 8;
    uint4 v[AHEAD][TASKS][4];
    auto load = [&](uint4 (&to)[TASKS][4], int step) {
      if (step >= steps) return;
#pragma unroll
      for (int k = 0; k < TASKS; ++k) {
        if (first_token + k * 32 >= tokens) break;
#pragma unroll
        for (int t = 0; t < 4; ++t) {
          to[k][t] = *reinterpret_cast<const uint4*>(x + k * 32 * p.x_stride + step * 128 + t * 32);
        }
      }
    };
    int stage = 0;
    uint32_t parity = 1;
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) load(v[a], a);
    for (int first = 0; first < steps; first += AHEAD) {
#pragma unroll
      for (int a = 0; a < AHEAD; ++a) {
        if (first + a >= steps) break;
        barrier_wait(empty + stage * 8, parity);
        // Chunks of 8 columns, and in each the tokens: [16][N][16 bytes]. Chunk 4 j + i has pair i of chunk j of the lanes.
        const uint32_t to = x_shared + stage * STAGE_BYTES + (4 * j * N + first_token) * 16;
#pragma unroll
        for (int k = 0; k < TASKS; ++k) {
          if (first_token + k * 32 >= tokens) break;
          const uint4(&w)[4] = v[a][k];
#pragma unroll
          for (int i = 0; i < 4; ++i) {  // columns (0, 4), (1, 5), (2, 6), (3, 7)
            const uint32_t how = i & 1 ? 0x7632 : 0x5410;
            uint32_t pair[4];
#pragma unroll
            for (int t = 0; t < 4; ++t) pair[t] = i < 2 ? __byte_perm(w[t].x, w[t].z, how) : __byte_perm(w[t].y, w[t].w, how);
            store_shared(to + (i * N + k * 32) * 16, pair[0], pair[1], pair[2], pair[3]);
          }
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) barrier_arrive(full + stage * 8);
        if (++stage == stages) stage = 0, parity ^= 1;
        load(v[a], first + a + AHEAD);
      }
    }
    return;
  }

  const int g = lane >> 2, t = lane & 3, half = p.rows >> 1;
  const int fragment = blockIdx.x * warps + warp;
  uint32_t from[2], scale_at[2];
  int row[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    row[h] = p.gated ? fragment * 8 + g + h * half : fragment * 16 + g + h * 8;
    const uint32_t r = min(row[h], (p.gated ? (h + 1) * half : p.rows) - 1);
    from[h] = r * p.weight_stride + uint32_t(first_step * 64 + t * 16);
    scale_at[h] = r * p.scale_stride;
  }
  const uint32_t lane_ring = ring + warp * (WIDE_STAGES * 1024) + lane * 16;
  auto copy = [&](uint32_t slot) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      copy16(slot + h * 512, p.weight + from[h]);
      from[h] += 64;
    }
  };
  uint32_t scale[2], zero[2];  // of the next step
  int scale_step = first_step;
  auto load_scales = [&] {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint32_t index = scale_at[h] + (uint32_t(scale_step) >> p.step_shift);
      scale[h] = load_small<uint16_t>(p.scale, index * 2);
      if constexpr (ZERO) zero[h] = load_small<uint8_t>(p.zero, index);
    }
    ++scale_step;
  };

#pragma unroll
  for (int d = 0; d < WIDE_STAGES; ++d) {
    if (d < steps) copy(lane_ring + d * 1024);
    commit();
  }
  load_scales();
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");

  float acc[1][N / 8][4] = {};
  auto& sums = reinterpret_cast<float(&)[N / 2]>(acc);
  uint32_t a[2][2][4];  // of two words, two products each
  uint32_t slot = lane_ring;
  int stage = 0, last_stage = 0;
  uint32_t parity = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    wait_groups<WIDE_STAGES - 1>();
    uint4 words[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) words[h] = load_shared(slot + h * 512);
    if (step + WIDE_STAGES < steps) copy(slot);
    commit();
    slot = slot + 1024 == lane_ring + WIDE_STAGES * 1024 ? lane_ring : slot + 1024;

    uint32_t scale2[2][2], offset[2];  // scale2: of even and odd pairs
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float v = Half<SCALE>::widen_bits(scale[h]);
      scale2[h][0] = Half<T>::pair(FAST ? v * WIDE_FACTOR : v);
      scale2[h][1] = FAST ? Half<T>::pair(v * (WIDE_FACTOR / 16)) : scale2[h][0];
      offset[h] = FAST ? Half<T>::pair(v * (-WIDE_UNIT * p.middle)) : offset_of<T, true>(ZERO ? zero[h] : p.middle);
    }
    if (step + 1 < steps) load_scales();

    barrier_wait(full + stage * 8, parity);
    // No swizzle: 8 tokens of a chunk are 128 bytes in a row. The next chunk is N * 16 bytes on, the next 8 tokens 128.
    const uint32_t x = (x_shared + stage * STAGE_BYTES) >> 4 | N << 16;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      wgmma_wait<1>();  // the products that read a[j & 1]
      if (j == 1 && step > 0 && lane == 0) barrier_arrive(empty + last_stage * 8);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t word = j == 0 ? words[h].x : j == 1 ? words[h].y : j == 2 ? words[h].z : words[h].w;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          uint32_t value;
          if constexpr (FAST) {
            value = Half<T>::fma2(bits_of<true>(word, i), scale2[h][i & 1], offset[h]);
          } else {
            value = Half<T>::fma2(decode<T, true>(word, i, offset[h]), scale2[h][0], 0x80008000u);
          }
          a[j & 1][i >> 1][2 * (i & 1) + h] = value;
        }
      }
      wgmma_fence();
      Wgmma<T, N>::multiply(sums, a[j & 1][0], descriptor(x + 4 * j * N));
      Wgmma<T, N>::multiply(sums, a[j & 1][1], descriptor(x + (4 * j + 2) * N));
      wgmma_commit();
    }
    last_stage = stage;
    if (++stage == stages) stage = 0, parity ^= 1;
  }
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    asm volatile("" : "+f"(sums[i]));  // ready
    if constexpr (FAST) sums[i] *= 1 / WIDE_UNIT;
  }

  store_results<T>(p, acc, [&](int, int h) { return row[h]; });
}

template <typename T, typename SCALE, bool ZERO>
cudaError_t wide_launch(const Product& p, const Launch& how, cudaStream_t stream) {
  const int rows = 64 * p.row_warps;
  if (how.warps * 32 > WIDE_THREADS || how.warps != p.row_warps * 4 + 4) return cudaErrorInvalidValue;
  if (p.tokens <= 32) return enqueue(wide_kernel<T, SCALE, ZERO, 32>, rows, p, how, stream);
  if (p.tokens <= 64) return enqueue(wide_kernel<T, SCALE, ZERO, 64>, rows, p, how, stream);
  return enqueue(wide_kernel<T, SCALE, ZERO, 128>, rows, p, how, stream);
}

template <bool ZERO>
cudaError_t with_wide_types(const Product& p, const Launch& how, Real x, Real scale, cudaStream_t stream) {
  if (x == Real::float16) {
    return scale == Real::float16 ? wide_launch<__half, __half, ZERO>(p, how, stream) : cudaErrorInvalidValue;
  }
  return scale == Real::float16 ? wide_launch<__nv_bfloat16, __half, ZERO>(p, how, stream)
                                : wide_launch<__nv_bfloat16, __nv_bfloat16, ZERO>(p, how, stream);
}

}  // namespace nanovllm::packed
