// The kernel of int4 for Hopper: a warpgroup decodes 64 rows in registers, `wgmma` multiplies them with all tokens.
//
// A block has warpgroups that multiply, `row_warps` with rows of their own times those that share columns, and one that copies
// x. Decoded weights are the first operand, in the registers in which product.cuh has them. x is the second, in shared memory:
// the copying warps bring its columns into the order of the decoded pairs. Its stages pass between them through barriers.
//
// Every copying warp has a part of every stage, so stages become full in order. Warps that share columns rely on it. A barrier
// only tells a phase from the one before it, and the phase before may be one in which another group read the stage. It is over
// by the time that a group asks, for a later stage was full when this group read it.
//
// Weights go through a ring as in ring.cuh: a lane copies what it will read itself. They are asked for before the kernel in
// front has ended.
#pragma once

#include "../mbarrier.cuh"
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
#define NANOVLLM_D16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
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

// As SCALE_FACTOR and SCALED_UNIT, with room for scales of bfloat16 up to 2^42.
constexpr float WIDE_FACTOR = 0x1p85f, WIDE_UNIT = 0x1p-48f;

template <typename T, typename SCALE, bool ZERO, int N>
__global__ void __launch_bounds__(WIDE_THREADS, 1) wide_kernel(const __grid_constant__ Product p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  constexpr bool FAST = Half<T>::bf16 && !ZERO;  // one fma scales a pair, else it is made an exact integer first
  constexpr int STEPS = N <= 64 ? 2 : 1;         // of a unit, which is what passes through a stage at once
  constexpr uint32_t STAGE_BYTES = STEPS * N * 256;
  extern __shared__ __align__(128) uint8_t shared[];

  const int lane = threadIdx.x & 31, warp = __shfl_sync(~0u, threadIdx.x >> 5, 0);  // uniform, as the compiler then knows
  const int consumers = (blockDim.x >> 7) - 1;  // warpgroups
  const int column_groups = consumers / p.row_warps, stages = p.phase_turns, tokens = p.tokens;
  const int first_step = blockIdx.y * p.split_steps, steps = min(p.split_steps, p.steps - first_step);
  const int units = (steps + STEPS - 1) / STEPS;
  const int turns = (units + column_groups - 1) / column_groups;  // a column group has so many adjacent units
  // Units pass through the stages in turns, one of each group. Blocks begin with different ones: else all would read the same
  // part of x from L2 at the same time.
  const int first_turn = blockIdx.x % turns;
  auto unit_of = [&](int turn) { return turn + first_turn < turns ? turn + first_turn : turn + first_turn - turns; };

  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  const uint32_t x_shared = ring + consumers * (4 * WIDE_STAGES * 1024);
  const uint32_t full = x_shared + stages * STAGE_BYTES, empty = full + stages * 8;
  if (threadIdx.x == 0) {
    for (int s = 0; s < stages; ++s) {
      barrier_init(full + s * 8, 4);
      barrier_init(empty + s * 8, p.row_warps * 4);
    }
  }
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");

  if (warp >= consumers * 4) {
    __syncthreads();
    asm volatile("griddepcontrol.wait;" ::: "memory");
    // A lane has a token, and chunk j of 8 columns of each of the four lanes that share a decoded row.
    constexpr int TASKS = N / 32, AHEAD = N == 32 ? 2 : 1;
    const int j = lane >> 3, first_token = (warp & 3) * 8;
    const int tasks = min(TASKS, (tokens - first_token + 31) >> 5);  // 0: this warp has no token
    const T* x[TASKS];
#pragma unroll
    for (int k = 0; k < TASKS; ++k) {
      const int token = min(first_token + k * 32 + (lane & 7), tokens - 1);
      x[k] = static_cast<const T*>(p.x) + token * p.x_stride + int64_t(first_step) * 128 + j * 8;
    }
    uint4 v[AHEAD][STEPS][TASKS][4];
    int load_turn = 0, load_group = 0, load_step = 0;  // the unit that is loaded next; all steps behind the last: none
    auto forward = [&] {
      while (load_group >= column_groups) load_group -= column_groups, ++load_turn;
      load_step = load_turn < turns ? (load_group * turns + unit_of(load_turn)) * STEPS : steps;
    };
    auto load = [&](uint4 (&to)[4], int e, int k) {
      if (load_step + e >= steps || k >= tasks) return;
      const T* from = x[k] + (load_step + e) * 128;
#pragma unroll
      for (int t = 0; t < 4; ++t) to[t] = *reinterpret_cast<const uint4*>(from + t * 32);
    };
    forward();
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
#pragma unroll
      for (int i = 0; i < STEPS * TASKS; ++i) load(v[a][i / TASKS][i % TASKS], i / TASKS, i % TASKS);
      ++load_group;
      forward();
    }
    int stage = 0;
    uint32_t parity = 1;
    for (int left = turns * column_groups; left > 0;) {
#pragma unroll
      for (int a = 0; a < AHEAD; ++a) {
        if (left <= 0) break;
        barrier_wait(empty + stage * 8, parity);
        // Chunks of 8 columns, and in each the tokens: [16][N][16 bytes]. Chunk 4 j + i has pair i of chunk j of the lanes.
        const uint32_t to = x_shared + stage * STAGE_BYTES + (4 * j * N + first_token + (lane & 7)) * 16;
#pragma unroll
        for (int e = 0; e < STEPS; ++e) {
#pragma unroll
          for (int k = 0; k < TASKS; ++k) {
            const uint4(&w)[4] = v[a][e][k];
            if (k < tasks) {
#pragma unroll
              for (int i = 0; i < 4; ++i) {  // columns (0, 4), (1, 5), (2, 6), (3, 7)
                const uint32_t how = i & 1 ? 0x7632 : 0x5410;
                uint32_t pair[4];
#pragma unroll
                for (int t = 0; t < 4; ++t) pair[t] = i < 2 ? __byte_perm(w[t].x, w[t].z, how) : __byte_perm(w[t].y, w[t].w, how);
                store_shared(to + (e * 16 * N + i * N + k * 32) * 16, pair[0], pair[1], pair[2], pair[3]);
              }
            }
            load(v[a][e][k], e, k);
          }
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) barrier_arrive(full + stage * 8);
        if (++stage >= stages) stage -= stages, parity ^= 1;
        --left;
        ++load_group;
        forward();
      }
    }
    return;
  }

  const int group = warp >> 2, row_group = group / column_groups, column_group = group - row_group * column_groups;
  const int g = lane >> 2, t = lane & 3, half = p.rows >> 1;
  const int fragment = (blockIdx.x * p.row_warps + row_group) * 4 + (warp & 3);
  const int my_first = column_group * turns, mine = max(0, min(turns, units - my_first));
  const int my_steps = steps - my_first * STEPS;  // and those of groups behind
  uint32_t from[2], scale_at[2];
  int row[2];
  int copied = 0, copy_unit = first_turn < mine ? first_turn : 0;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    row[h] = p.gated ? fragment * 8 + g + h * half : fragment * 16 + g + h * 8;
    const uint32_t r = min(row[h], (p.gated ? (h + 1) * half : p.rows) - 1);
    from[h] = r * p.weight_stride + uint32_t((first_step + (my_first + copy_unit) * STEPS) * 64 + t * 16);
    scale_at[h] = r * p.scale_stride;
  }
  constexpr int RING = WIDE_STAGES / STEPS;
  constexpr uint32_t SLOT_BYTES = STEPS * 1024;
  const uint32_t lane_ring = ring + warp * (WIDE_STAGES * 1024) + lane * 16;
  auto copy = [&](uint32_t slot) {  // the next unit's weights
    if (copied < mine) {
#pragma unroll
      for (int e = 0; e < STEPS; ++e) {
        if (e > 0 && copy_unit * STEPS + e >= my_steps) break;
#pragma unroll
        for (int h = 0; h < 2; ++h) copy16(slot + e * 1024 + h * 512, p.weight + (from[h] + e * 64));
      }
      ++copied;
      ++copy_unit;
      const bool last = copy_unit == mine;
      if (last) copy_unit = 0;
#pragma unroll
      for (int h = 0; h < 2; ++h) from[h] += last ? 64 * STEPS * (1 - mine) : 64 * STEPS;
    }
    commit();
  };
  uint32_t scale[STEPS][2], zero[STEPS][2];
  auto load_scales = [&](int unit) {
#pragma unroll
    for (int e = 0; e < STEPS; ++e) {
      const int step = min(first_step + (my_first + unit) * STEPS + e, p.steps - 1);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t index = scale_at[h] + (uint32_t(step) >> p.step_shift);
        scale[e][h] = load_small<uint16_t>(p.scale, index * 2);
        if constexpr (ZERO) zero[e][h] = load_small<uint8_t>(p.zero, index);
      }
    }
  };

  int unit = copy_unit;  // the next one
#pragma unroll
  for (int d = 0; d < RING; ++d) copy(lane_ring + d * SLOT_BYTES);
  if (mine > 0) load_scales(unit);
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");

  float acc[1][N / 8][4] = {};
  auto& sums = reinterpret_cast<float(&)[N / 2]>(acc);
  uint32_t a[2][2][4];  // of two words, two products each
  uint32_t slot = lane_ring;
  int stage = column_group, read_stage = -1;  // read_stage: of products under way
  uint32_t parity = 0;
#pragma unroll 1
  for (int turn = 0; turn < turns; ++turn) {
    if (unit_of(turn) >= mine) {  // another group's
      barrier_wait(full + stage * 8, parity);
      wgmma_wait<0>();
      if (read_stage >= 0 && lane == 0) barrier_arrive(empty + read_stage * 8);
      if (lane == 0) barrier_arrive(empty + stage * 8);
      read_stage = -1;
    } else {
      wait_groups<RING - 1>();
      uint4 words[STEPS][2];
#pragma unroll
      for (int e = 0; e < STEPS; ++e) {
#pragma unroll
        for (int h = 0; h < 2; ++h) words[e][h] = load_shared(slot + e * 1024 + h * 512);
      }
      copy(slot);
      slot = slot == lane_ring + (RING - 1) * SLOT_BYTES ? lane_ring : slot + SLOT_BYTES;
      uint32_t scale2[STEPS][2][2], offset[STEPS][2];  // scale2: of even and odd pairs
#pragma unroll
      for (int e = 0; e < STEPS; ++e) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float v = Half<SCALE>::widen_bits(scale[e][h]);
          scale2[e][h][0] = Half<T>::pair(FAST ? v * WIDE_FACTOR : v);
          scale2[e][h][1] = FAST ? Half<T>::pair(v * (WIDE_FACTOR / 16)) : scale2[e][h][0];
          offset[e][h] = FAST ? Half<T>::pair(v * (-WIDE_UNIT * p.middle)) : offset_of<T, true>(ZERO ? zero[e][h] : p.middle);
        }
      }
      const bool both = unit * STEPS + STEPS <= my_steps;
      if (++unit == mine) unit = 0;
      load_scales(unit);

      barrier_wait(full + stage * 8, parity);
      // No swizzle: 8 tokens of a chunk are 128 bytes in a row. The next chunk is N * 16 bytes on, the next 8 tokens 128.
      const uint32_t x = (x_shared + stage * STAGE_BYTES) >> 4 | N << 16;
#pragma unroll
      for (int e = 0; e < STEPS; ++e) {
        if (e > 0 && !both) break;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          wgmma_wait<1>();  // the products that read a[j & 1]
          if (e == 0 && j == 1 && read_stage >= 0 && lane == 0) barrier_arrive(empty + read_stage * 8);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const uint4& w = words[e][h];
            const uint32_t word = j == 0 ? w.x : j == 1 ? w.y : j == 2 ? w.z : w.w;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              uint32_t value;
              if constexpr (FAST) {
                value = Half<T>::fma2(bits_of<true>(word, i), scale2[e][h][i & 1], offset[e][h]);
              } else {
                value = Half<T>::fma2(decode<T, true>(word, i, offset[e][h]), scale2[e][h][0], 0x80008000u);
              }
              a[j & 1][i >> 1][2 * (i & 1) + h] = value;
            }
          }
          wgmma_fence();
          Wgmma<T, N>::multiply(sums, a[j & 1][0], descriptor(x + (16 * e + 4 * j) * N));
          Wgmma<T, N>::multiply(sums, a[j & 1][1], descriptor(x + (16 * e + 4 * j + 2) * N));
          wgmma_commit();
        }
      }
      read_stage = stage;
    }
    stage += column_groups;
    if (stage >= stages) stage -= stages, parity ^= 1;
  }
  wgmma_wait<0>();
  if (read_stage >= 0 && lane == 0) barrier_arrive(empty + read_stage * 8);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) {
    asm volatile("" : "+f"(sums[i]));  // ready
    if constexpr (FAST) sums[i] *= 1 / WIDE_UNIT;
  }

  auto barrier = [&] { asm volatile("bar.sync 1, %0;" ::"r"(consumers * 128) : "memory"); };
  if (!add_column_warps(acc, shared, row_group * 4 + (warp & 3), column_group, column_groups, barrier)) return;
  store_results<T>(p, acc, [&](int, int h) { return row[h]; });
#else
  __trap();  // other GPUs, for which the folder is compiled as well, lack these instructions: it is not launched there
#endif
}

template <typename T, typename SCALE, bool ZERO>
cudaError_t wide_launch(const Product& p, const Launch& how, cudaStream_t stream) {
  const int rows = 64 * p.row_warps;
  if (how.warps * 32 > WIDE_THREADS) return cudaErrorInvalidValue;
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
